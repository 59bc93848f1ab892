"""How weights go from training to serving ranks in most stacks of today, over plain mpi4py: to be timed beside a Refit.

Both write into the arrays that are served, so a reader waits for as long as they take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box
from lowshard.reshard import ReshardPlan

Array = Any
Arrays = Mapping[str, Array]


class GatherAndBroadcast:
    """Each tensor is gathered whole on one rank, which gives it to everybody; who serves cuts out its part."""

    name = "gather, broadcast"

    def __init__(self, plan: ReshardPlan, src: Arrays, dst: Arrays, mpi_comm: Any) -> None:
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

    def __init__(self, plan: ReshardPlan, src: Arrays, dst: Arrays, mpi_comm: Any) -> None:
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
