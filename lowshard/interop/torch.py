"""Layouts of torch's DTensors, and DTensors of layouts.

A DTensor splits by the ceiling rule, so its layout says `Sharded(dim, split="ceil")`. Several mesh dims that shard one
tensor dim nest in mesh order; another order is written with `_StridedShard(dim, split_factor)`, whose factor is the
number of parts that later mesh dims have made already. That stands for the other order only where the parts are equally
long: then, and only then, each rank holds one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from lowshard.argument import brief, instance
from lowshard.box import Interval, split_interval, strides_of
from lowshard.errors import BufferMismatchError, DependencyError, MeshError, ShardingError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import ReduceOp

__all__ = ["MeshDims", "dtensor", "layout", "placements"]


def __dir__() -> list[str]:
    return sorted(__all__)


Tensor = Any  # torch may not be there
Placed = Any  # a torch placement

_OPS: dict[ReduceOp, str] = {"sum": "sum", "avg": "avg", "min": "min", "max": "max", "prod": "product"}
"""Reductions, by our names and torch's."""


class MeshDims(NamedTuple):
    """Arguments of `torch.distributed.device_mesh.init_device_mesh` beside a device type."""

    names: tuple[str, ...]
    """`mesh_dim_names`."""
    sizes: tuple[int, ...]
    """`mesh_shape`."""


def layout(dtensor: Tensor) -> Layout:
    """Return the layout of a DTensor: its boxes are what the ranks of its mesh hold.

    Mesh dims keep their names; where the mesh has none they are called dim0, dim1, ... Ranks are torch's global ranks.

    Raises:
        ShardingError: no DTensor, or one that no layout says: a placement of another kind, a `Partial` of another op,
            a `_StridedShard` that gives a rank more than one box.
        DTypeError: a dtype that lowshard does not carry (complex, quantised).
        DependencyError: torch is not installed.
    """
    tensor = _tensor_module()
    if not isinstance(dtensor, tensor.DTensor):
        raise ShardingError(f"layout takes a DTensor, got {brief(dtensor)}")
    mesh = _mesh_of(dtensor.device_mesh)
    shape, placed = tuple(dtensor.shape), tuple(dtensor.placements)
    sharding_axes: list[list[int]] = [[] for _ in shape]
    factors = [1] * mesh.ndim
    partial: dict[str, ReduceOp] = {}
    ops = {theirs: ours for ours, theirs in _OPS.items()}
    for axis, placement in enumerate(placed):
        if _is_strided(placement) or type(placement) is tensor.Shard:
            if placement.dim not in range(len(shape)):
                raise ShardingError(
                    f"{placement!r} on mesh dim {mesh.axis_names[axis]!r} shards dim {placement.dim} of a DTensor of "
                    f"shape {list(shape)}; its dims are 0 to {len(shape) - 1}"
                )
            factors[axis] = int(getattr(placement, "split_factor", 1))
            sharding_axes[placement.dim].append(axis)
        elif type(placement) is tensor.Partial and placement.reduce_op in ops:
            partial[mesh.axis_names[axis]] = ops[placement.reduce_op]
        elif type(placement) is not tensor.Replicate:
            raise ShardingError(
                f"a layout has Replicate, Shard, _StridedShard and Partial of {', '.join(ops)}; the DTensor has "
                f"{placement!r} on mesh dim {mesh.axis_names[axis]!r}. Write dtensor.redistribute(placements=...) first"
            )
    stored = getattr(dtensor._spec, "shard_order", None)  # an order that the placements do not show
    if stored is not None and not any(map(_is_strided, placed)):
        for entry in stored:
            sharding_axes[entry.tensor_dim] = list(entry.mesh_dims)
    else:
        sharding_axes = [_order(axes, factors, mesh, placed) for axes in sharding_axes]
    spec = [tuple(mesh.axis_names[a] for a in axes) or None for axes in sharding_axes]
    made = Layout.from_spec(mesh, shape, _name_of(dtensor.dtype), spec, "ceil", partial=partial)
    for dim, axes in enumerate(made.sharding_axes):
        # Where torch keeps the order elsewhere it has sharded in that order, and nothing is strided.
        _compare(made, dim, [factors[a] for a in sorted(axes)] if any(factors[a] > 1 for a in axes) else None)
    return made


def placements(layout: Layout) -> tuple[MeshDims, tuple[Placed, ...]]:
    """Return how a DTensor says a layout: names and sizes of its mesh dims, and a placement for each.

    Axes of size 1 that shard one dim with others come back in mesh order. The mesh's ranks are `layout.mesh.ranks`.

    Raises:
        ShardingError: what a DTensor cannot express: an uneven split that is not torch\'s (write `split="ceil"`), or
            one in another order than the mesh's, ops of two kinds.
        DependencyError: torch is not installed.
    """
    tensor = _tensor_module()
    from torch.distributed.tensor.placement_types import _StridedShard

    instance(layout, Layout, "placements takes a Layout", ShardingError)
    mesh = layout.mesh
    ops = {op for op in layout.partials if op is not None}
    if len(ops) > 1:
        raise ShardingError(
            f"the Partial placements of a DTensor have one op, the layout {layout} has {' and '.join(sorted(ops))}: "
            "reduce one of its axes first"
        )
    found = [tensor.Replicate() if op is None else tensor.Partial(_OPS[op]) for op in layout.partials]
    for dim, axes in enumerate(layout.sharding_axes):
        later = ((axis, [a for a in axes[:place] if a > axis]) for place, axis in enumerate(axes))
        factors = {axis: prod(mesh.shape[a] for a in those) for axis, those in later}
        _compare(layout, dim, [factors[a] for a in sorted(axes)])
        for axis, factor in factors.items():
            found[axis] = tensor.Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return MeshDims(mesh.axis_names, mesh.shape), tuple(found)


def dtensor(local: Tensor, layout: Layout, device_mesh: Any) -> Tensor:
    """Return the DTensor of a layout whose part on this rank is a tensor: nothing is sent, nothing is copied.

    Args:
        local: this rank's part, of shape `layout.local_shape(rank)`: a torch tensor, or a NumPy array.
        layout: of the whole.
        device_mesh: torch's DeviceMesh, with the layout's names, sizes and ranks.

    Raises:
        ShardingError: what a DTensor does not say, see `placements`.
        MeshError: the two meshes differ.
        BufferMismatchError: `local` has another shape or dtype than the layout gives this rank.
        DependencyError: torch is not installed.
    """
    tensor = _tensor_module()
    import torch

    placed = placements(layout)[1]
    mesh = _mesh_of(device_mesh)
    theirs, ours = ((m.axis_names, m.shape, tuple(m.ranks)) for m in (mesh, layout.mesh))
    if theirs != ours:
        raise MeshError(
            f"the layout lies on {layout.mesh} of ranks {brief(list(layout.mesh.ranks))}, the device mesh is {mesh} of "
            f"ranks {brief(list(mesh.ranks))}; both have the same names, sizes and ranks"
        )
    if isinstance(local, np.ndarray):
        local = _from_numpy(local)
    if not isinstance(local, torch.Tensor) or isinstance(local, tensor.DTensor):
        raise BufferMismatchError(f"dtensor takes a rank's part as a plain torch.Tensor, got {brief(local)}")
    rank = device_mesh.get_rank()
    if rank in layout.mesh:
        wanted, dtype = layout.local_shape(rank), _name_of(local.dtype)
        if tuple(local.shape) != wanted or dtype != layout.dtype:
            raise BufferMismatchError(
                f"rank {rank} holds {layout.dtype}{list(wanted)} of {layout}, got {dtype}{list(local.shape)}"
            )
    shape, stride = torch.Size(layout.shape), tuple(strides_of(layout.shape))
    return tensor.DTensor.from_local(local, device_mesh, placed, run_check=False, shape=shape, stride=stride)


# ---- what torch's placements hold


def _held(extent: int, sizes: Sequence[int], factors: Sequence[int], coord: Sequence[int]) -> list[Interval]:
    """Return the intervals of a dim that torch assigns to a coordinate, in the order of its local tensor."""
    runs: list[Interval] = [(0, extent)]
    for parts, factor, index in zip(sizes, factors, coord, strict=True):
        length = sum(stop - start for start, stop in runs)
        pieces = (split_interval((0, length), factor, piece, "ceil") for piece in range(factor))
        runs = [run for piece in pieces for run in _pick(runs, split_interval(piece, parts, index, "ceil"))]
    joined: list[Interval] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _pick(runs: Sequence[Interval], wanted: Interval) -> list[Interval]:
    """Return the elements at positions `wanted` of the elements that runs list, as runs."""
    found, at = [], 0
    for start, stop in runs:
        lo, hi = max(wanted[0] - at, 0), min(wanted[1] - at, stop - start)
        if lo < hi:
            found.append((start + lo, start + hi))
        at += stop - start
    return found


def _compare(layout: Layout, dim: int, factors: Sequence[int] | None) -> None:
    """Raise ShardingError unless torch's placements hold the same as the layout along a dim, on every rank."""
    order = layout.sharding_axes[dim]
    sizes, extent = layout.mesh.shape, layout.shape[dim]
    if factors is None or extent % prod(sizes[a] for a in order) == 0:
        return
    axes = sorted(order)
    names = ", ".join(f"{layout.mesh.axis_names[a]}={sizes[a]}" for a in order)
    for coord in product(*(range(sizes[a]) for a in axes)):
        theirs = _held(extent, [sizes[a] for a in axes], factors, coord)
        ours: Interval = (0, extent)
        place = dict(zip(axes, coord, strict=True))
        for axis in order:
            ours = split_interval(ours, sizes[axis], place[axis], layout.splits[axis])
        if theirs == [ours] or (not theirs and ours[0] == ours[1]):
            continue
        held = " and ".join(f"{lo}:{hi}" for lo, hi in theirs) or "nothing"
        where = ", ".join(f"{layout.mesh.axis_names[a]} {place[a]}" for a in axes)
        if max(factors) > 1:
            why = "torch writes an order other than the mesh's as _StridedShard, which holds one box a rank only where "
            why += "the split is even: make the extent a multiple, or nest in mesh order"
        else:
            why = "torch splits by the ceiling rule: write Sharded(dim, split='ceil')"
        raise ShardingError(
            f"dim {dim} of {extent} elements sharded over {names} (outer first): at {where} a DTensor holds {held}, "
            f"the layout {layout} {ours[0]}:{ours[1]}. {why}"
        )


def _order(axes: list[int], factors: Sequence[int], mesh: DeviceMesh, placed: Sequence[Placed]) -> list[int]:
    """Return the mesh dims that shard one dim, outer first."""
    order: list[int] = []
    for axis in reversed(axes):
        places = range(len(order) + 1)
        at = next((p for p in places if prod(mesh.shape[a] for a in order[:p]) == factors[axis]), None)
        if at is None or (factors[axis] == 1 and _is_strided(placed[axis])):
            raise ShardingError(
                f"{placed[axis]!r} on mesh dim {mesh.axis_names[axis]!r} of {mesh}, in {tuple(placed)}: a layout nests "
                "mesh dims, so a split factor is the number of parts that later mesh dims of the same tensor dim make, "
                "2 or more; another leaves a rank several boxes. Write dtensor.redistribute(placements=...) with Shard"
            )
        order.insert(at, axis)
    return order


# ---- torch's objects


def _tensor_module() -> Any:
    try:
        import torch.distributed.tensor as tensor
    except ImportError as error:
        raise DependencyError(f"lowshard.interop.torch needs torch ({error}): pip install torch") from error
    return tensor


def _is_strided(placement: Placed) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _mesh_of(device_mesh: Any) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if not isinstance(device_mesh, TorchMesh):
        raise MeshError(f"device_mesh is torch's DeviceMesh, got {brief(device_mesh)}")
    names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(device_mesh.ndim))
    ranks = device_mesh.mesh.flatten().tolist()
    return DeviceMesh(tuple(device_mesh.mesh.shape), tuple(names), ranks=ranks)


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _from_numpy(array: np.ndarray) -> Tensor:
    import torch

    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = array.view(np.uint8 if array.dtype.itemsize == 1 else np.int16)
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
