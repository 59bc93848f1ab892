"""A BERT-type sentence encoder in NumPy, in one process or tensor parallel.

It follows sentence-transformers' all-MiniLM-L6-v2: embeddings and LayerNorm, attention and erf-GELU layers, mean
pooling over the mask, L2 normalisation. Tensor parallel is Megatron's: query, key, value and the first MLP matrix are
cut on their output dim, by whole heads, the attention output and the second MLP matrix on their input dim, so that two
all-reduces a layer are all that ranks exchange; row biases are added once, after the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.errors import CheckpointError
from lowshard.kernels.erf import erf

F32 = NDArray[np.float32]
Weights = Mapping[str, NDArray[Any]]
Shape = tuple[int, ...]
Spec = tuple[str | None, ...]
Compute = Literal["float32", "bfloat16"]

_EMBEDDING_NAMES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
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
# The dim that tensor parallel cuts, by the name after "encoder.layer.N."; what is not here is whole on every rank.
_COLUMN_PARALLEL = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "intermediate.dense",
)
_CUT_DIM = {
    **{f"{name}.{kind}": 0 for name in _COLUMN_PARALLEL for kind in ("weight", "bias")},
    "attention.output.dense.weight": 1,
    "output.dense.weight": 1,
}


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of one encoder."""

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

    def to_json(self) -> dict[str, Any]:
        """Return the config under the names that Hugging Face's BERT config.json uses."""
        values = asdict(self)
        return {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"} | {
            theirs: values[ours] for ours, theirs in _JSON_NAMES.items()
        }


def config_from_json(values: Mapping[str, Any], prefix: str = "") -> EncoderConfig:
    """Return the config that a BERT config.json states."""
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


def tensor_parallel_spec(name: str, ndim: int, config: EncoderConfig) -> Spec:
    """Return the serving spec of a tensor: the mesh axis tp for the dim that is cut, None for the others."""
    number, _, tail = name.removeprefix(f"{config.prefix}encoder.layer.").partition(".")
    cut = _CUT_DIM.get(tail) if number.isdecimal() else None
    return tuple("tp" if dim == cut else None for dim in range(ndim))


def embed(
    weights: Weights,
    config: EncoderConfig,
    token_ids: NDArray[np.int64],
    mask: NDArray[Any],
    tp: Communicator | None = None,
    compute: Compute = "float32",
) -> F32:
    """Return the embeddings `[batch, hidden]`, with `tp` on each of its ranks; ids and mask are `[batch, seq]`."""
    # "bfloat16" rounds weights, and activations after each operation; sums, also those across ranks, are in float32.
    batch, seq = token_ids.shape
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_heads
    rounded: Callable[[F32], F32] = _round_bf16 if compute == "bfloat16" else lambda x: x
    keep = np.asarray(mask, dtype=np.float32)
    # Finite, so that a sentence without tokens gives numbers and not NaN.
    hide = ((1.0 - keep) * np.float32(-1e30))[:, None, None, :]

    def weight(name: str) -> F32:
        return rounded(np.asarray(weights[f"{config.prefix}{name}"], dtype=np.float32))

    def norm(x: F32, name: str) -> F32:
        scale, bias = weight(f"{name}.weight"), weight(f"{name}.bias")
        return rounded(_layer_norm(x, scale, bias, config.layer_norm_eps))

    def rows(name: str, index: Any) -> F32:
        # Rows first, then the conversion: the vocabulary is most of the model.
        table = weights[f"{config.prefix}embeddings.{name}.weight"]
        return rounded(np.asarray(table[index], dtype=np.float32))

    word, position, kind = map(rows, _EMBEDDING_NAMES, (token_ids, slice(seq), 0))
    x = norm(rounded((word + position + kind).reshape(-1, hidden)), "embeddings.LayerNorm")
    for layer in range(config.num_layers):
        at = f"encoder.layer.{layer}."

        def column(x: F32, name: str, at: str = at) -> F32:
            return x @ weight(f"{at}{name}.weight").T + weight(f"{at}{name}.bias")

        def row(x: F32, name: str, at: str = at) -> F32:
            total = np.ascontiguousarray(x @ weight(f"{at}{name}.weight").T)
            if tp is not None:
                tp.all_reduce(total, total, op="sum", order="tree")
            return rounded(total + weight(f"{at}{name}.bias"))

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
