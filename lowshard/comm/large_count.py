"""Messages of more elements than MPI counts: one element each, of a type as long as the message.

MPI before version 4 counts in C ints, and so do the libraries that mpi4py finds today.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Array = Any

MOST_ELEMS = (1 << 31) - 1
"""Of a message, and of all messages of a collective."""
BLOCK_BYTES = 1 << 30
"""A long type is made of so many bytes at a time."""


def fits(elems: int) -> bool:
    """Say whether MPI's own collectives take so many elements."""
    return elems <= MOST_ELEMS


def byte_message(mpi: Any, buf: Array) -> list[Any]:
    """Return a flat buffer as mpi4py, whose module MPI this gets, takes it, in bytes."""
    raw = buf.view(np.uint8)
    return [raw, mpi.BYTE] if fits(raw.size) else [raw, 1, _bytes_type(mpi, raw.size, BLOCK_BYTES)]


@lru_cache(64)
def _bytes_type(mpi: Any, size: int, block: int) -> Any:
    blocks, rest = divmod(size, block)
    whole = mpi.BYTE.Create_contiguous(block)
    made = mpi.Datatype.Create_struct([blocks, rest], [0, blocks * block], [whole, mpi.BYTE]).Commit()
    whole.Free()
    return made
