"""Packing and MXFP8 in one pass on every engine: the bytes of both steps done one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.mxfp8_twin import BITS, COMBOS, DTYPES, assert_holds, exact, moderate_blocks, slow_quantize
from support.places import packed_place, places

from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    unpack_dequantize,
)

engine = engines.fixture()


@st.composite
def shapes_and_boxes(draw, max_boxes=5):
    """A shape and boxes whose widths, not their starts, are multiples of 32."""
    outer = draw(st.lists(st.integers(1, 4), max_size=3))
    last = draw(st.integers(32, 200))
    boxes = []
    for _ in range(draw(st.integers(0, max_boxes))):
        width = 32 * draw(
            st.sampled_from([0, *range(1, last // 32 + 1)] if len(boxes) == 1 else range(1, last // 32 + 1))
        )
        start = draw(st.integers(0, last - width))
        first = [draw(st.integers(0, n - 1)) for n in outer]
        least = 0 if len(boxes) == 2 else 1  # now and then an empty one
        spans = [(a, draw(st.integers(a + least, n))) for a, n in zip(first, outer, strict=True)]
        boxes.append((*spans, (start, start + width)))
    return (*outer, last), boxes


def disjoint(boxes):
    """The boxes without those that meet an earlier one."""
    kept = []
    for box in boxes:
        if not any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in kept):
            kept.append(box)
    return kept


def cut(array, box):
    return array[tuple(slice(*span) for span in box)]


def swapped(dtype):
    return np.dtype(DTYPES[dtype]).newbyteorder() if dtype != "bfloat16" else np.dtype(DTYPES[dtype])


def values_of(shape, dtype, seed=0):
    flat = moderate_blocks(seed, -(-int(np.prod(shape)) // 32), dtype).reshape(-1)
    return flat[: int(np.prod(shape))].reshape(shape)


def twin_of(x, boxes, combo=("e4m3", "rceil"), lowest=0):
    """Codes and scales of the boxes, each quantised by itself with the slow twin."""
    blocks = [np.ascontiguousarray(cut(x, box)).reshape(-1, 32) for box in boxes]
    codes, scale = slow_quantize(exact(np.concatenate([np.zeros((0, 32), x.dtype), *blocks])), *combo, lowest)
    return codes.reshape(-1), scale


@engines.many
@given(
    st.data(), shapes_and_boxes(), st.sampled_from(list(DTYPES)), st.sampled_from(COMBOS), st.sampled_from([0, 0, 125])
)  # fmt: skip
def test_pack_quantize_of_any_array_and_boxes_is_pack_then_quantise_byte_for_byte(
    data, case, dtype, combo, lowest
):
    shape, boxes = case
    x = values_of(shape, dtype)
    src = data.draw(places(shape, DTYPES[dtype] if data.draw(st.booleans()) else swapped(dtype))).holding(x)
    table = BoxTable(shape, boxes)
    q = pack_quantize(src, table, *combo, min_scale_byte=lowest)
    codes, scale = twin_of(x, boxes, combo, lowest)
    assert_holds(q, codes.reshape(-1, 32), scale)
    assert (q.shape, q.elem) == ((table.total_elems,), combo[0])
    in_two = quantize_mxfp8(pack(src, table), *combo, min_scale_byte=lowest)
    assert (q.data.tobytes(), q.scale.tobytes()) == (in_two.data.tobytes(), in_two.scale.tobytes())
    listed = pack_quantize(src, boxes, *combo, min_scale_byte=lowest)
    assert (q.data.tobytes(), q.scale.tobytes()) == (listed.data.tobytes(), listed.scale.tobytes())


@engines.many
@given(st.data(), shapes_and_boxes(), st.sampled_from(list(DTYPES)))
def test_out_of_pack_quantize_at_any_place_is_written_and_nothing_beside_it(data, case, dtype):
    shape, boxes = case
    x = values_of(shape, dtype)
    codes, scale = twin_of(x, boxes)
    data_place = data.draw(places(codes.shape, np.uint8))
    scale_place = data.draw(places(scale.shape, np.uint8))
    arenas = data_place.arena(1), scale_place.arena(2)
    before = arenas[0].copy(), arenas[1].copy()
    out = MXFP8Tensor(data_place.view(arenas[0]), scale_place.view(arenas[1]))
    assert pack_quantize(x, boxes, out=out) is out
    data_place.expect(before[0], arenas[0], codes)
    scale_place.expect(before[1], arenas[1], scale)


@given(
    st.data(),
    shapes_and_boxes(),
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["e4m3", "e5m2"]),
    st.booleans(),
)
def test_unpack_dequantize_writes_the_boxes_of_any_array_and_leaves_the_rest_alone(
    data, case, dtype, elem, swap
):
    shape, boxes = case
    boxes = disjoint(boxes)
    table = BoxTable(shape, boxes)
    elems = table.total_elems
    rng = np.random.default_rng(5)
    plain_q = MXFP8Tensor(
        rng.integers(0, 256, elems, dtype=np.uint8), rng.integers(110, 256, elems // 32, dtype=np.uint8), elem
    )
    data_place = data.draw(st.one_of(st.just(packed_place((elems,), np.uint8)), places((elems,), np.uint8)))
    scale_place = data.draw(
        st.one_of(st.just(packed_place((elems // 32,), np.uint8)), places((elems // 32,), np.uint8))
    )
    q = MXFP8Tensor(data_place.holding(plain_q.data), scale_place.holding(plain_q.scale), elem)
    place = data.draw(places(shape, swapped(dtype) if swap else DTYPES[dtype]))
    arena = place.arena(6)
    before = arena.copy()
    out = place.view(arena)
    wanted = np.array(place.view(before))
    values = dequantize_mxfp8(plain_q, dtype)
    offset = 0
    for box in boxes:
        target = cut(wanted, box)
        target[...] = values[offset : offset + target.size].reshape(target.shape)
        offset += target.size
    assert unpack_dequantize(q, table if data.draw(st.booleans()) else boxes, out) is out
    place.expect(before, arena, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "way", ["direct", "transposed", "other byte order", "out of scales that do not follow"]
)
def test_every_way_through_gives_the_same_bytes_and_heeds_every_option(dtype, way):
    x = values_of((40, 96), dtype)
    boxes = [((0, 40), (32, 96)), ((3, 40), (7, 39))]
    elems = BoxTable(x.shape, boxes).total_elems
    src, out = x, MXFP8Tensor.over(np.zeros(MXFP8Tensor.buffer_bytes((elems,)), np.uint8), (elems,), "e5m2")
    back = np.full(x.shape, 3, DTYPES[dtype])
    if way == "transposed":
        src, back = np.asfortranarray(x), np.asfortranarray(back)
    elif way == "other byte order":
        src, back = x.astype(swapped(dtype)), back.astype(swapped(dtype))
    elif way != "direct":
        out = MXFP8Tensor(np.zeros(elems, np.uint8), np.zeros(elems // 16, np.uint8)[::2], "e5m2")
    for mode_ in ("floor", "ceil"):
        pack_quantize(src, boxes, "e5m2", mode_, out, min_scale_byte=118)
        codes, scale = twin_of(x, boxes, ("e5m2", mode_), 118)
        assert (scale == 118).any()
        assert_holds(out, codes.reshape(-1, 32), scale)
    table = BoxTable(x.shape, disjoint(boxes))
    part = slice(0, table.total_elems)
    q = MXFP8Tensor(out.data[part], out.scale[: table.total_elems // 32], "e5m2")
    unpack_dequantize(q, table, back)
    wanted = np.full(x.shape, 3, DTYPES[dtype])
    fresh = MXFP8Tensor(codes[part], scale[: table.total_elems // 32], "e5m2")
    wanted[:, 32:96] = dequantize_mxfp8(fresh, dtype).reshape(40, 64)
    np.testing.assert_array_equal(back.astype(DTYPES[dtype]).view(BITS[dtype]), wanted.view(BITS[dtype]))


def test_boxes_may_overlap_where_they_are_read():
    x = values_of((4, 64), "bfloat16")
    boxes = [((0, 4), (0, 64)), ((1, 3), (16, 48)), ((1, 3), (16, 48))]
    q = pack_quantize(x, boxes)
    codes, scale = twin_of(x, boxes)
    assert_holds(q, codes.reshape(-1, 32), scale)


def test_no_boxes_and_empty_boxes_are_no_work():
    x = values_of((4, 64), "float32")
    for boxes in ([], [((0, 4), (5, 5))], [((2, 2), (0, 32))]):
        q = pack_quantize(x, boxes)
        assert (q.shape, q.scale.shape) == ((0,), (0,))
        out = x.copy()
        assert unpack_dequantize(q, boxes, out) is out
        assert out.tobytes() == x.tobytes()
    nothing = np.zeros((0, 64), np.float32)
    assert pack_quantize(nothing, [((0, 0), (0, 32))]).shape == (0,)


# ------------------------------------------------------------------------------------------------ errors
