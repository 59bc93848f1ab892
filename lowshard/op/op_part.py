"""A rank's part of an op: its boxes and groups, the kernels, and the exchange of runs along a cut dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, instance, whole
from lowshard.box import Box, Interval, shape_of
from lowshard.comm.communicator import Communicator
from lowshard.errors import LayoutError, LowshardError, MeshError, PlanError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Sharded
from lowshard.solver.action import Action
from lowshard.solver.assignment import How
from lowshard.solver.table.op_argument import PerShard
from lowshard.solver.table.op_rule import NOT_TAKEN

Array = Any

_GROUPS_KEPT = 64
"""Groups that are kept for a communicator: each has slots in shared memory."""
_GROUPS: WeakKeyDictionary[Communicator, dict[Any, Communicator | None]] = WeakKeyDictionary()


class Part:
    """One rank's view of an action: kernels read boxes and arguments here, and reduce over groups of ranks.

    Args:
        action: the action, equal on every rank.
        rank: whose part it is.
        comm: the communicator, whose ranks are those of the mesh; None when no row needs one.
        xp: numpy or cupy.
    """

    def __init__(self, action: Action, rank: int, comm: Communicator | None, xp: Any = np) -> None:
        instance(action, Action, "a part is of an Action", PlanError)
        rank = whole(rank, "a rank is an integer", MeshError)
        self.action, self.rank, self.comm, self.xp = action, rank, comm, xp
        self.args: dict[str, Any] = {
            name: x.values[action.mesh.ranks.index(rank)] if isinstance(x, PerShard) else x
            for name, x in action.args
        }

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.action.op

    def box(self, operand: int = 0) -> Box:
        """Return the box of an operand that this rank holds when the op runs."""
        return self.action.inputs[operand].box(self.rank)

    def out_box(self, result: int = 0) -> Box:
        """Return the box of a result that this rank makes."""
        return self.action.outputs[result].box(self.rank)

    def out_shape(self, result: int = 0) -> tuple[int, ...]:
        """Return the local shape of a result."""
        return shape_of(self.out_box(result))

    def shape(self, operand: int = 0) -> tuple[int, ...]:
        """Return the global shape of an operand."""
        return self.action.sources[operand].shape

    def dim(self, name: str = "axis", default: int = -1, operand: int = 0) -> int:
        """Return an argument that is a dim, counted from 0."""
        return int(self.args.get(name, default)) % len(self.shape(operand))

    def axes(self, how: How, operand: int, dim: int) -> tuple[int, ...]:
        """Return the mesh axes, of more than one rank, whose row runs like this and cuts a dim of an operand."""
        return tuple(
            a
            for a, (row, size) in enumerate(zip(self.action.rows, self.action.mesh.shape, strict=True))
            if size > 1 and row.how == how and _cuts(row.needed_inputs[operand], dim)
        )

    # ---- collectives inside the op

    def group(self, axes: Sequence[int]) -> Group:
        """Return this rank's group along some mesh axes."""
        return Group(self, tuple(axes))

    def reduce(self, value: Array, op: str, axes: Sequence[int]) -> Array:
        """Return `value` reduced over the group along some mesh axes, in tree order; itself when there are none.

        Collective: all ranks of the mesh call this.
        """
        if not axes:
            return value
        send = self.xp.ascontiguousarray(value)
        out = self.xp.empty_like(send)
        self.group(axes).comm.all_reduce(send, out, op=op, order="tree")  # type: ignore[arg-type]
        return out


class Group:
    """The ranks that differ from one rank only along some mesh axes."""

    def __init__(self, part: Part, axes: tuple[int, ...]) -> None:
        self._part, self.axes = part, axes
        mesh = part.action.mesh
        names = [mesh.axis_names[a] for a in axes]
        self.ranks: tuple[int, ...] = next((g for g in mesh.groups(names) if part.rank in g), (part.rank,))

    @property
    def comm(self) -> Communicator:
        """The communicator of the group, in the order of `ranks`."""
        assert self._part.comm is not None, "a row that needs a communicator ran without one"
        found = subgroup(self._part.comm, self._part.action.mesh, self.axes)
        assert found is not None, "a rank outside the mesh computes nothing"
        return found

    @property
    def place(self) -> int:
        """This rank's place in `ranks`."""
        return self.ranks.index(self._part.rank)

    def intervals(self, layout: Layout, dim: int) -> list[Interval]:
        """Return what each of `ranks` holds of a dim."""
        return [layout.box(rank)[dim] for rank in self.ranks]

    def gather(self, value: Array) -> list[Array]:
        """Return everyone's value, all of one shape, in the order of `ranks`."""
        xp = self._part.xp
        send = xp.ascontiguousarray(value)
        out = xp.empty((len(self.ranks), *send.shape), send.dtype)
        self.comm.all_gather(send, out)
        return list(out)


def subgroup(comm: Communicator, mesh: DeviceMesh, axes: Sequence[int]) -> Communicator | None:
    """Return the communicator of a rank's group along some mesh axes, kept for the next time; None outside the mesh."""
    groups = mesh.groups([mesh.axis_names[a] for a in axes])
    if len(groups) == 1 and groups[0] == tuple(range(comm.size)):
        return comm
    kept = _GROUPS.setdefault(comm, {})
    key = (mesh.shape, tuple(mesh.ranks), tuple(axes))
    if key not in kept:
        if len(kept) >= _GROUPS_KEPT:  # the same on all ranks of `comm`
            oldest = kept.pop(next(iter(kept)))
            if oldest is not None:
                oldest.close()
        color = next((i for i, g in enumerate(groups) if comm.rank in g), None)
        kept[key] = comm.split(color, 0 if color is None else groups[color].index(comm.rank))
    return kept[key]


def _cuts(placement: object, dim: int) -> bool:
    return isinstance(placement, Sharded) and placement.dim == dim


Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}


def in_accumulator(x: Array) -> Array:
    """Return an array in the dtype that its elements are added up in; itself where that is its own."""
    return x.astype(dtypes.get(x.dtype).accumulator.numpy, copy=False)


def converted(xp: Any, x: Array, dtype: dtypes.DType) -> Array:
    """Return an array in a dtype, row-major; itself where it is so."""
    came = dtypes.get(x.dtype)
    # By way of int64: of what a narrower one does not hold NumPy's vector code makes other values than its scalar code.
    if came.kind == "float" and dtype.kind in ("int", "uint") and dtype.bits < 64:
        x = x.astype(np.int64)
    return xp.asarray(x, dtype.in_memory(xp), order="C")


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register `function(part, *local arrays) -> array or tuple of arrays` for ops."""

    def register(function: Kernel) -> Kernel:
        for name in names:
            KERNELS[name] = function
        return function

    return register


def find_kernel(op: str) -> Kernel:
    """Return an op's kernel, or raise LayoutError with the ops that have one."""
    if op not in KERNELS:
        raise LayoutError(
            f"op {op!r} has no kernel here: its rule can be picked from, but it runs in the caller's own code; "
            f"there are kernels for {', '.join(sorted(KERNELS))}"
        )
    return KERNELS[op]


def run_kernel(part: Part, *arrays: Array) -> tuple[Array, ...]:
    """Return the local results of an op, row-major, perhaps views of operands.

    NaN and infinities are results, about which NumPy does not warn here.

    Raises:
        LayoutError: the kernel does not take the arguments, or such operands.
    """
    try:
        with np.errstate(all="ignore"):
            found = find_kernel(part.op)(part, *arrays)
    except LowshardError:
        raise
    except NOT_TAKEN as error:
        came = ", ".join(map(str, part.action.sources))
        said = ", ".join(f"{name}={brief(value)}" for name, value in part.args.items())
        raise LayoutError(
            f"{part.op} does not take operands {came}{f' and {said}' if said else ''}: {error}"
        ) from error
    many = found if isinstance(found, tuple) else (found,)
    results = [part.xp.asarray(x) for x in many]  # NumPy's 0-d results are scalars
    outputs = part.action.outputs
    shapes = [layout.local_shape(part.rank) for layout in outputs]
    if [x.shape for x in results] != shapes:
        raise LayoutError(
            f"{part.op}: its rule gives results of shapes {shapes} on rank {part.rank}, its kernel "
            f"{[x.shape for x in results]}: the operands do not go together"
        )
    with np.errstate(all="ignore"):
        return tuple(
            converted(part.xp, x, dtypes.get(layout.dtype))
            for x, layout in zip(results, outputs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Run:
    """`length` indices of an operand's dim, from `source` on, that become those of the result from `target` on."""

    operand: int
    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Held:
    """An operand along the dim: the local array as [outer, local, inner], and what each rank of the group holds."""

    array: Array
    intervals: Sequence[Interval]


def exchange(
    part: Part, group: Group, held: Sequence[Held], runs: Sequence[Run], wanted: Sequence[Interval]
) -> Array:
    """Return this rank's `wanted` interval of what the `runs` of `held` operands make, as [outer, local, inner]."""
    xp, me = part.xp, group.place
    outer, _, inner = held[0].array.shape
    dtype = held[0].array.dtype
    low, high = wanted[me]
    result = xp.empty((outer, high - low, inner), dtype)
    everyone = range(len(group.ranks))
    moved = [[_pieces(held, runs, src, wanted[dst]) for dst in everyone] for src in everyone]
    for operand, source, target, length in moved[me][me]:
        result[:, target : target + length] = held[operand].array[:, source : source + length]
    if not any(moved[src][dst] for src in everyone for dst in everyone if src != dst):
        return result
    gives = [[] if dst == me else moved[me][dst] for dst in everyone]
    takes = [[] if src == me else moved[src][me] for src in everyone]
    wide = outer * inner
    send_counts = [sum(p[3] for p in pieces) * wide for pieces in gives]
    recv_counts = [sum(p[3] for p in pieces) * wide for pieces in takes]
    send, recv = xp.empty(sum(send_counts), dtype), xp.empty(sum(recv_counts), dtype)
    at = 0
    for pieces in gives:
        for operand, source, _, length in pieces:
            size = length * wide
            send[at : at + size].reshape(outer, length, inner)[...] = held[operand].array[
                :, source : source + length
            ]
            at += size
    group.comm.all_to_all_v(send, send_counts, _starts(send_counts), recv, recv_counts, _starts(recv_counts))
    at = 0
    for pieces in takes:
        for _, _, target, length in pieces:
            size = length * wide
            result[:, target : target + length] = recv[at : at + size].reshape(outer, length, inner)
            at += size
    return result


def along(array: Array, dim: int, dims: int = 1) -> Array:
    """Return an array as [outer, dim, inner]; `dims` dims from `dim` on count as one."""
    shape = array.shape
    return array.reshape(prod(shape[:dim]), prod(shape[dim : dim + dims]), prod(shape[dim + dims :]))


def _pieces(
    held: Sequence[Held], runs: Sequence[Run], src: int, wanted: Interval
) -> list[tuple[int, int, int, int]]:
    """Return what rank `src` of the group has of the wanted interval: operand, local source, local target, length."""
    found = []
    for run in runs:
        have = held[run.operand].intervals[src]
        shift = run.target - run.source
        start = max(run.target, wanted[0], have[0] + shift)
        stop = min(run.target + run.length, wanted[1], have[1] + shift)
        if start < stop:
            found.append((run.operand, start - shift - have[0], start - wanted[0], stop - start))
    return found


def _starts(counts: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count
    return starts
