"""The signals that end a command: Ctrl-C, SIGTERM of batch systems, SIGHUP of a terminal that has gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["ended_by_signals", "signal_of"]


class _Ended(KeyboardInterrupt):
    """A signal has come that ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise _Ended(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does: nothing that a command made is left behind."""
    taken: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        # Not those that the program has its own way with, or that are ignored (nohup).
        taken = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def signal_of(end: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that has raised a KeyboardInterrupt."""
    return signal.Signals(end.number) if isinstance(end, _Ended) else signal.SIGINT
