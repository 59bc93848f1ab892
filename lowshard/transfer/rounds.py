"""Rounds: what cannot be read where it lies is packed in one half of a rank's stage while peers take the other half.

See "The mover of boxes" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lowshard.comm.communicator import Communicator
from lowshard.comm.work import Work
from lowshard.errors import LowshardError, VerificationError

Array = Any


def nothing(*_: object) -> None:
    """Do nothing."""


def run_rounds(
    numbers: range,
    fill: Callable[[int], object],
    meet: Callable[[int], object],
    take: Callable[[int], object],
    own: Callable[[int], object] = nothing,
    *,
    ahead: bool = True,
) -> None:
    """Go through rounds; the same on all ranks that meet. What is given in one may not rest on what another brings."""
    if numbers:
        fill(numbers[0])
    for number in numbers:
        meet(number)
        if (
            ahead and number + 1 in numbers
        ):  # for messages to be on their way; else what peers take stays cached
            fill(number + 1)
        own(number)
        take(number)
        if not ahead and number + 1 in numbers:
            fill(number + 1)


class Message(NamedTuple):
    """What one rank sends another in a round: where it begins and ends in the half that it is sent out of, or into."""

    peer: int
    start: int
    stop: int


class RoundMessages:
    """Messages of rounds, started and not waited for: packing, sending and taking overlap."""

    def __init__(
        self, comm: Communicator, out: Sequence[Array], into: Sequence[Array], sends: Sequence[Sequence[Message]],
        receives: Sequence[Sequence[Message]],
    ) -> None:  # fmt: skip
        self._comm, self._out, self._into, self._sends, self._receives = comm, out, into, sends, receives
        self._sent: list[list[Work]] = [[], []]
        self._coming: list[list[Work]] = [[], []]

    def make_room(self, number: int) -> None:
        """Before a round is filled: wait for what was sent out of its half, and expect what comes in the round."""
        half = number & 1
        _wait(self._sent[half])
        for r, a, b in self._receives[number]:
            self._coming[half].append(self._comm.start.recv(self._into[half][a:b], r))

    def send(self, number: int) -> None:
        """Send what a round was filled with."""
        half = number & 1
        for r, a, b in self._sends[number]:
            self._sent[half].append(self._comm.start.send(self._out[half][a:b], r))

    def take(self, number: int) -> dict[int, Array]:
        """Wait for what comes in a round, and return it by rank."""
        half = number & 1
        _wait(self._coming[half])
        return {r: self._into[half][a:b] for r, a, b in self._receives[number]}

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""
        for works in self._sent:
            _wait(works)


def _wait(works: list[Work]) -> None:
    while works:
        works.pop(0).wait()


class FirstError:
    """What goes wrong first on one rank, kept until all ranks can raise it: the others must not wait in vain."""

    def __init__(self) -> None:
        self.error: LowshardError | None = None

    def collect_error(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run what may raise on this rank alone; None where it does."""
        try:
            return call(*args)
        except Exception as error:
            self.keep(error)
            return None

    def keep(self, error: Exception) -> None:
        """Keep an error, unless there is one."""
        if self.error is None:
            known = isinstance(error, LowshardError)
            self.error = error if known else VerificationError(f"{type(error).__name__}: {error}")  # type: ignore[assignment]
            if not known:
                self.error.__cause__ = error  # type: ignore[union-attr]

    def take(self) -> LowshardError | None:
        """Return it, and forget it."""
        error, self.error = self.error, None
        return error
