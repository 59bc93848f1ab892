"""Shares of boxes: every element in one of them and once, as many bytes in each, of boxes of any shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import lowshard as ls
from lowshard.box import Box, shape_of
from lowshard.reshard import build_reshard_plan
from lowshard.reshard.reshard_move import Move
from lowshard.reshard.stream_shares import LEAST_SHARE_BYTES, even_shares, share_count, shares_of

shapes = st.lists(st.sampled_from([1, 1, 2, 3, 7, 40, 301]), max_size=4).filter(
    lambda shape: np.prod(shape, dtype=np.int64) <= 40_000
)
tensors = st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8)


def _moved(shape: list[int], first: int) -> Box:
    return tuple((first + d, first + d + extent) for d, extent in enumerate(shape))


@given(tensors, st.integers(1, 9))
def test_every_element_is_in_one_share_and_shares_are_even(
    given_: list[tuple[list[int], int]], count: int
) -> None:
    """Boxes of one element, boxes without dims, and boxes of one long row, at other places on either side."""
    itemsizes = [itemsize for _, itemsize in given_]
    moves = [Move(i, i, 0, 1, _moved(shape, 2), _moved(shape, 5)) for i, (shape, _) in enumerate(given_)]
    shares = even_shares(moves, itemsizes, count)
    assert 1 <= len(shares) <= count
    assert all(shares)
    seen = [np.zeros(shape, np.int64) for shape, _ in given_]
    row = []
    for share in shares:
        for move in share:
            shape = given_[move.entry][0]
            assert move.elems > 0
            assert [(a - 5 - d, b - 5 - d) for d, (a, b) in enumerate(move.dst_box)] == [
                (a - 2 - d, b - 2 - d) for d, (a, b) in enumerate(move.src_box)
            ]
            at = tuple(slice(a - 2 - d, b - 2 - d) for d, (a, b) in enumerate(move.src_box))
            part = seen[move.entry][(*at, ...)]
            assert part.shape == shape_of(move.src_box)
            part += 1
            numbers = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)[(*at, ...)]
            row += [(move.entry, int(number)) for number in numbers.reshape(-1)[:: max(1, numbers.size - 1)]]
    assert all((one == 1).all() for one in seen)
    assert row == sorted(row)  # in the order of the moves
    sizes = [sum(move.elems * itemsizes[move.entry] for move in share) for share in shares]
    fair = sum(sizes) / count
    if fair >= max(itemsizes):
        assert len(shares) == count
    for size in sizes:
        assert abs(size - fair) <= max(0.01 * fair, 2 * max(itemsizes))


def test_shares_of_whole_weights_are_cut_between_rows() -> None:
    """A few boxes for each share, not one for each row or element."""
    moves = [Move(i, 0, 0, 1, box, box) for i, box in enumerate([((0, 4096), (0, 4096))] * 3)]
    shares = even_shares(moves, [2], 4)
    sizes = [sum(move.elems for move in share) for share in shares]
    assert max(sizes) <= 1.01 * min(sizes)
    assert sum(map(len, shares)) == 6
    assert all(shape_of(move.src_box)[1] == 4096 for share in shares for move in share)


def test_a_single_long_row_and_a_few_huge_rows_are_even_too() -> None:
    for box in [
        ((0, 1), (0, 10_000_001)),
        ((0, 3), (0, 1), (0, 3_000_000)),
        ((0, 2), (0, 3), (0, 5), (0, 99_991)),
    ]:
        shares = even_shares([Move(0, 0, 0, 1, box, box)], [2], 4)
        sizes = [sum(move.elems for move in share) for share in shares]
        assert len(sizes) == 4
        assert max(sizes) <= 1.02 * min(sizes)
        assert all(len(share) <= 2 * len(box) for share in shares)


def test_small_transfers_keep_one_stream() -> None:
    assert share_count(0, 4) == share_count(2 * LEAST_SHARE_BYTES - 1, 4) == 1
    assert share_count(2 * LEAST_SHARE_BYTES, 4) == 2
    assert share_count(1 << 40, 4) == 4
    assert share_count(1 << 40, 1) == 1


def test_shares_are_named_by_tensor_and_what_is_empty_does_not_come(rng: np.random.Generator) -> None:
    mesh = ls.DeviceMesh((1,), ("x",))
    src = {
        name: ls.Layout(mesh, shape, "bfloat16", (ls.Replicated(),))
        for name, shape in {"a": (), "none": (0, 5), "b": (3, 4)}.items()
    }
    have = {name: _tensor_layout(layout) for name, layout in src.items()}
    plan = build_reshard_plan(have, {name: layout.shifted(1) for name, layout in have.items()})
    (share,) = shares_of(plan, plan.for_rank(1).receives[0], 4)
    assert [(boxes.name, boxes.src_name, boxes.src_boxes) for boxes in share] == [
        ("a", "a", ((),)),
        ("b", "b", (((0, 3), (0, 4)),)),
    ]
    empty = {"none": have["none"]}
    plan = build_reshard_plan(empty, {"none": empty["none"].shifted(1)})
    for moves in plan.for_rank(1).receives.values():
        assert shares_of(plan, moves, 4) == ()


def _tensor_layout(layout: ls.Layout) -> ls.reshard.TensorLayout:
    from lowshard.reshard.tensor_layout import as_tensor_layout

    return as_tensor_layout(layout)
