"""Runs a plan: packs what each rank gives, exchanges it, unpacks and folds what arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, relative_slices, shape_of
from lowshard.comm.agreement import agree
from lowshard.comm.protocol import Communicator
from lowshard.comm.reduction import fold, identity
from lowshard.errors import BufferMismatchError, DTypeError, MeshError
from lowshard.layout import Layout
from lowshard.placement import ReduceOp
from lowshard.redistribute import Exchange, Piece, RedistributePlan, plan_redistribute

Array = Any


def execute(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None = None
) -> Array | None:
    """Move a rank's local array as the plan says and return its part of the destination.

    Collective: all ranks of the communicator call this. Partial terms fold in tree order over their
    ranks, so the bits are the same on every transport.

    Args:
        plan: from `plan_redistribute`, equal on every rank (its digest is compared first).
        local: this rank's part of `plan.src`, of shape `plan.src.local_shape(rank)`; None on a rank
            outside the source mesh.
        comm: a communicator whose ranks are those of the meshes; it may have more ranks, which pass
            None.
        out: where to put the result: C-contiguous, of shape `plan.dst.local_shape(rank)`, not
            overlapping local. By default a new array; where no rank needs a byte from another, a
            read-only view of local may be returned instead.

    Returns:
        This rank's part of `plan.dst`, or None on a rank outside the destination mesh.

    Raises:
        MeshError: the communicator has fewer ranks than the meshes name.
        BufferMismatchError: local or out has another shape, dtype or memory order than required.
        MismatchError: the ranks hold different plans.
        (Each on every rank, whichever rank is at fault.)
    """
    error = _argument_error(plan, local, comm, out)
    agree(comm, bytes.fromhex(plan.digest()), error, "execute")
    if not plan.steps:
        return _same(local, out)
    programs = _programs(plan, comm.rank)
    for program in programs[:-1]:
        local = _run(program, local, comm, None)
    return _run(programs[-1], local, comm, out)


def redistribute(
    local: Array | None, src: Layout, dst: Layout, comm: Communicator, out: Array | None = None
) -> Array | None:
    """Move a rank's local array from layout `src` to layout `dst`: plan, then execute.

    Collective: all ranks of the communicator call this. Arguments, result and errors: as for
    `execute`, and those of `plan_redistribute`, on every rank.
    """
    return execute(plan_redistribute(src, dst), local, comm, out)


@dataclass(frozen=True)
class _Part:
    """One box of a packed buffer and where it lies in the local array."""

    peer: int
    start: int
    stop: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    term: int


@dataclass(frozen=True)
class _Kept:
    """One box that stays on its rank."""

    src_index: tuple[slice, ...]
    dst_index: tuple[slice, ...]
    term: int


@dataclass(frozen=True)
class _Program:
    """One rank's side of an exchange, worked out once."""

    shape: tuple[int, ...] | None
    """Local shape of the result; None outside the destination mesh."""
    dtype: np.dtype[Any]
    terms: int
    op: ReduceOp | None
    divisor: int
    fill_op: ReduceOp | None
    moves: bool
    """Whether any rank moves a byte (else nobody enters the collective)."""
    gives: tuple[_Part, ...]
    takes: tuple[_Part, ...]
    keeps: tuple[_Kept, ...]

    @property
    def is_a_view(self) -> bool:
        """True when the result is one box of what this rank already holds, and nobody moves a byte."""
        return not self.moves and self.op is None and self.fill_op is None and len(self.keeps) == 1


_PROGRAMS: dict[tuple[str, int], tuple[_Program, ...]] = {}
_PROGRAMS_KEPT = 16384


def _programs(plan: RedistributePlan, rank: int) -> tuple[_Program, ...]:
    key = (plan.digest(), rank)
    found = _PROGRAMS.get(key)
    if found is None:
        found = tuple(_program(step, rank) for step in plan.steps)
        if len(_PROGRAMS) >= _PROGRAMS_KEPT:
            _PROGRAMS.clear()
        _PROGRAMS[key] = found
    return found


def _program(step: Exchange, rank: int) -> _Program:
    src_box = step.src.box(rank) if rank in step.src.mesh else None
    dst_box = step.dst.box(rank) if rank in step.dst.mesh else None
    gives, takes, keeps = [], [], []
    sent = received = 0
    for piece in step.outgoing(rank):
        if piece.dst_rank != rank and src_box is not None:
            gives.append(_part(piece.dst_rank, sent, piece, src_box))
            sent += piece.elems
    # Packed parts arrive by source rank; within one source in the order its pieces are listed.
    for piece in sorted(step.incoming(rank), key=lambda p: p.src_rank):
        if dst_box is None:
            continue
        if piece.src_rank == rank and src_box is not None:
            keeps.append(
                _Kept(relative_slices(piece.box, src_box), relative_slices(piece.box, dst_box), piece.term)
            )
        else:
            takes.append(_part(piece.src_rank, received, piece, dst_box))
            received += piece.elems
    return _Program(
        shape=None if dst_box is None else shape_of(dst_box),
        dtype=step.dst.numpy_dtype,
        terms=step.terms,
        op=step.op,
        divisor=step.divisor,
        fill_op=None if dst_box is None else step.fill_op(rank),
        moves=step.moves_bytes(),
        gives=tuple(gives),
        takes=tuple(takes),
        keeps=tuple(keeps),
    )


def _part(peer: int, start: int, piece: Piece, box: Box) -> _Part:
    return _Part(
        peer, start, start + piece.elems, shape_of(piece.box), relative_slices(piece.box, box), piece.term
    )


def _run(program: _Program, local: Array | None, comm: Communicator, out: Array | None) -> Array | None:
    """Do one exchange and return this rank's result."""
    xp, dtype = comm.xp, _buffer_dtype(program.dtype, comm.xp)
    received = None
    if program.moves:
        packed = _pack(program.gives, local, xp, dtype)
        received = xp.empty(program.takes[-1].stop if program.takes else 0, dtype)
        send_counts, send_displs = _spans(program.gives, comm.size)
        recv_counts, recv_displs = _spans(program.takes, comm.size)
        comm.all_to_all_v(packed, send_counts, send_displs, received, recv_counts, recv_displs)
    if program.shape is None:
        return None
    if out is None and local is not None and program.is_a_view:
        return _read_only(local[(..., *program.keeps[0].src_index)])  # an array even when 0-d
    result = xp.empty(program.shape, dtype) if out is None else out
    if program.fill_op is not None:
        result[...] = identity(program.fill_op, program.dtype)
    elif program.op is None:
        _unpack(program, local, received, [result])
    else:
        terms = [xp.empty(program.shape, dtype) for _ in range(program.terms)]
        _unpack(program, local, received, terms)
        fold(terms, result, program.op, "tree", program.divisor)
    return result


def _pack(parts: Sequence[_Part], local: Array | None, xp: Any, dtype: np.dtype[Any]) -> Array:
    packed = xp.empty(parts[-1].stop if parts else 0, dtype)
    for part in parts:
        packed[part.start : part.stop].reshape(part.shape)[...] = local[part.index]  # type: ignore[index]
    return packed


def _unpack(program: _Program, local: Array | None, received: Array | None, terms: Sequence[Array]) -> None:
    for kept in program.keeps:
        terms[kept.term][kept.dst_index] = local[kept.src_index]  # type: ignore[index]  # a keeper has a local array
    for part in program.takes:
        terms[part.term][part.index] = received[part.start : part.stop].reshape(part.shape)  # type: ignore[index]


def _spans(parts: Sequence[_Part], size: int) -> tuple[list[int], list[int]]:
    counts, displs = [0] * size, [0] * size
    for part in parts:
        if counts[part.peer] == 0:
            displs[part.peer] = part.start
        counts[part.peer] += part.stop - part.start
    return counts, displs


def _same(local: Array | None, out: Array | None) -> Array | None:
    if local is None or out is None:
        return None if local is None else _read_only(local[...])
    out[...] = local
    return out


def _read_only(view: Array) -> Array:
    if not isinstance(view, np.ndarray):
        return view.copy()  # CuPy has no read-only arrays
    view = view.view()
    view.flags.writeable = False
    return view


def _buffer_dtype(dtype: np.dtype[Any], xp: Any) -> np.dtype[Any]:
    """Return the dtype a buffer has in memory: fp8 and e8m0 are uint8 on a GPU."""
    carried_raw = (
        xp is not np and dtypes.get(dtype).bits == 8 and dtypes.get(dtype).kind in ("float", "scale")
    )
    return np.dtype(np.uint8) if carried_raw else dtype


# ---- checks


def _argument_error(
    plan: RedistributePlan, local: Array | None, comm: Communicator, out: Array | None
) -> Exception | None:
    """Return what is wrong with this rank's arguments, or None: the caller compares over all ranks."""
    if comm.size < plan.world_size:
        return MeshError(
            f"meshes {plan.src.mesh} and {plan.dst.mesh} name ranks up to {plan.world_size - 1}, but the "
            f"communicator has {comm.size}; start {plan.world_size} ranks or make a smaller mesh"
        )
    if comm.xp is not np and any(step.op for step in plan.steps) and dtypes.get(plan.src.dtype).is_float8:
        return DTypeError(f"partial {plan.src.dtype} terms cannot be folded on a GPU; cast to float32 first")
    for array, layout, name in ((local, plan.src, "local"), (out, plan.dst, "out")):
        if array is None and name == "out":
            continue
        wrong = _array_error(array, layout, name, comm)
        if wrong is not None:
            return BufferMismatchError(wrong)
    if local is None or out is None or comm.xp is not np:
        return None
    if not out.flags.writeable:
        return BufferMismatchError("out is written to, but the array is read-only")
    if np.may_share_memory(local, out):
        return BufferMismatchError("out overlaps local; give it memory of its own, or pass out=None")
    return None


def _array_error(array: Array | None, layout: Layout, name: str, comm: Communicator) -> str | None:
    if comm.rank not in layout.mesh:
        if array is None:
            return None
        return (
            f"rank {comm.rank} is not in mesh {layout.mesh} of {layout}, so its {name} is None; "
            f"got an array of shape {getattr(array, 'shape', '?')}"
        )
    shape, dtype = layout.local_shape(comm.rank), _buffer_dtype(layout.numpy_dtype, comm.xp)
    if not isinstance(array, comm.xp.ndarray):
        return (
            f"{name} is a {comm.xp.__name__} array of {dtype} and shape {shape}, got {type(array).__name__}"
        )
    if tuple(array.shape) != shape or array.dtype != dtype:
        return (
            f"{name} of rank {comm.rank} in {layout} has shape {shape} and dtype {dtype}, "
            f"got shape {tuple(array.shape)} and dtype {array.dtype}"
        )
    if name == "out" and not array.flags.c_contiguous:
        return f"out is C-contiguous, got strides {array.strides} for shape {shape}"
    return None
