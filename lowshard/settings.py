"""The environment: every variable that lowshard reads, with its values, its default and what it does.

No other module reads or changes the environment. `lowshard doctor --settings` prints the table below with the values
that hold now. A variable is read when it is needed, so a program may set it before it makes its first communicator.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowshard.errors import CommError, KernelError, LowshardError

MOST_S = 1e9
"""Of a time limit, some 30 years: longer ones are cut to it, since some are counted in 64 bits of nanoseconds."""

__all__ = ["SETTINGS", "Setting", "cache_root", "change", "environment", "is_later_rank", "numba_cache_dir"]


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str
    default: str
    values: str
    meaning: str
    error: type[LowshardError] = CommError

    def is_set(self, env: Mapping[str, str] | None = None) -> bool:
        """Return whether an environment, by default this process's, has the variable."""
        return self.name in (os.environ if env is None else env)

    def text(self, env: Mapping[str, str] | None = None) -> str:
        """Return the variable's text, else the default; it may be wrong."""
        return (os.environ if env is None else env).get(self.name, self.default)

    def choice(self, env: Mapping[str, str] | None = None) -> str:
        """Return the variable's text, one of its values."""
        text, known = self.text(env), self.values.split("|")
        if text not in known and text != self.default:
            choices = f"{', '.join(known[:-1])} or {known[-1]}"
            raise self.error(f"{self.name} is {choices}, got {text!r}: {self.meaning}")
        return text

    def seconds(
        self, env: Mapping[str, str] | None = None, error: type[LowshardError] | None = None
    ) -> float:
        """Return the variable as seconds."""
        text = self.text(env)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            told = f"{self.name} is a positive number of seconds, got {text!r}: {self.meaning}"
            raise (error or self.error)(told)
        return min(seconds, MOST_S)


# fmt: off
# What ranks do with each other.
CHECK = Setting("LOWSHARD_CHECK", "hash", "off|hash|full", "what ranks compare before a call moves bytes")
TIMEOUT_S = Setting("LOWSHARD_TIMEOUT_S", "600", "seconds", "deadline of each wait for other ranks")
ON_FAILURE = Setting("LOWSHARD_ON_FAILURE", "end", "end|raise",
                     "what becomes of a process that hangs after a peer has failed")
INTERFACE = Setting("LOWSHARD_INTERFACE", "", "a network interface",
                    "where rank 0 listens for the failure channel of several hosts")
# Which way bytes take.
CPU_PATH = Setting("LOWSHARD_CPU_PATH", "auto", "auto|window|mpi",
                   "whether ranks of a host share memory: if they can, must, never")
CROSS_MEMORY = Setting("LOWSHARD_CROSS_MEMORY", "auto", "auto|off",
                       "whether processes of a host may read each other's private memory")
HUGE_PAGES = Setting("LOWSHARD_HUGE_PAGES", "auto", "auto|off", "whether a refit puts its arrays into huge pages")
NODE_SIZE = Setting("LOWSHARD_NODE_SIZE", "", "a number of ranks", "takes so many ranks for a node, for trials")
NCCL_REDUCE16 = Setting("LOWSHARD_NCCL_REDUCE16", "exact", "exact|nccl",
                        'who reduces bf16 and fp16 where order="fast"')
KERNELS = Setting("LOWSHARD_KERNELS", "", "numba|plain",
                  "kernels for host arrays; Numba's by default, if it is there", KernelError)
SHIPPED_CODE = Setting("LOWSHARD_SHIPPED_CODE", "on", "on|off",
                       "whether compiled code that came with the package is used", KernelError)
# For those who build or work on lowshard.
BUILD_CODE = Setting("LOWSHARD_BUILD_CODE", "host", "host|all|off",
                     "for which processors an installation or a wheel is compiled: those like this one, all of this "
                     "kind, none", KernelError)
# fmt: on

SETTINGS = (
    CHECK, TIMEOUT_S, ON_FAILURE, INTERFACE,
    CPU_PATH, CROSS_MEMORY, HUGE_PAGES, NODE_SIZE, NCCL_REDUCE16, KERNELS, SHIPPED_CODE,
    BUILD_CODE,
)  # fmt: skip
"""What users may set, in the order of the table."""

NUMBA_CODE_SETTINGS = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX",  # the processor that is compiled for
    "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE",  # what LLVM makes of it
    "NUMBA_LLVM_REFPRUNE_PASS", "NUMBA_LLVM_REFPRUNE_FLAGS",
    "NUMBA_DISABLE_INTEL_SVML",  # which functions are called
    "NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_EXTEND_VARIABLE_LIFETIMES",  # what else the code does
    "NUMBA_DEBUG_JIT", "NUMBA_DEBUG_NRT",
)  # fmt: skip
"""Numba's settings that change compiled code. The others do not: above all NUMBA_NUM_THREADS,
which differs between jobs of one machine."""


# Set by lowshard for the processes that it starts.
JOB_DIR = Setting("LOWSHARD_JOB_DIR", "", "a folder", "the job's own folder")
LINK = Setting("LOWSHARD_LINK", "", "an address", "where a rank's supervisor reaches the launcher")
USER_TMPDIR = Setting(
    "LOWSHARD_USER_TMPDIR", "", "a folder", "the user's TMPDIR, since mpiexec has another one"
)
SELFTEST_STEP = Setting(
    "LOWSHARD_SELFTEST_STEP", "", "a mark", "the step of a selftest that this process belongs to"
)


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, for a child or to find out who started this process."""
    return dict(os.environ)


def change(name: str, text: str | None) -> None:
    """Set a variable of this process's environment, or take it away."""
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def is_later_rank() -> bool:
    """Return whether a launcher has said that this process is not rank 0, which says what is said once."""
    ranks = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    return any(os.environ.get(name, "0") != "0" for name in ranks)


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


def numba_cache_dir() -> Path | None:
    """Return the folder that Numba's own variable names for compiled code, or None."""
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    return Path(named).absolute() if named else None
