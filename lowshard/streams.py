"""Standard streams that whoever started this process has closed (`>&-`)."""

from __future__ import annotations

import os
import sys

__all__ = ["open_closed_streams"]


def open_closed_streams() -> None:
    """Open what is closed of stdin, stdout and stderr to the null device.

    Else the next file that is opened gets the number of one, and what libraries print goes into it; and Python has
    None in place of the stream.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  as long as the process lives
