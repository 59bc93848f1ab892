"""The collectives that are measured: what each takes and gives, in elements, and in which ways it can be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALL_REDOPS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Operation:
    """One collective."""

    name: str
    reduces: bool = False
    rooted: bool = False
    shared: bool = False
    out_of_place: bool = True
    in_place: bool = True
    whole_send: bool = True
    whole_recv: bool = True

    def sizes(self, size_bytes: int, itemsize: int, ranks: int) -> Sizes:
        """Return the elements of each buffer for a size; one element a part at least."""
        if self.name == "barrier":
            return Sizes(0, 0, 0, 0)
        parts = self.divides
        each = max(1, size_bytes // itemsize // (ranks if parts else 1))
        whole = each * ranks if parts else each
        send, recv = whole if self.whole_send else each, whole if self.whole_recv else each
        return Sizes(send, recv, each, whole * itemsize)

    @property
    def divides(self) -> bool:
        """Whether the larger buffer is made of a part for each rank."""
        return not (self.whole_send and self.whole_recv) or self.name.startswith("all_to_all")


@dataclass(frozen=True)
class Sizes:
    """Elements of a call."""

    send: int
    recv: int
    count: int
    size_bytes: int


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", reduces=True, shared=True),
        Operation("all_gather", shared=True, whole_send=False),
        Operation("reduce_scatter", reduces=True, whole_recv=False),
        Operation("all_to_all", in_place=False),
        Operation("all_to_all_v", in_place=False),
        Operation("broadcast", rooted=True, shared=True, out_of_place=False),
        Operation("reduce", reduces=True, rooted=True),
        Operation("gather", rooted=True, whole_send=False),
        Operation("scatter", rooted=True, whole_recv=False),
        Operation("send_recv", in_place=False),
        Operation("barrier", in_place=False),
    )
}


@dataclass(frozen=True)
class Uneven:
    """One rank's counts and displacements of an uneven exchange."""

    send_counts: tuple[int, ...]
    send_displs: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_displs: tuple[int, ...]
    peer_displs: tuple[int, ...]


def uneven(each: int, rank: int, ranks: int) -> Uneven:
    """Return rank's part of an exchange in which parts are in turn a quarter larger and smaller than `each`."""
    skew = each // 4
    row = [each] * ranks
    for pair in range(ranks // 2):
        row[2 * pair] += skew
        row[2 * pair + 1] -= skew
    table = [row[-sender:] + row[:-sender] if sender else row for sender in range(ranks)]
    starts = [_starts(counts) for counts in table]
    mine, received = table[rank], [counts[rank] for counts in table]
    peers = tuple(start[rank] for start in starts)
    return Uneven(tuple(mine), tuple(starts[rank]), tuple(received), tuple(_starts(received)), peers)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
