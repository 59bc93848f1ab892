"""Which dims of a shape become which of another when an array is reshaped."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the smallest runs of dims of both shapes that hold the same elements, in order."""
    if prod(source) == 0:
        return [((0, len(source)), (0, len(target)))] if tuple(source) == tuple(target) else []
    found = []
    i = j = 0
    while i < len(source) and j < len(target):
        i0, j0 = i, j
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= source[i]
                i += 1
            else:
                b *= target[j]
                j += 1
        found.append(((i0, i), (j0, j)))
    return found


def major(shape: Sequence[int], start: int, stop: int) -> int | None:
    """Return the first dim of a run that is longer than 1."""
    return next((d for d in range(start, stop) if shape[d] != 1), None)
