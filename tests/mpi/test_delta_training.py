"""A model in training whose steps are served: what the field's deltas are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.starting import start_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.full_only  # refits by deltas: tests/world/test_delta_refit.py, and the page of refits
@pytest.mark.time_limit(150)
def test_little_changes_in_a_step_and_little_is_sent() -> None:
    """Compared bit for bit by the ranks; 20 steps at 3e-6 on a model that has learned for 100."""
    ended = start_ranks(Path(__file__).parent / "run_delta_fsdp.py", 4, ["100", "20"], 140).ok()
    found = json.loads(ended.stdout)
    print(f"{100 * found['changed']:.2f} % changed, {100 * found['sent']:.2f} % sent")
    assert 0 < found["changed"] < 0.02
    assert found["sent"] <= 0.05
