"""Packing of boxes on every engine, against a twin that copies one element at a time."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.boxes import disjoint, elements, shapes_and_boxes, slow_overlap, slow_pack
from support.places import places

from lowshard.errors import KernelError
from lowshard.kernels import BoxTable, pack, unpack

engine = engines.fixture()


@engines.many
@given(shapes_and_boxes())
def test_pack_is_as_the_twin_for_any_boxes_overlapping_ones_too(case):
    shape, boxes = case
    src = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    table = BoxTable(shape, boxes)
    packed = pack(src, table)
    assert packed.tolist() == slow_pack(src, boxes)
    assert packed.shape == (table.total_elems,)
    for box, elems, offset in zip(boxes, table.elems, table.offsets_elems, strict=True):
        assert packed[offset : offset + elems].tolist() == slow_pack(src, [box])
    np.testing.assert_array_equal(pack(src, boxes), packed)


# Odd itemsizes, and some wider than a machine word.
DTYPES = (
    "u1", "f2", "<f4", ">f4", "f8", "c16", "U5",
    [("a", "u1"), ("b", "<u2")],
    [("a", "u1"), ("b", "<f4")],
    [("a", "<f8"), ("b", ">i4")],
    {"names": ["a", "b"], "formats": ["u1", "<u4"], "itemsize": 7},
)  # fmt: skip
dtypes = st.sampled_from([np.dtype(d) for d in DTYPES] + [np.dtype(ml_dtypes.bfloat16)])
wide_cases = shapes_and_boxes(max_boxes=4, max_dims=6, max_extent=4)


def raw(place):
    """The same place with its elements as bare bytes, which NumPy moves without a look at them."""
    return replace(place, dtype=np.dtype((np.void, place.dtype.itemsize)))


@engines.many
@given(st.data(), wide_cases, dtypes)
def test_pack_between_any_places_is_as_the_twin_and_touches_nothing_else(data, case, dtype):
    shape, boxes = case
    place = data.draw(places(shape, dtype))
    src_arena = place.arena(1)
    moved = slow_pack(raw(place).view(src_arena), boxes)
    packed_place = data.draw(places((len(moved),), dtype))
    arena = packed_place.arena(2)
    wanted = arena.copy()
    target = raw(packed_place).view(wanted)
    for index, item in enumerate(moved):
        target[index] = item
    out = packed_place.view(arena)
    assert pack(place.view(src_arena), boxes, out) is out
    np.testing.assert_array_equal(arena, wanted)
    fresh = pack(place.view(src_arena), BoxTable(shape, boxes))
    assert (fresh.dtype, fresh.shape, fresh.flags.c_contiguous) == (dtype, (len(moved),), True)
    assert fresh.tobytes() == b"".join(item.tobytes() for item in moved)


@engines.many
@given(st.data(), wide_cases, dtypes)
def test_unpack_between_any_places_writes_the_boxes_and_touches_nothing_else(data, case, dtype):
    shape, boxes = case
    boxes = disjoint(boxes)
    table = BoxTable(shape, boxes)
    packed_place, place = data.draw(places((table.total_elems,), dtype)), data.draw(places(shape, dtype))
    packed_arena, arena = packed_place.arena(1), place.arena(2)
    wanted = arena.copy()
    source, target = raw(packed_place).view(packed_arena), raw(place).view(wanted)
    for position, index in enumerate(index for box in boxes for index in elements(box)):
        target[index] = source[position]
    out = place.view(arena)
    assert unpack(packed_place.view(packed_arena), table, out) is out
    np.testing.assert_array_equal(arena, wanted)


def test_more_outer_dims_than_a_run_table_has_are_packed_and_unpacked():
    src = np.arange(3**8, dtype=np.uint16).reshape((3,) * 8)
    boxes = [((0, 2),) * 8, ((2, 3),) + ((1, 3),) * 7]
    packed = pack(src, boxes)
    assert packed.tolist() == [
        int(x) for box in boxes for x in src[tuple(slice(*s) for s in box)].reshape(-1)
    ]
    out = np.zeros_like(src)
    unpack(packed, boxes, out)
    assert np.count_nonzero(out) == len(packed) - 1  # element 0 is 0
    np.testing.assert_array_equal(pack(out, boxes), packed)


@pytest.mark.parametrize("extents", [(0,), (3, 0), (0, 4, 5)])
def test_arrays_and_boxes_of_no_elements_move_nothing(extents):
    src = np.zeros(extents, np.float32)
    boxes = [tuple((0, n) for n in extents)] * 2
    assert pack(src, boxes).shape == (0,)
    assert unpack(np.zeros(0, np.float32), boxes, src) is src
    full = np.arange(6, dtype=np.int8).reshape(2, 3)
    assert pack(full, []).shape == (0,)
    packed = pack(full, [((1, 1), (0, 3)), ((0, 2), (2, 3)), ((0, 2), (3, 3))])
    assert packed.tolist() == [2, 5]
    out = np.zeros_like(full)
    unpack(packed, [((1, 1), (0, 3)), ((0, 2), (2, 3)), ((0, 2), (3, 3))], out)
    assert out.tolist() == [[0, 0, 2], [0, 0, 5]]


@engines.many
@given(shapes_and_boxes(max_boxes=3))
def test_unpack_undoes_pack_and_leaves_the_rest_alone_or_refuses_overlaps(case):
    shape, boxes = case
    src = np.arange(1, prod(shape) + 1, dtype=np.int64).reshape(shape)
    table = BoxTable(shape, boxes)
    packed = pack(src, table)
    out = np.zeros(shape, np.int64)
    if slow_overlap(boxes):
        with pytest.raises(KernelError, match="overlap"):
            unpack(packed, table, out)
        assert not out.any()
        return
    assert unpack(packed, table, out) is out
    inside = {index for box in boxes for index in elements(box)}
    for index in np.ndindex(*shape):
        assert out[index] == (src[index] if index in inside else 0)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int8, np.bool_, np.uint64, np.complex64, ml_dtypes.bfloat16,
              ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, np.dtype([("a", np.int16), ("b", np.float32)])]
)  # fmt: skip
def test_any_dtype_travels_bit_for_bit(dtype):
    raw = np.random.default_rng(1).integers(0, 2, 6 * 7 * np.dtype(dtype).itemsize, dtype=np.uint8)
    src = raw.view(dtype).reshape(6, 7)
    table = BoxTable(src.shape, [((0, 3), (1, 7)), ((3, 6), (0, 7)), ((0, 3), (0, 1))])
    packed = pack(src, table)
    assert packed.dtype == src.dtype
    out = np.zeros_like(src)
    unpack(packed, table, out)
    assert out.tobytes() == src.tobytes()


def test_a_zero_dim_array_is_one_element():
    src = np.array(5, np.int16)
    table = BoxTable((), [(), ()])
    assert pack(src, table).tolist() == [5, 5]
    out = np.array(0, np.int16)
    unpack(np.array([9], np.int16), [()], out)
    assert out == 9
    with pytest.raises(KernelError, match=r"box 0 .* and box 1 .* overlap"):
        unpack(pack(src, table), table, out)


def test_ten_thousand_disjoint_boxes_unpack_and_one_shared_element_is_found():
    boxes = [((i * 3, i * 3 + 3), (j * 2, j * 2 + 2)) for i in range(100) for j in range(100)]
    src = np.arange(300 * 200, dtype=np.uint16).reshape(300, 200)
    out = np.zeros_like(src)
    table = BoxTable(src.shape, boxes)
    unpack(pack(src, table), table, out)
    np.testing.assert_array_equal(out, src)
    boxes.append(((299, 300), (199, 200)))
    assert BoxTable(src.shape, boxes).overlap == (9999, 10000)
