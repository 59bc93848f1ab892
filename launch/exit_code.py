"""What a `sys.exit` in a rank means, be the rank a process or a thread."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["code_of"]


def code_of(end: SystemExit) -> int:
    """Returns the exit code of a `sys.exit` and prints its text, as the interpreter would."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(Exception):  # the program has closed stderr, or its text has no str()
        print(end.code, file=sys.stderr)
    return 1
