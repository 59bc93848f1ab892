"""Types of the flags of commands: each returns what the text of a flag means, or says what to write instead.

`write_whole` writes the files that they name.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from lowshard import argument
from lowshard.errors import LowshardError

__all__ = [
    "bandwidth_of", "count_of", "counts_of", "file_of", "folder_of", "made_target_of", "natural_of", "seconds_of",
    "size_of", "target_of", "write_whole",
]  # fmt: skip

_MOST_COUNT = 10**9
"""Of anything that a flag counts: more is a slip of the hand, and no run of it would end."""
_MOST_BYTES = 1 << 60
_BYTES = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)([KMGT]?)(?:I?B)?")


def count_of(text: str) -> int:
    """Return an integer of 1 or more."""
    return _integer(text, 1)


def natural_of(text: str) -> int:
    """Return an integer of 0 or more."""
    return _integer(text, 0)


def counts_of(text: str) -> tuple[int, ...]:
    """Return integers of 1 or more, separated by commas, each once."""
    return tuple(dict.fromkeys(count_of(part.strip()) for part in text.split(",")))


def seconds_of(text: str) -> float:
    """Return seconds above 0."""
    seconds = _number(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {argument.quoted(text)}")
    return seconds


def bandwidth_of(text: str) -> float:
    """Return a bandwidth of 0 GB/s or more."""
    bandwidth = _number(text)
    if not bandwidth >= 0:
        raise argparse.ArgumentTypeError(f"expected GB/s, 0 or more, got {argument.quoted(text)}")
    return bandwidth


def size_of(text: str) -> int:
    """Return a size in bytes, written as nccl-tests takes it: 1024, 1K, 64M, 1.5G; K, M, G and T are powers of 1024."""
    found = _BYTES.fullmatch(text.strip().upper())
    if found is not None:
        size = Decimal(found[1]) * 1024 ** " KMGT".index(found[2] or " ")
        if 1 <= size <= _MOST_BYTES and size == int(size):
            return int(size)
    raise argparse.ArgumentTypeError(
        "a size is a number of bytes such as 1024, 1K, 64M or 1G (powers of 1024), got "
        + argument.quoted(text)
    )


def file_of(text: str) -> Path:
    """Return the path of a file that can be written, in a folder that is there."""
    path = _file(text)
    folder = path.absolute().parent
    if not folder.exists():
        raise argparse.ArgumentTypeError(f"there is no folder {str(folder)!r}: make it first")
    return path


def target_of(text: str) -> str:
    """Return the path of a file as `file_of` does, or -, which is stdout."""
    return text if text == "-" else str(file_of(text))


def made_target_of(text: str) -> str:
    """Return the path of a file whose folder may have to be made, or -, which is stdout."""
    return text if text == "-" else str(_file(text))


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


def _file(text: str) -> Path:
    path = _path(text, "a file")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}: name a file in it")
    if not path.exists() or path.is_file():  # else a device or a pipe
        _require_writable(path.absolute().parent)
    return path


def _path(text: str, kind: str) -> Path:
    try:
        return argument.path(text, f"expected {kind}", LowshardError)
    except LowshardError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _require_writable(folder: Path) -> None:
    """Raise where no file can be made in a folder; asked before the work, whose result would be lost."""
    place = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with TemporaryFile(dir=place):  # os.access says that root may write to a read-only file system, too
            pass
    except OSError as error:
        why = f"no file can be made in {str(place)!r}" if place.is_dir() else f"{str(place)!r} is a file"
        raise argparse.ArgumentTypeError(f"{why}: {error.strerror}; give another place") from error


def _integer(text: str, least: int) -> int:
    # ASCII: int() takes other scripts' digits too, and refuses very many.
    if text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= _MOST_COUNT:
        return int(text)
    most = f", at most {_MOST_COUNT:,}" if text.isdecimal() and len(text) > 9 else ""
    raise argparse.ArgumentTypeError(
        f"expected an integer of {least} or more{most}, got {argument.quoted(text)}"
    )


def _number(text: str) -> float:
    """Return a finite number; -1 for other text, which no flag takes."""
    try:
        found = float(text)
    except ValueError:
        return -1.0
    return found if math.isfinite(found) else -1.0
