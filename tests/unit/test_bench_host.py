"""`lowshard bench host`: what collectives on GPU arrays cost the host, and that the stand-in is really called."""

from __future__ import annotations

import json

import pytest

from lowshard.bench.bench_host import LIMITS_US, measure
from lowshard.cli import main

# The limits are for a machine that does nothing else.
_BESIDE_OTHER_WORK = 2.0


@pytest.mark.full_only
def test_the_host_time_of_collectives_on_gpu_arrays_is_within_its_limits() -> None:
    for _ in range(6):  # one free moment is enough
        rows = {row.name: row for row in measure(8, 15)}
        assert {name: rows[name].calls for name in LIMITS_US} == {
            "all_reduce": 1,
            "all_gather": 1,
            "all_to_all": 17,
        }
        assert all(rows[name].above_us > 0.0 for name in LIMITS_US)
        over = [
            rows[n] for n, limit_us in LIMITS_US.items() if rows[n].above_us > _BESIDE_OTHER_WORK * limit_us
        ]
        if not over:
            break
    assert not over


def test_the_figures_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--ranks", "2", "--rounds", "1", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ranks"] == 2
    assert {row["name"]: row["calls"] for row in said["rows"]}["all_to_all"] == 5  # a group of 2, and a copy
