"""What each file of tests costs in CPU time, and a limit for it: a run fails when a file outgrows its budget.

The budgets come from tests/durations.json, which `pytest --record-durations` writes. CPU time, of this process and of
those it waited for, does not count what else the machine does. A slower processor has larger budgets: a fixed piece of
work is timed on both.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILE = TESTS / "durations.json"
TOTAL_S = 550.0
"""Of all files together: five minutes of two cores are 600, of which pytest itself and killed processes take some."""

FACTOR, SLACK_S = 3.0, 10.0
"""A budget is FACTOR times what was recorded, and SLACK_S more: busy cores share caches and execution units."""


def cpu_s() -> float:
    """Return the CPU time so far of this process and of all that it, or those it waited for, have waited for."""
    return sum(os.times()[:4])


def unit_s() -> float:
    """Return the CPU time of a fixed piece of work, the best of five."""
    best = float("inf")
    for _ in range(5):
        start, total = time.process_time(), 0
        for number in range(200_000):
            total += number * number % 7
        best = min(best, time.process_time() - start)
    return best


def recorded() -> tuple[float, dict[str, float]]:
    """Return the unit and the CPU seconds of each file when they were recorded."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return data["unit_s"], data["files"]


def in_order(paths: Iterable[str], recorded_s: Mapping[str, float]) -> list[str]:
    """Return files as processes that share a run take them: long ones first, so that none ends alone.

    Files that start ranks, which are many processes, lie between the others. What has no record comes first.
    """
    kinds: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for path in paths:
        kinds["/mpi/" in path].append((recorded_s.get(path, inf), path))
    order = []
    for files in kinds.values():
        total_s, so_far_s = sum(s for s, _ in files if s < inf) or 1.0, 0.0
        for seconds, path in sorted(files, key=lambda file: (-file[0], file[1])):
            order.append((so_far_s / total_s, path))
            so_far_s += seconds if seconds < inf else 0.0
    return [path for _, path in sorted(order)]


def budget_s(recorded_s: float, slower: float) -> float:
    """Return what a file may take on a machine that is `slower` times as slow as the one of the record."""
    return (FACTOR * recorded_s + SLACK_S) * max(slower, 1.0)


def over_budget(took_s: dict[str, float], before_s: dict[str, float], slower: float) -> list[str]:
    """Return a line for each file that took more than its budget; a file without a record has SLACK_S alone."""
    lines = []
    for path, seconds in sorted(took_s.items()):
        allowed_s = budget_s(before_s.get(path, 0.0), slower)
        if seconds > allowed_s:
            lines.append(
                f"{path} took {seconds:.1f} s of CPU time, its budget is {allowed_s:.1f} s: make it smaller (draw with "
                "support.mode, leave the rest to --full), or record anew with `pytest --record-durations`"
            )
    return lines


class Durations:
    """A plugin that measures files, and judges them at the end of a default run."""

    def __init__(self, record: bool, compiled: Path) -> None:
        self._record, self._compiled = record, compiled
        self._took_s: dict[str, float] = {}
        self._compiling: set[str] = set()
        self._skipping: set[str] = set()
        self._lines: list[str] = []

    def _written(self) -> int:
        """Return when the newest compiled code was written."""
        return max((folder.stat().st_mtime_ns for folder in self._compiled.glob("*")), default=0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        path, start_s, written = item.nodeid.partition("::")[0], cpu_s(), self._written()
        try:
            return (yield)
        finally:
            self._took_s[path] = self._took_s.get(path, 0.0) + cpu_s() - start_s
            if self._written() != written:
                self._compiling.add(path)  # what compiles says nothing about the tests

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of pytest-xdist has measured; each file has been in one of them."""
        took_s, compiling = getattr(node, "workeroutput", {}).get("durations", ({}, []))
        self._took_s |= took_s
        self._compiling |= {*compiling}

    @pytest.hookimpl(trylast=True)  # after all processes have ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["durations"] = self._took_s, sorted(self._compiling)
        elif self._record:
            self._write(session)
        elif not session.config.option.markexpr:  # ranks of an MPI that waits busily take more
            unit, before_s = recorded()
            judged = {path: s for path, s in self._took_s.items() if path not in self._compiling}
            self._lines = over_budget(judged, before_s, unit_s() / unit)
            if self._lines and exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(f"OVER BUDGET {line}", red=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note whose tests were skipped: a record made here says little of a machine that has what is missing."""
        if report.skipped:
            self._skipping.add(report.nodeid.partition("::")[0])

    def _write(self, session: pytest.Session) -> None:
        before_s = recorded()[1] if FILE.exists() else {}
        kept = {path: s for path, s in before_s.items() if (session.config.rootpath / path).is_file()}
        for path, seconds in self._took_s.items():
            if path not in self._compiling:
                least_s = kept.get(path, 0.0) if path in self._skipping else 0.0
                kept[path] = max(round(seconds, 1), least_s)
        data = {"unit_s": round(unit_s(), 5), "files": dict(sorted(kept.items()))}
        FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
