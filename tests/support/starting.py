"""Starts MPI ranks from a test: with a time limit, all ranks' stacks when it is over, nothing left behind."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lowshard
from lowshard.errors import TimedOut
from lowshard.launch.job import JobResult, python_command, run_ranks
from lowshard.launch.mpiexec import find_mpi, rank_environment

_TESTS = Path(__file__).resolve().parents[1]
_PACKAGE_PARENT = Path(lowshard.__file__).resolve().parents[1]


class RanksTimedOut(AssertionError):
    """The ranks of a test did not end in time; the text has their output and their stacks."""


@dataclass(frozen=True)
class Finished:
    """How the ranks ended; named as in `subprocess.CompletedProcess`."""

    returncode: int
    """The job's exit code: 0, or that of the first rank that failed (lowshard.launch.job.JobResult)."""
    stdout: str
    stderr: str
    job: JobResult

    def ok(self) -> Finished:
        """Return itself; raise AssertionError with all output if the job failed."""
        assert self.returncode == 0, f"{self.job.message}\n{self.text}"
        return self

    @property
    def text(self) -> str:
        """All output, for a failure's message."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def start_ranks(
    target: str | Path,
    n: int,
    args: Sequence[str] = (),
    timeout_s: float = 60.0,
    *,
    env: Mapping[str, str] | None = None,
    prefix_output: bool = False,
    may_time_out: bool = False,
) -> Finished:
    """Run a script (a path) or a module (a dotted name) on n MPI ranks and wait for them.

    Ranks find lowshard and the modules of `support` whatever their working directory is. An uncaught
    exception in one of them ends all.

    Args:
        target: path of a script, or name of a module.
        n: number of ranks.
        args: the arguments of each rank.
        timeout_s: after this the ranks print the stacks of all their threads and are ended.
        env: variables to set, beside those of this process.
        prefix_output: whether each line of output gets its rank in front. Without it the bytes of ranks
            that print at once mix, so let one rank print.
        may_time_out: return, with the return code 71, when the time is over; else raise.

    Raises:
        RanksTimedOut: the time is over; the text has the ranks' output and stacks.
    """
    module = isinstance(target, str) and not target.endswith(".py")
    stdout, stderr = io.StringIO(), io.StringIO()
    result = run_ranks(
        python_command(str(target), list(args), module=module),
        n,
        timeout_s=timeout_s,
        env=_environment(env),
        prefix_output=prefix_output,
        stdout=stdout,
        stderr=stderr,
    )
    finished = Finished(result.exit_code, stdout.getvalue(), stderr.getvalue(), result)
    if result.exit_code == TimedOut.exit_code and result.cause == "timeout" and not may_time_out:
        raise RanksTimedOut(f"{n} ranks of {target} were not over after {timeout_s:g} s\n{finished.text}")
    return finished


def start_bare(
    argv: Sequence[str],
    n: int,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program on n ranks under a plain mpiexec, which gets these options first."""
    mpi = find_mpi()
    command = mpi.command(n, list(argv))
    command[1:1] = options
    from support.launching import own_files

    base = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join([str(_PACKAGE_PARENT), str(_TESTS)])}
    with own_files():
        return subprocess.run(
            command, env=rank_environment(mpi, n, base), capture_output=True, text=True, timeout=limit_s, check=False
        )  # fmt: skip


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    env = {**os.environ, **(more or {})}
    folders = [str(_TESTS)]
    if (_PACKAGE_PARENT / "pyproject.toml").exists():  # a checkout; an installed package is found anyhow
        folders.append(str(_PACKAGE_PARENT))
    env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH")])])
    return env
