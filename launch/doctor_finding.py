"""One finding of the doctor, and how it asks: in child Pythons, of which one that crashes is a finding too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Check", "last_object", "run_python"]

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PYTHON_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        return f"no end within {_PYTHON_LIMIT_S:.0f} s", text.decode() if isinstance(text, bytes) else text
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"status {done.returncode} {last[0]}".strip(), done.stdout


def last_object(text: str) -> dict[str, Any] | None:
    """Returns the last JSON object among the lines that a program printed; None where there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None
