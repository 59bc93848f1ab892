"""Shares: each element falls to one of the ranks that hold it, evenly; overlapping boxes are taken apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowshard.box import Box, contains
from lowshard.checkpoint.read_shares import disjoint, shares
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy

SHAPE = (9, 7)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    return tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in SHAPE)  # type: ignore[misc]


@given(st.lists(boxes(), min_size=1, max_size=6), st.integers(1, 64), st.data())
def test_every_element_that_is_held_falls_to_one_holder(
    found: list[Box], split: int, data: st.DataObject
) -> None:
    tiling = Tiling.from_pieces(SHAPE, "f32", [[box] for box in found])
    ranks = data.draw(st.none() | st.sets(st.integers(0, len(found) - 1), min_size=1))
    held = {r for r in range(len(found)) if ranks is None or r in ranks}
    ids = np.arange(63).reshape(SHAPE)
    right = {int(i) for r in held for i in ids[tuple(slice(*x) for x in found[r])].ravel()}
    seen: Counter[int] = Counter()
    for share in shares({"w": tiling}, ranks, split):
        assert share.rank in held
        assert contains(found[share.rank], share.box)
        assert share.holders == tuple(sorted(r for r in held if contains(found[r], share.box)))
        seen.update(int(i) for i in ids[tuple(slice(*x) for x in share.box)].ravel())
    assert set(seen) == right
    assert set(seen.values()) <= {1}
    apart = disjoint(tiling, ranks)
    assert sum(ids[tuple(slice(*x) for x in box)].size for box, _ in apart) == len(right)


def test_copies_are_spread_evenly() -> None:
    tilings = {f"n{i}": ShardingStrategy.replicate(4).layout((100 + i,)) for i in range(40)}
    tilings["embed"] = ShardingStrategy.replicate(4).layout((1000, 600))
    loads: Counter[int] = Counter()
    for share in shares(tilings):
        loads[share.rank] += int(np.prod([b - a for a, b in share.box]))
    assert max(loads.values()) - min(loads.values()) < 200
    assert [s.rank for s in shares(tilings) if s.name == "embed"] == [0, 1, 2, 3]
