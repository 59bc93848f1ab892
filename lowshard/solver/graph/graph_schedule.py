"""Schedule: what an assignment of layouts makes happen, step by step: moves, copies that serve again, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from lowshard.solver.graph.space import Choice, Space


class Move(NamedTuple):
    """A tensor is brought into another layout before a step. Layouts are numbered in the tensor's family."""

    tensor: int
    step: int
    src: int
    dst: int
    price: float


@dataclass(frozen=True)
class Assignment:
    """Where each leaf lies and how each op runs."""

    leaves: Mapping[int, int]
    choices: tuple[Choice, ...]

    def layout(self, space: Space, tensor: int) -> int:
        """Return the layout that a tensor comes in."""
        if tensor in self.leaves:
            return self.leaves[tensor]
        step, k = space.producer[tensor]
        return self.choices[step].outputs[k]


@dataclass(frozen=True)
class Schedule:
    """An assignment, priced."""

    assignment: Assignment
    moves: tuple[Move, ...]
    compute: float
    inner: float  # of the collectives inside ops
    memory_bytes: tuple[int, ...]  # on the fullest device at each step; the last entry is after the last op

    @property
    def moved(self) -> float:
        """Price of the moves."""
        return sum(m.price for m in self.moves)

    @property
    def price(self) -> float:
        """Price of everything."""
        return self.compute + self.inner + self.moved

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest device holds at any step."""
        return max(self.memory_bytes, default=0)


def schedule(space: Space, assignment: Assignment) -> Schedule:
    """Price an assignment."""
    # A tensor is held from its making to its last use, a weight all the time. A copy in another layout is made before
    # the first op that needs it, from the cheapest of the source and earlier copies, and held to the last use of the
    # tensor. Where the timing reuses nothing, each use pays for its own move, and holds its own copy for that step.
    moves: list[Move] = []
    steps = space.steps
    change = [0] * (steps + 2)
    for tensor, uses in enumerate(space.uses):
        family, last = space.family[tensor], space.last_use[tensor]
        source = assignment.layout(space, tensor)
        change[space.born(tensor)] += family.bytes[source]
        change[last + 1] -= family.bytes[source]
        held = [source]
        for step, k, fixed in uses:
            need = assignment.choices[step].inputs[k] if fixed is None else fixed
            if need in held:
                continue
            if not space.timing.reuses:
                moves.append(Move(tensor, step, source, need, family.move(source, need)))
                change[step] += family.bytes[need]
                change[step + 1] -= family.bytes[need]
                continue
            price, place = min((family.move(have, need), i) for i, have in enumerate(held))
            moves.append(Move(tensor, step, held[place], need, price))
            held.append(need)
            change[step] += family.bytes[need]
            change[space.copies_until[tensor] + 1] -= family.bytes[need]
    memory, now = [], 0
    for step in range(steps + 1):
        now += change[step]
        memory.append(now + (assignment.choices[step].temporary_bytes if step < steps else 0))
    moves.sort(key=lambda m: m.step)
    return Schedule(
        assignment,
        tuple(moves),
        sum(c.compute for c in assignment.choices),
        sum(c.inner for c in assignment.choices),
        tuple(memory),
    )


def holders(space: Space, assignment: Assignment, step: int) -> list[tuple[int, int, int]]:
    """Return what a device holds at a step: (bytes, tensor, layout), the largest first."""
    found = []
    for tensor, uses in enumerate(space.uses):
        if not space.born(tensor) <= step <= space.last_use[tensor]:
            continue
        family = space.family[tensor]
        held = [assignment.layout(space, tensor)]
        for at, k, fixed in uses:
            need = assignment.choices[at].inputs[k] if fixed is None else fixed
            until = space.copies_until[tensor] if space.timing.reuses else at
            if at <= step <= until and need not in held:
                held.append(need)
        found += [(family.bytes[layout], tensor, layout) for layout in held]
    return sorted(found, key=lambda f: (-f[0], f[1], f[2]))


def is_feasible(found: Schedule, budget_bytes: float | None) -> bool:
    """Whether every move can be made, and the budget holds at every step."""
    return found.price != inf and (budget_bytes is None or found.peak_bytes <= budget_bytes)
