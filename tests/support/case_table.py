"""Runs the case table on MPI ranks, once for each way of starting them, and says how each case ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.comm_cases import CASES, Way, cases_for
from support.starting import start_ranks

_RUNNER = Path(__file__).resolve().parents[1] / "comm" / "run_cases.py"
_DEADLINE_S = 60  # of a wait: what hangs is to end by an error that says where, before the job's own limit

LIMIT_S = 250.0  # ranks of MPICH that wait take cores from those that work
GPU_LIMIT_S = max(LIMIT_S, 5.0 * len(CASES))
"""On GPUs: ranks that share one take turns on it, for each case."""

__all__ = ["CASES", "GPU_LIMIT_S", "LIMIT_S", "cases_of_jobs", "check_case", "some_cases"]


@cache  # one start of mpiexec for all cases
def _table(
    size: int, device: str, names: tuple[str, ...], env: tuple[tuple[str, str], ...]
) -> tuple[dict[str, dict[str, Any]], str]:
    limit_s = (LIMIT_S if device == "cpu" else GPU_LIMIT_S) * (4 if mode.full() else 1)
    ended = start_ranks(
        _RUNNER, size, [device, *names], limit_s, env=dict(env), prefix_output=True, may_time_out=True
    )
    lines = [line.removeprefix("[0] ") for line in ended.stdout.splitlines()]
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return {result["case"]: result for result in results}, f"{ended.job.message}\n{ended.stderr}"


def _way(size: int, device: str, env: Mapping[str, str]) -> Way:
    """Return what the communicator of such a job is."""
    compares = env.get("LOWSHARD_CHECK") != "off"
    if device in ("nccl", "staged"):
        late = device == "nccl" and compares
        return Way(size, device, on_gpu=True, compares=compares, late=late)  # type: ignore[arg-type]
    apart = env.get("LOWSHARD_CPU_PATH") == "mpi" or "LOWSHARD_NODE_SIZE" in env
    return Way(size, "mpi" if apart else "node", compares=compares)


def cases_of_jobs(
    sizes: Iterable[int], device: str = "cpu", names: Iterable[str] | None = None, **env: str
) -> list[tuple[str, int]]:
    """Return name and size of the cases that mean something in jobs of such sizes; arguments as of `check_case`."""
    every = [*CASES] if names is None else [*names]
    return [(name, size) for size in sizes for name in cases_for(_way(size, device, env), every)]


def some_cases(few: int, way: str) -> tuple[str, ...]:
    """Return the names of a few cases that are drawn for a way of moving bytes; of all cases in a full run."""
    return tuple(mode.sample([*CASES], few, f"cases {way}"))


def check_case(name: str, size: int, device: str, names: tuple[str, ...] | None = None, **env: str) -> None:
    """Report one case of the table: pass, or fail with every rank's error.

    Args:
        name: of the case.
        size: number of ranks.
        device: "cpu", "cuda", "nccl" or "staged"; see tests/comm/run_cases.py.
        names: of all cases to run in one job with this one, as far as they mean something there; by default, of all
            there are.
        env: variables to set for the ranks.
    """
    together = tuple(cases_for(_way(size, device, env), names))
    env = {"LOWSHARD_TIMEOUT_S": str(_DEADLINE_S), **env}
    results, said = _table(size, device, together, tuple(sorted(env.items())))
    if name not in results:
        last = list(results)[-1] if results else "none"
        pytest.fail(f"the job ended before this case did (the last that did: {last})\n{said}", pytrace=False)
    errors = results[name]["errors"]
    if errors:
        text = "\n".join(f"--- rank {rank} of {size}\n{error}" for rank, error in errors.items())
        pytest.fail(text, pytrace=False)
