"""Where the ranks of an NCCL communicator meet: a folder of small files, for threads and processes alike."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupy.checker import LIMIT_S, at_exit, need

_MEMORY = Path("/dev/shm")
_PAUSE_S = 0.0003


class Meeting:
    """A rank's place in the folder of a communicator."""

    def __init__(self, name: bytes, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        root = Path(tempfile.gettempdir() if not _MEMORY.is_dir() else _MEMORY)
        self.key = hashlib.sha256(name).hexdigest()[:24]
        self._folder = root / f"lowshard-gpu-checker-{os.getuid()}" / self.key
        self._folder.mkdir(parents=True, exist_ok=True)
        self._has_left = False
        at_exit(self.leave)

    def post(self, name: str, head: Any, body: bytes = b"") -> None:
        """Leave something for others to find."""
        made = self._folder / f".{name}"
        try:
            made.write_bytes(json.dumps(head).encode() + b"\n" + body)
            made.rename(self._folder / name)
        except FileNotFoundError:  # all ranks have left
            return

    def find(self, name: str) -> tuple[Any, bytes] | None:
        """Return what somebody has left, or None."""
        try:
            head, _, body = (self._folder / name).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return json.loads(head), body

    def is_there(self, name: str) -> bool:
        """Say whether something has been left, and not taken."""
        return (self._folder / name).exists()

    def take_away(self, name: str) -> None:
        """Take something away."""
        (self._folder / name).unlink(missing_ok=True)

    def all_there(self, name: str) -> bool:
        """Say whether every rank has left its own of a name."""
        return all(self.is_there(f"{name}.{rank}") for rank in range(self.size))

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Return once something is so.

        Raises:
            Misuse: it is not, for as long as NCCL is waited for at most.
        """
        end = time.monotonic() + LIMIT_S
        while not is_so():
            need(
                time.monotonic() < end,
                f"{what} of rank {self.rank} of {self.size} waits for a rank: it hangs",
            )
            time.sleep(_PAUSE_S)

    def leave(self) -> None:
        """Say good-bye; who is last takes the folder away."""
        if self._has_left:
            return
        self._has_left = True
        self.post(f"bye.{self.rank}", None)
        if self.all_there("bye"):
            shutil.rmtree(self._folder, ignore_errors=True)

    def has_left(self, rank: int) -> bool:
        """Say whether a rank has left."""
        return self.is_there(f"bye.{rank}")

    def have_all_left(self) -> bool:
        """Say whether every rank has left."""
        return not self._folder.exists() or self.all_there("bye")
