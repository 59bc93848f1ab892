"""What run_publisher.py and run_subscriber.py have in common: a tensor, its layouts and its content by version.

It is published as "w", and in float32 as "q", which is there to be quantised.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import lowshard as ls
from lowshard import comm as lc

ROWS, COLUMNS = 192, 640


def content(version: int) -> np.ndarray:
    """Return the whole tensor of a version, int32: one element of 50 changes with each, the others with every fifth."""
    place = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
    return np.where(place % 50 == 7, version, version // 5 * 5) * 1000 + place % 997


def train_layouts(ranks: int) -> dict[str, ls.Layout]:
    """Return the publisher's layouts: columns."""
    mesh = ls.DeviceMesh((ranks,), ("tp",))
    return {
        name: ls.Layout(mesh, (ROWS, COLUMNS), dtype, (ls.Sharded(1),))
        for name, dtype in (("w", "int32"), ("q", "float32"))
    }


def serve_layout(ranks: int, dtype: str = "int32") -> ls.Layout:
    """Return a subscriber's layout: rows."""
    return ls.Layout(ls.DeviceMesh((ranks,), ("tp",)), (ROWS, COLUMNS), dtype, (ls.Sharded(0),))


def token_of(address: str) -> bytes | None:
    """Return the token of a TCP address; None where it lies in the publisher's folder."""
    return b"of this test, and of nothing else" if address.startswith("tcp") else None


def own_rows(version: int, rank: int, ranks: int) -> np.ndarray:
    """Return what a subscriber's rank holds of a version."""
    return np.array_split(content(version), ranks)[rank]


def own_columns(version: int, rank: int, ranks: int) -> np.ndarray:
    """Return what a publisher's rank holds of a version."""
    return np.array_split(content(version), ranks, axis=1)[rank]


def communicator() -> Any:
    """Return a communicator over the job's ranks; of a plain process one of its own."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        from mpi4py import MPI

        return lc.from_mpi(MPI.COMM_WORLD, device="cpu", timeout_s=20)
    return lc.loopback(1)[0]
