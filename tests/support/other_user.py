"""Running a program as another user, where the tests are root's."""

from __future__ import annotations

import os
import shutil

import pytest

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="it needs root, and setpriv of util-linux"
)


def as_user(user: int) -> list[str]:
    """Return what to put before a command to run it as a user without groups and rights, who may read everything.

    The last is for the interpreter, which may lie in root's home.
    """
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *may_read]
