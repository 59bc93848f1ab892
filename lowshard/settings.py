"""What lowshard takes from its surroundings: where it may keep files between runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_root"]


def cache_root() -> Path:
    """Return lowshard's folder in the user's cache, which may not exist yet.

    That is `$XDG_CACHE_HOME/lowshard`, else `~/.cache/lowshard`; relative paths do not count, as the XDG rule says. A
    user without a home, as containers have them, has `lowshard-cache-UID` in the folder for temporary files.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "lowshard"
    home = os.path.expanduser("~")  # what it cannot expand it gives back
    if os.path.isabs(home):
        return Path(home) / ".cache" / "lowshard"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"lowshard-cache-{os.geteuid()}"
