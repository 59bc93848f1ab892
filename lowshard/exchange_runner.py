"""Runs one exchange on a rank: reads what others show in place, or packs, sends and unpacks, and folds what is partial.

Where ranks can read each other's memory a box goes from its source to its place in one pass. A source that others
cannot read is laid out for them slab by slab in memory that they can. Elsewhere slabs are packed and sent. So nothing
is ever held beside source and result but one slab of bounded size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.box import single_run
from lowshard.comm.protocol import Communicator
from lowshard.comm.reduction import identity
from lowshard.kernels.buffer import is_gpu
from lowshard.kernels.engine import engine_for, host_engine
from lowshard.kernels.runs import RunTable, lower
from lowshard.rank_schedule import Chunk, Index, Laid, Program

Array = Any

SEND_FROM_BYTES = 32 << 20
"""Arrays above this are packed and sent in several rounds, each of about so many bytes."""
STAGE_BYTES = 8 << 20
"""The same for what is laid out where others can read it: two slabs of this, taken in turn."""
READ_FROM_BYTES = 64 << 10
"""Smaller arrays are packed and sent: one meeting of the ranks where reading takes two."""

_KERNEL_FROM_BYTES = 16 << 10  # below, NumPy's own copy is over before a kernel is called
_ROW_BYTES = 1 << 10  # rows from here on are copied one by one
_STREAMED_FROM_BYTES = 4 << 20  # results from here on are written past the caches
_NOTHING, _IN_PLACE, _LAID_OUT = range(3)
_MODES = 4


def run(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    """Fill a rank's result from all ranks' arrays.

    Collective: all ranks of the communicator call this, if the exchange moves a byte.

    Args:
        program: this rank's side.
        local: its array; None outside the source mesh.
        out: its result, C-contiguous, apart from local; None outside the destination mesh.
        comm: what moves the bytes.
    """
    if not program.moves:
        _fill(program, 0, 1, local, out, _own, comm)
    elif comm.shows and program.largest_bytes >= READ_FROM_BYTES:
        _read(program, local, out, comm)
    else:
        _send(program, local, out, comm)
    if out is not None and program.fill_op is not None:
        out[...] = identity(program.fill_op, program.dtype)


# ---- by reading


def _read(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    key = ("move", program.serial)
    call = comm._calls.get(key)
    if call is None:
        exchange = program.exchange
        text = f"{program.name} {exchange.src} -> {exchange.dst}"
        call = comm._make(program.name, text, 0, program.sent_bytes, program.received_bytes)

        def begin(local: Array | None, out: Array | None) -> None:
            _read_boxes(program, local, out, comm, call.signature, text)

        call.run = begin
        comm._keep(key, call)
    comm._do(call, local, out)


def _read_boxes(
    program: Program, local: Array | None, out: Array | None, comm: Communicator, signature: int, text: str
) -> None:
    of = -(-program.largest_bytes // STAGE_BYTES)
    stage, shown, note, half = None, None, _NOTHING, 0
    if local is not None and program.sent_bytes:
        if local.flags.c_contiguous and comm._is_seen(local):
            shown, note = local, _IN_PLACE
        else:
            half = max(program.round(number, of).stage.elems for number in range(of))
            shown = stage = comm.empty(2 * half, program.dtype)
            note = _LAID_OUT + _MODES * half
            _lay_out(program, 0, of, local, stage)
    notes, see = comm._show(signature, text, shown, note)
    if not any(said % _MODES == _LAID_OUT for said in notes):
        of = 1
    views: dict[int, Array] = {}
    for rank in program.sources - {program.rank}:
        if notes[rank] == _IN_PLACE:
            src = program.exchange.src
            views[rank] = see(rank, program.dtype, src.local_elems(rank)).reshape(src.local_shape(rank))
        else:
            views[rank] = see(rank, program.dtype, 2 * (notes[rank] // _MODES))
    for number in range(of):
        if number:
            if stage is not None and local is not None:
                _lay_out(program, number, of, local, stage[(number & 1) * half :])
            comm._barrier()

        def given(rank: int, turn: int = number & 1) -> tuple[Array, bool]:
            view, said = views[rank], notes[rank]
            if said == _IN_PLACE:
                return view, True
            return view[turn * (said // _MODES) :], False

        if out is not None:
            _fill(program, number, of, local, out, given, comm)
    comm._hide()


def _lay_out(program: Program, number: int, of: int, local: Array, into: Array) -> None:
    """Pack what this rank gives in a round."""
    stage = program.round(number, of).stage
    small = not is_gpu(local) and stage.elems * local.itemsize < _KERNEL_FROM_BYTES
    if small or not local.flags.c_contiguous:
        _pack(stage.laid, local, into)
        return
    key = ("lay out", number, of)
    table = program.kept.get(key)
    if table is None:
        parts = [(laid.index, laid.shape, laid.start) for laid in stage.laid]
        table = program.kept[key] = _table(parts, local.shape, None, local.itemsize)
    _move_runs(local, into, table, into.nbytes)


def _pack(laid: Sequence[Laid], local: Array, into: Array) -> None:
    for part in laid:
        into[part.start : part.stop].reshape(part.shape)[...] = local[part.index]


# ---- by messages


def _send(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    of = max(1, -(-program.largest_bytes // SEND_FROM_BYTES))
    nothing = comm.xp.empty(0, _dtype_of(program, local, out))
    for number in range(of):
        rounds = program.round(number, of)
        gives, takes = rounds.gives, rounds.takes
        send, displs = nothing, gives.displs
        if local is not None and rounds.stage.elems:
            direct = _direct(program, of)[0] if local.flags.c_contiguous else None
            if direct is not None:
                send, displs = local.reshape(-1), direct
            else:
                send = comm.xp.empty(rounds.stage.elems, local.dtype)
                _lay_out(program, number, of, local, send)
        into = _direct(program, of)[1]
        if into is not None and out is not None:
            comm.all_to_all_v(send, gives.counts, displs, out.reshape(-1), takes.counts, into)
            _fill(program, number, of, local, out, None, comm)
            continue
        received = nothing if out is None or not takes.elems else comm.xp.empty(takes.elems, out.dtype)
        comm.all_to_all_v(send, gives.counts, displs, received, takes.counts, takes.displs)
        if out is not None:
            _fill(program, number, of, local, out, received, comm)


def _direct(program: Program, of: int) -> tuple[list[int] | None, list[int] | None]:
    """Return where in its flat array a rank's messages begin, and where in its flat result those to it; kept.

    None where not every message is a single run in memory, so that something must be packed or unpacked.
    """
    found = program.kept.get("direct")
    if found is None:
        only = program.round(0, 1)
        gives = takes = None
        if program.rank in program.exchange.src.mesh:
            shape = program.exchange.src.local_shape(program.rank)
            runs = {part.start: _run_of(part.index, shape) for part in only.stage.laid}
            if None not in runs.values():
                gives = [runs.get(at) or 0 for at in only.gives.displs]
        if program.shape is not None and program.op is None:
            into = {c.sources[0].rank: _run_of(c.index, program.shape) for c in only.chunks}
            if None not in into.values():
                takes = [into.get(rank) or 0 for rank in range(program.size)]
        found = program.kept["direct"] = gives, takes
    return (None, None) if of > 1 else found


def _run_of(index: Index, shape: tuple[int, ...]) -> int | None:
    return single_run(tuple((s.start, s.stop) for s in index), shape)


def _dtype_of(program: Program, local: Array | None, out: Array | None) -> Any:
    """Return the dtype that buffers have in memory, also where this rank has none."""
    if local is not None:
        return local.dtype
    return program.dtype if out is None else out.dtype


# ---- what arrives


def _own(rank: int) -> tuple[Array, bool]:
    raise AssertionError("nothing moves, so every source is this rank itself")


def _fill(
    program: Program, number: int, of: int, local: Array | None, out: Array | None, given: Any,
    comm: Communicator,
) -> None:  # fmt: skip
    """Put the boxes of a round in their places.

    Args:
        program: this rank's side.
        number: of the round.
        of: how many rounds there are.
        local: this rank's array.
        out: its result.
        given: gives for a rank its array, or what it has laid out, and which of them it is; or what was received, or
            None if it is in its place already.
        comm: what folds.
    """
    if out is None or program.fill_op is not None:
        return
    me, size = program.rank, program.size
    chunks = program.round(number, of).chunks
    if program.op is None and is_gpu(out):
        if local is not None:
            _fill_at_once(program, (number, of), "own", local, out)
        if given is not None and not callable(given):
            _fill_at_once(program, (number, of), "got", given, out)
        return
    if program.op is None:
        # Each begins with another, so that no memory is asked by all at once.
        chunks = tuple(sorted(chunks, key=lambda chunk: (chunk.sources[0].rank - me) % size))
    for place, chunk in enumerate(chunks):
        terms: list[tuple[Any, Any, bool]] = []
        for source in chunk.sources:
            if source.rank == me:
                terms.append((local, source.index, True))
            elif given is None:
                continue
            elif callable(given):
                array, whole = given(source.rank)
                terms.append((array, source.index, True) if whole else (array, source.start, False))
            else:
                terms.append((given, source.got, False))
        if program.op is not None:
            arrays = [_part(array, at, chunk) for array, at, _ in terms]
            comm._fold(arrays, out[(*chunk.index, ...)], program.op, program.divisor)
        elif terms:
            array, at, whole = terms[0]
            _copy(program, (number, of, place, whole), array, at, out, chunk)


def _fill_at_once(program: Program, numbers: tuple[int, int], which: str, array: Array, out: Array) -> None:
    """Put all boxes of a round in their places by one launch: those of this rank's array, or those that it got."""
    own = which == "own"
    chunks = [c for c in program.round(*numbers).chunks if (c.sources[0].rank == program.rank) == own]
    if not chunks:
        return
    if not array.flags.c_contiguous:
        for chunk in chunks:
            out[chunk.index] = array[chunk.sources[0].index]
        return
    key = (which, *numbers)
    table = program.kept.get(key)
    if table is None:
        parts = [(c.index, c.shape, c.sources[0].index if own else c.sources[0].got) for c in chunks]
        shape = array.shape if own else None
        table = program.kept[key] = _table(parts, out.shape, shape, out.itemsize, True)
    _move_runs(array, out, table, out.nbytes)


def _part(array: Array, at: Index | int, chunk: Chunk) -> Array:
    if isinstance(at, int):
        return array[at : at + chunk.elems].reshape(chunk.shape)
    return array[(*at, ...)]


def _copy(program: Program, key: Any, array: Array, at: Index | int, out: Array, chunk: Chunk) -> None:
    small = chunk.elems * out.itemsize < _KERNEL_FROM_BYTES
    if small or not array.flags.c_contiguous:
        out[chunk.index] = _part(array, at, chunk)
        return
    table = program.kept.get(key)
    if table is None:
        shape = None if isinstance(at, int) else array.shape
        table = program.kept[key] = _table(
            [(chunk.index, chunk.shape, at)], out.shape, shape, out.itemsize, True
        )
    _move_runs(array, out, table, out.nbytes)


def _move_runs(src: Array, dst: Array, table: RunTable, result_bytes: int) -> None:
    if is_gpu(dst):
        engine_for(src, dst).copy(src, dst, table)
    elif table.run_limits_bytes[0] >= _ROW_BYTES:
        host_engine().copy_rows(src, dst, table, result_bytes >= _STREAMED_FROM_BYTES)
    else:
        host_engine().copy(src, dst, table)


def _table(
    parts: Sequence[tuple[Index, tuple[int, ...], Any]], shape: tuple[int, ...], other: tuple[int, ...] | None,
    item: int, reading: bool = False,
) -> RunTable:  # fmt: skip
    """Return the runs between boxes of an array and boxes of another, or a packed buffer.

    Args:
        parts: slices of each box in the array, its shape, and its slices or its first element in the other.
        shape: of the array, C-contiguous.
        other: of the other array; None for a packed buffer.
        item: bytes of an element.
        reading: whether the other is what is read.
    """
    extents = np.array([part[1] for part in parts], np.int64).reshape(len(parts), len(shape))
    steps = _strides(shape, item)
    here = np.array(
        [sum(s.start * n for s, n in zip(index, steps, strict=True)) for index, _, _ in parts], np.int64
    )
    here_steps = np.array([steps] * len(parts), np.int64).reshape(len(parts), len(shape))
    if other is None:
        there = np.array([at * item for _, _, at in parts], np.int64)
        there_steps = np.array([_strides(part[1], item) for part in parts], np.int64).reshape(
            len(parts), len(shape)
        )
    else:
        far = _strides(other, item)
        there = np.array(
            [sum(s.start * n for s, n in zip(at, far, strict=True)) for _, _, at in parts], np.int64
        )
        there_steps = np.array([far] * len(parts), np.int64).reshape(len(parts), len(shape))
    if reading:
        return lower(extents, there, here, there_steps, here_steps, item, item)
    return lower(extents, here, there, here_steps, there_steps, item, item)


def _strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    found = [item] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        found[dim] = found[dim + 1] * shape[dim + 1]
    return tuple(found)
