"""Tables of boxes: values that are checked once, find their overlaps and keep their runs."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from support import engines
from support.boxes import shapes_and_boxes, slow_overlap

from lowshard.errors import BufferMismatchError, KernelError, LowshardError
from lowshard.kernels import BoxTable, pack, unpack


@engines.many
@given(shapes_and_boxes())
def test_overlaps_are_found_exactly_when_an_element_lies_in_two_boxes(case):
    shape, boxes = case
    overlap = BoxTable(shape, boxes).overlap
    assert (overlap is not None) == slow_overlap(boxes)
    if overlap is not None:
        first, second = overlap
        assert first < second
        assert slow_overlap([boxes[first], boxes[second]])


def test_boxes_that_touch_do_not_overlap():
    quarters = [((r, r + 2), (c, c + 3), (0, 5)) for r in (0, 2) for c in (0, 3)]
    assert BoxTable((4, 6, 5), quarters).overlap is None
    halves = [(*box[:2], (z, z + n)) for box in quarters for z, n in ((0, 2), (2, 3))]
    assert BoxTable((4, 6, 5), halves).overlap is None
    assert BoxTable((4, 6, 5), [*halves, ((1, 2), (2, 3), (1, 2))]).overlap == (0, 8)


def test_a_table_is_a_value():
    a = BoxTable((4, 5), [((0, 2), (1, 3))])
    b = BoxTable([np.int64(4), 5], [[[0, 2], [1, np.int32(3)]]])
    assert a == b
    assert hash(a) == hash(b)
    assert a != BoxTable((4, 6), a.boxes)
    assert (a.elems, a.offsets_elems, a.total_elems) == ((4,), (0,), 4)
    assert BoxTable((4, 5), []).total_elems == 0


def test_the_runs_of_an_array_are_built_once_and_again_for_other_strides():
    table = BoxTable((4, 6), [((0, 2), (1, 3)), ((2, 4), (0, 6))])
    first = table.runs((24, 4), 4, 4, 4, False)
    assert table.runs((24, 4), 4, 4, 4, False) is first
    others = [
        table.runs((48, 4), 4, 4, 4, False),
        table.runs((12, 2), 2, 4, 4, False),
        table.runs((24, 4), 4, 8, 4, False),
        table.runs((24, 4), 4, 1, 1, False),
        table.runs((24, 4), 4, 4, 4, True),
    ]
    assert len({id(runs) for runs in (first, *others)}) == 6
    assert [(runs.src_itemsize, runs.dst_itemsize) for runs in others] == [
        (4, 4),
        (2, 4),
        (4, 4),
        (4, 1),
        (4, 4),
    ]
    assert not first.columns.flags.writeable


def test_the_runs_of_a_table_are_neither_compared_nor_shown():
    boxes = [((0, 2), (1, 3))]
    used, fresh = BoxTable((4, 6), boxes), BoxTable((4, 6), boxes)
    used.runs((24, 4), 4, 4, 4, False)
    assert used.overlap is None
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert repr(used) == repr(fresh) == "BoxTable(shape=(4, 6), boxes=(((0, 2), (1, 3)),))"


def test_a_table_survives_a_copy_and_a_pickle():
    table = BoxTable((4, 6), [((0, 2), (1, 3)), ((0, 4), (3, 6))])
    src = np.arange(24, dtype=np.int16).reshape(4, 6)
    packed = pack(src, table)
    for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert again == table
        np.testing.assert_array_equal(pack(src, again), packed)


@pytest.mark.parametrize(
    ("boxes", "divisor"),
    [
        ([], 0),
        ([((0, 3), (2, 34))], 32),
        ([((0, 3), (2, 34)), ((0, 1), (0, 48))], 16),
        ([((0, 1), (5, 5))], 0),
    ],
)
def test_last_dim_divisor_divides_every_width(boxes, divisor):
    assert BoxTable((4, 64), boxes).last_dim_divisor == divisor


SRC = np.arange(12, dtype=np.float32).reshape(3, 4)
BOXES = [((0, 2), (0, 4)), ((2, 3), (1, 3))]
TABLE = BoxTable((3, 4), BOXES)
PACKED = np.zeros(10, np.float32)


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
        (lambda: BoxTable(3, []), KernelError, "such as array.shape"),
        (lambda: BoxTable((3, 4), None), KernelError, "takes a list of boxes, got None"),
        (lambda: pack(SRC.tolist(), TABLE), KernelError,
         r"src must be a NumPy or CuPy array.*, got builtins.list; write numpy.asarray\(src, dtype\)"),
        (lambda: pack(SRC.T, TABLE), BufferMismatchError, r"built for shape \[3, 4\], got src \[4, 3\]"),
        (lambda: pack(SRC, TABLE, np.empty(9, np.float32)), BufferMismatchError, r"out must be float32 \[10\]"),
        (lambda: pack(SRC, TABLE, np.empty(10, np.int32)), BufferMismatchError, "got int32"),
        (lambda: pack(SRC, TABLE, np.empty(10, ">f4")), BufferMismatchError, "converts nothing"),
        (lambda: pack(SRC, TABLE, frozen(PACKED)), BufferMismatchError, "read-only"),
        (lambda: pack(SRC, TABLE, SRC.reshape(-1)[:10]), BufferMismatchError, "must not share memory with src"),
        (lambda: unpack(PACKED[:9], TABLE, SRC.copy()), BufferMismatchError, r"packed must be \[10\].*got \[9\]"),
        (lambda: unpack(PACKED, TABLE, SRC.T.copy()), BufferMismatchError, "built for shape"),
        (lambda: unpack(PACKED.astype(np.float16), TABLE, SRC.copy()), BufferMismatchError, "dtype of out"),
        (lambda: unpack(PACKED, TABLE, frozen(SRC)), BufferMismatchError, "read-only"),
        (lambda: unpack(SRC.reshape(-1)[:10], TABLE, SRC), BufferMismatchError, "must not share memory"),
        (lambda: unpack(PACKED, TABLE, None), KernelError, "out must be a NumPy or CuPy array.*NoneType"),
        (lambda: unpack(np.zeros(9, np.float32), [((0, 2), (0, 4)), ((1, 2), (3, 4))], SRC.copy()), KernelError,
         "box 0 .* and box 1 .* overlap"),
    ],
)  # fmt: skip
def test_wrong_calls_raise_the_named_error_with_the_rule_in_its_text(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, LowshardError)
    assert isinstance(caught.value, ValueError)
