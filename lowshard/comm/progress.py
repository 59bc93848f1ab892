"""Letting MPI go on while a rank waits for something else.

A message that MPI calls sent may still lie with the sender: one that was copied away while its connection was being
made leaves when the sender is next inside MPI (MPI 4.1, section 3.7.4, promises no more). A rank that waits in shared
memory, or for others at its end, is not inside MPI, and whoever waits for that message may be what it waits for.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
from typing import Any

import numpy as np

# To probe for what nobody sends: the highest tag that every MPI has. From any rank of the world, since MPICH looks at
# the network only where a message may come by it.
_TAG = 32767
_FLAG_AT, _STATUS_AT, _WORDS = 6, 8, 64
"""Behind function and arguments: what the function writes to."""


def progress_words() -> np.ndarray | None:
    """Return six int64: the address of a C function that lets MPI go on, and its five arguments.

    The function is 0 from the end of the program, or of MPI, on: a thread that waits still must not call MPI then. Who
    gives the address to such a thread keeps the array, which Python's end would free before the thread.

    None where mpi4py is not loaded, or MPI does not let every thread call it.
    """
    mpi = _mpi()
    return None if mpi is None or mpi.Query_thread() < mpi.THREAD_MULTIPLE else _probe()


def let_mpi_go_on() -> None:
    """Be inside MPI for a moment, where it runs."""
    mpi = _mpi()
    if mpi is not None:
        mpi.COMM_WORLD.Iprobe(mpi.ANY_SOURCE, _TAG)


def stop() -> None:
    """Have nobody who waits call MPI any more."""
    if _probe.cache_info().currsize:
        _probe()[0] = 0


def _mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


@functools.cache
def _probe() -> np.ndarray:
    """Return MPI_Iprobe with its arguments, and what it writes to."""
    mpi = sys.modules["mpi4py.MPI"]
    words = np.zeros(_WORDS, np.int64)
    library = ctypes.CDLL(mpi.__file__)  # finds what mpi4py is linked with
    function = ctypes.cast(library.MPI_Iprobe, ctypes.c_void_p).value
    flag, status = (words[at:].ctypes.data for at in (_FLAG_AT, _STATUS_AT))
    call = [function, mpi.ANY_SOURCE, _TAG, mpi._handleof(mpi.COMM_WORLD), flag, status]
    words[:_FLAG_AT] = np.array(call, np.int64)
    atexit.register(stop)
    return words
