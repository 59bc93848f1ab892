"""What commands share: the parser and what it says of wrong usage, types of options, files that are written whole."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from lowshard import argument
from lowshard.errors import LowshardError
from lowshard.nearest import nearest

__all__ = ["CommandParser", "count_of", "folder_of", "made_target_of", "seconds_of", "write_whole"]

_MOST_COUNT = 10**9
"""Of anything that an option counts: more is a slip of the hand, and no run of it would end."""


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, which also says which option or name was meant; its subparsers are of the class too."""

    suggest_on_error = False  # Python 3.15's own suggestion

    def parse_known_args(  # type: ignore[override]  # as argparse's; its overloads are about the namespace's class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; those that are not known end the program here, where their command is known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0].lstrip("-")  # the dashes, which all have, make any two alike
            known = [
                name[2:] for action in self._actions for name in action.option_strings if name[:2] == "--"
            ]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(word, known, before='--')}")
        return found, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(value, map(str, action.choices or ()))
            raise


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
    place = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with TemporaryFile(dir=place):  # os.access says that root may write to a read-only file system, too
            pass
    except OSError as error:
        why = f"no file can be made in {str(place)!r}" if place.is_dir() else f"{str(place)!r} is a file"
        raise argparse.ArgumentTypeError(f"{why}: {error.strerror}; give another place") from error
