"""A Llama-type decoder in NumPy: one process or tensor parallel, the same code, with a key-value cache.

RMSNorm, rotary embeddings on the two halves of a head, grouped-query attention, SiLU-gated MLP, tied
embeddings (Touvron et al. 2023; names and order of dims as Hugging Face's LlamaForCausalLM has them). Tensor
parallel is Megatron-LM's: outputs of query, key, value, gate and up are cut, inputs of the other two, two
all-reduces a layer; the vocabulary is cut by rows, so that embeddings are summed and logits gathered. Attention
is cut by `ShardingStrategy.grouped_qkv`, so every rank has the key-value heads of its own query heads, however
uneven that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowshard.box import split_interval
from lowshard.comm import Communicator
from lowshard.errors import BufferMismatchError
from lowshard.weights import NamePatterns, ShardingStrategy, Sizes

F32 = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of one decoder. Compares by value."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_heads

    @property
    def sizes(self) -> Sizes:
        """What name patterns ask for."""
        return Sizes(self.num_heads, self.num_kv_heads)

    def to_json(self) -> dict[str, Any]:
        """Return the config under the names of Hugging Face's config.json."""
        return {
            "model_type": "llama", "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "intermediate_size": self.intermediate_size,
            "rope_theta": self.rope_theta, "rms_norm_eps": self.rms_eps, "tie_word_embeddings": True,
        }  # fmt: skip


SMOLLM2_135M = LlamaConfig(49152, 576, 30, 9, 3, 1536, 100000.0, 1e-5)


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, by Hugging Face's name."""
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (hidden, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{at}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{at}mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def tensor_parallel_strategies(config: LlamaConfig, ranks: int) -> dict[str, ShardingStrategy]:
    """Return how each tensor is cut over `ranks`: the shipped name patterns for Llama."""
    return NamePatterns.load("llama").strategies(expected_shapes(config), ranks, config.sizes)


def heads_of(config: LlamaConfig, ranks: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the query heads and the key-value heads of a rank, as intervals."""
    cut = tensor_parallel_strategies(LlamaConfig(**{**config.__dict__, "num_layers": 1}), ranks)
    shapes, found = expected_shapes(config), []
    for part in "qk":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        ((start, stop), _), *_ = cut[name].pieces(shapes[name], rank)
        found.append((start // config.head_dim, stop // config.head_dim))
    return found[0], found[1]


class Decoder:
    """One rank's part of a decoder, and its cache: `step` takes tokens and returns the logits of the last.

    Args:
        config: the sizes of the whole decoder.
        weights: this rank's part of every tensor, cut as `tensor_parallel_strategies` says; whole for one rank.
        comm: the ranks it is cut over; None for one process.

    Raises:
        BufferMismatchError: a weight has another shape than this rank's part.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, np.ndarray], comm: Communicator | None = None
    ) -> None:
        self.config, self.comm = config, comm
        self.rank, self.ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        cut = tensor_parallel_strategies(config, self.ranks)
        for name, shape in expected_shapes(config).items():
            expected = cut[name].layout(shape).local_shape(self.rank)
            if name not in weights or weights[name].shape != expected:
                got = weights[name].shape if name in weights else "nothing"
                raise BufferMismatchError(
                    f"{name}: rank {self.rank} of {self.ranks} holds {expected}, got {got}"
                )
        self._w = {n: np.asarray(a, np.float32) for n, a in weights.items()}
        (self._q0, self._q1), (self._kv0, self._kv1) = heads_of(config, self.ranks, self.rank)
        self._vocab = split_interval((0, config.vocab_size), self.ranks, self.rank)
        self._keys: list[F32] = [
            np.empty((self._kv1 - self._kv0, 0, config.head_dim), np.float32)
        ] * config.num_layers
        self._values = list(self._keys)
        self._length = 0

    def step(self, ids: Sequence[int] | Ids) -> F32:
        """Return the logits `[vocab]` after these tokens, which follow all that came before.

        Collective: all ranks call this with the same tokens. The logits are the same on every rank.
        """
        tokens = np.asarray(ids, np.int64)
        x = self._embed(tokens)
        positions = np.arange(self._length, self._length + len(tokens))
        self._length += len(tokens)
        for layer in range(self.config.num_layers):
            at = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{at}input_layernorm"), layer, positions)
            h = self._norm(x, f"{at}post_attention_layernorm")
            gate, up = h @ self._t(f"{at}mlp.gate_proj"), h @ self._t(f"{at}mlp.up_proj")
            x = x + self._sum((gate / (1 + np.exp(-gate)) * up) @ self._t(f"{at}mlp.down_proj"))
        return self._gather(self._norm(x[-1:], "model.norm")[0] @ self._w["model.embed_tokens.weight"].T)

    def greedy(
        self, prompt: Sequence[int], count: int, each: Callable[[int], None] | None = None
    ) -> tuple[list[int], F32]:
        """Return `count` tokens, each the likeliest, and the logits after the prompt."""
        logits = first = self.step(prompt)
        tokens: list[int] = []
        while True:
            tokens.append(int(np.argmax(logits)))
            if each is not None:
                each(len(tokens))
            if len(tokens) == count:
                return tokens, first
            logits = self.step(tokens[-1:])

    # ---- parts

    def _t(self, name: str) -> F32:
        return self._w[f"{name}.weight"].T

    def _norm(self, x: F32, name: str) -> F32:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        out: F32 = x / np.sqrt(mean + np.float32(self.config.rms_eps)) * self._w[f"{name}.weight"]
        return out

    def _embed(self, tokens: Ids) -> F32:
        first, last = self._vocab
        here = (tokens >= first) & (tokens < last)
        rows = np.zeros((len(tokens), self.config.hidden_size), np.float32)
        rows[here] = self._w["model.embed_tokens.weight"][tokens[here] - first]
        return self._sum(rows)

    def _attention(self, x: F32, layer: int, positions: Ids) -> F32:
        at, dim = f"model.layers.{layer}.self_attn.", self.config.head_dim

        def heads(part: str) -> F32:
            flat = x @ self._t(f"{at}{part}_proj")
            return flat.reshape(len(x), flat.shape[1] // dim, dim).transpose(1, 0, 2)

        query, key, value = (
            self._rotate(heads("q"), positions),
            self._rotate(heads("k"), positions),
            heads("v"),
        )
        key = self._keys[layer] = np.concatenate([self._keys[layer], key], axis=1)
        value = self._values[layer] = np.concatenate([self._values[layer], value], axis=1)
        group = self.config.num_heads // self.config.num_kv_heads
        mine = np.arange(self._q0, self._q1) // group - self._kv0
        scores = query @ key[mine].transpose(0, 2, 1) * np.float32(1 / math.sqrt(dim))
        scores = np.where(np.arange(key.shape[1]) <= positions[:, None], scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) if scores.size else scores
        weights = weights / weights.sum(axis=-1, keepdims=True)
        context = (weights @ value[mine]).transpose(1, 0, 2).reshape(len(x), len(mine) * dim)
        return self._sum(context @ self._t(f"{at}o_proj"))

    def _rotate(self, x: F32, positions: Ids) -> F32:
        half = self.config.head_dim // 2
        angles = positions[:, None] * self.config.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _sum(self, partial: F32) -> F32:
        if self.comm is None:
            return partial
        total = np.ascontiguousarray(partial, np.float32)
        self.comm.all_reduce(total, total, order="tree")
        return total

    def _gather(self, part: F32) -> F32:
        if self.comm is None:
            return part
        spans = [split_interval((0, self.config.vocab_size), self.ranks, r) for r in range(self.ranks)]
        whole = np.empty(self.config.vocab_size, np.float32)
        self.comm.all_gather_v(
            np.ascontiguousarray(part), whole, [b - a for a, b in spans], [a for a, _ in spans]
        )
        return whole
