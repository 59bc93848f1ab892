"""Runs one exchange of boxes on a rank.

Where ranks can read each other's memory, a box is copied once, from source to destination. A source that peers cannot
read is staged for them slab by slab, and boxes for other ranks are packed and sent, so that only a few slabs of bounded
size are needed beside source and result. Terms are folded as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.box import single_run
from lowshard.comm.communicator import Communicator
from lowshard.comm.reach import Published
from lowshard.comm.reduction import identity
from lowshard.errors import LowshardError
from lowshard.kernels.buffer import is_gpu
from lowshard.transfer.rank_schedule import (
    IN_PLACE,
    SENT,
    STAGED,
    Chunk,
    Index,
    Program,
    Round,
    Source,
    Stage,
)
from lowshard.transfer.rounds import run_rounds
from lowshard.transfer.spans import BoxCopy, Span, box_span, packed_span

Array = Any

SEND_FROM_BYTES = 32 << 20
"""Arrays above this are packed and sent in several rounds, each of about so many bytes."""
STAGE_BYTES = 8 << 20
"""The same for arrays staged for peers: two slabs of this size, used in turn."""
READ_FROM_BYTES = 64 << 10
"""Smaller arrays are packed and sent: that takes one synchronisation of the ranks, reading takes two."""

_KERNEL_FROM_BYTES = 16 << 10  # below, NumPy's copy is faster than calling a kernel
_MAPPED, _OPEN, _STAGED = 1, 2, 3
"""How peers read a rank's array: by loads; by a system call; in its stage. Sent with the length of a buffer."""
_NOTES = 4


def reads_peers(program: Program) -> bool:
    """Return whether an exchange reads peers' memory where it can; the same on all ranks."""
    return program.shares_nodes and program.largest_bytes >= READ_FROM_BYTES


def run(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    """Fill a rank's result from all ranks' arrays."""
    if not program.moves:
        _Run(program, local, out, comm, 1, SENT).take(0)
    elif reads_peers(program):
        comm.step(
            program.name, program.text, _by_memory, program, local, out, comm,
            sent_bytes=program.sent_bytes, received_bytes=program.received_bytes,
            reached_bytes=program.reached_bytes,
        )  # fmt: skip
    else:
        _by_messages(program, local, out, comm)
    if out is not None and program.fill_op is not None:
        out[...] = identity(program.fill_op, program.dtype)


# ---- by memory, and messages beside it


def _by_memory(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    of, reach = -(-program.largest_bytes // STAGE_BYTES), comm.reach
    note = 0
    if local is not None and program.sends_near:
        note = _STAGED
        if local.flags.c_contiguous and reach.maps(local):
            note = _MAPPED
        elif local.flags.c_contiguous and reach.crosses and program.is_worth_reading:
            note = _OPEN
    way = STAGED if note == _STAGED else IN_PLACE
    half = 0
    if local is not None and (note == _STAGED or program.leaves_nodes):
        half = max(program.round(number, of, way).stage.elems for number in range(of))
    stage = comm.empty(2 * half, program.dtype) if half else None
    if stage is not None and local is not None:
        pack_stage(program, program.round(0, of, way).stage, (0, of, way), local, stage)
    published = reach.publish([stage if note == _STAGED else local if note else None], note + _NOTES * half)
    if not program.leaves_nodes and not any(said % _NOTES == _STAGED for said in published.notes.values()):
        of = 1
    job = _Run(program, local, out, comm, of, way)
    job.published = published

    def fill(number: int) -> None:
        if number and stage is not None and local is not None:
            key = (number, of, way)
            pack_stage(program, program.round(*key).stage, key, local, stage[(number & 1) * half :])

    def meet(number: int) -> None:
        if number:
            reach.barrier()

    def take(number: int) -> None:
        if program.leaves_nodes:
            job.carry(number, None if stage is None else stage[(number & 1) * half :])
        job.take(number)

    if of == 1:  # filled and synchronised already
        take(0)
    else:
        run_rounds(range(of), fill, meet, take, ahead=False)
    reach.barrier()  # published arrays stay until all have read them
    if job.error is not None:
        raise job.error


class _Run:
    """One rank's part of one run of an exchange."""

    __slots__ = ("_comm", "_local", "_of", "_out", "_program", "_way", "error", "published", "received")

    def __init__(
        self, program: Program, local: Array | None, out: Array | None, comm: Communicator, of: int, way: str
    ) -> None:
        self._program, self._local, self._out, self._comm = program, local, out, comm
        self._of, self._way = of, way
        self.published: Published | None = None
        self.received: Array | None = None
        self.error: LowshardError | None = None

    def round(self, number: int) -> Round:
        return self._program.round(number, self._of, self._way)

    def carry(self, number: int, stage: Array | None) -> None:
        """Exchange messages with the ranks that cannot read each other's memory."""
        receives, sends, dtype = self.round(number).receives, self.round(number).sends, self._program.dtype
        if self.received is None or self.received.size < receives.elems:
            self.received = np.empty(receives.elems, dtype)
        send = np.empty(0, dtype) if stage is None else stage
        self._comm.carry(send, sends.counts, sends.displs, self.received, receives.counts, receives.displs)

    def take(self, number: int, received_is_placed: bool = False) -> None:
        """Copy the boxes of a round into the result."""
        program, out = self._program, self._out
        if out is None or program.fill_op is not None:
            return
        chunks = self.round(number).chunks
        if program.op is not None:
            for chunk in chunks:
                terms = [_part(*self._term(source, number), chunk) for source in chunk.sources]
                self._comm.fold(terms, out[(*chunk.index, ...)], program.op, program.divisor)
            return
        if self._way == SENT and out.nbytes < _KERNEL_FROM_BYTES and not is_gpu(out):
            for chunk in chunks:
                source = chunk.sources[0]
                if source.got < 0:
                    out[chunk.index] = _part(self._local, source.index, chunk)
                elif not received_is_placed:
                    out[chunk.index] = _part(self.received, source.got, chunk)
            return
        groups: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            source = chunk.sources[0]
            if source.got < 0 or not received_is_placed:
                groups.setdefault(-1 if source.got >= 0 else source.rank, []).append(chunk)
        me, size = program.rank, program.size
        # Each rank begins with another one, so that not all read the same memory at once.
        for rank in sorted(groups, key=lambda rank: (rank - me) % size):
            self._place(number, rank, groups[rank])

    def _term(self, source: Source, number: int) -> tuple[Array, Index | int]:
        """Return a source's array in this process, and its slices of it or its first element."""
        program = self._program
        if source.rank == program.rank:
            return self._local, source.index
        if source.got >= 0:
            return self.received, source.got
        view, half = self._seen(source.rank)
        if half is None:
            return view.reshape(program.near_shapes[source.rank]), source.index
        return view[(number & 1) * half :], source.start

    def _seen(self, rank: int) -> tuple[Array, int | None]:
        """Return a peer's published array, and the length of a buffer if it is a stage."""
        assert self.published is not None
        half, note = divmod(self.published.notes[rank], _NOTES)
        view = self.published.view(rank)
        assert view is not None
        return view.view(self._program.dtype), half if note == _STAGED else None

    def _place(self, number: int, rank: int, chunks: Sequence[Chunk]) -> None:
        """Copy the boxes of one source: a rank's array, or the receive buffer (-1)."""
        program, out = self._program, self._out
        assert out is not None
        if rank >= 0 and rank != program.rank:
            assert self.published is not None
            if self.published.notes[rank] % _NOTES == _OPEN:
                self._read_across(number, rank, chunks)
                return
        array, at = self._term(chunks[0].sources[0], number)
        elems = sum(chunk.elems for chunk in chunks)
        if not array.flags.c_contiguous or (elems * out.itemsize < _KERNEL_FROM_BYTES and not is_gpu(out)):
            for chunk in chunks:
                source = chunk.sources[0]
                where = source.index if not isinstance(at, int) else max(source.got, source.start)
                out[chunk.index] = _part(array, where, chunk)
            return
        self._copies(number, rank, chunks, None if isinstance(at, int) else array.shape).run(array, out)

    def _read_across(self, number: int, rank: int, chunks: Sequence[Chunk]) -> None:
        program = self._program
        assert self.published is not None
        copies = self._copies(number, rank, chunks, program.near_shapes[rank])
        try:
            copies.read_across(rank, self._comm.reach.pid(rank), self.published.address(rank), self._out)
        except LowshardError as error:  # raised later: the others wait for this rank
            self.error = self.error or error

    def _copies(
        self, number: int, rank: int, chunks: Sequence[Chunk], shape: tuple[int, ...] | None
    ) -> BoxCopy:
        """Return the cached copies of one source's boxes; `shape` is that of its array, None if they are packed."""
        program, out = self._program, self._out
        key = (number, self._of, self._way, rank, shape is None)
        found: BoxCopy | None = program.kept.get(key)
        if found is None:
            item = program.dtype.itemsize
            sources, targets = [], []
            for chunk in chunks:
                source = chunk.sources[0]
                if shape is not None:
                    sources.append(box_span(source.index, shape, item))
                else:
                    sources.append(packed_span(max(source.got, source.start) * item, chunk.shape, item))
                targets.append(box_span(chunk.index, out.shape, item))  # type: ignore[union-attr]
            found = program.kept[key] = BoxCopy(sources, targets, result_bytes=out.nbytes, itemsize=item)  # type: ignore[union-attr]
        return found


def pack_stage(program: Program, stage: Stage, key: tuple[int, int, str], local: Array, into: Array) -> None:
    """Pack what this rank sends in a round."""
    small = not is_gpu(local) and stage.elems * local.itemsize < _KERNEL_FROM_BYTES
    if small or not local.flags.c_contiguous:
        for part in stage.laid:
            into[part.start : part.stop].reshape(part.shape)[...] = local[part.index]
        return
    copies = program.kept.get(("lay out", key))
    if copies is None:
        item = local.itemsize
        sources: list[Span] = [box_span(part.index, local.shape, item) for part in stage.laid]
        targets = [packed_span(part.start * item, part.shape, item) for part in stage.laid]
        copies = program.kept["lay out", key] = BoxCopy(
            sources, targets, result_bytes=into.nbytes, itemsize=item
        )
    copies.run(local, into)


# ---- by messages alone


def _by_messages(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    of = max(1, -(-program.largest_bytes // SEND_FROM_BYTES))
    job = _Run(program, local, out, comm, of, SENT)
    nothing = comm.xp.empty(0, _dtype_of(program, local, out))
    for number in range(of):
        _, stage, sends, receives = job.round(number)
        send, displs = nothing, sends.displs
        direct, into = _direct(program, of)
        if local is not None and stage.elems:
            if direct is not None and local.flags.c_contiguous:
                send, displs = local.reshape(-1), direct
            else:
                send = comm.xp.empty(stage.elems, local.dtype)
                pack_stage(program, stage, (number, of, SENT), local, send)
        if into is not None and out is not None:
            comm.all_to_all_v(send, sends.counts, displs, out.reshape(-1), receives.counts, into)
            job.take(number, received_is_placed=True)
            continue
        job.received = (
            nothing if out is None or not receives.elems else comm.xp.empty(receives.elems, out.dtype)
        )
        comm.all_to_all_v(send, sends.counts, displs, job.received, receives.counts, receives.displs)
        job.take(number)


def _direct(program: Program, of: int) -> tuple[list[int] | None, list[int] | None]:
    """Return where in its flat array a rank's messages begin, and where in its flat result those to it; cached."""
    if of > 1:
        return None, None
    found: tuple[list[int] | None, list[int] | None] | None = program.kept.get("direct")
    if found is None:
        only = program.round(0, 1, SENT)
        sends = receives = None
        if program.rank in program.exchange.src.mesh:
            shape = program.exchange.src.local_shape(program.rank)
            runs = {part.start: _run_of(part.index, shape) for part in only.stage.laid}
            if None not in runs.values():
                sends = [runs.get(at) or 0 for at in only.sends.displs]
        if program.shape is not None and program.op is None:
            into = {c.sources[0].rank: _run_of(c.index, program.shape) for c in only.chunks}
            if None not in into.values():
                receives = [into.get(rank) or 0 for rank in range(program.size)]
        found = program.kept["direct"] = sends, receives
    return found


def _run_of(index: Index, shape: tuple[int, ...]) -> int | None:
    return single_run(tuple((s.start, s.stop) for s in index), shape)


def _dtype_of(program: Program, local: Array | None, out: Array | None) -> Any:
    """Return the dtype of buffers, also if this rank has none."""
    if local is not None:
        return local.dtype
    return program.dtype if out is None else out.dtype


def _part(array: Array, at: Index | int, chunk: Chunk) -> Array:
    if isinstance(at, int):
        return array[at : at + chunk.elems].reshape(chunk.shape)
    return array[(*at, ...)]
