"""mpi4py's own collectives on private NumPy buffers, as its users write them: what `--compare-mpi` times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench.case import Case, Request
from lowshard.bench.operation import uneven
from lowshard.bench.sweep_setting import Placement

Work = Callable[[], object]

# MPI has no reductions of these that its users could call: no bf16 at all, no float16 before MPI 5, no average.
_NO_SUMS = ("bfloat16", "float16")
SMALL_BYTES = 16
"""The smallest message that a check between ranks takes."""


def rival(mpi_comm: Any, request: Request, placement: Placement, case: Case | None = None) -> Work | None:
    """Return mpi4py's call for a request; None where MPI has none."""
    if request.redop == "avg" or (request.redop is not None and request.dtype in _NO_SUMS):
        return None
    return Rival(mpi_comm, request, placement, case).run


PROBE_BYTES, NEAR_S, APART_S = 1 << 20, 300e-6, 350e-6
"""Two ranks whose cores share a cache reduce so many bytes over mpi4py in at most NEAR_S; others take over APART_S."""


def plain_all_reduce(mpi_comm: Any, size_bytes: int = PROBE_BYTES) -> Work:
    """Return mpi4py's all-reduce of 8-byte integers."""
    from mpi4py import MPI

    send, recv = np.ones(size_bytes // 8, np.int64), np.zeros(size_bytes // 8, np.int64)
    return partial(mpi_comm.Allreduce, send, recv, MPI.MAX)


def is_apart(probes_s: Sequence[float]) -> bool | None:
    """Say whether the cores of two ranks shared no cache while the probes were timed; None where some did."""
    if max(probes_s) <= NEAR_S:
        return False
    return True if min(probes_s) > APART_S else None


class Rival:
    """One of mpi4py's calls, and its buffers."""

    def __init__(
        self, mpi_comm: Any, request: Request, placement: Placement, case: Case | None = None
    ) -> None:  # fmt: skip
        from mpi4py import MPI

        self._mpi, self._comm, self._request = MPI, mpi_comm, request
        self._rank, self._size = int(mpi_comm.Get_rank()), int(mpi_comm.Get_size())
        self._sizes = request.sizes(self._size)
        dtype = dtypes.get(request.dtype).numpy
        if request.redop is None:  # a move needs the width alone, and bf16 has no type in MPI
            dtype = np.dtype(f"u{dtype.itemsize}")
        self._dtype = dtype
        self._at_root = self._rank == request.root
        # MPI.IN_PLACE is the root's own where there is a root, and everybody's elsewhere.
        self._in_place = placement == "in" and (self._at_root or not request.operation.rooted)
        if case is None or request.redop is not None or request.window or request.shared:
            self.send, self.recv = self._buffers()
        else:
            self.send, self.recv = (
                None if buf is None else buf.view(dtype) for buf in (case.send, case.recv)
            )
        self.run: Work = self._call()

    def _buffers(self) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None]:
        op, sizes = self._request.op, self._sizes
        if op == "barrier":
            return None, None
        if op == "broadcast":
            buf = self._buffer(sizes.send)
            return buf, buf
        if not self._in_place:
            sends, receives = (
                op != "scatter" or self._at_root,
                op not in ("reduce", "gather") or self._at_root,
            )
            return self._buffer(sizes.send) if sends else None, self._buffer(sizes.recv) if receives else None
        whole = self._buffer(max(sizes.send, sizes.recv))
        # MPI leaves the part of a reduce-scatter at the beginning of the operand, every other part at its place.
        first = 0 if op == "reduce_scatter" else sizes.count * self._rank
        part = whole[first : first + sizes.count]
        if sizes.send < sizes.recv:
            return part, whole
        return whole, whole if sizes.send == sizes.recv else part

    def _call(self) -> Work:
        comm, send, recv, request = self._comm, self.send, self.recv, self._request
        root = request.root
        source: Any = self._mpi.IN_PLACE if self._in_place else send
        redop = getattr(self._mpi, (request.redop or "sum").upper())
        calls: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: partial(comm.Allreduce, source, recv, redop),
            "all_gather": lambda: partial(comm.Allgather, source, recv),
            "reduce_scatter": lambda: partial(
                comm.Reduce_scatter_block, source, send if self._in_place else recv, redop
            ),
            "all_to_all": lambda: partial(comm.Alltoall, send, recv),
            "all_to_all_v": self._uneven,
            "broadcast": lambda: partial(comm.Bcast, recv, root),
            "reduce": lambda: partial(comm.Reduce, source, recv, redop, root),
            "gather": lambda: partial(comm.Gather, source, recv, root),
            "scatter": lambda: partial(
                comm.Scatter, send, self._mpi.IN_PLACE if self._in_place else recv, root
            ),
            "send_recv": lambda: partial(
                comm.Sendrecv, send, (self._rank + 1) % self._size, 0, recv, (self._rank - 1) % self._size, 0
            ),
            "barrier": lambda: comm.Barrier,
        }
        return calls[request.op]()

    def _uneven(self) -> Work:
        from mpi4py.util import dtlib

        one = uneven(self._sizes.count, self._rank, self._size)
        kind = dtlib.from_numpy_dtype(self._dtype)
        return partial(
            self._comm.Alltoallv,
            [self.send, (one.send_counts, one.send_displs), kind],
            [self.recv, (one.recv_counts, one.recv_displs), kind],
        )

    def _buffer(self, elems: int) -> np.ndarray[Any, Any]:
        from lowshard.kernels.buffer import allocate

        made: np.ndarray[Any, Any] = allocate((elems,), self._dtype, like=np.empty(0))
        made.fill(0)  # touches the pages; any number of sums of zeros is zero
        return made
