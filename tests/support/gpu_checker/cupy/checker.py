"""What the checker found and counted: reports of broken rules, and how often each kind of work was asked for.

Environment:
    LOWSHARD_CHECKER: "off" for a stand-in that checks nothing and runs no kernel, to time the host.
    LOWSHARD_CHECKER_REPORT: a file that gets a line for each report.
    LOWSHARD_CHECKER_COUNTS: a file that gets a line of JSON when the process ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

OFF = os.environ.get("LOWSHARD_CHECKER") == "off"
LAG = 0 if OFF else 2  # how often an event or stream that is done answers "not ready" before it says so
LIMIT_S, PAUSE_S = 60.0, 0.0002  # a wait of the host that takes so long hangs
_FOLDER = str(Path(__file__).parent)
_FRAMES = 4  # of the program, in the name of a place
_found: dict[str, None] = {}
_counts: Counter[str] = Counter()
_lock = threading.RLock()


@contextmanager
def locked() -> Iterator[None]:
    """Look at the state of the device, or change it: a `__del__` that the collector calls would find it half done."""
    with _lock:
        is_collected = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if is_collected:
                gc.enable()


class Misuse(AssertionError):
    """A call that CUDA, CuPy or NCCL leaves undefined."""


reports: Callable[[], list[str]] = partial(list, _found)
counts: Callable[[], Counter[str]] = partial(Counter, _counts)


def reset() -> None:
    _found.clear()
    _counts.clear()


def count(what: str, number: int = 1) -> None:
    _counts[what] += number


def report(text: str) -> None:
    """Write a fault down, unless the same one has been."""
    with locked():
        if text in _found:
            return
        _found[text] = None
    line = f"gpu checker: {text}\n"
    sys.stderr.write(line)
    if path := os.environ.get("LOWSHARD_CHECKER_REPORT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)


def need(is_right: bool, text: str, place: str = "") -> None:
    if not is_right:
        text = f"{text}, at {place or where()}"
        report(text)
        raise Misuse(text)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        need(time.monotonic() < end, f"{what} has waited for {LIMIT_S:g} s: it hangs")
        time.sleep(PAUSE_S)


def where() -> str:
    """Return the lines of the program that called the checker, the innermost first."""
    frame: FrameType | None = None if OFF else sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith((_FOLDER, "<frozen")) and "contextlib" not in file:
            lines.append(f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "?"


@atexit.register
def _write_counts() -> None:
    if path := os.environ.get("LOWSHARD_CHECKER_COUNTS"):
        copies = sum(number for name, number in _counts.items() if name.endswith("_copies"))
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_counts | Counter(copies=copies)) + "\n")
