"""A BERT-type sentence encoder in NumPy: the unsharded forward and the tensor-parallel one.

Both run the same code, which follows sentence-transformers' all-MiniLM-L6-v2: embeddings and
LayerNorm, attention and erf-GELU layers, mean pooling over the mask, L2 normalisation. Tensor
parallel is Megatron's: query, key, value and the first MLP matrix are cut on their output dim, the
attention output and the second MLP matrix on their input dim, so that two all-reduces a layer are all
that ranks exchange; column biases are cut with their columns, row biases are added once, after the sum.

Attention is cut by whole heads. A balanced cut of 384 rows over 5 ranks would end inside a head, so
the layouts are written for a view of the tensor that has heads as a dim of its own (`shard_view`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.box import Box, full_box, shape_of, split_interval
from lowshard.errors import BufferMismatchError, CheckpointError, DTypeError, ShardingError
from lowshard.special import erf

F32 = NDArray[np.float32]
Weights = Mapping[str, NDArray[Any]]
Shape = tuple[int, ...]
Spec = tuple[str | None, ...]
Compute = Literal["float32", "bfloat16"]

_EMBEDDING_NAMES = ("word_embeddings", "position_embeddings", "token_type_embeddings")


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of one encoder. Compares by value."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    prefix: str = ""
    """What stands before `embeddings.` and `encoder.` in the tensor names (`bert.` in some files)."""

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.num_layers, self.num_heads, self.intermediate_size,
                 self.max_positions, self.type_vocab_size)  # fmt: skip
        if min(sizes) < 1 or self.hidden_size % self.num_heads:
            raise CheckpointError(
                "an encoder needs sizes of at least 1 and a hidden size that is a multiple of the number of "
                f"heads; got {self}"
            )

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_heads

    def to_json(self) -> dict[str, Any]:
        """Return the config under the names that Hugging Face's BERT config.json uses."""
        values = asdict(self)
        return {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"} | {
            theirs: values[ours] for ours, theirs in _JSON_NAMES.items()
        }


_JSON_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
}


def config_from_json(values: Mapping[str, Any], prefix: str = "") -> EncoderConfig:
    """Return the config that a BERT config.json states.

    Raises:
        CheckpointError: another architecture, an option this forward does not have, or a missing size.
    """
    for key, expected in (
        ("model_type", "bert"), ("hidden_act", "gelu"), ("position_embedding_type", "absolute")
    ):  # fmt: skip
        if (got := values.get(key, expected if key != "model_type" else None)) != expected:
            raise CheckpointError(f"the demo's encoder takes {key} {expected!r}, config.json says {got!r}")
    known = {ours: values[theirs] for ours, theirs in _JSON_NAMES.items() if theirs in values}
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, float if name == "layer_norm_eps" else int):
            raise CheckpointError(
                f"config.json must state {_JSON_NAMES[name]} as a number, it says {value!r}"
            )
    try:
        return EncoderConfig(**known, prefix=prefix)
    except TypeError as error:
        missing = sorted(set(_JSON_NAMES.values()) - set(values) - {"type_vocab_size", "layer_norm_eps"})
        raise CheckpointError(f"config.json of an encoder must state {', '.join(missing)}") from error


# name after "encoder.layer.N." -> how tensor parallel cuts it
_CUTS: dict[str, Literal["heads_out", "heads_in", "out", "in"]] = {
    "attention.self.query.weight": "heads_out",
    "attention.self.query.bias": "heads_out",
    "attention.self.key.weight": "heads_out",
    "attention.self.key.bias": "heads_out",
    "attention.self.value.weight": "heads_out",
    "attention.self.value.bias": "heads_out",
    "attention.output.dense.weight": "heads_in",
    "intermediate.dense.weight": "out",
    "intermediate.dense.bias": "out",
    "output.dense.weight": "in",
}


def expected_shapes(config: EncoderConfig) -> dict[str, Shape]:
    """Return the shape of every tensor that the forward reads, by name."""
    hidden, inner, pre = config.hidden_size, config.intermediate_size, config.prefix
    rows = (config.vocab_size, config.max_positions, config.type_vocab_size)
    shapes: dict[str, Shape] = {
        f"{pre}embeddings.{name}.weight": (n, hidden) for name, n in zip(_EMBEDDING_NAMES, rows, strict=True)
    }
    linears = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden),
               "attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden),
               "intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}  # fmt: skip
    norms = [f"{pre}embeddings.LayerNorm"]
    for layer in range(config.num_layers):
        at = f"{pre}encoder.layer.{layer}."
        for name, (n_out, n_in) in linears.items():
            shapes[f"{at}{name}.weight"] = (n_out, n_in)
            shapes[f"{at}{name}.bias"] = (n_out,)
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    for norm in norms:
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (hidden,)
    return shapes


def shard_view(name: str, shape: Sequence[int], config: EncoderConfig | None) -> Shape:
    """Return the shape to lay a tensor out with, so that a cut of one dim falls between heads.

    Query, key and value weights become `[heads, head_dim, hidden]` (biases `[heads, head_dim]`), the
    attention output weight `[hidden, heads, head_dim]`; every other tensor keeps its shape. It is a
    reshape: the bytes keep their order.
    """
    cut = _cut(name, config)
    if config is None or cut not in ("heads_out", "heads_in"):
        return tuple(shape)
    heads = (config.num_heads, config.head_dim)
    at = 0 if cut == "heads_out" else 1
    if shape[at] != config.hidden_size:
        raise CheckpointError(
            f"{name} is cut by heads, so dim {at} must be {config.hidden_size} "
            f"({config.num_heads} heads of {config.head_dim}); its shape is {tuple(shape)}"
        )
    return (*shape[:at], *heads, *shape[at + 1 :])


def tensor_parallel_specs(
    config: EncoderConfig | None, shapes: Mapping[str, Sequence[int]], axis: str = "tp"
) -> dict[str, Spec]:
    """Return the serving spec of every tensor: for each dim of its `shard_view`, None or the mesh axis.

    Tensors that the forward does not cut (embeddings, norms, row biases, unknown names) are replicated;
    without a config all are.
    """
    specs: dict[str, Spec] = {}
    for name, shape in shapes.items():
        ndim = len(shard_view(name, shape, config))
        cut = _cut(name, config)
        at = None if cut is None else 1 if cut in ("heads_in", "in") else 0
        specs[name] = tuple(axis if dim == at else None for dim in range(ndim))
    return specs


def flat_box(name: str, box: Box, config: EncoderConfig | None) -> Box:
    """Return a box of a tensor's `shard_view` in the coordinates of the tensor as the file has it.

    Raises:
        ShardingError: the box cuts inside a head as well as between heads, so it is no box there.
    """
    cut = _cut(name, config)
    if config is None or cut not in ("heads_out", "heads_in"):
        return box
    at = 0 if cut == "heads_out" else 1
    (h0, h1), inner = box[at], box[at + 1]
    if inner != (0, config.head_dim):
        raise ShardingError(
            f"{name} is cut by whole heads: dim {at + 1} of the box must be (0, {config.head_dim}), it is {inner}"
        )
    return (*box[:at], (h0 * config.head_dim, h1 * config.head_dim), *box[at + 2 :])


def embed(weights: Weights, config: EncoderConfig, token_ids: NDArray[np.int64], mask: NDArray[Any]) -> F32:
    """Return the embeddings `[batch, hidden]` of unsharded weights, computed in float32.

    Args:
        weights: every tensor of `expected_shapes`, whole; other dtypes are converted to float32.
        config: the sizes.
        token_ids: `[batch, seq]`.
        mask: `[batch, seq]`, 1 (or True) where a token counts.
    """
    _check_tokens(config, token_ids, mask)
    _check_weights(weights, config, 0, 1)
    return _forward(weights, config, token_ids, mask, lambda partial: partial, lambda x: x)


def embed_tensor_parallel(
    local: Weights,
    config: EncoderConfig,
    token_ids: NDArray[np.int64],
    mask: NDArray[Any],
    tp: lc.Communicator,
    compute: Compute = "float32",
) -> F32:
    """Return the embeddings `[batch, hidden]`, the same on every rank, of weights cut over `tp`.

    Collective: all ranks of `tp`, a communicator of host arrays, call this with the same tokens. Two
    all-reduces a layer, in tree order.

    Args:
        local: this rank's part of every tensor, cut as `tensor_parallel_specs` says with the balanced
            split; in the dims of `shard_view` or in the file's.
        config: the sizes of the whole encoder.
        token_ids: `[batch, seq]`.
        mask: `[batch, seq]`.
        tp: the ranks that the weights are cut over.
        compute: "bfloat16" rounds weights, and activations after each operation, to bf16; products are
            summed in float32 and partial sums cross ranks in float32.

    Raises:
        BufferMismatchError: on every rank, if a shape is wrong on any.
        MismatchError: ranks brought different tokens or configs.
    """
    error: Exception | None = None
    digest = hashlib.sha256(f"{config} {compute} {token_ids.shape} {mask.shape}".encode())
    digest.update(token_ids.astype(np.int64).tobytes())
    digest.update(mask.astype(np.int64).tobytes())
    try:
        if compute not in ("float32", "bfloat16"):
            raise DTypeError(f"compute must be 'float32' or 'bfloat16', got {compute!r}")
        _check_tokens(config, token_ids, mask)
        _check_weights(local, config, tp.rank, tp.size)
    except (BufferMismatchError, CheckpointError, DTypeError) as caught:
        error = caught
    lc.agree(tp, digest.digest(), error, "embed_tensor_parallel")

    def reduce(partial: F32) -> F32:
        total = np.ascontiguousarray(partial)
        tp.all_reduce(total, total, op="sum", order="tree")
        return total

    return _forward(
        local, config, token_ids, mask, reduce, _round_bf16 if compute == "bfloat16" else lambda x: x
    )


def _cut(name: str, config: EncoderConfig | None) -> Literal["heads_out", "heads_in", "out", "in"] | None:
    if config is None or not name.startswith(layers := f"{config.prefix}encoder.layer."):
        return None
    number, _, tail = name[len(layers) :].partition(".")
    return _CUTS.get(tail) if number.isdecimal() else None


def _forward(
    weights: Weights,
    config: EncoderConfig,
    token_ids: NDArray[np.int64],
    mask: NDArray[Any],
    reduce: Callable[[F32], F32],
    rounded: Callable[[F32], F32],
) -> F32:
    batch, seq = token_ids.shape
    hidden, head_dim = config.hidden_size, config.head_dim
    keep = np.asarray(mask, dtype=np.float32)
    # Finite, so that a sentence without tokens gives numbers and not NaN.
    hide = ((1.0 - keep) * np.float32(-1e30))[:, None, None, :]

    def weight(name: str) -> F32:
        return rounded(np.asarray(weights[f"{config.prefix}{name}"], dtype=np.float32))

    def norm(x: F32, name: str) -> F32:
        return rounded(
            _layer_norm(x, weight(f"{name}.weight"), weight(f"{name}.bias"), config.layer_norm_eps)
        )

    def rows(name: str, index: Any) -> F32:
        # Rows first, then the conversion: the vocabulary is most of the model.
        return rounded(
            np.asarray(weights[f"{config.prefix}embeddings.{name}.weight"][index], dtype=np.float32)
        )

    word, position, kind = map(rows, _EMBEDDING_NAMES, (token_ids, slice(seq), 0))
    x = norm(rounded((word + position + kind).reshape(-1, hidden)), "embeddings.LayerNorm")
    for layer in range(config.num_layers):
        at = f"encoder.layer.{layer}."

        def column(x: F32, name: str, at: str = at) -> F32:
            w = weight(f"{at}{name}.weight").reshape(-1, hidden)
            return x @ w.T + weight(f"{at}{name}.bias").reshape(-1)

        def row(x: F32, name: str, at: str = at) -> F32:
            w = weight(f"{at}{name}.weight").reshape(hidden, -1)
            return rounded(reduce(x @ w.T) + weight(f"{at}{name}.bias"))

        def heads(x: F32) -> F32:
            return x.reshape(batch, seq, x.shape[1] // head_dim, head_dim).transpose(0, 2, 1, 3)

        q, k, v = (heads(rounded(column(x, f"attention.self.{n}"))) for n in ("query", "key", "value"))
        scores = (q @ k.transpose(0, 1, 3, 2)) * np.float32(1.0 / math.sqrt(head_dim)) + hide
        context = rounded(rounded(_softmax(scores)) @ v)
        context = context.transpose(0, 2, 1, 3).reshape(batch * seq, context.shape[1] * head_dim)
        x = norm(rounded(x + row(context, "attention.output.dense")), f"{at}attention.output.LayerNorm")
        inner = rounded(_gelu(rounded(column(x, "intermediate.dense"))))
        x = norm(rounded(x + row(inner, "output.dense")), f"{at}output.LayerNorm")
    pooled = (x.reshape(batch, seq, hidden) * keep[:, :, None]).sum(axis=1)
    pooled /= np.maximum(keep.sum(axis=1, keepdims=True), np.float32(1e-9))
    out: F32 = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), np.float32(1e-12))
    return out


def _layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    out: F32 = centred / np.sqrt(variance + np.float32(eps)) * weight + bias
    return out


def _softmax(x: F32) -> F32:
    out: F32 = np.exp(x - x.max(axis=-1, keepdims=True))
    out /= out.sum(axis=-1, keepdims=True)
    return out


def _gelu(x: F32) -> F32:
    return (0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))).astype(np.float32)


def _round_bf16(x: F32) -> F32:
    return x.astype(dtypes.get("bfloat16").numpy).astype(np.float32)


def _check_tokens(config: EncoderConfig, token_ids: NDArray[np.int64], mask: NDArray[Any]) -> None:
    if token_ids.ndim != 2 or mask.shape != token_ids.shape or token_ids.dtype.kind not in "iu":
        raise BufferMismatchError(
            "token ids must be integers [batch, seq] and the mask have the same shape; "
            f"got ids {token_ids.dtype}{token_ids.shape}, mask {mask.shape}"
        )
    if not 1 <= token_ids.shape[1] <= config.max_positions:
        raise BufferMismatchError(
            f"sentences must have 1 to {config.max_positions} tokens (the model's positions), got "
            f"{token_ids.shape[1]}: tokenize with max_length={config.max_positions}"
        )
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= config.vocab_size):
        raise BufferMismatchError(
            f"token ids must lie in 0..{config.vocab_size - 1}, got {token_ids.min()}..{token_ids.max()}: "
            "the tokenizer belongs to another model"
        )


def _check_weights(local: Weights, config: EncoderConfig, rank: int, size: int) -> None:
    shapes = expected_shapes(config)
    for name, spec in tensor_parallel_specs(config, shapes).items():
        if name not in local:
            raise CheckpointError(f"the encoder needs tensor {name} and the weights do not hold it")
        box = tuple(
            split_interval(interval, size, rank) if axis else interval
            for interval, axis in zip(full_box(shard_view(name, shapes[name], config)), spec, strict=True)
        )
        viewed, flat = shape_of(box), shape_of(flat_box(name, box, config))
        if local[name].shape not in (viewed, flat):
            raise BufferMismatchError(
                f"{name} on rank {rank} of {size} must have shape {viewed} or {flat}, got {local[name].shape}"
            )
