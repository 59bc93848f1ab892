"""What was measured once on this machine: sizes from which one way to write or to read memory beats another.

    lowshard warmup --measures--> calibration/ in the cache folder --read once a process--> calibration()

Where nothing was measured the defaults hold. Kernels and copies of one process take its own `calibration()`. What ranks
of a machine decide together they decide by the values of the first of them, told when they first meet
(`lowshard.comm.node.node_memory`): a file may appear, or differ, between the moments at which two of them look.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal

from lowshard import owned
from lowshard.argument import brief
from lowshard.errors import LowshardError, ProfileError
from lowshard.reading import reader
from lowshard.settings import CALIBRATION, cache_root, is_later_rank

__all__ = [
    "NEVER",
    "Calibration",
    "Record",
    "calibration",
    "folder",
    "kept",
    "machine",
    "save",
    "setting_fault",
]

NEVER = 1 << 40
"""In place of a number of bytes: the way is not taken."""
_LEAST = 4096
SCHEMA: Literal["lowshard-calibration-1"] = "lowshard-calibration-1"
"""Changes with what the values mean and with how they are measured."""


def _value(default: int, meaning: str) -> int:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Calibration:
    """Thresholds in bytes, from a page to NEVER. The defaults are those of an AMD EPYC (Zen 4).

    Raises:
        ProfileError: a value is none.
    """

    stream_from_bytes: int = _value(4 << 20, "results from here on are written by non-temporal stores")
    share_past_from_bytes: int = _value(
        64 << 10,
        "what is written at a time for other ranks to read goes so from here on, where each has a core",
    )
    last_cache_bytes: int = _value(16 << 20, "what a core's caches keep for it between writing and reading")
    pipes_from_bytes: int = _value(
        16 << 10, "private memory in small pages is handed on by pipes from here on"
    )

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if type(size) is not int or not _LEAST <= size <= NEVER:
                raise ProfileError(
                    f"{name} is a whole number of bytes from {_LEAST} to {NEVER} (never), got {brief(size)}"
                )

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return what each value is, by name."""
        return {one.name: one.metadata["meaning"] for one in fields(cls)}


@dataclass(frozen=True)
class Record:
    """What a file of the cache folder says.

    Attributes:
        schema: SCHEMA.
        machine: where it was measured, as `machine` says it.
        measured_at: when, for people.
        values: what was found.
    """

    schema: Literal["lowshard-calibration-1"]
    machine: str
    measured_at: str
    values: Calibration


_read = reader("calibration", ProfileError, most_bytes=1 << 16)(Record)


@cache
def calibration() -> Calibration:
    """Return the values that hold in this process: LOWSHARD_CALIBRATION over what was measured over the defaults.

    Raises:
        ProfileError: the setting is wrong.
    """
    wish = CALIBRATION.text()
    if wish == "off":
        return Calibration()
    record, fault = kept()
    if fault and not is_later_rank():
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or full
            sys.stderr.write(f"lowshard: {fault}; `lowshard warmup` measures anew\n")
    return _with(Calibration() if record is None else record.values, wish)


def setting_fault() -> str:
    """Return what is wrong with LOWSHARD_CALIBRATION, or "": ranks tell each other before they meet."""
    try:
        _with(Calibration(), CALIBRATION.text())
    except ProfileError as error:
        return str(error)
    return ""


def kept() -> tuple[Record | None, str]:
    """Return what was measured on this machine, None where nothing was, and why a file is left aside, else "".

    That is one that is damaged, another's, or that others may write to.
    """
    try:
        with suppress(FileNotFoundError):
            inside = owned.open_folder(folder())
            try:
                record = _read.text(owned.read_file(_file_name(), inside).decode(), "it")
            finally:
                os.close(inside)
            if record.machine != machine():
                raise ProfileError(f"it was measured on {record.machine}, and this is {machine()}")
            return record, ""
    except (OSError, ValueError, LowshardError) as error:
        return None, f"{folder() / _file_name()} is left aside ({type(error).__name__}: {error})"
    return None, ""


def save(values: Calibration, measured_at: str) -> Path:
    """Keep what was measured on this machine, for processes that begin from now on; return the file.

    Raises:
        OSError: it cannot be written, or the folder is open to others.
    """
    record = Record(SCHEMA, machine(), measured_at, values)
    folder().parent.mkdir(parents=True, exist_ok=True)
    inside = owned.open_folder(folder(), make=True)
    try:
        owned.write_file(_file_name(), inside, (json.dumps(asdict(record), indent=1) + "\n").encode())
    finally:
        os.close(inside)
    return folder() / _file_name()


def folder() -> Path:
    """Return where files lie, one a machine: homes are shared by machines of several kinds."""
    return cache_root() / "calibration"


@cache
def machine() -> str:
    """Return what tells this machine from others: processor, cores, caches. Nothing is chosen by it."""
    cores = os.cpu_count() or 1
    return f"{_processor()}, {cores} cores, {_caches()}"


def _file_name() -> str:
    return f"{hashlib.sha256(machine().encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    told = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                break  # the first core stands for all
            key, _, said = line.partition(":")
            told[key.strip()] = said.strip()
    keys = ("vendor_id", "model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
    words = [f"{key} {told[key]}" for key in keys if told.get(key)]
    return " ".join((sys.platform, platform.machine(), *words))


def _caches() -> str:
    sizes = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError):
            sizes.append((index / "size").read_text(encoding="ascii").strip())
    return f"caches {' '.join(sizes) or 'unknown'}"


def _with(values: Calibration, wish: str) -> Calibration:
    """Return values some of which the setting says: name=bytes, or name=never, separated by commas."""
    if wish in ("auto", "off"):
        return values
    said = {}
    for part in wish.split(","):
        name, _, size = part.strip().partition("=")
        if name not in Calibration.meanings() or not (size == "never" or (size.isascii() and size.isdigit())):
            raise ProfileError(
                f"{CALIBRATION.name} is auto, off or name=bytes (or name=never), separated by commas, with the names "
                f"{', '.join(Calibration.meanings())}; got {brief(part)}"
            )
        said[name] = NEVER if size == "never" else int(size)
    try:
        return replace(values, **said)
    except ProfileError as error:
        raise ProfileError(f"{CALIBRATION.name}: {error}") from None
