"""Packing of boxes against a twin that copies one element at a time."""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowshard.errors import BufferMismatchError, KernelError, LowshardError
from lowshard.kernels import BoxTable, pack, unpack


def elements(box):
    """Indices of a box, row-major."""
    extents = [stop - start for start, stop in box]
    for index in np.ndindex(*extents):
        yield tuple(start + i for (start, _), i in zip(box, index, strict=True))


def slow_pack(src, boxes):
    return [src[index] for box in boxes for index in elements(box)]


def slow_overlap(boxes):
    """True when some element lies in two boxes."""
    seen = [index for box in boxes for index in elements(box)]
    return len(seen) != len(set(seen))


@st.composite
def shapes_and_boxes(draw, max_boxes=6):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = st.tuples(
        *(st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda s: tuple(sorted(s))) for n in shape)
    )
    return shape, draw(st.lists(box, max_size=max_boxes))


any_case = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@any_case
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


@any_case
@given(shapes_and_boxes())
def test_overlaps_are_found_exactly_when_an_element_lies_in_two_boxes(case):
    shape, boxes = case
    overlap = BoxTable(shape, boxes).overlap
    assert (overlap is not None) == slow_overlap(boxes)
    if overlap is not None:
        first, second = overlap
        assert first < second
        assert slow_overlap([boxes[first], boxes[second]])


@any_case
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


def test_nan_payloads_are_moved_as_bits():
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32)
    assert pack(bits.view(np.float32), [((0, 4),)]).view(np.uint32).tolist() == bits.tolist()


def test_an_object_that_is_a_list_is_moved_as_one_element():
    src = np.empty((), object)
    src[()] = [1, 2]
    assert pack(src, [()])[0] is src[()]
    out = np.empty((), object)
    unpack(pack(src, [()]), [()], out)
    assert out[()] is src[()]


def test_a_zero_dim_array_is_one_element():
    src = np.array(5, np.int16)
    table = BoxTable((), [(), ()])
    assert pack(src, table).tolist() == [5, 5]
    out = np.array(0, np.int16)
    unpack(np.array([9], np.int16), [()], out)
    assert out == 9
    with pytest.raises(KernelError, match=r"box 0 .* and box 1 .* overlap"):
        unpack(pack(src, table), table, out)


def test_strided_misaligned_and_reversed_arrays_pack_and_unpack():
    base = np.arange(6 * 8 * 4, dtype=np.float32).reshape(6, 8, 4)
    raw = np.zeros(base.nbytes + 1, np.uint8)[1:]
    misaligned = raw.view(np.float32).reshape(base.shape)
    misaligned[...] = base
    assert not misaligned.flags.aligned
    for src in (base.T, base[::-1, ::2], base.transpose(1, 0, 2)[1:], misaligned):
        boxes = [tuple((0, n // 2) for n in src.shape), tuple((n // 2, n) for n in src.shape)]
        packed = pack(src, boxes)
        np.testing.assert_array_equal(packed, pack(np.ascontiguousarray(src), boxes))
        out = np.zeros(tuple(2 * n for n in src.shape), np.float32)[
            tuple(slice(None, None, 2) for _ in src.shape)
        ]
        unpack(packed, boxes, out)
        np.testing.assert_array_equal(pack(out, boxes), packed)


def test_pack_writes_into_out_where_it_is_also_a_strided_one():
    src = np.arange(20, dtype=np.uint8).reshape(4, 5)
    table = BoxTable(src.shape, [((1, 3), (2, 5)), ((0, 0), (0, 5)), ((3, 4), (0, 2))])
    arena = np.zeros(2 * table.total_elems, np.uint8)
    out = arena[1::2]
    address = out.ctypes.data
    assert pack(src, table, out) is out
    assert out.ctypes.data == address
    assert out.tolist() == slow_pack(src, table.boxes)
    assert not arena[::2].any()
    back = np.zeros_like(src)
    unpack(out, table, back)
    assert pack(back, table).tolist() == out.tolist()


def test_a_table_is_a_value():
    a = BoxTable((4, 5), [((0, 2), (1, 3))])
    b = BoxTable([np.int64(4), 5], [[[0, 2], [1, np.int32(3)]]])
    assert a == b
    assert hash(a) == hash(b)
    assert a != BoxTable((4, 6), a.boxes)
    assert (a.elems, a.offsets_elems, a.total_elems) == ((4,), (0,), 4)
    assert BoxTable((4, 5), []).total_elems == 0


def test_ten_thousand_disjoint_boxes_unpack_and_one_shared_element_is_found():
    boxes = [((i * 3, i * 3 + 3), (j * 2, j * 2 + 2)) for i in range(100) for j in range(100)]
    src = np.arange(300 * 200, dtype=np.uint16).reshape(300, 200)
    out = np.zeros_like(src)
    table = BoxTable(src.shape, boxes)
    unpack(pack(src, table), table, out)
    np.testing.assert_array_equal(out, src)
    boxes.append(((299, 300), (199, 200)))
    assert BoxTable(src.shape, boxes).overlap == (9999, 10000)


SRC = np.arange(12, dtype=np.float32).reshape(3, 4)
BOXES = [((0, 2), (0, 4)), ((2, 3), (1, 3))]
TABLE = BoxTable((3, 4), BOXES)
PACKED = pack(SRC, TABLE)


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: BoxTable((3, 4), [((0, 2),)]), KernelError, "box 0 must have one .* each of the 2 dims"),
        (lambda: BoxTable((3, 4), [((0, 2), (1, 5))]), KernelError, r"stop <= 4 in dim 1, got \(1, 5\)"),
        (lambda: BoxTable((3, 4), [((2, 1), (0, 1))]), KernelError, r"dim 0, got \(2, 1\)"),
        (lambda: BoxTable((3, 4), [((-1, 1), (0, 1))]), KernelError, "0 <= start"),
        (lambda: BoxTable((3, 4), [((0, 1.5), (0, 1))]), KernelError, r"tuple of \(start, stop\) integers"),
        (lambda: BoxTable((3, 4), ((0, 2), (0, 4))), KernelError, r"tuple of \(start, stop\) integers.* as box 0"),
        (lambda: BoxTable((3, -4), []), KernelError, "0 or more"),
        (lambda: BoxTable(3, []), KernelError, "write array.shape"),
        (lambda: BoxTable((3, 4), None), KernelError, "takes a list of boxes, got None"),
        (lambda: pack(SRC.tolist(), TABLE), KernelError, "src must be a NumPy array"),
        (lambda: pack(SRC.T, TABLE), BufferMismatchError, r"built for shape \[3, 4\], got src \[4, 3\]"),
        (lambda: pack(SRC, TABLE, np.empty(9, np.float32)), BufferMismatchError, r"out must be float32 \[10\]"),
        (lambda: pack(SRC, TABLE, np.empty(10, np.int32)), BufferMismatchError, "got int32"),
        (lambda: pack(SRC, TABLE, np.empty(10, ">f4")), BufferMismatchError, "converts nothing"),
        (lambda: pack(SRC, TABLE, frozen(PACKED)), BufferMismatchError, "writeable"),
        (lambda: pack(SRC, TABLE, SRC.reshape(-1)[:10]), BufferMismatchError, "must not share memory with src"),
        (lambda: unpack(PACKED[:9], TABLE, SRC.copy()), BufferMismatchError, r"packed must be \[10\].*got \[9\]"),
        (lambda: unpack(PACKED, TABLE, SRC.T.copy()), BufferMismatchError, "built for shape"),
        (lambda: unpack(PACKED.astype(np.float16), TABLE, SRC.copy()), BufferMismatchError, "dtype of out"),
        (lambda: unpack(PACKED, TABLE, frozen(SRC)), BufferMismatchError, "writeable"),
        (lambda: unpack(SRC.reshape(-1)[:10], TABLE, SRC), BufferMismatchError, "must not share memory"),
        (lambda: unpack(PACKED, TABLE, None), KernelError, "out must be a NumPy array"),
        (lambda: unpack(np.zeros(9, np.float32), [((0, 2), (0, 4)), ((1, 2), (3, 4))], SRC.copy()), KernelError,
         "box 0 .* and box 1 .* overlap"),
    ],
)  # fmt: skip
def test_wrong_calls_raise_the_named_error_with_the_rule_in_its_text(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, LowshardError)
    assert isinstance(caught.value, ValueError)
