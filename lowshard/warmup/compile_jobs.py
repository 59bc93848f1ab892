"""Groups of functions compiled side by side, each by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lowshard
from lowshard.compiled.shipped import Level
from lowshard.settings import NUMBA_CODE_SETTINGS, SHIPPED_CODE, environment

FUNCTIONS = 113
"""About as many functions there are; for bars."""


@dataclass
class Outcome:
    """What came of compiling for one level."""

    origins: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def compile_groups(
    groups: Iterable[str], levels: Iterable[Level | None], on_function: Callable[[], None]
) -> dict[Level | None, Outcome]:
    """Compile groups for levels, or None: what a job here would need, on all cores that this process may use."""
    outcomes = {level: Outcome() for level in levels}
    lock, running = threading.Lock(), set[subprocess.Popen[str]]()

    def run(group: str, level: Level | None) -> None:
        command = [sys.executable, "-m", "lowshard.warmup.compile_worker", group]
        process = subprocess.Popen(
            command if level is None else [*command, level.name], env=_environment(level),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.add(process)
        said: list[str] = []
        with process:  # which closes its pipes
            reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
            reader.start()
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    origin, name = line.split()
                    origins = outcomes[level].origins
                    if name not in origins:
                        on_function()
                    # What one group has compiled, another that needs it too may find on disk.
                    if origins.get(name) in (None, "disk"):
                        origins[name] = origin
            reader.join()
        running.discard(process)
        if process.returncode:
            last = said[-1].strip() if said else f"it ended with status {process.returncode}"
            with lock:
                outcomes[level].faults.append(f"{group}: {last}")

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        tasks = [pool.submit(run, group, level) for group in groups for level in outcomes]
        for task in tasks:
            task.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.kill()
        raise
    pool.shutdown()
    return outcomes


def _environment(level: Level | None) -> dict[str, str]:
    """Return the environment of a process that compiles: this lowshard comes first in it."""
    env = environment()
    places = [str(Path(lowshard.__file__).parents[1]), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONDONTWRITEBYTECODE": "1",  # into a folder that becomes a wheel
    }
    if level is not None:
        for name in NUMBA_CODE_SETTINGS:
            env.pop(name, None)
        env[SHIPPED_CODE.name] = "off"
    return env
