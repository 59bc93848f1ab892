"""Tables of boxes: values that are checked once, find their overlaps and keep their runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from support import engines
from support.boxes import shapes_and_boxes, slow_overlap

from lowshard.kernels import BoxTable


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
