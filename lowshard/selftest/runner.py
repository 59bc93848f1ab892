"""Runs the steps, each in a process of its own under its own time limit, one after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lowshard.compiled import cache_folder
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.step_facts import END
from lowshard.selftest.step_list import Step
from lowshard.selftest.step_setting import Device, Setting
from lowshard.settings import SELFTEST_STEP, environment

Say = Callable[[str], None]

_TICK_S = 0.05
_QUIET_S = 2.0  # a step that takes longer is announced
_REMIND_S = 15.0
_TERM_S = 8.0  # from SIGTERM to SIGKILL: the launcher of ranks ends them meanwhile
_KILL_S = 5.0  # from the first SIGKILL until the processes are gone
_MARK = SELFTEST_STEP.name
_LOG_TAIL_LINES = 3

# NCCL ranks that share a GPU: allowed at all; no multicast, which cannot be shared; few blocks, since those of all
# ranks must be resident at once; every algorithm connected when the communicator is made, before any kernel waits.
_SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_RUNTIME_CONNECT": "0",
}
# A module that is loaded while another rank's kernel waits for this one would wait for that kernel.
_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Outcome:
    """What became of a step; `compiled` counts kernels for the CPU that are in the cache now."""

    name: str
    result: Literal["ok", "FAILED", "skipped"]
    seconds: float
    limit_s: float
    finding: str
    findings: tuple[str, ...] = ()
    checks: int = 0
    compiled: int = 0
    log: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class Runner:
    """Runs steps and keeps what became of them, so that an interrupted run can be told too."""

    def __init__(self, steps: Sequence[Step], device: Device, ranks: int, folder: Path, say: Say) -> None:
        self._steps, self._device, self._ranks = tuple(steps), device, ranks
        self._folder, self._say = folder, say
        self._ok: set[str] | None = None  # what facts found to be in order; None: not asked
        self._gpus = 0
        self.outcomes: list[Outcome] = []

    def run(self) -> None:
        """Run all steps; only `facts` may end the run."""
        end = ""
        for number, step in enumerate(self._steps, 1):
            outcome = self._why_not(step, end) or self._run_step(step, f"{number} of {len(self._steps)}")
            self.outcomes.append(outcome)
            if step.name == "facts":
                end = str(outcome.data.get(END, ""))
                if "ok" in outcome.data:
                    self._ok = set(outcome.data["ok"])
                facts = outcome.data.get("facts", {})
                self._gpus = len(facts.get("cuda", {}).get("gpus", ()))

    def _why_not(self, step: Step, end: str) -> Outcome | None:
        """Return the outcome of a step that cannot run."""
        if end:
            return Outcome(
                step.name, "skipped", 0.0, step.limit_s(self._device), "not run: facts ended the run"
            )
        missing = [name for name in step.needs if self._ok is not None and name not in self._ok]
        if missing:
            text = f"not run: it needs {' and '.join(missing)}, see facts"
            return Outcome(step.name, "skipped", 0.0, step.limit_s(self._device), text)
        return None

    def _run_step(self, step: Step, count: str) -> Outcome:
        """Run a step in a process group of its own and read what it wrote."""
        limit_s = step.limit_s(self._device)
        setting = Setting(self._device, self._ranks, str(self._folder), limit_s)
        log, result = self._folder / f"{step.name}.log", self._folder / f"{step.name}.result.json"
        result.unlink(missing_ok=True)
        mark = f"{os.getpid()} {self._folder} {step.name}"
        command = [sys.executable, "-m", "lowshard.selftest", step.name, setting.to_json(), str(result)]
        start_s, before = time.monotonic(), _compiled()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(), **self._environment(step), "PYTHONUNBUFFERED": "1", _MARK: mark},
                start_new_session=True,
            )
            try:
                in_time = self._wait(process, step, count, limit_s)
            finally:
                _end(process, mark)
        seconds = time.monotonic() - start_s
        outcome = _outcome(step, process.returncode, in_time, seconds, limit_s, log, result)
        return replace(outcome, compiled=max(0, _compiled() - before))

    def _wait(self, process: subprocess.Popen[bytes], step: Step, count: str, limit_s: float) -> bool:
        """Wait for a step's end; return False when its time is over."""
        start_s = time.monotonic()
        next_s, before = _QUIET_S, _compiled()
        while process.poll() is None:
            passed_s = time.monotonic() - start_s
            if passed_s > limit_s:
                return False
            if passed_s > next_s:
                so_far = f", {passed_s:.0f} s so far" if passed_s > _REMIND_S else ""
                made = _compiled() - before
                compiled = f"; {made} kernels compiled into {cache_folder()}" if made > 0 else ""
                self._say(f"{step.name} ({count}): {step.shows}{so_far}, limit {limit_s:.0f} s{compiled}")
                next_s += _REMIND_S
            time.sleep(_TICK_S)
        return True

    def _environment(self, step: Step) -> dict[str, str]:
        """Return what a step's environment has beside the user's, whose own settings win."""
        if self._device == "cpu":
            return {}
        shares = step.name == "threads" or self._gpus < self._ranks
        present = environment()
        wanted = {**_CUDA, **(_SHARED_GPU if shares else {})}
        return {name: value for name, value in wanted.items() if name not in present}


def _outcome(
    step: Step, status: int, in_time: bool, seconds: float, limit_s: float, log: Path, result: Path
) -> Outcome:
    """Return what became of a step, from the tally that it wrote, or from how its process ended."""
    made = Outcome(step.name, "FAILED", seconds, limit_s, "", log=str(log))
    if not result.exists():
        if not in_time:
            how = f"no end within its limit of {limit_s:.0f} s; its processes were ended"
        elif status < 0:
            how = f"its process died by {signal.Signals(-status).name}"
        else:
            how = f"its process ended with status {status} and no result"
        tail = " | ".join(_tail(log))
        finding = f"{how}; last words: {tail}" if tail else how
        return replace(made, finding=finding, findings=(finding,))
    tally = Tally.from_json(result.read_text(encoding="utf-8"))
    result.unlink()
    found = replace(made, checks=tally.checks, findings=tuple(tally.findings), data=tally.data)
    if "skipped" in tally.data:
        return replace(found, result="skipped", finding=f"not run: {tally.data['skipped']}")
    if tally.wrong:
        more = f" (and {tally.wrong - 1} more)" if tally.wrong > 1 else ""
        return replace(found, finding=f"{tally.findings[0]}{more}")
    return replace(found, result="ok", finding=tally.summary)


def _compiled() -> int:
    """Return the number of kernels in the cache of compiled code."""
    return sum(1 for _ in cache_folder().rglob("*.o"))


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log that hold anything."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()][-_LOG_TAIL_LINES:]


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a step's process, gently at first, and whatever it has started."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
    finally:
        end_s = time.monotonic() + _KILL_S
        # More than once: one may have started another meanwhile, and what is killed takes a moment to go.
        while (pids := _marked(mark)) and time.monotonic() < end_s:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(_TICK_S)
        process.wait()


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment has the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found
