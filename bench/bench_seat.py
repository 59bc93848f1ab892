"""A rank's seat in a measurement: how it meets the others, and how it opens communicators over a transport."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from lowshard._version import __version__
from lowshard.bench.bench_meeting import Meeting, ThreadMeeting, usable_cores
from lowshard.bench.machine import cpu_model, versions
from lowshard.bench.sweep import Place
from lowshard.errors import LowshardError
from lowshard.settings import CHECK, CPU_PATH, environment

Facts = tuple[tuple[str, str], ...]

_QUIET_S = 2.0
_LIBRARIES = ("numpy", "mpi4py", "numba", "ml_dtypes")
# Settings of MPI libraries and NCCL that change figures, without what launchers set for themselves.
_SETTINGS = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "NCCL_", "FI_")
_NO_SETTINGS = (
    "PREFIXES",
    "initial_wdir",
    "num_procs",
    "cpu_type",
    "_ess",
    "_pmix",
    "_prte",
    "_orte",
    "KEY",
    "TOKEN",
)


class Seat(Protocol):
    """What an entry gets on each rank."""

    meeting: Meeting

    def open(self, transport: str, say: Say | None = None) -> Any:
        """Return a context manager that gives a `Place`. Collective: all ranks call this."""


class Say:
    """Tells what goes on, on stderr, when nothing has been shown for two seconds."""

    def __init__(self, bench: str, on: bool, now: Callable[[], float] = time.perf_counter) -> None:
        self._bench, self._on, self._now = bench, on, now
        self._last_s = now()

    def __call__(self, what: str) -> None:
        """Say what goes on, perhaps."""
        if self._on and self._now() - self._last_s >= _QUIET_S:
            self._last_s = self._now()
            print(f"lowshard bench {self._bench}: {what}", file=sys.stderr, flush=True)

    def shown(self) -> None:
        """Note that the user has just seen something."""
        self._last_s = self._now()


class MpiSeat:
    """A rank of an MPI job."""

    def __init__(self, mpi_comm: Any) -> None:
        from lowshard.bench.bench_meeting import MpiMeeting

        self.mpi_comm = mpi_comm
        self.meeting: Meeting = MpiMeeting(mpi_comm)
        self._cores = usable_cores(self.meeting)

    @contextmanager
    def open(self, transport: str, say: Say | None = None) -> Iterator[Place]:
        """Open a communicator over a transport and close it after. Collective: all ranks call this."""
        with open_transport(self.mpi_comm, transport) as comm:
            on_host = comm.xp is np
            rivals = self.mpi_comm.Dup()
            yield Place(comm, self.meeting, self._cores if on_host else None, rivals, say=say or _silent)
            rivals.Free()


class ThreadSeat:
    """A thread of one process, with its loopback communicator."""

    def __init__(self, comm: Any, meeting: ThreadMeeting) -> None:
        self._comm = comm
        self.meeting: Meeting = meeting

    @contextmanager
    def open(self, transport: str, say: Say | None = None) -> Iterator[Place]:
        """Give the one communicator there is; it stays open."""
        if transport != "loopback":
            raise LowshardError(f"threads are joined by --transport loopback, not by {transport}")
        # Threads sleep while they wait, so CPU time says nothing about who else used the machine.
        yield Place(self._comm, self.meeting, None, None, time.thread_time, say or _silent)


def open_transport(mpi_comm: Any, transport: str) -> Any:
    """Return a communicator over MPI ranks. Collective: all ranks call this."""
    from lowshard import comm as lc

    if transport == "loopback":
        raise LowshardError("--transport loopback runs on threads of one process, not on MPI ranks")
    if transport in ("auto", "mpi"):
        return lc.from_mpi(mpi_comm, "auto" if transport == "auto" else "cpu")
    from lowshard.comm.nccl_over_mpi import build_over_mpi

    return build_over_mpi(lc.from_mpi(mpi_comm, "cpu"), mpi_comm, transport)  # type: ignore[arg-type]


def collective_facts(place: Place) -> Facts:
    """Return names and values that say what runs where. Collective: all ranks of the place call this."""
    comm = place.comm
    counts = place.meeting.exchange(len(os.sched_getaffinity(0)))
    found = {"lowshard": __version__, "transport": comm.transport}
    if place.mpi_comm is not None:
        found["mpi"] = mpi_name()
    found["hosts"] = hosts_of(place.meeting)
    found["cpu"] = f"{cpu_model()}, {' or '.join(map(str, sorted(set(counts))))} cores usable a rank"
    if comm.xp is not np:
        found |= _gpu_facts()
    found["load"] = f"{os.getloadavg()[0]:.2f} processes running on average in the minute before"
    found["system"] = f"Linux {platform.release()}"
    found["versions"] = f"python {platform.python_version()}, {versions(_LIBRARIES)}"
    found["check"] = CHECK.text()
    found["path"] = CPU_PATH.text()
    settings = {k: v for k, v in sorted(environment().items()) if k.startswith(_SETTINGS)}
    kept = [f"{k}={v}" for k, v in settings.items() if not any(part in k for part in _NO_SETTINGS)]
    if kept:
        found["settings"] = " ".join(kept)
    return tuple(found.items())


def hosts_of(meeting: Meeting) -> str:
    """Return how many ranks are on which host, in words. Collective: all ranks of the meeting call this."""
    hosts = meeting.exchange(socket.gethostname())
    counts = {host: hosts.count(host) for host in hosts}
    return ", ".join(f"{count} rank{'s' * (count != 1)} on {host}" for host, count in counts.items())


def mpi_name() -> str:
    """Return the MPI library's name and version: "Open MPI 5.0.11"."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _gpu_facts() -> dict[str, str]:
    import cupy
    from cupy.cuda import nccl

    about = cupy.cuda.runtime.getDeviceProperties(int(cupy.cuda.runtime.getDevice()))
    name = about["name"].decode() if isinstance(about["name"], bytes) else str(about["name"])
    return {
        "gpu": name,
        "nccl": str(nccl.get_version()) if nccl.available else "none",
        "cupy": cupy.__version__,
    }


def _silent(what: str) -> None:
    """Say nothing."""
