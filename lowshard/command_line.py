"""What commands share: types of options, and files that are written whole."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from lowshard import argument
from lowshard.errors import LowshardError

__all__ = ["count_of", "folder_of", "made_target_of", "seconds_of", "write_whole"]

_MOST_COUNT = 10**9
"""Of anything that an option counts: more is a slip of the hand, and no run of it would end."""


def count_of(text: str) -> int:
    """Return an integer of 1 or more."""
    # ASCII: int() takes other scripts' digits too, and refuses very many.
    if text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= _MOST_COUNT:
        return int(text)
    most = f", at most {_MOST_COUNT:,}" if text.isdecimal() and len(text) > 9 else ""
    raise argparse.ArgumentTypeError(f"expected an integer of 1 or more{most}, got {argument.quoted(text)}")


def seconds_of(text: str) -> float:
    """Return seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {argument.quoted(text)}")
    return seconds


def made_target_of(text: str) -> str:
    """Return the path of a file whose folder may have to be made, or -, which is stdout."""
    if text != "-":
        path = _path(text, "a file")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}: name a file in it")
        if not path.exists() or path.is_file():  # else a device or a pipe
            _require_writable(path.absolute().parent)
    return text


def folder_of(text: str) -> Path:
    """Return the path of a folder that can be written, or made."""
    path = _path(text, "a folder")
    _require_writable(path.absolute())
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there, so that no half of it is ever seen.

    A device or a pipe is written to as it is, and a link stays one.
    """
    if path.exists() and not path.is_file():  # /dev/null would be a file of ours from now on
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".write-", dir=path.parent) as tmp:
        part = Path(tmp) / path.name
        part.write_bytes(data)
        os.replace(part, path)


def _path(text: str, kind: str) -> Path:
    try:
        return argument.path(text, f"expected {kind}", LowshardError)
    except LowshardError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _require_writable(folder: Path) -> None:
    """Raise where no file can be made in a folder; asked before the work, whose result would be lost."""
    try:
        with TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())):
            pass
    except OSError as error:
        text = f"no file can be made in {str(folder)!r} ({error.strerror}); give another place"
        raise argparse.ArgumentTypeError(text) from error
