"""Quantised weights: scales follow their blocks, bad cuts are refused with a way out, the bias is added once."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import mode

from lowshard.errors import ShardingError
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.weights import Quantization, Segment, ShardingStrategy, Weight, scale_strategy
from lowshard.weights.shard_rules import ExpertRange, Owned

S = ShardingStrategy
Q = Quantization


def block_scaled(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the plain values of a block-scaled matrix whose first block starts at (0, 0)."""
    rows, cols = (np.arange(n) // b for n, b in zip(values.shape, block, strict=True))
    return values * scale[rows][:, cols]


STRATEGIES = {
    "rowwise": S.rowwise, "columnwise": S.columnwise, "gate_up": lambda k: S.gate_up(k, axis=0),
    "stacked": lambda k: S.stacked_qkv(k, 4, 8), "heads": lambda k: S.head_aware_columnwise(k, 12, 8),
    "segments": lambda k: S.segmented(k, 1, [Segment(64, num_heads=4), Segment(32)]),
    "grouped": lambda k: S.grouped_qkv(k, 8, 2, 8), "replicate": S.replicate,
}  # fmt: skip


@given(
    kind=st.sampled_from(sorted(STRATEGIES)), k=st.integers(1, 6),
    block=st.tuples(st.sampled_from([1, 4, 8, 16, 40]), st.sampled_from([1, 8, 16, 32, 36])),
)  # fmt: skip
def test_a_block_scaled_shard_means_what_the_weight_means_or_is_refused(
    kind: str, k: int, block: tuple[int, int]
) -> None:
    rng = np.random.default_rng([k, *block])
    shape = (96, 96)
    values = rng.standard_normal(shape)
    quantization = Q.scaled("block", block)
    scale = rng.uniform(0.5, 2.0, quantization.scale_shape(shape))
    strategy = STRATEGIES[kind](k)
    weight = Weight("w", values, strategy, quantization=quantization, scale=scale)
    truth = block_scaled(values, scale, block)
    if not is_legal(quantization, strategy, shape):
        with pytest.raises(ValueError, match="inside a block of"):
            weight.shard()
        return
    for index, part in enumerate(weight.shard()):
        assert np.array_equal(block_scaled(part.array, part.scale, block), strategy(truth, index))


@given(k=st.integers(1, 6), row_axes=st.booleans(), kind=st.sampled_from(sorted(STRATEGIES)))
def test_row_and_tensor_scales(k: int, row_axes: bool, kind: str) -> None:
    rng = np.random.default_rng(k)
    values, scale = rng.standard_normal((96, 96)), rng.uniform(1, 2, (96, 1) if row_axes else 96)
    strategy = STRATEGIES[kind](k)
    weight = Weight("w", values, strategy, quantization=Q.scaled("row"), scale=scale, input_scale=3.0)
    truth = values * scale.reshape(-1, 1)
    for index, part in enumerate(weight.shard()):
        assert part.scale.ndim == scale.ndim
        assert part.input_scale == 3.0
        assert np.array_equal(part.array * part.scale.reshape(-1, 1), strategy(truth, index))
    tensor = Weight("w", values, strategy, quantization=Q.scaled("tensor"), scale=np.float32(2))
    assert all(part.scale == 2 for part in tensor.shard())


def test_mxfp8_scales_follow_their_values() -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 128)).astype(np.float32)
    made = quantize_mxfp8(whole)
    strategy = S.columnwise(4)
    weight = Weight("w", made.data, strategy, quantization=Q.mxfp8(), scale=made.scale)
    for index, part in enumerate(weight.shard()):
        again = quantize_mxfp8(np.ascontiguousarray(strategy(whole, index)))
        assert np.array_equal(part.array, again.data)
        assert np.array_equal(part.scale, again.scale)
        one = MXFP8Tensor(np.ascontiguousarray(part.array), np.ascontiguousarray(part.scale))
        assert dequantize_mxfp8(one, "float32").shape == (6, 32)
    with pytest.raises(ValueError, match="block of 32") as caught:
        Weight("w", made.data, S.columnwise(3), quantization=Q.mxfp8(), scale=made.scale).shard()
    assert "Segment(128, num_heads=4)" in str(caught.value)


def is_legal(quantization: Quantization, strategy: ShardingStrategy, shape: tuple[int, ...]) -> bool:
    """Return whether every device gets whole units and blocks."""
    try:
        return all(quantization.pieces(strategy, shape, i) for i in range(strategy.num_devices))
    except ValueError:
        return False


def follow_advice(text: str, k: int) -> ShardingStrategy:
    """Return the strategy that an error's text proposes."""
    if found := re.search(r"ShardingStrategy\.(segmented\(.*\]\))", text):
        return eval(f"S.{found[1]}", {"S": S, "Segment": Segment})  # type: ignore[no-any-return]
    assert f"replicate({k})" in text
    return S.replicate(k)


@given(
    quantization=st.sampled_from([Q.packed(4), Q.packed(6), Q.gguf("Q4_1"), Q.gguf("Q6_K"), Q.mxfp8()]),
    units=st.integers(1, 12), k=st.integers(1, 6),
)  # fmt: skip
def test_the_proposed_alternative_is_legal(quantization: Quantization, units: int, k: int) -> None:
    unit = quantization.values if quantization.block is None else quantization.block[1]
    stored = units * (quantization.stored if quantization.block is None else 32)
    weight = Weight("w", np.zeros((4, stored), np.uint8), quantization=quantization)
    strategy = S.head_aware_columnwise(k, units * unit // 2 or 1, 2) if unit % 2 == 0 else S.columnwise(k)
    weight.sharding_strategy = strategy
    try:
        parts = weight.shard()
    except ValueError as error:
        weight.sharding_strategy = follow_advice(str(error), k)
        parts = weight.shard()
    held = sum(p.shape[1] for p in parts)
    assert held == stored or weight.sharding_strategy.is_replicate
    assert all(p.shape[1] % quantization.stored == 0 for p in parts)


@pytest.mark.parametrize(
    ("quantization", "strategy", "columns", "expected"),
    [
        (Q.packed(4), S.columnwise(3), 10, [4, 3, 3]),
        (Q.packed(4), S.head_aware_columnwise(4, 30, 64), 960, [256, 256, 224, 224]),
        (Q.packed(6), S.head_aware_columnwise(4, 30, 64), 1440, [384, 384, 336, 336]),
        (Q.gguf("Q4_1"), S.head_aware_columnwise(2, 3, 64), 120, [80, 40]),
        (Q.gguf("Q8_0"), S.columnwise(2), 136, [68, 68]),
        (Q.packed(6), S.segmented(2, 1, [Segment(16, num_heads=2), Segment(8)]), 18, [9, 9]),
    ],
)  # fmt: skip
def test_widths_of_packed_parts(
    quantization: Quantization, strategy: ShardingStrategy, columns: int, expected: list[int]
) -> None:
    array = np.arange(2 * columns, dtype=np.int32).reshape(2, columns)
    parts = Weight("w", array, strategy, quantization=quantization).shard()
    assert [p.shape[1] for p in parts] == expected
    if not strategy.is_segmented:
        assert np.array_equal(np.concatenate([p.array for p in parts], axis=1), array)


@pytest.mark.parametrize(
    ("quantization", "strategy", "columns", "said"),
    [
        (Q.packed(4), S.head_aware_columnwise(4, 6, 3), 9,
         r"value 15 .*inside a packed element of 2.*\(4, 1, \[Segment\(18, num_heads=3\)"),
        (Q.packed(6), S.columnwise(2), 9, "inside a block of 4"),
        (Q.gguf("Q4_1"), S.columnwise(3), 80, r"block of 32.*Segment\(128, num_heads=4\)"),
    ],
)  # fmt: skip
def test_cuts_through_storage_are_refused(
    quantization: Quantization, strategy: ShardingStrategy, columns: int, said: str
) -> None:
    array = np.zeros((4, columns), np.uint8)
    with pytest.raises(ValueError, match=said):
        Weight("w", array, strategy, quantization=quantization).shard()
    whole = Weight("w", array, quantization=quantization)
    with pytest.raises(ValueError, match="inside"):
        [strategy(whole, index) for index in range(strategy.num_devices)]


def test_the_hazard_of_scales_that_divide_but_do_not_align_is_refused() -> None:
    scale_strategy(S.rowwise(3), "block", (320, 128), (128, 128))  # MAX: fine
    with pytest.raises(ValueError, match=r"inside a block of 128 .*replicate it"):
        Weight("w", np.zeros((320, 128)), S.rowwise(3), quantization=Q.scaled("block", (128, 128)),
               scale=np.ones((3, 1))).shard()  # fmt: skip
    # 30 heads, aligned blocks, 4 devices: refused by MAX.
    with pytest.raises(ValueError, match="does not divide"):
        scale_strategy(S.head_aware_columnwise(4, 30, 128), "block", (128, 3840), (128, 128))
    parts = Weight("w", np.zeros((128, 3840)), S.head_aware_columnwise(4, 30, 128),
                   quantization=Q.scaled("block", (128, 128)), scale=np.ones((1, 30))).shard()  # fmt: skip
    assert [p.scale.shape for p in parts] == [(1, 8), (1, 8), (1, 7), (1, 7)]


# ---- bias


@given(
    kind=st.sampled_from([*sorted(STRATEGIES.keys() - {"stacked", "grouped"}), "axis0", "axis1", "gate0", "gate1"]),
    k=st.integers(1, 5),
)  # fmt: skip
def test_the_bias_is_added_once(kind: str, k: int) -> None:
    strategies: dict[str, Any] = STRATEGIES | {
        "axis0": lambda k: S.axiswise(0, k), "axis1": lambda k: S.axiswise(-1, k),
        "gate0": lambda k: S.gate_up(k, 0), "gate1": lambda k: S.gate_up(k, 1),
    }  # fmt: skip
    rng = np.random.default_rng(k)
    w, b, x = rng.standard_normal((96, 96)), rng.standard_normal(96), rng.standard_normal((3, 96))
    strategy = strategies[kind](k)
    parts = Weight("w", w, strategy, bias=b).shard()
    zero = np.zeros(())
    if strategy.is_replicate:
        results = [x @ p.array.T + p.bias for p in parts]
        assert all(np.allclose(r, x @ w.T + b) for r in results)
    elif strategy.concat_axis % 2 == 0:
        whole = np.concatenate([x @ p.array.T + p.bias for p in parts], axis=1)
        order = np.concatenate([strategy(np.arange(96)[:, None], i)[:, 0] for i in range(k)])
        assert np.allclose(whole, (x @ w.T + b)[:, order])
    else:
        total = sum(
            strategy(np.broadcast_to(x[:, None], (3, 96, 96))[:, 0], i) @ p.array.T
            + (zero if p.bias is None else p.bias)
            for i, p in enumerate(parts)
        )
        assert np.allclose(total, x @ w.T + b)


@pytest.mark.parametrize("owner", [0, 1])
def test_the_bias_of_an_owned_weight_is_on_its_owner(owner: int) -> None:
    for shape in ((4,), (4, 0), (4, 4)):
        bias = np.ones(shape[:-1], np.float32)
        parts = Weight("w", np.zeros(shape, np.float32), S(2, Owned(owner)), bias=bias).shard()
        held = [0 if part.bias is None else part.bias.size for part in parts]
        assert held[owner] == bias.size
        assert sum(held) == bias.size


def test_companions_are_checked() -> None:
    array = np.zeros((4, 64))
    with pytest.raises(ValueError, match="nothing says"):
        Weight("w", array, scale=np.ones(4))
    with pytest.raises(ValueError, match="has scales of shape"):
        Weight("w", array, quantization=Q.mxfp8(), scale=np.ones((4, 3)))
    for kind, block in (("row", None), ("block", (1, 4))):
        with pytest.raises(ShardingError, match=f"a weight of 0 axes has no {kind}s"):
            Weight("w", np.ones(()), quantization=Q.scaled(kind, block), scale=np.ones(()))
    with pytest.raises(ValueError, match="a bias has"):
        Weight("w", array, bias=np.ones(64))
    with pytest.raises(ValueError, match="a multiple of 20"):
        Weight("w", array, quantization=Q.gguf("Q4_1"))
    with pytest.raises(ValueError, match="one of Q4_0"):
        Q.gguf("Q9_9")
    with pytest.raises(ValueError, match="4 or 6 bits"):
        Q.packed(5)
    with pytest.raises(ValueError, match="comes with a block"):
        Q.scaled("block")


def test_experts_stacked_in_three_axes() -> None:
    """[experts, out, in] with a scale block of two axes and a bias a row, cut on each axis."""
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((4, 8, 12)), rng.standard_normal((4, 8))
    q = Q.scaled("block", (4, 4))
    scale = rng.standard_normal(q.scale_shape(w.shape))
    assert scale.shape == (4, 2, 3)
    for strategy, bias in ((S.rowwise(2), 0), (S.axiswise(1, 2), 1), (S.axiswise(2, 3), None)):
        parts = Weight("e", w, strategy, quantization=q, scale=scale, bias=b).shard()
        axis = strategy.concat_axis
        assert np.array_equal(np.concatenate([p.scale for p in parts], axis), scale)
        if bias is None:
            assert [p.bias is None for p in parts] == [False, True, True]
        else:
            assert np.array_equal(np.concatenate([p.bias for p in parts], bias), b)


def cut_small(kind: str, k: int, heads: int, head_dim: int) -> tuple[ShardingStrategy, tuple[int, ...]]:
    """Return a strategy over k devices, of which some get nothing where heads are few, and a shape it fits."""
    n = heads * head_dim
    return {
        "rowwise": (S.rowwise(k), (n, 32)), "columnwise": (S.columnwise(k), (3, n)),
        "axis0": (S.axiswise(0, k), (n, 8)),
        "axis-1": (S.axiswise(-1, k), (2, 3, n)), "replicate": (S.replicate(k), (n, 8)),
        "heads": (S.head_aware_columnwise(k, heads, head_dim), (5, n)),
        "stacked": (S.stacked_qkv(k, heads, head_dim), (3 * n, 8)), "gate_up": (S.gate_up(k, axis=0), (2 * n, 8)),
        "segments": (S.segmented(k, 0, [Segment(n, num_heads=heads), Segment(n)]), (2 * n, 8)),
        "grouped": (S.grouped_qkv(k, heads, heads, head_dim, few_kv="empty"), (3 * n, 8)),
        "few groups": (S.grouped_qkv(k, heads, 1, head_dim), ((heads + 2) * head_dim, 8)),
        "experts": (S(k, ExpertRange()), (heads, 4, 8)), "owned": (S(k, Owned(k - 1)), (n, 8)),
    }[kind]  # fmt: skip


CUTS = (
    "rowwise", "columnwise", "axis0", "axis-1", "replicate", "heads", "stacked", "gate_up", "segments", "grouped",
    "few groups", "experts", "owned",
)  # fmt: skip


@pytest.mark.parametrize("kind", mode.sample([*CUTS], 5, "cuts of quantised weights"))
def test_every_part_is_a_weight_that_the_library_accepts(kind: str) -> None:
    empty = accepted = 0
    quantizations = [
        Q.scaled("tensor"), Q.scaled("row"), Q.scaled("block", (4, 4)), Q.scaled("block", (1, 8)), Q.packed(4),
        Q.packed(4, "block", (2, 4)), Q.packed(6, "row"), Q.mxfp8(),
    ]  # fmt: skip
    for q, k, heads, head_dim in product(quantizations, (1, 2, 3, 5), (1, 2, 4), (1, 2, 4, 8)):
        strategy, shape = cut_small(kind, k, heads, head_dim)
        stored = shape if q.stored == q.values else (*shape[:-1], shape[-1] // q.values * q.stored)
        if not is_legal(q, strategy, stored):
            continue
        scale = None if q.granularity == "none" else np.ones(q.scale_shape(stored))
        whole = Weight(
            "w", np.zeros(stored), strategy, quantization=q, scale=scale, bias=np.zeros(stored[:-1])
        )
        for part in whole.shard():
            again = Weight(part.name, part.array, quantization=q, scale=part.scale, bias=part.bias)
            assert again.shape == part.shape
            assert scale is None or tuple(part.scale.shape) == q.scale_shape(part.shape)
            empty += part.array.size == 0
            accepted += 1
    assert accepted > 100
    assert empty > 0 or kind == "replicate"
