"""Numbers every file operation and every meeting of one rank's save, and makes any one of them fail.

A step is an operation of the system on a name or a descriptor below one folder, or a meeting with the other ranks. The
steps of the thread that is `counted`, and of what it starts in the background, are numbered from 1; all others run as
ever.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lowshard.comm.background import Background
from lowshard.comm.transport import Transport
from lowshard.errors import PeerFailed
from lowshard.fsdp.core import Core

OPERATIONS = (
    *((os, name) for name in (
        "open", "write", "pwrite", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate",
        "posix_fallocate", "listdir",
    )),
    (fcntl, "flock"), (io, "open"), (builtins, "open"),
)  # fmt: skip
_MEETINGS = ("compare", "all_gather_v", "barrier")

FILE_FAULTS = ("ENOSPC", "EIO", "EIO after", "interrupt", "interrupt after")
MEETING_FAULTS = ("PeerFailed", "PeerFailed after", "interrupt", "interrupt after")
KILL = "SIGKILL"


@dataclass
class Steps:
    """The steps of one rank's save; the `at`-th has a fault, 0 has none."""

    at: int = 0
    fault: str = ""
    names: list[str] = field(default_factory=list)

    def take(self, name: str, run: Callable[[], Any]) -> Any:
        """Count a step, and run it or let it fail."""
        self.names.append(name)
        if len(self.names) != self.at:
            return run()
        kind, after, _ = self.fault.partition(" after")
        if kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if after:
            opened = run()
            if name == "open":  # who fails to open has nothing to close
                opened.close() if hasattr(opened, "close") else os.close(opened)
        if kind == "PeerFailed":
            raise PeerFailed(f"step {self.at}, {name}: a rank died")
        if kind == "interrupt":
            raise KeyboardInterrupt
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number))

    @property
    def faults(self) -> list[tuple[int, str]]:
        """Every step with each fault that it can have."""
        return [
            (at, fault)
            for at, name in enumerate(self.names, 1)
            for fault in (MEETING_FAULTS if name.startswith("meeting") else FILE_FAULTS)
        ]


class _Here(threading.local):
    steps: Steps | None = None
    is_inside = False


_here = _Here()


@contextmanager
def counted(steps: Steps) -> Iterator[None]:
    """Count the steps that this thread takes in the block."""
    _here.steps = steps
    try:
        yield
    finally:
        _here.steps = None


@contextmanager
def watched(folder: Path, kind: type[Transport]) -> Iterator[None]:
    """Look at all operations below a folder, and at all meetings over a kind of transport, in the block."""
    places: list[tuple[Any, str]] = [*OPERATIONS, *((kind, name) for name in _MEETINGS), (Core, "_in_queue")]
    start = Background.start

    def start_counted(self: Background, call: Callable[[], Any], text: str) -> Any:
        steps = _here.steps
        return start(self, call if steps is None else partial(_in_block, steps, call), text)

    Background.start = start_counted  # type: ignore[method-assign]
    real = [(place, name, getattr(place, name)) for place, name in places]
    top = str(folder)
    for place, name, function in real:
        is_meeting = place in (kind, Core)
        setattr(
            place,
            name,
            _looking(f"meeting {name}" if is_meeting else name, function, None if is_meeting else top),
        )
    try:
        yield
    finally:
        Background.start = start  # type: ignore[method-assign]
        for place, name, function in real:
            setattr(place, name, function)


def _in_block(steps: Steps, call: Callable[[], Any]) -> Any:
    with counted(steps):
        return call()


def _looking(name: str, real: Callable[..., Any], below: str | None) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        steps = _here.steps
        if steps is None or _here.is_inside or (below is not None and not _lies_below(args[0], below)):
            return real(*args, **options)

        def run() -> Any:
            _here.is_inside = True
            try:
                return real(*args, **options)
            finally:
                _here.is_inside = False

        return steps.take(name, run)

    return call


def _lies_below(what: Any, folder: str) -> bool:
    try:
        path = (
            os.readlink(f"/proc/self/fd/{what}")
            if isinstance(what, int)
            else os.path.abspath(os.fspath(what))
        )
    except (OSError, TypeError):
        return False
    return path == folder or path.startswith(folder + os.sep)
