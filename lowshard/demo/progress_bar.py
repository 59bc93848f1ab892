"""Progress of a command on stderr: moving bars where a person watches, else a plain line a phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """Shows phases and transfers; only rank 0 prints.

    Args:
        rank: this process's rank; others than 0 are silent.
        stream: where to write; stderr when None.
        terminal: True for moving bars, False for plain lines; None asks the stream.
        command: the subcommand, which plain lines name.
    """

    def __init__(
        self,
        rank: int = 0,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        command: str = "demo",
    ) -> None:
        self._command = command
        self._stream = sys.stderr if stream is None else stream
        self._shown = rank == 0
        self._terminal = self._stream.isatty() if terminal is None else terminal

    @contextmanager
    def phase(self, label: str) -> Iterator[Callable[[str], None]]:
        """Show that a phase runs, then one line with its time. The value yielded takes a closing note."""
        notes: list[str] = []
        start = time.perf_counter()
        done = False
        try:
            with self._spinner(label):
                yield notes.append
            done = True
        finally:
            seconds = time.perf_counter() - start
            note = f"  {'; '.join(notes)}" if notes else ""
            self._line(
                "✓" if done else "✗", f"{label:<34} {seconds:8.3f} s{note}", "green" if done else "red"
            )

    @contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show a transfer; the value yielded takes the bytes that are there by now.

        Plain lines say the start, every quarter, and the time when it is done.
        """
        if not self._shown:
            yield lambda done_bytes: None
        elif self._terminal:
            yield from self._bar(label, total_bytes)
        else:
            yield from self._quarters(label, total_bytes)

    def say(self, text: str) -> None:
        """Print one line."""
        self._line(" ", text, "")

    def _bar(self, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), progress.DownloadColumn(),
            progress.TransferSpeedColumn(), progress.TimeRemainingColumn(), console=self._console(),
        )  # fmt: skip
        with bar:
            task = bar.add_task(label, total=total_bytes)
            yield lambda done_bytes: bar.update(task, completed=min(done_bytes, total_bytes))
            bar.update(task, completed=total_bytes)

    def _quarters(self, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        start = time.perf_counter()
        shown = 0

        def update(done_bytes: int) -> None:
            nonlocal shown
            quarter = min(done_bytes * 4 // max(total_bytes, 1), 3)
            if quarter > shown:
                shown = quarter
                self._line(" ", f"{label}: {quarter * 25} %", "")

        self._line(" ", f"{label}: {total_bytes / 1e6:.1f} MB", "")
        yield update
        self._line("✓", f"{label}: done in {time.perf_counter() - start:.1f} s", "green")

    @contextmanager
    def _spinner(self, label: str) -> Iterator[None]:
        if not (self._shown and self._terminal):
            yield
            return
        from rich.text import Text

        with self._console().status(Text(label)):
            yield

    def _line(self, mark: str, text: str, style: str) -> None:
        if not self._shown:
            return
        if self._terminal:
            from rich.text import Text

            self._console().print(Text.assemble((mark, style), " ", text), soft_wrap=True)
        else:
            # A log or pipe may not take the marks.
            word = {"✓": "ok ", "✗": "FAILED ", " ": ""}[mark]
            print(f"lowshard {self._command}: {word}{text}", file=self._stream, flush=True)

    def _console(self) -> Console:
        from rich.console import Console

        return Console(file=self._stream, force_terminal=True, highlight=False)
