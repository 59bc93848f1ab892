"""Ranks of one machine that have found, or set, different values take one way together all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(100)]

SCRIPT = Path(__file__).parent / "run_calibration.py"


def test_ranks_with_different_values_give_one_result() -> None:
    """As where a file appears in the cache folder between the moments at which two ranks look."""
    assert start_ranks(SCRIPT, 4, ["agree"], 90).ok().stdout == "right\n" * 4


def test_a_wrong_setting_on_one_rank_is_one_error_on_all() -> None:
    ends = start_ranks(SCRIPT, 2, ["wrong"], 90).ok().stdout.splitlines()
    assert len(ends) == 2
    assert len(set(ends)) == 1
    assert ends[0].startswith("CommError: rank 1: LOWSHARD_CALIBRATION is auto, off or name=bytes")
