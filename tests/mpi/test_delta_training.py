"""A model in training whose steps are served: what the field's deltas are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.starting import start_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.full_only  # refits by deltas: tests/world/test_delta_refit.py, and the page of refits
@pytest.mark.time_limit(150)
@pytest.mark.parametrize(("before", "changed"), [(100, 0.02), (0, 0.05)])
def test_little_changes_in_a_step_and_little_is_sent(before: int, changed: float) -> None:
    """Compared bit for bit by the ranks; 20 steps at 3e-6, on a model that has learned before or on a new one."""
    ended = start_ranks(Path(__file__).parent / "run_delta_fsdp.py", 4, [str(before), "20"], 140).ok()
    found = json.loads(ended.stdout)
    print(f"{before}: {100 * found['changed']:.2f} % changed, {100 * found['sent']:.2f} % sent")
    assert 0 < found["changed"] < changed
    assert found["sent"] <= 0.05
