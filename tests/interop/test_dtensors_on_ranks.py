"""DTensors on true ranks of gloo, not on a group that sends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import gloo

pytest.importorskip("torch", reason="torch is not installed: pip install torch")


@pytest.mark.parametrize("ranks", [2, 4])
def test_boxes_are_what_ranks_were_sent(ranks: int) -> None:
    gloo.start(Path(__file__).with_name("run_dtensors.py"), ranks)
