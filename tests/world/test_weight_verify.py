"""Checksums of a checkpoint: compared whichever ranks read its bytes, from the sums of the pieces they read."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.checkpoints import on_ranks, save_over, values_of

from lowshard.checkpoint import Catalog
from lowshard.checkpoint.catalog import chain, crc32, joined, sum_of
from lowshard.errors import CheckpointError
from lowshard.weights import LoadReport, ShardingStrategy, load, plan_load
from lowshard.weights.load_plan import STRATEGIES

S = ShardingStrategy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loaded", [1, 2, 3, 4])
def test_damage_is_found_however_the_bytes_are_read(tmp_path: Path, strategy: Any, loaded: int) -> None:
    shape = (24, 40)
    before = {"w": S.columnwise(2).layout(shape), "v": S.rowwise(2).layout(shape)}
    save_over(tmp_path / "c", values_of(before), before, 2)
    catalog = Catalog.open(tmp_path / "c")
    for cut in (S.rowwise, S.columnwise, S.replicate):
        after = {n: cut(loaded).layout(shape) for n in before}
        plan = plan_load(catalog, after, loaded, strategy=strategy)
        reports: list[list[LoadReport]] = [[] for _ in range(loaded)]
        on_ranks(loaded, lambda c, p=plan, r=reports: load(catalog, p, c, reports=r[c.rank]))  # type: ignore[misc]
        assert sum(r[0].verified_bytes for r in reports) == 2 * 24 * 40 * 4
        for name in before:
            part = catalog.tensor(name).parts[-1]
            at = int(mode.rng(f"{name} {strategy} {loaded}").integers(part.entry.start, part.entry.stop))
            right = Path(part.file).read_bytes()
            Path(part.file).write_bytes(right[:at] + bytes([right[at] ^ 16]) + right[at + 1 :])
            with pytest.raises(CheckpointError, match=f"{name!r}: its data is damaged"):
                on_ranks(loaded, lambda c, p=plan: load(catalog, p, c))  # type: ignore[misc]
            Path(part.file).write_bytes(right)


def test_sums_of_pieces_join_to_the_sum_of_the_whole() -> None:
    rng = mode.rng("joined sums")
    data = rng.bytes(70_000)
    cuts = sorted({0, len(data), *map(int, rng.integers(0, len(data), 9))})
    pieces = [(a, b, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(cuts)]
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[7:], crc32(data[:7])) == zlib.crc32(data)
    assert joined(zlib.crc32(data[:7]), zlib.crc32(data[7:]), len(data) - 7) == zlib.crc32(data)
    found = chain(0, len(data), rng.permutation(np.array(pieces)).tolist())
    assert found is not None
    assert sum_of(found) == zlib.crc32(data)
    assert chain(0, len(data), pieces[:3] + pieces[4:]) is None
    assert sum_of(chain(5, 5, []) or []) == 0
