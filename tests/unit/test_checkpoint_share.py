"""Shares: each element falls to one of the ranks that hold it, evenly; overlapping boxes are taken apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import attention_and_more, save_over, values_of

from lowshard.box import Box, contains, full_box, relative_slices, shape_of
from lowshard.checkpoint import Catalog
from lowshard.checkpoint.read_shares import disjoint, shares, with_whole_rows
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


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("loaded", [1, 2, 3, 4])
def test_whole_rows_cover_what_the_columns_covered(tmp_path: Path, saved: int, loaded: int) -> None:
    before, after = attention_and_more(saved), attention_and_more(loaded)
    save_over(tmp_path / "c", values_of(before), before, saved)
    catalog = Catalog.open(tmp_path / "c")
    joined = with_whole_rows(shares(after), catalog.boxes)
    for name, tiling in after.items():
        counts = np.zeros(tiling.shape, np.int64)
        for share in joined:
            if share.name != name:
                continue
            counts[relative_slices(share.box, full_box(tiling.shape))] += 1
            held = sum(
                np.prod(shape_of(box)) for r in share.holders for box, _ in tiling.places(r, share.box)
            )
            assert held >= np.prod(shape_of(share.box))  # each element has a holder among those named
            assert share.rank in share.holders
        assert (counts == 1).all()
    wide = [s for s in joined if s.name == "wide"]
    if loaded > 1 and saved == 1:  # columns of stored rows: each rank reads whole rows for all
        assert sorted(s.rank for s in wide) == list(range(loaded))
        assert all(s.box[1] == (0, 40000) and s.holders == tuple(range(loaded)) for s in wide)
