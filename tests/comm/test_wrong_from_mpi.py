"""Wrong arguments of `from_mpi` are one named error on every rank; see tests/unit/test_wrong_calls.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.starting import start_ranks

SCRIPT = Path(__file__).parent / "run_wrong_from_mpi.py"


@pytest.mark.mpi
@pytest.mark.time_limit(100)
@pytest.mark.full_only
def test_wrong_arguments_are_one_error_on_all_ranks() -> None:
    assert start_ranks(SCRIPT, 2, [], 90).ok().stdout == "right\n"
