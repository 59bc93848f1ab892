"""Runs a part of the selftest on MPI ranks, and what each of them runs.

A rank is `python -m lowshard.selftest.ranks PART SETTING RESULT`, started as `lowshard run` starts one.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from lowshard import comm as lc
from lowshard.launch.job import python_command, run_ranks
from lowshard.selftest.arrays import array_module, fill_pools
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import Setting
from lowshard.settings import TIMEOUT_S, environment

_WAIT_S = 20.0
"""Seconds that a rank waits for another, where LOWSHARD_TIMEOUT_S says nothing else."""
_LAST_S = 8.0
"""Of a step's limit, for the launcher to end the ranks and print their stacks."""


def run_over_mpi(part: str, setting: Setting, tally: Tally) -> str:
    """Run `run_rank` of the module `part` on ranks, add what they found, and return what carried the arrays, or ""."""
    path = Path(setting.folder) / part
    results = [path.with_suffix(f".{rank}.json") for rank in range(setting.ranks)]
    for result in results:
        result.unlink(missing_ok=True)
    named = f"{setting.transport}: " if setting.device == "cuda" else ""
    print(f"{named}{part} on {setting.ranks} MPI ranks", flush=True)
    env = {TIMEOUT_S.name: f"{_WAIT_S:g}", **environment()}
    command = python_command("lowshard.selftest.ranks", [part, setting.to_json(), str(path)], module=True)
    job = run_ranks(
        command, setting.ranks, timeout_s=max(5.0, setting.limit_s - _LAST_S), env=env, stderr=sys.stdout
    )
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
    return through.replace("mpi", "shared memory and MPI")


def main(part: str, setting: Setting, result: Path) -> None:
    """Run a part as one rank and write what it found, also where it fails."""
    from lowshard.comm.mpi import load_mpi

    tally = Tally()
    world = load_mpi().COMM_WORLD
    try:
        if setting.device == "cuda":
            fill_pools(array_module("cuda"))
        with lc.from_mpi(world, setting.device, transport=setting.transport) as comm:
            tally.data["transport"] = comm.transport
            importlib.import_module(f"lowshard.selftest.{part}").run_rank(comm, tally)
    finally:
        result.with_suffix(f".{world.Get_rank()}.json").write_text(tally.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Setting.from_json(sys.argv[2]), Path(sys.argv[3]))
