"""Runs a part of the selftest on MPI ranks, started as `lowshard run` starts them, and says what became of them."""

from __future__ import annotations

import sys
from pathlib import Path

from lowshard.launch.job import python_command, run_ranks
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.step_setting import Setting, result_of
from lowshard.settings import TIMEOUT_S, environment

_WAIT_S = 20.0
"""Seconds that a rank waits for another, where LOWSHARD_TIMEOUT_S says nothing else."""
_LAST_S = 8.0
"""Of a step's limit, for the launcher to end the ranks and print their stacks."""


def run_over_mpi(part: str, setting: Setting, tally: Tally, limit_s: float | None = None) -> str:
    """Run `step_rank` on ranks, add what all of them found, and return what carried the arrays, or ""."""
    path = Path(setting.folder) / part
    results = [result_of(path, rank) for rank in range(setting.ranks)]
    for result in results:
        result.unlink(missing_ok=True)
    limit_s = max(5.0, (setting.limit_s if limit_s is None else limit_s) - _LAST_S)
    transport = "" if setting.device == "cpu" else f" transport={setting.transport}"
    print(f"{part} on {setting.ranks} MPI ranks{transport}", flush=True)
    env = {TIMEOUT_S.name: f"{_WAIT_S:g}", **environment()}
    command = python_command("lowshard.selftest.step_rank", [part, setting.to_json(), str(path)], module=True)
    job = run_ranks(command, setting.ranks, timeout_s=limit_s, env=env, stderr=sys.stdout)
    named = f"{setting.transport}: " if setting.device == "cuda" else ""
    if job.exit_code:
        tally.fail(f"{named}{' '.join(job.message.split())}")
        for record in job.failures:
            if record.message and record.message not in job.message:
                tally.fail(f"{named}rank {record.rank}: {' '.join(record.message.split())}")
    through = ""
    for result in results:
        if result.exists():  # a rank that was killed leaves none
            found = Tally.from_json(result.read_text(encoding="utf-8"))
            result.unlink()
            through = str(found.data.pop("transport", through))
            tally.add(found, named)
    return through
