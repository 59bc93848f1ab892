"""DTensors on true ranks of gloo, not on a group that sends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install torch")


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [2, 4] if mode.full() else [2])
def test_boxes_are_what_ranks_were_sent(ranks: int, tmp_path: Path) -> None:
    start_ranks(Path(__file__).with_name("run_dtensors.py"), ranks, [str(tmp_path)], timeout_s=100).ok()
