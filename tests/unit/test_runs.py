"""Run tables against every address written out: the right pairs of bytes, folded as far as it goes."""

from __future__ import annotations

import itertools
from math import gcd, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines

from lowshard.kernels import BoxTable
from lowshard.kernels.runs import (
    DST_OFFSET,
    FIRST_DIM,
    MAX_OUTER_DIMS,
    RUN,
    SRC_OFFSET,
    RunTable,
    lower,
    whole_array_runs,
)


def runs_of(table):
    """Yield (source byte, target byte, elements) of every run of a table, outermost dim slowest."""
    for column in table.columns.T.tolist():
        dims = [column[i : i + 3] for i in range(FIRST_DIM, len(column), 3)][::-1]
        for index in itertools.product(*(range(count) for count, _, _ in dims)):
            src = column[SRC_OFFSET] + sum(i * dim[1] for i, dim in zip(index, dims, strict=True))
            dst = column[DST_OFFSET] + sum(i * dim[2] for i, dim in zip(index, dims, strict=True))
            yield src, dst, column[RUN]


def pairs_of(table):
    """All (source byte, target byte) pairs of the elements of a table, sorted."""
    return sorted(
        (src + i * table.src_itemsize, dst + i * table.dst_itemsize)
        for src, dst, run in runs_of(table)
        for i in range(run)
    )


def slow_pairs(extents, offsets, strides):
    """The same from the boxes themselves, one element at a time."""
    sides = [list(zip(*side, strict=True)) for side in zip(offsets, strides, strict=True)]
    return sorted(
        tuple(offset + sum(i * s for i, s in zip(index, steps, strict=True)) for offset, steps in box)
        for extent, *box in zip(extents, *sides, strict=True)
        for index in itertools.product(*(range(n) for n in extent))
    )


@st.composite
def boxes(draw):
    """Arguments of lower: some boxes of up to six dims, strides that continue each other and others."""
    dims, count = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    src_item, dst_item = draw(
        st.sampled_from([(1, 1), (2, 2), (4, 4), (2, 1), (4, 1), (1, 2), (3, 3), (12, 12)])
    )
    extents, offsets, strides = [], ([], []), ([], [])
    for _ in range(count):
        extent = [
            draw(st.sampled_from([0, 1, 1, 2, 2, 3, 4] if dims < 5 else [1, 1, 2, 2, 3])) for _ in range(dims)
        ]
        extents.append(extent)
        for side, item in enumerate((src_item, dst_item)):
            offsets[side].append(draw(st.integers(-50, 5000)))
            step, steps = item, []
            for n in reversed(extent):
                kind = draw(st.sampled_from(["on", "on", "on", "gap", "back", "any"]))
                step += draw(st.integers(1, 3)) * item if kind == "gap" else 0
                steps.append({"back": -step, "any": draw(st.integers(-9, 9))}.get(kind, step))
                step *= max(n, 1)
            strides[side].append(steps[::-1])
    return extents, offsets, strides, (src_item, dst_item)


def table_of(case):
    extents, offsets, strides, items = case
    shape = len(extents), len(extents[0]) if extents else 0
    grid = [np.array(rows, np.int64).reshape(shape) for rows in (extents, *strides)]
    first = [np.array(rows, np.int64) for rows in offsets]
    return lower(grid[0], *first, *grid[1:], *items)


@engines.many
@given(boxes())
def test_the_runs_hold_every_pair_of_addresses_of_the_boxes_once(case):
    extents, offsets, strides, items = case
    table = table_of(case)
    assert pairs_of(table) == slow_pairs(extents, offsets, strides)
    assert (table.src_itemsize, table.dst_itemsize) == items
    volumes = [prod(extent) for extent in extents]
    assert table.total_elems == sum(volumes)
    if table.boxes == sum(v > 0 for v in volumes):  # none was unrolled
        assert table.elems.tolist() == [v for v in volumes if v]
    assert table.outer_dims <= MAX_OUTER_DIMS


@engines.many
@given(boxes())
def test_no_two_levels_of_a_box_could_be_one(case):
    table = table_of(case)
    for column in table.columns.T.tolist():
        levels = [(column[RUN], table.src_itemsize, table.dst_itemsize)]
        levels += [tuple(column[i : i + 3]) for i in range(FIRST_DIM, len(column), 3)]
        for (count, src, dst), (outer, outer_src, outer_dst) in itertools.pairwise(levels):
            assert outer == 1 or (outer_src, outer_dst) != (count * src, count * dst)
        counts = [count for count, _, _ in levels[1:]]
        assert 1 not in counts[: sum(count > 1 for count in counts)]  # the dims in use come first


@engines.many
@given(boxes())
def test_divisors_are_those_of_all_runs_written_out(case):
    table = table_of(case)
    runs = list(runs_of(table))
    assert table.run_divisor_elems == gcd(*(run for _, _, run in runs))
    for side, item, got in (
        (0, table.src_itemsize, table.src_divisor_bytes),
        (1, table.dst_itemsize, table.dst_divisor_bytes),
    ):
        common = gcd(*(run[side] for run in runs), *(run[2] * item for run in runs))
        assert got == next(p for p in (4096 >> i for i in range(13)) if common % p == 0)


def fills_one_stretch(places):
    """Whether each (first byte, bytes) begins where the one before it ends."""
    return all(at + size == following for (at, size), (following, _) in itertools.pairwise(places))


@engines.many
@given(boxes())
def test_limits_and_gaps_are_those_of_all_runs_written_out(case):
    table = table_of(case)
    runs = list(runs_of(table))
    sizes = [run * table.src_itemsize for _, _, run in runs] or [0]
    assert table.run_limits_bytes == (min(sizes), max(sizes))
    assert table.src_is_gapless == fills_one_stretch(
        [(src, run * table.src_itemsize) for src, _, run in runs]
    )
    assert table.dst_is_gapless == fills_one_stretch(
        [(dst, run * table.dst_itemsize) for _, dst, run in runs]
    )


@given(st.lists(st.integers(1, 7), max_size=8), st.sampled_from([(1, 1), (2, 1), (4, 4), (5, 5)]))
def test_two_contiguous_arrays_are_one_run(shape, items):
    strides = [tuple(item * prod(shape[i + 1 :]) for i in range(len(shape))) for item in items]
    table = whole_array_runs(tuple(shape), *strides, *items)
    assert table.columns.tolist() == [[0], [0], [prod(shape)]]


def test_dims_fold_only_where_both_sides_continue():
    # [4, 3, 5] of 2 bytes, contiguous and out of wider arrays, to one of 1 byte.
    table = whole_array_runs((4, 3, 5), (30, 10, 2), (15, 5, 1), 2, 1)
    assert table.columns.tolist() == [[0], [0], [60]]
    table = whole_array_runs((4, 3, 5), (60, 20, 2), (15, 5, 1), 2, 1)
    assert table.columns[:, 0].tolist() == [0, 0, 5, 12, 20, 5]  # the outer two fold on both sides
    table = whole_array_runs((4, 3, 5), (80, 20, 2), (15, 5, 1), 2, 1)
    assert table.columns[:, 0].tolist() == [0, 0, 5, 3, 20, 5, 4, 80, 15]
    table = whole_array_runs((4, 3, 5), (30, 10, 2), (20, 5, 1), 2, 1)
    assert table.columns[:, 0].tolist() == [0, 0, 15, 4, 30, 20]
    broadcast = whole_array_runs((4, 5), (0, 2), (5, 1), 2, 1)
    assert broadcast.columns[:, 0].tolist() == [0, 0, 5, 4, 0, 5]


@pytest.mark.parametrize("dims", [5, 6, 7])
def test_more_than_four_outer_dims_are_unrolled_outermost_first(dims):
    shape = (2, 3, 2, 2, 3, 2, 4)[-dims - 1 :] if dims < 7 else (2, 2, 3, 2, 2, 3, 2, 4)
    src, step = [], 1
    for n in reversed(shape):
        src.insert(0, step)
        step *= n + 1  # a gap in every dim
    dst = [prod(shape[i + 1 :]) for i in range(len(shape))]
    table = whole_array_runs(tuple(shape), tuple(src), tuple(dst), 1, 1)
    cut = len(shape) - 1 - MAX_OUTER_DIMS
    assert table.outer_dims == MAX_OUTER_DIMS == 4
    assert table.boxes == prod(shape[:cut])
    assert table.elems.tolist() == [prod(shape[cut:])] * table.boxes
    extents, offsets, strides = [shape], ([0], [0]), ([src], [dst])
    assert pairs_of(table) == slow_pairs(extents, offsets, strides)


def test_boxes_of_one_table_may_have_different_numbers_of_outer_dims():
    extents = np.array([[2, 3, 4], [2, 3, 4], [2, 0, 4]])
    src = np.array([[12, 4, 1], [48, 12, 2], [1, 1, 1]])
    dst = np.array([[12, 4, 1]] * 3)
    table = lower(extents, np.array([5, 7, 9]), np.array([0, 24, 48]), src, dst, 1, 1)
    assert (table.boxes, table.outer_dims) == (2, 3)
    assert table.columns.T.tolist() == [
        [5, 0, 24, 1, 0, 0, 1, 0, 0, 1, 0, 0],
        [7, 24, 1, 4, 2, 1, 3, 12, 4, 2, 48, 12],
    ]


def test_no_boxes_give_an_empty_table():
    table = lower(*(np.zeros(s, np.int64) for s in ((0, 2), 0, 0, (0, 2), (0, 2))), 4, 4)
    assert (table.boxes, table.total_elems, table.run_divisor_elems, table.outer_dims) == (0, 0, 0, 0)
    assert (table.src_divisor_bytes, table.dst_divisor_bytes) == (4096, 4096)
    assert (table.run_limits_bytes, table.src_is_gapless, table.dst_is_gapless) == ((0, 0), True, True)


def test_a_table_is_read_only_and_compared_by_identity():
    table = whole_array_runs((2, 3), (16, 4), (12, 4), 4, 4)
    assert table is whole_array_runs((2, 3), (16, 4), (12, 4), 4, 4)  # built once
    assert not table.columns.flags.writeable
    assert (table.columns.dtype, table.columns.flags.c_contiguous) == (np.int64, True)
    twin = RunTable(table.columns, 4, 4)
    assert twin != table
    assert twin.derived is not table.derived


def test_the_run_divisor_is_that_of_all_boxes_together():
    extents, strides = np.array([[3, 4], [3, 6], [0, 5]]), np.array([[100, 1]] * 3)
    starts = np.array([0, 4, 9])
    table = lower(extents, starts, starts, strides, strides, 1, 1)
    assert table.columns[RUN].tolist() == [4, 6]
    assert table.run_divisor_elems == 2


@pytest.mark.parametrize(("elems", "divisor"), [(2048, 2048), (4096, 4096), (1 << 20, 4096), (4096 + 64, 64)])
def test_divisors_in_bytes_end_at_4096(elems, divisor):
    table = whole_array_runs((elems,), (1,), (2,), 1, 2)
    assert (table.src_divisor_bytes, table.dst_divisor_bytes) == (divisor, min(2 * divisor, 4096))


@engines.many
@given(st.data(), st.lists(st.integers(1, 4), max_size=4), st.booleans())
def test_the_runs_of_a_box_table_pair_each_element_with_its_place_in_the_packed_buffer(
    data, shape, unpacking
):
    spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    boxes = [tuple(map(tuple, spans)), tuple((0, n) for n in shape)]
    strides = tuple(data.draw(st.integers(-40, 40)) for _ in shape)
    table = BoxTable(tuple(shape), boxes).runs(strides, 4, 6, 2, unpacking)
    expected, position = [], 0
    for box in boxes:
        for index in itertools.product(*(range(*span) for span in box)):
            pair = sum(i * s for i, s in zip(index, strides, strict=True)), 6 * position
            expected.append(pair[::-1] if unpacking else pair)
            position += 1
    assert pairs_of(table) == sorted(expected)
    assert (table.src_itemsize, table.dst_itemsize) == ((2, 4) if unpacking else (4, 2))
