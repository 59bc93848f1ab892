"""Letting MPI go on while a rank waits for something else.

A message that MPI calls sent may still lie with the sender: one that was copied away while its connection was being
made leaves when the sender is next inside MPI (MPI 4.1, section 3.7.4, promises no more). A rank that waits in shared
memory, or for others at its end, is not inside MPI, and whoever waits for that message may be what it waits for.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

# To probe for what nobody sends: the highest tag that every MPI has. From any rank of the world, since MPICH looks at
# the network only where a message may come by it.
_TAG = 32767
_PROBE_ARGS = 5
_STATUS_BYTES = 256


def progress_address() -> int:
    """Return where six int64 lie: the address of a C function that lets MPI go on, and its five arguments.

    0 where mpi4py is not loaded, or MPI does not let every thread call it.
    """
    mpi = _mpi()
    if mpi is None or mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return 0
    words, _ = _probe()
    return int(words.ctypes.data)


def let_mpi_go_on() -> None:
    """Be inside MPI for a moment, where it runs."""
    mpi = _mpi()
    if mpi is not None:
        mpi.COMM_WORLD.Iprobe(mpi.ANY_SOURCE, _TAG)


def _mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


@functools.cache
def _probe() -> tuple[np.ndarray, np.ndarray]:
    """Return MPI_Iprobe with its arguments, and what it writes to, which must live as long."""
    mpi = sys.modules["mpi4py.MPI"]
    written = np.zeros(_STATUS_BYTES, np.uint8)
    library = ctypes.CDLL(mpi.__file__)  # finds what mpi4py is linked with
    function = ctypes.cast(library.MPI_Iprobe, ctypes.c_void_p).value
    flag, status = written.ctypes.data, written.ctypes.data + 64
    world = mpi._handleof(mpi.COMM_WORLD)
    words = np.array([function, mpi.ANY_SOURCE, _TAG, world, flag, status], np.int64)
    assert len(words) == 1 + _PROBE_ARGS
    return words, written
