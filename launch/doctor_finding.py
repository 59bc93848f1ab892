"""One finding of the doctor, and how it asks: in child Pythons, of which one that crashes is a finding too."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Check", "answers", "last_object", "run_python"]

_PYTHON_LIMIT_S = 120.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: what was looked at.
        status: "ok", "warning" (works, but see the advice), "missing" or "broken".
        detail: version, path, size or error.
        advice: what to do; "" if nothing.
        required: true if the CPU path needs it.
    """

    name: str
    status: str
    detail: str
    advice: str = ""
    required: bool = False


def run_python(program: str, args: list[str]) -> tuple[str, str]:
    """Runs a program in a child Python; returns how it ended and what it printed."""
    command = [sys.executable, "-P", "-c", program, *args]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PYTHON_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        return f"no end within {_PYTHON_LIMIT_S:.0f} s", (error.stdout or b"").decode(errors="replace")
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return f"status {done.returncode} {last[0]}".strip(), done.stdout.decode(errors="replace")


def last_object(text: str) -> dict[str, Any] | None:
    """Returns the last JSON object with keys among the lines that a program printed; None where there is none."""
    return next((value for value in reversed(answers(text)) if isinstance(value, dict) and value), None)


def answers(text: str) -> list[Any]:
    """Returns the lines of JSON among those that a program printed; libraries print others."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return found
