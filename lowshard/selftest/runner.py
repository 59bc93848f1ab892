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

from lowshard.selftest.comparisons import Tally
from lowshard.selftest.facts import END
from lowshard.selftest.steps import Device, Setting, Step
from lowshard.settings import SELFTEST_STEP, environment

_TICK_S = 0.05
_QUIET_S = 2.0  # a step that takes longer is announced
_REMIND_S = 15.0
_TERM_S = 8.0  # from SIGTERM to SIGKILL: the launcher of ranks ends them meanwhile
_KILL_S = 5.0  # from the first SIGKILL until the processes are gone
_MARK = SELFTEST_STEP.name
_LAST_LINES = 3  # of a log, where a step has ended without a result

# NCCL ranks that share a GPU: allowed at all; no multicast, which cannot be shared; few blocks, since those of all
# ranks must be resident at once; every algorithm connected when the communicator is made, before any kernel waits.
_SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_RUNTIME_CONNECT": "0",
}  # fmt: skip
# A module that is loaded while another rank's kernel waits for this one would wait for that kernel.
_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN"}


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    result: Literal["ok", "FAILED", "skipped"]
    seconds: float
    limit_s: float
    finding: str
    findings: tuple[str, ...] = ()
    checks: int = 0
    log: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class Runner:
    """Runs steps and keeps what became of them, so that an interrupted run can be told too."""

    def __init__(self, device: Device, ranks: int, folder: Path, say: Callable[[str], None]) -> None:
        self._device, self._ranks, self._folder, self._say = device, ranks, folder, say
        self._facts: Mapping[str, Any] = {}
        self.outcomes: list[Outcome] = []

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps; only `facts` may end the run."""
        for number, step in enumerate(steps, 1):
            missing = [need for need in step.needs if need not in self._facts.get("ok", step.needs)]
            why = "facts ended the run" if self._facts.get(END) else ""
            why = why or f"it needs {' and '.join(missing)}, see facts" * bool(missing)
            if why:
                outcome = Outcome(step.name, "skipped", 0.0, step.limit_s(self._device), f"not run: {why}")
            else:
                outcome = self._run_step(step, f"{step.name} ({number} of {len(steps)}): {step.shows}")
            self.outcomes.append(outcome)
            if step.name == "facts":
                self._facts = outcome.data

    def _run_step(self, step: Step, title: str) -> Outcome:
        """Run a step in a process group of its own and read what it wrote."""
        limit_s, log = step.limit_s(self._device), self._folder / f"{step.name}.log"
        setting = Setting(self._device, self._ranks, str(self._folder), limit_s)
        result = log.with_suffix(".result.json")
        result.unlink(missing_ok=True)
        mark = f"{os.getpid()} {self._folder} {step.name}"
        start_s = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "lowshard.selftest", step.name, setting.to_json(), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._added(step), **environment(), "PYTHONUNBUFFERED": "1", _MARK: mark},
                start_new_session=True,
            )
            next_s = _QUIET_S
            try:
                while process.poll() is None and (passed_s := time.monotonic() - start_s) < limit_s:
                    if passed_s > next_s:
                        self._say(f"{title}, {passed_s:.0f} s so far, limit {limit_s:.0f} s")
                        next_s += _REMIND_S
                    time.sleep(_TICK_S)
                in_time = process.returncode is not None
            finally:
                _end(process, mark)
        made = Outcome(step.name, "FAILED", time.monotonic() - start_s, limit_s, "", log=str(log))
        if result.exists():
            tally = Tally.from_json(result.read_text(encoding="utf-8"))
            result.unlink()
            found = replace(made, checks=tally.checks, findings=tuple(tally.findings), data=tally.data)
            if not tally.wrong:
                return replace(found, result="ok", finding=tally.summary)
            more = f" (and {tally.wrong - 1} more)" if tally.wrong > 1 else ""
            return replace(found, finding=f"{tally.findings[0]}{more}")
        if not in_time:
            how = f"no end within its limit of {limit_s:.0f} s; its processes were ended"
        elif process.returncode < 0:
            how = f"its process died by {signal.Signals(-process.returncode).name}"
        else:
            how = f"its process ended with status {process.returncode} and no result"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = " | ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])
        finding = f"{how}; last words: {last}" if last else how
        return replace(made, finding=finding, findings=(finding,))

    def _added(self, step: Step) -> dict[str, str]:
        """Return what a step's environment has where the user's has nothing else."""
        if self._device == "cpu":
            return {}
        gpus = len(self._facts.get("facts", {}).get("cuda", {}).get("gpus", ()))
        return {**_CUDA, **(_SHARED_GPU if step.name == "threads" or gpus < self._ranks else {})}


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
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
