"""Progress of a benchmark on stderr: a moving bar where a person watches, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

_QUIET_S = 2.0


class Progress:
    """Shows which step runs, of how many; draws nothing between steps, which would take time from what is measured."""

    def __init__(self, bench: str, stream: TextIO | None = None, terminal: bool | None = None) -> None:
        self._bench = bench
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._bar: Any = None
        self._task: Any = None
        self._done = self._total = 0
        self._said_s = float("-inf")

    def __enter__(self) -> Progress:
        if self._terminal:
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=Console(file=self._stream, force_terminal=True),
                transient=True,
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, steps: int) -> None:
        """Say that so many more steps will come."""
        self._total += steps

    def step(self, what: str) -> None:
        """Say what begins now; the step before is over."""
        self._done += 1
        self.say(what)

    def say(self, what: str) -> None:
        """Say what happens now, within a step. Plain lines are at least two seconds apart."""
        if self._bar is not None:
            self._bar.update(
                self._task, description=what, completed=self._done - 1, total=self._total, refresh=True
            )
            return
        now_s = time.perf_counter()
        if now_s - self._said_s >= _QUIET_S:
            self._said_s = now_s
            count = f" ({self._done} of {self._total})" if self._total > 1 else ""
            print(f"lowshard bench {self._bench}: {what}{count}", file=self._stream, flush=True)
