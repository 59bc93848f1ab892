"""Boxes for the tests of packing: one element at a time, and strategies that draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lowshard.box import Box


def elements(box: Box) -> Iterator[tuple[int, ...]]:
    """Yield the indices of a box, row-major."""
    extents = [stop - start for start, stop in box]
    for index in np.ndindex(*extents):
        yield tuple(start + i for (start, _), i in zip(box, index, strict=True))


def slow_pack(src: Any, boxes: Sequence[Box]) -> list[Any]:
    """Return the elements of all boxes, one after the other."""
    return [src[index] for box in boxes for index in elements(box)]


def slow_overlap(boxes: Sequence[Box]) -> bool:
    """Return True when some element lies in two boxes."""
    seen = [index for box in boxes for index in elements(box)]
    return len(seen) != len(set(seen))


@st.composite
def shapes_and_boxes(
    draw: st.DrawFn, max_boxes: int = 6, max_dims: int = 4, max_extent: int = 5
) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes in it; empty ones, equal ones and ones that overlap among them."""
    shape = tuple(draw(st.lists(st.integers(0, max_extent), max_size=max_dims)))
    box = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(_sorted) for n in shape))
    return shape, draw(st.lists(box, max_size=max_boxes))


def disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes without those that share an element with an earlier one."""
    kept: list[Box] = []
    for box in boxes:
        if not any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in kept):
            kept.append(box)
    return kept


def _sorted(span: tuple[int, int]) -> tuple[int, int]:
    return min(span), max(span)
