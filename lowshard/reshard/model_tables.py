"""Layout tables of two models that planning is benchmarked with: a dense transformer and DeepSeek-V3's shape."""

from __future__ import annotations

from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.tensor_layout import TensorLayout

Tables = dict[str, TensorLayout]


def dense(
    count: int, tp: int, pp: int, dp: int, *, offset: int = 0, hidden: int = 1024, dtype: str = "bfloat16"
) -> Tables:
    """Return a model of `count` tensors: column-parallel, gated, row-parallel and replicated ones in equal parts."""
    found = {}
    for i in range(count):
        stage = i * pp // count
        axes = {"dp": (dp, tp), "tp": (tp, 1)}
        at = offset + stage * dp * tp
        shape = (hidden, hidden)
        if i % 4 == 0:
            made = TensorLayout.sharded(shape, dtype, axes, {0: "tp"}, offset=at)
        elif i % 4 == 1:
            gated = DimSharding(2 * hidden, tp, chunks=2)
            made = TensorLayout.sharded(
                (2 * hidden, hidden), dtype, axes, {0: gated}, by={0: "tp"}, offset=at
            )
        elif i % 4 == 2:
            made = TensorLayout.sharded(shape, dtype, axes, {1: "tp"}, offset=at)
        else:
            made = TensorLayout.sharded((hidden,), dtype, axes, offset=at)
        found[f"layers.{i // 4}.{('qkv', 'fc1', 'fc2', 'norm')[i % 4]}.weight"] = made
    return found


def mixture(
    ranks: int, tp: int, pp: int, ep: int, *, layers: int = 61, experts: int = 256, dense_layers: int = 3,
    offset: int = 0, hidden: int = 7168, expert_hidden: int = 2048, dtype: str = "bfloat16",
) -> Tables:  # fmt: skip
    """Return a mixture of experts; by default of DeepSeek-V3's shape (arXiv 2412.19437, section 4.2)."""
    per_stage = ranks // pp
    data = per_stage // tp
    copies = per_stage // ep
    found: Tables = {}
    rank_map: dict[tuple[int, ...], TensorLayout] = {}

    def sharded(shape: tuple[int, ...], dim: int | None, stage: int) -> TensorLayout:
        key = (*shape, -1 if dim is None else dim, stage)
        if key not in rank_map:
            axes = {"dp": (data, tp), "tp": (tp, 1)}
            dims = {} if dim is None else {dim: "tp"}
            rank_map[key] = TensorLayout.sharded(shape, dtype, axes, dims, offset=offset + stage * per_stage)
        return rank_map[key]

    def expert(shape: tuple[int, ...], place: int, stage: int) -> TensorLayout:
        key = (*shape, -2, place, stage)
        if key not in rank_map:
            at = offset + stage * per_stage + place
            rank_map[key] = TensorLayout.sharded(shape, dtype, {"edp": (copies, ep)}, offset=at)
        return rank_map[key]

    for layer in range(layers):
        stage, name = layer * pp // layers, f"model.layers.{layer}"
        for part, shape, dim in (
            ("self_attn.q_a_proj", (1536, hidden), None),
            ("self_attn.q_b_proj", (24576, 1536), 0),
            ("self_attn.kv_a_proj_with_mqa", (576, hidden), None),
            ("self_attn.kv_b_proj", (32768, 512), 0),
            ("self_attn.o_proj", (hidden, 16384), 1),
            ("input_layernorm", (hidden,), None),
            ("post_attention_layernorm", (hidden,), None),
        ):
            found[f"{name}.{part}.weight"] = sharded(shape, dim, stage)
        if layer < dense_layers:
            for part, shape, dim in (
                ("gate_proj", (18432, hidden), 0),
                ("up_proj", (18432, hidden), 0),
                ("down_proj", (hidden, 18432), 1),
            ):
                found[f"{name}.mlp.{part}.weight"] = sharded(shape, dim, stage)
            continue
        found[f"{name}.mlp.gate.weight"] = sharded((experts, hidden), None, stage)
        for number in range(experts):
            place = number * ep // experts
            for part, shape in (
                ("gate_proj", (expert_hidden, hidden)),
                ("up_proj", (expert_hidden, hidden)),
                ("down_proj", (hidden, expert_hidden)),
            ):
                found[f"{name}.mlp.experts.{number}.{part}.weight"] = expert(shape, place, stage)
    found["model.embed_tokens.weight"] = sharded((129280, hidden), 0, 0)
    found["model.norm.weight"] = sharded((hidden,), None, pp - 1)
    found["lm_head.weight"] = sharded((129280, hidden), 0, pp - 1)
    return found
