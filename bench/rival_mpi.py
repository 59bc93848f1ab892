"""What one writes with mpi4py alone: its collectives, redistributions by one call, and two ways to refit a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench.collective_case import Case, Placement, Request, uneven
from lowshard.bench.turn_timing import Work
from lowshard.box import Box

Array = Any
Arrays = Mapping[str, Array]

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
        self._in_place = placement == "in-place" and (self._at_root or not request.operation.rooted)
        if case is None or request.redop is not None or request.window:
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


# ---- redistributions


def transition_by_mpi(mpi_comm: Any, name: str, side: int, local: np.ndarray, out: np.ndarray) -> Any:
    """Return what one writes with mpi4py alone for a transition; None where one call, of equal parts, is not enough."""
    ranks = int(mpi_comm.Get_size())
    if side % ranks or "," in name:
        return None
    rows, cols = side // ranks, side // ranks
    if name == "S0->R":
        return lambda: mpi_comm.Allgather(local, out)
    if name == "P->R":
        return lambda: mpi_comm.Allreduce(local, out)
    if name == "P->S0":
        return lambda: mpi_comm.Reduce_scatter_block(local, out)
    if name == "S0->S1":
        packed = np.zeros((ranks, rows, cols), np.float32)

        def pack_and_send() -> None:
            np.copyto(packed, local.reshape(rows, ranks, cols).transpose(1, 0, 2))
            mpi_comm.Alltoall(packed, out)  # blocks come by source rank, which is their place

        return pack_and_send
    return None


# ---- refits: both write into the arrays that are served, so a reader waits for as long as they take


class GatherAndBroadcast:
    """Each tensor is gathered whole on one rank, which gives it to everybody; who serves cuts out its part."""

    name = "gather, broadcast"

    def __init__(self, plan: Any, src: Arrays, dst: Arrays, mpi_comm: Any) -> None:
        self._plan, self._src, self._dst, self._comm = plan, src, dst, mpi_comm
        self._rank, self._root = int(mpi_comm.Get_rank()), min(plan.entries[0].src.rank_map.ranks(0))
        largest = max(np.prod(e.src.shape) * e.src.itemsize_bytes for e in plan.entries)
        self._whole, self._part = np.empty((2, int(largest)), np.uint8)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a run takes between all ranks."""
        total = 0
        for entry in self._plan.entries:
            layout = entry.src
            first = [min(layout.rank_map.ranks(cell)) for cell in range(layout.rank_map.cells)]
            elems = sum(t.elems for rank in first if rank != self._root for t in layout.tiles(rank))
            elems += (self._comm.Get_size() - 1) * int(np.prod(layout.shape))
            total += elems * layout.itemsize_bytes
        return total

    def __call__(self) -> None:
        """Move all tensors. Collective: all ranks of the communicator call this."""
        for entry in self._plan.entries:
            layout, kind = entry.src, dtypes.get(entry.src.dtype).numpy
            size_bytes = int(np.prod(layout.shape)) * layout.itemsize_bytes
            whole = self._whole[:size_bytes].view(kind).reshape(layout.shape)
            for cell in range(layout.rank_map.cells):
                self._gather(entry.src_name, layout, min(layout.rank_map.ranks(cell)), whole)
            self._comm.Bcast(self._whole[:size_bytes], self._root)
            if self._rank in entry.dst:
                for tile in entry.dst.tiles(self._rank):
                    self._dst[entry.name][_at(tile.local)] = whole[_at(tile.box)]

    def _gather(self, name: str, layout: Any, holder: int, whole: Array) -> None:
        """Bring one rank's part to its place in the whole tensor."""
        if self._rank not in (holder, self._root):
            return
        is_holder = self._rank == holder
        held: Array = self._src[name] if is_holder else self._part
        if holder != self._root:
            shape = layout.local_shape(holder)
            size_bytes = int(np.prod(shape)) * layout.itemsize_bytes
            if is_holder:
                self._comm.Send(_bytes(held), self._root)
                return
            self._comm.Recv(self._part[:size_bytes], holder)
            held = self._part[:size_bytes].view(whole.dtype).reshape(shape)
        for tile in layout.tiles(holder):
            whole[_at(tile.box)] = held[_at(tile.local)]


class TensorByTensor:
    """Each rank gives each other what that needs of a tensor, one tensor after the other, a message a box."""

    name = "tensor by tensor"

    def __init__(self, plan: Any, src: Arrays, dst: Arrays, mpi_comm: Any) -> None:
        self._comm = mpi_comm
        own = plan.for_rank(int(mpi_comm.Get_rank()))
        self._steps: list[list[Callable[[], Any]]] = [[] for _ in plan.entries]
        self.sent_bytes = sum(plan.received_bytes(rank) for rank in plan.ranks)
        for peer, moves in own.receives.items():
            for tag, move in enumerate(moves):
                into = dst[plan.entries[move.entry].name][_at(move.dst_box)]
                self._steps[move.entry].append(self._taker(into, peer, tag))
        for peer, moves in own.sends.items():
            for tag, move in enumerate(moves):
                taken = src[plan.entries[move.entry].src_name][_at(move.src_box)]
                self._steps[move.entry].append(self._giver(taken, peer, tag))
        for move in own.copies:
            entry = plan.entries[move.entry]
            into, taken = dst[entry.name][_at(move.dst_box)], src[entry.src_name][_at(move.src_box)]
            self._steps[move.entry].append(partial(np.copyto, into, taken))

    def __call__(self) -> None:
        """Move all tensors. Collective: all ranks of the communicator call this."""
        for steps in self._steps:
            ends = [step() for step in steps]
            for end in ends:
                if end is not None:
                    end()

    def _taker(self, into: Array, peer: int, tag: int) -> Callable[[], Any]:
        came = np.empty(into.shape, into.dtype)

        def begin() -> Callable[[], None]:
            request = self._comm.Irecv(_bytes(came), peer, tag)

            def end() -> None:
                request.Wait()
                into[...] = came

            return end

        return begin

    def _giver(self, taken: Array, peer: int, tag: int) -> Callable[[], Any]:
        packed = np.empty(taken.shape, taken.dtype)

        def begin() -> Callable[[], None]:
            packed[...] = taken
            request = self._comm.Isend(_bytes(packed), peer, tag)
            return lambda: request.Wait()

        return begin


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


def _bytes(array: Array) -> Array:
    """Return an array's memory as bytes, which every MPI library knows."""
    return array.reshape(-1).view(np.uint8)
