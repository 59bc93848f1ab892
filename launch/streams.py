"""Standard streams that whoever started this process has closed (`>&-`), or has stopped to read (`| head`)."""

from __future__ import annotations

import os
import sys

__all__ = ["drop_stdout", "open_closed_streams"]


def drop_stdout() -> None:
    """Let all that is printed from now on, and what is not written yet, go to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # else Python complains at its end of what it could not write
    os.close(null)


def open_closed_streams() -> None:
    """Open what is closed of stdin, stdout and stderr to the null device."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process lives
