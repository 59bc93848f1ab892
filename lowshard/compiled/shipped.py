"""Object code that comes with the package: compiled when it was built, for levels of processors, as all code is.

It is kept beside this module and is as trusted as the module is. What a function's name and a level's key do not fit
any more, since the source has changed, is not used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowshard.compiled.store import unsealed
from lowshard.settings import NUMBA_CODE_SETTINGS, SHIPPED_CODE, environment

_FORM = 1
"""Counts up when objects are called in another way."""


@dataclass(frozen=True)
class Level:
    """Processors that have some features of LLVM's."""

    name: str
    machine: str
    cpu: str
    features: tuple[str, ...]

    @property
    def flags(self) -> str:
        """The features as LLVM and Numba take them."""
        return ",".join(f"+{feature}" for feature in self.features)

    @property
    def key(self) -> str:
        """What objects for this level are sealed with: changes with what makes them."""
        found = hashlib.sha256(repr((_FORM, self)).encode())
        for name in ("compiler.py", "emitted.py", "native.py", "deferred.py"):
            found.update(Path(__file__).with_name(name).read_bytes())
        return found.hexdigest()[:16]


_V3 = (
    "cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2", "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt",
    "movbe",
)  # fmt: skip
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = (
    Level("x86-64-v4-vbmi", "x86_64", "x86-64-v4", (*_V4, "avx512vbmi", "avx512vbmi2")),
    Level("x86-64-v3", "x86_64", "x86-64-v3", _V3),
    Level("armv8-a", "aarch64", "generic", ("neon",)),
)
"""The best first. The first has what quantising gains most by: Intel from Ice Lake on, AMD from Zen 4 on. Other
processors with AVX-512 take the second."""


def levels_here() -> tuple[Level, ...]:
    """Return the levels of this kind of machine."""
    return tuple(level for level in LEVELS if level.machine == platform.machine())


def best_level(features: Mapping[str, bool]) -> Level | None:
    """Return the best level that a processor of this kind of machine with some features belongs to."""
    return next((one for one in levels_here() if all(features.get(f) for f in one.features)), None)


@cache
def host_level() -> Level | None:
    """Return this processor's level."""
    import llvmlite.binding as llvm

    return best_level(llvm.get_host_cpu_features())


def folder() -> Path:
    """Return where the folders of levels are."""
    return Path(__file__).with_name("objects")


def level_of_code() -> Level | None:
    """Return the level that code is made for here, None for this very processor: Numba's settings ask for that."""
    asked = environment()
    return None if any(name in asked for name in NUMBA_CODE_SETTINGS) else host_level()


def level_in_use() -> Level | None:
    """Return the level whose code came with the package and may be used here, or None."""
    level = None if SHIPPED_CODE.choice() == "off" else level_of_code()
    return level if level is not None and (folder() / level.name).is_dir() else None


def read_shipped(name: str) -> bytes | None:
    """Return a function's code, None where none came or it is not of this source."""
    level = level_in_use()
    if level is None:
        return None
    try:
        content = _trusted(folder() / level.name / f"{name}.o")
    except OSError:
        return None
    return unsealed(level.key, name, content)


def _trusted(path: Path) -> bytes:
    """Return the content of a file that nobody may have changed who might not have changed this module."""
    with open(path, "rb", opener=_open) as file:
        found, module = os.fstat(file.fileno()), os.stat(__file__)
        writers = stat.S_IWGRP | stat.S_IWOTH
        if (
            found.st_uid not in (0, os.geteuid(), module.st_uid)
            or found.st_mode & writers & ~module.st_mode
            or not stat.S_ISREG(found.st_mode)
        ):
            raise PermissionError(f"{path} may be changed by others than lowshard itself")
        return file.read()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
