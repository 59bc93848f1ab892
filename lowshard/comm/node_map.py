"""Which ranks of a communicator share a node, and who of them talks to whom on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Seating:
    """The ranks of a communicator over nodes, in any order and any numbers.

    Attributes:
        seats: by rank: a number of its node, and its rank among the processes there that share memory.
    """

    seats: tuple[tuple[int, int], ...]

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node in ascending order; nodes in the order of their first ranks."""
        found: dict[int, list[int]] = {}
        for rank, (node, _) in enumerate(self.seats):
            found.setdefault(node, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """By rank: its node's index in `nodes`, and its index there."""
        found = {rank: (i, j) for i, ranks in enumerate(self.nodes) for j, rank in enumerate(ranks)}
        return tuple(found[rank] for rank in range(len(self.seats)))

    @property
    def shares(self) -> bool:
        """Whether any node has more than one rank."""
        return len(self.nodes) < len(self.seats)

    def home(self, rank: int) -> int:
        """Return a rank's node, as an index of `nodes`."""
        return self._places[rank][0]

    def contact(self, rank: int, node: int) -> int:
        """Return the rank of another node that a rank exchanges parts with: one of its own place there, if it can."""
        there = self.nodes[node]
        return there[self._places[rank][1] % len(there)]

    def part(self, ranks: Sequence[int]) -> Seating:
        """Return the seating of some of the ranks, in the order given."""
        return Seating(tuple(self.seats[rank] for rank in ranks))
