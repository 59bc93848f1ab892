"""Runs a redistribution plan: agrees on it, then walks its exchanges of boxes.

Where ranks can read each other's memory, a box is copied once, from source to destination. A source that peers cannot
read is staged for them slab by slab, and boxes for other ranks are packed and sent, so that only a few slabs of bounded
size are needed beside source and result. Terms are folded as they arrive.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words, kind_of
from lowshard.box import single_run
from lowshard.comm.agreement import collective_step, control_of, share
from lowshard.comm.communicator import Communicator
from lowshard.comm.reach import Published
from lowshard.comm.reduction import identity
from lowshard.comm.work import Stream
from lowshard.content_hash import text_digest
from lowshard.cost import ClusterProfile
from lowshard.errors import BufferMismatchError, DTypeError, LowshardError, MeshError, PlanError
from lowshard.foreign_array import READ_ONLY, like, view_in_call
from lowshard.kernels.buffer import allocate, is_gpu, require_results_apart, share_memory
from lowshard.layout import Layout
from lowshard.pool import BufferPool
from lowshard.redistribute_plan import RedistributePlan, plan_redistribute
from lowshard.transfer.mover import run_rounds
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
    StepProgram,
    form_of,
    programs,
)
from lowshard.transfer.spans import BoxCopy, Span, box_span, packed_span

Array = Any

_HOST = np.empty(0)

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


def execute(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None = None, *,
    pool: BufferPool | None = None, profile: bool = False, stream: Stream = None,
) -> Array | None:  # fmt: skip
    """Move a rank's local array as the plan says and return its part of the destination.

    Collective: all ranks of the communicator call this. Partial terms fold in tree order over their
    ranks, so the bits are the same on every transport.

    Beside local and result nothing is held but what one step leaves for the next, no larger than the two, and one
    slab of bounded size. Among ranks of a node arrays of `comm.empty` are read where they lie, and so are others where
    their boxes are long runs and the system allows it; else they take one more pass.

    Every rank raises the same error, whichever rank is at fault.

    Args:
        plan: from `plan_redistribute`, equal on every rank (its digest is compared first).
        local: this rank's part of `plan.src`, of shape `plan.src.local_shape(rank)`; None on a rank
            outside the source mesh.
        comm: a communicator whose ranks are those of the meshes; it may have more ranks, which pass
            None.
        out: where to put the result: C-contiguous, of shape `plan.dst.local_shape(rank)`, not
            overlapping local. By default a new array of the library that local is of; where no rank needs a byte from
            another, a read-only view of local may be returned instead (torch and CuPy, which have none, get a copy).
        pool: where a new result comes from.
        profile: take the time of each step, on the slowest rank, for `plan.explain()`; ranks synchronise between steps.
        stream: on GPUs, where the work is put, as for the calls of a `Communicator`; by default the current one.

    Returns:
        This rank's part of `plan.dst`, or None on a rank outside the destination mesh.

    Raises:
        PlanError: plan is not a RedistributePlan, or profile is neither True nor False.
        MeshError: the communicator has fewer ranks than the meshes name.
        BufferMismatchError: local or out has another shape, dtype or memory order than required.
        MismatchError: the ranks hold different plans, or not all profile.
        CommError: comm is not a communicator, or a stream is given and comm moves host memory.
        StreamError: stream is not a stream, or belongs to another device.
        DTypeError: the plan folds what has no mean (bools), or float8 on a GPU.
    """
    control = control_of(comm)
    times: list[float] | None = [] if profile is True else None
    with comm.meeting("execute", stream) as wrong:
        with collective_step(comm, "execute", said=partial(_words, plan), once=True) as step:
            step.error = wrong
            mine, into = _seen(local, out)
            _check_arguments(plan, mine, comm, into, pool, profile)
            step.digest = plan.digest_bytes[::-1] if profile else plan.digest_bytes
        result = _given_back(_walk(plan, mine, into, comm, pool, times), local, out)
    if times is None:
        return result
    rows = share(control, np.array(times, np.float64)) if times else []
    plan.note_measured([float(max(row[i] for row in rows)) for i in range(len(times))])
    return result


def execute_all(
    plans: Mapping[str, RedistributePlan],
    local: Mapping[str, Array | None],
    comm: Communicator,
    out: Mapping[str, Array] | None = None,
    *,
    pool: BufferPool | None = None,
    stream: Stream = None,
) -> dict[str, Array | None]:
    """Move many arrays, each by its plan, after one agreement over all of them.

    Collective: all ranks of the communicator call this, with the same names in the same order. As
    `execute` for each name; an array without an entry in `out` gets a new one. Nothing has moved when it raises.

    Raises:
        BufferMismatchError: `local` or `out` does not fit the names of `plans`, or an array of `out` shares memory with
            another, or with one of `local`.
        LowshardError: as `execute`.
    """
    control_of(comm)
    given: Mapping[str, Array] = {} if out is None else out
    seen: dict[str, tuple[Array | None, Array | None]] = {}
    with comm.meeting("execute_all", stream) as wrong:
        with collective_step(comm, "execute_all", once=True) as step:
            step.error = wrong
            tables: dict[str, object] = {"plans": plans, "local": local, "out": given}
            for what, table in tables.items():
                if not isinstance(table, Mapping):
                    raise BufferMismatchError(f"{what} is a mapping by name, got {brief(table)}")
            for name, plan in plans.items():
                try:
                    seen[name] = _seen(local.get(name), given.get(name))
                    _check_arguments(plan, seen[name][0], comm, seen[name][1], pool)
                except LowshardError as error:
                    raise type(error)(f"{name!r}: {error}") from error.__cause__
            strange = (local.keys() | given.keys()) - plans.keys()
            if strange:
                raise BufferMismatchError(
                    f"arrays were given for {sorted(map(str, strange))}, for which there is no plan"
                )
            outs, sources = ([(n, a[i]) for n, a in seen.items() if a[i] is not None] for i in (1, 0))
            # All are read and written one after the other.
            require_results_apart(outs, comm.rank, lambda *_: False, sources)
            step.digest = text_digest("".join(f"{name}={plan.digest()};" for name, plan in plans.items()))
            step.said = lambda: in_words({n: _words(plan) for n, plan in plans.items()})
        return {
            name: _given_back(_walk(plan, *seen[name], comm, pool), local.get(name), given.get(name))
            for name, plan in plans.items()
        }


def redistribute(
    local: Array | None, src: Layout, dst: Layout, comm: Communicator, out: Array | None = None, *,
    cost: ClusterProfile | None = None, pool: BufferPool | None = None, stream: Stream = None,
) -> Array | None:  # fmt: skip
    """Move a rank's local array from layout `src` to layout `dst`: plan, then execute.

    Collective: all ranks of the communicator call this. Where its ranks are on several nodes, copies of the own node
    are read first. Arguments, result and errors: as for `execute`, and those of `plan_redistribute`, on every rank.
    """
    control_of(comm)
    with comm.meeting("redistribute", stream) as wrong:
        with collective_step(comm, "redistribute", once=True) as step:
            step.error = wrong
            mine, into = _seen(local, out)
            plan = plan_redistribute(src, dst, cost, comm.node_size)
            _check_arguments(plan, mine, comm, into, pool)
            step.digest, step.said = plan.digest_bytes, partial(_words, plan)
        return _given_back(_walk(plan, mine, into, comm, pool), local, out)


def _words(plan: RedistributePlan) -> str:
    """Return a plan's description, for a message about ranks with different plans."""
    return f"{plan.src} to {plan.dst} on mesh {plan.dst.mesh}"


def _seen(local: object, out: object) -> tuple[Array | None, Array | None]:
    """Return arrays of any library as NumPy's or CuPy's."""
    is_numpy = local is None or (type(local) is np.ndarray and local.dtype.isnative)
    if is_numpy and (out is None or (type(out) is np.ndarray and out.dtype.isnative)):
        return local, out
    return view_in_call(local, "local"), view_in_call(out, "out", writes=True)


def _given_back(result: Array | None, local: object, out: Any) -> Any:
    """Return the result as the given array, or as one of the input's library."""
    return out if result is None or out is not None else like(result, local, apart=True)


def _walk(
    plan: RedistributePlan, local: Array | None, out: Array | None, comm: Communicator,
    pool: BufferPool | None, times: list[float] | None = None,
) -> Array | None:  # fmt: skip
    """Run the steps of a plan that all ranks have agreed on."""
    if not plan.steps:
        return _same(local, out)
    with comm.turn("execute"):
        return _steps(plan, local, comm, out, pool, times)


def _steps(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None,
    pool: BufferPool | None, times: list[float] | None,
) -> Array | None:  # fmt: skip
    steps = programs(plan, comm.rank, comm.reach.homes)
    last = steps[-1].parts[-1]
    for step in steps:
        if times is not None:
            control_of(comm).barrier()
            begin_s = time.perf_counter()
        if step.whole is not None and comm.reach.whole and _reads_peers(step.whole):
            part = step.parts[-1]
            result = out if part is last and out is not None else _result(part, comm, part is last, pool)
            _move(step.whole, local, result, comm)
            local = result
        elif step.native:
            part = step.parts[-1]
            result = out if part is last and out is not None else _result(part, comm, part is last, pool)
            _collective(step, comm.xp.ascontiguousarray(local), result, comm)
            local = result
        else:
            for part in step.parts:
                local = _run(part, local, comm, out if part is last else None, part is last, pool)
        if times is not None:
            if comm.xp is not np:
                comm.xp.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - begin_s)
    return local


def _collective(step: StepProgram, local: Array | None, out: Array | None, comm: Communicator) -> None:
    """Run a step with the communicator's own collective."""
    first = step.parts[0]
    op = "avg" if first.divisor != 1 else first.op
    if step.native == "all_gather":
        comm.all_gather(local, out)
    elif step.native == "all_gather_v":
        comm.all_gather_v(local, out, *step.counts)
    elif step.native == "reduce_scatter":
        comm.reduce_scatter(local, out, op, "tree")  # type: ignore[arg-type]
    else:
        comm.all_reduce(local, out, op, "tree")  # type: ignore[arg-type]


def _run(
    program: Program, local: Array | None, comm: Communicator, out: Array | None, is_last: bool,
    pool: BufferPool | None,
) -> Array | None:  # fmt: skip
    """Run one exchange and return this rank's result."""
    if out is None and local is not None and program.view is not None:
        view = local[(*program.view, ...)]  # an array even when 0-d
        return read_only_view(view) if is_last else view
    result = out if out is not None else _result(program, comm, is_last, pool)
    _move(program, local, result, comm)
    return result


def _result(program: Program, comm: Communicator, is_last: bool, pool: BufferPool | None) -> Array | None:
    """Return a new array for a result; an intermediate one is allocated where peers can read it."""
    if program.shape is None:
        return None
    dtype = program.dtype if comm.xp is np else dtypes.get(program.dtype).in_memory(comm.xp)
    if comm.xp is np and not is_last:
        return comm.empty(program.shape, dtype)
    if is_last and pool is not None:
        return pool.empty(program.shape, dtype)
    if comm.xp is np:
        return allocate(program.shape, dtype, _HOST)
    return comm.xp.empty(program.shape, dtype)


def _same(local: Array | None, out: Array | None) -> Array | None:
    if local is None or out is None:
        return None if local is None else read_only_view(local[...])
    out[...] = local
    return out


def read_only_view(view: Array) -> Array:
    """Return a view that cannot be written; on a GPU a copy."""
    if not isinstance(view, np.ndarray):
        return view.copy()  # CuPy has no read-only arrays
    view = view.view()
    view.flags.writeable = False
    return view


# ---- one exchange


def _reads_peers(program: Program) -> bool:
    """Return whether an exchange reads peers' memory where it can; the same on all ranks."""
    return program.shares_nodes and program.largest_bytes >= READ_FROM_BYTES


def _move(program: Program, local: Array | None, out: Array | None, comm: Communicator) -> None:
    """Fill a rank's result from all ranks' arrays."""
    if not program.moves:
        _Run(program, local, out, comm, 1, SENT).take(0)
    elif _reads_peers(program):
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
        _pack_stage(program, program.round(0, of, way).stage, (0, of, way), local, stage)
    published = reach.publish([stage if note == _STAGED else local if note else None], note + _NOTES * half)
    if not program.leaves_nodes and not any(said % _NOTES == _STAGED for said in published.notes.values()):
        of = 1
    job = _Run(program, local, out, comm, of, way)
    job.published = published

    def fill(number: int) -> None:
        if number and stage is not None and local is not None:
            key = (number, of, way)
            _pack_stage(program, program.round(*key).stage, key, local, stage[(number & 1) * half :])

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


def _pack_stage(program: Program, stage: Stage, key: tuple[int, int, str], local: Array, into: Array) -> None:
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
                _pack_stage(program, stage, (number, of, SENT), local, send)
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


# ---- checks


def _check_arguments(
    plan: object,
    local: Array | None,
    comm: Communicator,
    out: Array | None,
    pool: object,
    profile: object = False,
) -> None:
    """Raise what is wrong with this rank's arguments."""
    if not isinstance(plan, RedistributePlan):
        raise PlanError(f"plan is a RedistributePlan, from plan_redistribute, got {type(plan).__name__}")
    if pool is not None and not isinstance(pool, BufferPool):
        raise BufferMismatchError(f"pool is a BufferPool or None, got {brief(pool)}")
    if not isinstance(profile, bool):
        raise PlanError(f"profile is True or False, got {brief(profile)}")
    form = form_of(plan, comm.rank)
    if (
        comm.xp is np
        and form.dtype != bool
        and comm.size >= plan.world_size
        and (_is_array(local, form.local, form.dtype) if form.local is not None else local is None)
        and (
            out is None
            or (
                form.out is not None
                and _is_array(out, form.out, form.dtype)
                and out.flags.c_contiguous
                and out.flags.writeable
                and not (local is not None and np.may_share_memory(local, out))
            )
        )
    ):
        return
    if comm.size < plan.world_size:
        raise MeshError(
            f"meshes {plan.src.mesh} and {plan.dst.mesh} name ranks up to {plan.world_size - 1}, but the "
            f"communicator has {comm.size}; start {plan.world_size} ranks, as `lowshard run "
            f"-n {plan.world_size}` does, or make a smaller mesh"
        )
    if comm.xp is not np and any(step.folded for step in plan.steps) and dtypes.get(plan.src.dtype).is_float8:
        raise DTypeError(f"partial {plan.src.dtype} terms cannot be folded on a GPU; cast to float32 first")
    if form.dtype == bool and any(step.src.partials[a] == "avg" for step in plan.steps for a in step.folded):
        raise DTypeError(
            f"the terms of {plan.src} have no mean: bools are folded by sum (or), min, max or prod"
        )
    for array, layout, name in ((local, plan.src, "local"), (out, plan.dst, "out")):
        if array is None and name == "out":
            continue
        wrong = _array_error(array, layout, name, comm)
        if wrong is not None:
            raise BufferMismatchError(wrong)
    if local is None or out is None:
        return
    if comm.xp is np and not out.flags.writeable:
        raise BufferMismatchError(f"out {READ_ONLY}")
    if share_memory(local, out):
        raise BufferMismatchError("out overlaps local; give it memory of its own, or pass out=None")


def _is_array(array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.shape == shape and array.dtype == dtype


def _array_error(array: Array | None, layout: Layout, name: str, comm: Communicator) -> str | None:
    if comm.rank not in layout.mesh:
        if array is None:
            return None
        return (
            f"rank {comm.rank} is not in mesh {layout.mesh} of {layout}, so its {name} is None; "
            f"got an array of shape {getattr(array, 'shape', '?')}"
        )
    shape, dtype = layout.local_shape(comm.rank), dtypes.get(layout.numpy_dtype).in_memory(comm.xp)
    if not isinstance(array, comm.xp.ndarray):
        return f"{name} is a {comm.xp.__name__} array of {dtype} and shape {shape}, got {kind_of(array)}"
    if tuple(array.shape) != shape or array.dtype != dtype:
        return (
            f"{name} of rank {comm.rank} in {layout} has shape {shape} and dtype {dtype}, "
            f"got shape {tuple(array.shape)} and dtype {array.dtype}"
        )
    if name == "out" and not array.flags.c_contiguous:
        return (
            f"out is C-contiguous, got strides {array.strides} for shape {shape}; pass a contiguous array and copy the "
            "result, or no out"
        )
    return None
