"""What one rank knows while it computes its part of an op: its boxes, its groups, and the collectives inside the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from lowshard.argument import instance, whole
from lowshard.box import Box, Interval, shape_of
from lowshard.comm.communicator import Communicator
from lowshard.errors import MeshError, PlanError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Sharded
from lowshard.solver.action import Action
from lowshard.solver.assignment import How

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
        self.args: dict[str, Any] = dict(action.args)

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
