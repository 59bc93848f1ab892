"""The table of transports: which there are, and what each declares that it can do.

A new transport is a module with one class that derives from `lowshard.comm.transport.Transport`, and a line here.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from lowshard.comm.collectives import COLLECTIVES
from lowshard.comm.transport import Transport


class Entry(NamedTuple):
    """A transport that there is."""

    module: str
    kind: str  # its class there
    ranks: str  # which ranks it joins, and over what

    def load(self) -> type[Transport]:
        """Import the transport, and so what it needs: mpi4py, Numba or CuPy."""
        found: type[Transport] = getattr(import_module(self.module), self.kind)
        return found


TRANSPORTS = (
    Entry("lowshard.comm.loopback", "LoopbackTransport", "threads of one process"),
    Entry("lowshard.comm.mpi", "MPITransport", "processes, by MPI's messages"),
    Entry("lowshard.comm.node.node_transport", "NodeTransport", "processes of one machine, by shared memory"),
    Entry("lowshard.comm.nccl", "NCCLTransport", "GPUs, by NCCL"),
    Entry("lowshard.comm.staged", "StagedTransport", "GPUs, through the memory of the host"),
)


def capabilities() -> list[tuple[str, str, list[str]]]:
    """Return of each transport its class, which ranks it joins, and the collectives it has plans of its own for."""
    rows = []
    for entry in TRANSPORTS:
        kind = entry.load()
        own = [name for name in COLLECTIVES if name in kind.plans]
        rows.append((entry.kind, entry.ranks, own))
    return rows
