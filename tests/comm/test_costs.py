"""What small calls cost beside mpi4py's: the promises of docs/limits.md, in microseconds, on two quiet cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.starting import start_ranks

SMALL_US = 4.0
"""64 bytes, any collective, above mpi4py's."""
GROUPED_US, STARTED_US = {1: 10.0, 4: 25.0}, 4.5
"""960 bytes: a group of one or four messages each way, above Isend, Irecv and Waitall; each message that is started."""


@pytest.mark.mpi
@pytest.mark.quiet
@pytest.mark.full_only  # beside other tests it measures those
@pytest.mark.time_limit(120)
def test_small_calls_cost_little_more_than_those_of_mpi4py() -> None:
    ended = start_ranks(Path(__file__).with_name("run_costs.py"), 2, [], 100).ok()
    found = {name: ours - theirs for name, (ours, theirs) in json.loads(ended.stdout).items()}
    print({name: round(us, 2) for name, us in found.items()})
    limits = {name: SMALL_US for name in found}
    limits |= {
        "grouped 1": GROUPED_US[1],
        "grouped 4": GROUPED_US[4],
        "started 1": 2 * STARTED_US,
        "started 4": 8 * STARTED_US,
    }
    assert not {name: us for name, us in found.items() if us > limits[name]}, found
