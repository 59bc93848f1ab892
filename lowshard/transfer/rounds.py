"""Rounds: data is packed into one of a rank's two buffers while peers read the other.

See "The mover of boxes" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Work

Array = Any


def nothing(*_: object) -> None:
    """Do nothing."""


def run_rounds(
    numbers: range,
    fill: Callable[[int], object],
    meet: Callable[[int], object],
    take: Callable[[int], object],
    local: Callable[[int], object] = nothing,
    *,
    ahead: bool = True,
) -> None:
    """Run rounds, the same on all ranks that synchronise. Rounds must not depend on data of the round before."""
    if numbers:
        fill(numbers[0])
    for number in numbers:
        meet(number)
        if ahead and number + 1 in numbers:  # so that messages are under way; else peers read cached data
            fill(number + 1)
        local(number)
        take(number)
        if not ahead and number + 1 in numbers:
            fill(number + 1)


class Message(NamedTuple):
    """What one rank sends another in a round: its range in the send or receive buffer."""

    peer: int
    start: int
    stop: int


class RoundMessages:
    """Non-blocking messages of rounds: packing, sending and unpacking overlap."""

    def __init__(
        self, comm: Communicator, out: Sequence[Array], into: Sequence[Array], sends: Sequence[Sequence[Message]],
        receives: Sequence[Sequence[Message]],
    ) -> None:  # fmt: skip
        self._comm, self._out, self._into, self._sends, self._receives = comm, out, into, sends, receives
        self._sent: list[list[Work]] = [[], []]
        self._coming: list[list[Work]] = [[], []]

    def make_room(self, number: int) -> None:
        """Before a round is packed: wait for the sends of its buffer, and post the round's receives."""
        half = number & 1
        _wait(self._sent[half])
        for r, a, b in self._receives[number]:
            self._coming[half].append(self._comm.start.recv(self._into[half][a:b], r))

    def send(self, number: int) -> None:
        """Send a packed round."""
        half = number & 1
        for r, a, b in self._sends[number]:
            self._sent[half].append(self._comm.start.send(self._out[half][a:b], r))

    def take(self, number: int) -> dict[int, Array]:
        """Wait for a round's messages, and return them by rank."""
        half = number & 1
        _wait(self._coming[half])
        return {r: self._into[half][a:b] for r, a, b in self._receives[number]}

    def finish(self) -> None:
        """Wait for all sends."""
        for works in self._sent:
            _wait(works)


def _wait(works: list[Work]) -> None:
    while works:
        works.pop(0).wait()
