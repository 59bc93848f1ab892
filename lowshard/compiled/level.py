"""Levels of processors: what code is compiled for, so that one build serves many machines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowshard.settings import NUMBA_CODE_SETTINGS, environment

_FORM = 3
"""Counts up when objects are kept or called in another way."""
_SOURCES = ("compiler.py", "deferred.py", "emitted.py", "native.py")


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
        """What its code is kept under: changes with what makes the code."""
        return _digest(self)


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


def levels_of(features: Mapping[str, bool] | None = None) -> tuple[Level, ...]:
    """Return the levels of this kind of machine, of processors with some features alone if they are given."""
    levels = (level for level in LEVELS if level.machine == os.uname().machine)
    return tuple(one for one in levels if features is None or all(features.get(f) for f in one.features))


@cache
def host_levels() -> tuple[Level, ...]:
    """Return this processor's levels; none where Numba's settings ask for other code."""
    import llvmlite.binding as llvm

    asked = any(name in environment() for name in NUMBA_CODE_SETTINGS)
    return () if asked else levels_of(llvm.get_host_cpu_features())


chosen: list[Level] = []
"""A level that this process compiles for in place of its own, using nothing that came with the package."""


def target_level() -> Level | None:
    """Return the level that this process compiles for, None for this very processor."""
    return next(iter((*chosen, *host_levels())), None)


def target_key() -> str:
    """Return what code of this process is kept under."""
    level = target_level()
    if level is not None:
        return level.key
    import llvmlite.binding as llvm

    settings = [environment().get(name) for name in NUMBA_CODE_SETTINGS]
    return _digest(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), settings)


@cache
def _sources() -> bytes:
    return b"".join(Path(__file__).with_name(name).read_bytes() for name in _SOURCES)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr((_FORM, facts)).encode() + _sources()).hexdigest()[:16]
