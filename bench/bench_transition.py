"""The transitions that are measured: what they are called, what they move, and the least work that they stand beside.

The floor of a transition is what its result costs in memory that is warm already: every rank fills a buffer of its
result's size once; where terms are folded it adds up its share of them in blocks that stay in a cache, and fills the
result where that is replicated. Each rank does so by NumPy alone, all ranks at once, in turn with what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowshard.errors import LowshardError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import parse_placement

_BLOCK_ELEMS = 1 << 16
_NAMES = ("x", "y", "z")
_WHOLE = 4096

ONE_AXIS = ("S0->R", "S1->R", "R->S0", "S0->S1", "P->R", "P->S0")
TWO_AXES = ("S0,R->R,S0", "S0,S1->S1,S0", "P,S0->R,S1", "S0,S0->R,R")


@dataclass(frozen=True)
class Transition:
    """One transition of a square fp32 matrix on a mesh, such as "S0,S1->S1,S0" on 2 x 2 ranks."""

    name: str
    grid: tuple[int, ...]
    side: int

    @property
    def src(self) -> Layout:
        """The layout before."""
        return self._layout(0)

    @property
    def dst(self) -> Layout:
        """The layout after."""
        return self._layout(1)

    @property
    def placements(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The words before and after."""
        before, _, after = self.name.partition("->")
        return tuple(before.split(",")), tuple(after.split(","))

    @property
    def terms(self) -> int:
        """Terms that are folded."""
        return math.prod(n for n, p in zip(self.grid, self.placements[0], strict=True) if p == "P")

    @property
    def spread(self) -> int:
        """Ranks that share the folding of what all of them hold afterwards."""
        before, after = self.placements
        return math.prod(n for n, p, q in zip(self.grid, before, after, strict=True) if p == "P" and q == "R")

    def value(self, box: Sequence[tuple[int, int]], terms: int = 1) -> np.ndarray:
        """Return what a box of the matrix holds, times so many; small whole numbers, exact in fp32."""
        rows, cols = (np.arange(*span, dtype=np.int64) for span in box)
        found: np.ndarray = ((rows[:, None] * 31 + cols[None] * 7) % _WHOLE * terms).astype(np.float32)
        return found

    def _layout(self, which: int) -> Layout:
        mesh = DeviceMesh(self.grid, _NAMES[: len(self.grid)])
        return Layout(
            mesh, (self.side, self.side), "float32", [parse_placement(p) for p in self.placements[which]]
        )


def transitions(names: Sequence[str], ranks: int, size_bytes: int) -> tuple[Transition, ...]:
    """Return those of some names that so many ranks can do; one with two mesh axes takes an even number of them."""
    side = math.isqrt(size_bytes // 4)
    found = []
    for name in names:
        grid = (ranks,) if "," not in name else (2, ranks // 2)
        made = Transition(name, grid, side)
        before, after = made.placements
        if len(before) != len(after) or len(before) > 2:
            raise LowshardError(
                f"a transition reads like S0->S1 or S0,S1->S1,S0, one placement a mesh axis; got {name!r}"
            )
        if len(before) == 1 or (ranks >= 4 and ranks % 2 == 0):
            _ = made.src, made.dst  # raises what is wrong with a placement
            found.append(made)
    return tuple(found)


class Floor:
    """The least work of a transition on one rank, as `lowshard.bench.bench_transition` tells it."""

    def __init__(self, out_elems: int, terms: int, spread: int) -> None:
        self._whole = np.ones(max(1, out_elems), np.float32)
        self._out = np.zeros_like(self._whole)
        self._own = 0 if terms == 1 else -(-out_elems // spread)
        self._terms = [np.full(max(1, self._own), i, np.float32) for i in range(terms if self._own else 0)]

    def __call__(self) -> None:
        """Do it."""
        out, terms = self._out, self._terms
        for start in range(0, self._own, _BLOCK_ELEMS):
            stop = min(self._own, start + _BLOCK_ELEMS)
            np.add(terms[0][start:stop], terms[1][start:stop], out=out[start:stop])
            for term in terms[2:]:
                np.add(out[start:stop], term[start:stop], out=out[start:stop])
        if self._own < out.size:
            np.copyto(out, self._whole)


def floor_of(transition: Transition, out_elems: int) -> Floor:
    """Return the floor of a transition on a rank that holds so many elements afterwards."""
    return Floor(out_elems, transition.terms, transition.spread)
