"""Which of a publisher's boxes a rank of a subscriber gets over which stream: shares that are even in bytes.

The boxes that one rank gives another lie end to end, each row-major. The row is cut where a share ends, and the box
that lies there along its outer dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowshard.box import Box, shape_of
from lowshard.reshard.reshard_move import Move
from lowshard.reshard.reshard_plan import ReshardPlan

LEAST_SHARE_BYTES = 8 << 20
"""A share of less is not worth a stream of its own."""
_UNEVEN = 200
"""A share may be longer or shorter than the others by so small a part of it, so that boxes are cut between rows."""


@dataclass(frozen=True)
class TensorBoxes:
    """Boxes of one tensor, in the order in which they come.

    Attributes:
        name: of the tensor, in this job.
        src_name: the publisher's name of it.
        src_boxes: in the array of the publisher's rank.
        dst_boxes: the same elements in this rank's array.
    """

    name: str
    src_name: str
    src_boxes: tuple[Box, ...]
    dst_boxes: tuple[Box, ...]


def share_count(size_bytes: int, most: int) -> int:
    """Return how many streams so many bytes are worth.

    Args:
        size_bytes: of all boxes.
        most: streams.
    """
    return max(1, min(most, size_bytes // LEAST_SHARE_BYTES))


def shares_of(plan: ReshardPlan, moves: Iterable[Move], most: int) -> tuple[tuple[TensorBoxes, ...], ...]:
    """Return what comes over each stream from one rank; nothing where no element comes.

    Args:
        plan: whose moves they are.
        moves: from one rank to another.
        most: streams.
    """
    some = [move for move in moves if move.elems]
    itemsizes = [entry.src.itemsize_bytes for entry in plan.entries]
    count = share_count(sum(move.elems * itemsizes[move.entry] for move in some), most)
    return tuple(_by_tensor(plan, share) for share in even_shares(some, itemsizes, count))


def even_shares(moves: Sequence[Move], itemsizes: Sequence[int], count: int) -> list[list[Move]]:
    """Return moves in shares of as many bytes each, within a hundredth or an element; none is empty.

    Args:
        moves: each of one element or more.
        itemsizes: bytes of an element, by the entry of a move.
        count: of shares, at most.

    Returns:
        The shares, with parts of moves in the place of moves that were cut.
    """
    total_bytes = sum(move.elems * itemsizes[move.entry] for move in moves)
    slack_bytes = total_bytes // count // _UNEVEN
    shares: list[list[Move]] = [[]]
    left, dealt_bytes = list(reversed(moves)), 0
    while left:
        move = left.pop()
        itemsize = itemsizes[move.entry]
        size_bytes = move.elems * itemsize
        room_bytes = total_bytes * len(shares) // count - dealt_bytes
        if size_bytes <= room_bytes + slack_bytes or len(shares) == count:
            shares[-1].append(move)
            dealt_bytes += size_bytes
        elif room_bytes <= slack_bytes or room_bytes < itemsize:
            left.append(move)
            shares.append([])
        else:
            left.extend(reversed(_cut(move, room_bytes // itemsize)))
    return [share for share in shares if share]


def _cut(move: Move, elems: int) -> tuple[Move, Move]:
    """Return a move of two elements or more in two: its first rows, with so many elements at most, and the others.

    A first row that has more comes alone, and is cut next.
    """
    shape = shape_of(move.src_box)
    dim = next(d for d, extent in enumerate(shape) if extent > 1)
    rows = min(max(1, elems * shape[dim] // move.elems), shape[dim] - 1)
    return _rows(move, dim, 0, rows), _rows(move, dim, rows, shape[dim])


def _rows(move: Move, dim: int, start: int, stop: int) -> Move:
    def part(box: Box) -> Box:
        first = box[dim][0]
        return (*box[:dim], (first + start, first + stop), *box[dim + 1 :])

    return move._replace(src_box=part(move.src_box), dst_box=part(move.dst_box))


def _by_tensor(plan: ReshardPlan, moves: Iterable[Move]) -> tuple[TensorBoxes, ...]:
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(move.entry, []).append(move)
    return tuple(
        TensorBoxes(
            plan.entries[entry].name,
            plan.entries[entry].src_name,
            tuple(move.src_box for move in some),
            tuple(move.dst_box for move in some),
        )
        for entry, some in found.items()
    )
