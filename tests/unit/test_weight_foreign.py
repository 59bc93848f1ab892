"""Row ranges of a batch: whoever reads rows for others, each holder gets its part in its own array, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.checkpoints import attention_and_more, local_of, same, save_over, values_of

from lowshard.box import Box, full_box, relative_slices, shape_of
from lowshard.checkpoint import Catalog
from lowshard.checkpoint.read_shares import shares, with_whole_rows
from lowshard.errors import CheckpointError, PeerFailed
from lowshard.kernels.buffer import address
from lowshard.tiling import Tiling
from lowshard.transfer.peer_write_kernel import write_across
from lowshard.weights import ShardingStrategy, plan_load
from lowshard.weights.load import _KEPT, RankPlan, _Load
from lowshard.weights.peer_write import SCRATCH_BYTES, ArrayPlace, RowBatch, row_batches_of

S = ShardingStrategy
CASES: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "columns": ((37, 24), "float32", S.columnwise),
    "rows": ((37, 24), "bfloat16", S.rowwise),
    "middle": ((5, 12, 7), "float16", lambda k: S.axiswise(1, k)),
    "last": ((3, 5, 16), "uint8", lambda k: S.axiswise(2, k)),
    "gate_up": ((3, 24, 10), "float32", lambda k: S.gate_up(k, 1)),
    "long rows": ((2, 3, 1 << 18), "float32", S.columnwise),
    "whole": ((9,), "int64", S.replicate),
    "number": ((), "float32", S.replicate),
}


def write(
    batch: RowBatch, value: np.ndarray, arrays: dict[int, np.ndarray], pid: int, rows_at_once: int
) -> None:
    """Hand a batch's row ranges out as one process would that holds all arrays."""
    block = np.ascontiguousarray(value[relative_slices(batch.box, full_box(value.shape))])
    flat = block.reshape(-1).view(np.uint8)
    row_ranges, vectors = batch.row_ranges.copy(), np.zeros(4 * 1024, np.int64)
    for row_range in row_ranges:
        row_range[1], row_range[0] = address(arrays[int(row_range[0])]), pid
    rows = flat.size // batch.row_bytes
    for first in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - first)
        scratch = flat[first * batch.row_bytes :][: count * batch.row_bytes].copy()
        facts = (
            address(row_ranges),
            len(row_ranges),
            first,
            count,
            batch.row_bytes,
            address(scratch),
            address(vectors),
        )
        assert write_across()(*facts) == 0


@pytest.mark.parametrize("own", [True, False], ids=["copied", "by the system"])
@pytest.mark.parametrize("case", mode.sample([*CASES], 3, "holders"))
def test_every_holder_gets_its_part(tmp_path: Path, case: str, own: bool) -> None:
    shape, dtype, strategy = CASES[case]
    tiling: Tiling = strategy(3).layout(shape, dtype)
    values = values_of({"w": tiling})
    save_over(tmp_path / "c", values, {"w": Tiling.whole(shape, dtype)}, 1)
    catalog, rng = Catalog.open(tmp_path / "c"), mode.rng(case)
    arrays = {r: np.zeros(tiling.local_shape(r), values["w"].dtype) for r in range(3)}
    places = {r: ArrayPlace("w", 0, 0, tiling.local_shape(r), values["w"].dtype) for r in range(3)}
    cut = int(rng.integers(1, shape[0])) if shape else 0
    boxes: list[Box] = (
        [((0, cut), *full_box(shape[1:])), ((cut, shape[0]), *full_box(shape[1:]))] if shape else [()]
    )
    for box in boxes:
        for batch in row_batches_of("w", box, tiling, places, catalog):
            assert batch.row_bytes <= SCRATCH_BYTES
            assert batch.run is not None
            write(batch, values["w"], arrays, 0 if own else os.getpid(), int(rng.integers(1, 9)))
    for rank, array in arrays.items():
        right = local_of(values["w"], tiling, rank)
        assert right is not None
        assert same(array, right)


def test_a_process_that_is_not_there_is_named() -> None:
    gone = int(
        subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout
    )
    row_ranges = np.array([[gone, 4096, 0, 1, 0, 0, 8, 8]], np.int64)
    row, vectors = np.zeros(8, np.uint8), np.zeros(4096, np.int64)
    assert write_across()(address(row_ranges), 1, 0, 1, 8, address(row), address(vectors)) == gone


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


def test_memory_that_others_may_write_to_is_kept_until_they_cannot(tmp_path: Path) -> None:
    tilings = {"w": Tiling.whole((4, 4), "float32")}
    save_over(tmp_path / "c", values_of(tilings), tilings, 1)
    catalog = Catalog.open(tmp_path / "c")
    plan = plan_load(catalog, tilings)

    def job() -> _Load:
        return _Load(plan, 0, RankPlan.of(plan, catalog, 0), None, None, None)  # type: ignore[arg-type]

    for error in (None, CheckpointError("all ranks have met")):
        one = job()
        with pytest.raises(CheckpointError) if error else one.kept_for_others():
            if error:
                with one.kept_for_others():
                    raise error
        assert id(one) not in _KEPT
    for failure in (PeerFailed("rank 1"), KeyboardInterrupt()):
        left = job()
        with pytest.raises(type(failure)), left.kept_for_others():
            raise failure
        assert _KEPT.pop(id(left)) is left
