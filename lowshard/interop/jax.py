"""Layouts of JAX's NamedShardings and PartitionSpecs, and those of layouts.

Both nest mesh axes that shard one dim as they are named, outer first. JAX shards only evenly. A rank is a device: its
index in `jax.devices(platform)`, which is the same on all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from lowshard.argument import brief, instance
from lowshard.errors import DependencyError, MeshError, ShardingError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import ReduceOp

__all__ = ["layout", "sharding", "spec"]


def __dir__() -> list[str]:
    return sorted(__all__)


def layout(sharding: Any, shape: Sequence[int], dtype: object, *, mesh: Any = None) -> Layout:
    """Return the layout of an array of a NamedSharding: its boxes are what `sharding.devices_indices_map(shape)` says.

    Args:
        sharding: a NamedSharding, or a PartitionSpec with `mesh`. Axes under `unreduced` hold terms of a sum.
        shape: of the whole array.
        dtype: any dtype, JAX's included.
        mesh: for a PartitionSpec, a JAX mesh or a DeviceMesh. An AbstractMesh has ranks 0, 1, ...

    Raises:
        ShardingError: a sharding of another kind, a dim that the compiler may shard (UNCONSTRAINED), `reduced` axes, or
            an uneven sharding, which JAX has no arrays of.
        DependencyError: jax is not installed.
    """
    jax = _jax()
    if isinstance(sharding, jax.NamedSharding):
        if mesh is not None:
            raise ShardingError("layout: a NamedSharding has a mesh; mesh= goes with a PartitionSpec")
        mesh, given = sharding.mesh, sharding.spec
    elif isinstance(sharding, jax.PartitionSpec):
        given = sharding
    else:
        is_laid_out = isinstance(getattr(sharding, "sharding", None), jax.NamedSharding)  # an array of one
        write = "x.sharding" if is_laid_out else "jax.device_put(x, NamedSharding(mesh, spec)).sharding"
        raise ShardingError(
            f"layout takes a NamedSharding, or a PartitionSpec and mesh=, got {brief(sharding)}. Pass {write}"
        )
    if getattr(given, "reduced", None):
        raise ShardingError(
            f"{given}: an array whose cotangent is unreduced over {', '.join(map(str, sorted(given.reduced)))} is "
            "replicated there, and a layout says no more than that. Write the spec without reduced="
        )
    entries = tuple(getattr(given, "partitions", given))  # one with unreduced axes is not to be iterated over
    if any(entry is jax.PartitionSpec.UNCONSTRAINED for entry in entries):
        raise ShardingError(
            f"{given}: where a dim is UNCONSTRAINED the compiler chooses, so no layout is known. Take the sharding "
            "of the array that came out (x.sharding)"
        )
    ours = mesh if isinstance(mesh, DeviceMesh) else _mesh_of(mesh)
    partial: dict[str, ReduceOp] = {axis: "sum" for axis in getattr(given, "unreduced", ())}
    made = Layout.from_spec(ours, shape, dtype, entries, partial=partial)
    _check_even(made)
    return made


def spec(layout: Layout) -> Any:
    """Return the PartitionSpec of a layout: an entry for each dim; partial axes are `unreduced`.

    Raises:
        ShardingError: what JAX cannot express: an uneven sharding, a Partial that is not a sum.
        DependencyError: jax is not installed.
    """
    jax = _jax()
    _check_even(instance(layout, Layout, "spec takes a Layout", ShardingError))
    ops = dict(zip(layout.mesh.axis_names, layout.partials, strict=True))
    other = [f"{axis}={op}" for axis, op in ops.items() if op not in (None, "sum")]
    if other:
        raise ShardingError(
            f"JAX's unreduced axes hold terms of a sum, {layout} has {', '.join(other)}: reduce it first"
        )
    unreduced = frozenset(axis for axis, op in ops.items() if op)
    return jax.PartitionSpec(*layout.spec, **({"unreduced": unreduced} if unreduced else {}))


def sharding(layout: Layout, jax_mesh: Any, *, memory_kind: str | None = None) -> Any:
    """Return the NamedSharding of a layout on a JAX mesh.

    Args:
        layout: of an array.
        jax_mesh: a Mesh with the layout's names, sizes and ranks, or an AbstractMesh with its names and sizes.
        memory_kind: as NamedSharding takes it; a layout does not say which memory of a device it means.

    Raises:
        ShardingError: what JAX cannot express: an uneven sharding, a Partial that is not a sum, or one on a mesh axis
            whose type is not Explicit.
        MeshError: the two meshes differ.
        DependencyError: jax is not installed.
    """
    jax = _jax()
    entries = spec(instance(layout, Layout, "sharding takes a Layout", ShardingError))
    mesh = _mesh_of(jax_mesh)
    same_ranks = isinstance(jax_mesh, jax.AbstractMesh) or tuple(mesh.ranks) == tuple(layout.mesh.ranks)
    if (mesh.axis_names, mesh.shape) != (layout.mesh.axis_names, layout.mesh.shape) or not same_ranks:
        raise MeshError(
            f"the layout lies on {layout.mesh} of ranks {brief(list(layout.mesh.ranks))}, the JAX mesh is {mesh} of "
            f"devices {brief(list(mesh.ranks))}; both have the same names, sizes and order: "
            "DeviceMesh(..., ranks=...) takes the order of the JAX mesh"
        )
    try:
        return jax.NamedSharding(jax_mesh, entries, memory_kind=memory_kind)
    except ValueError as error:
        hint = "; make the mesh with axis_types=(AxisType.Explicit, ...), or reduce the array first"
        raise ShardingError(
            f"JAX refuses {entries} on {jax_mesh}: {error}{hint if any(layout.partials) else ''}"
        ) from error


def _jax() -> Any:
    try:
        import jax.sharding
    except ImportError as error:
        raise DependencyError(f"lowshard.interop.jax needs jax ({error}): pip install jax") from error
    return jax.sharding


def _mesh_of(mesh: Any) -> DeviceMesh:
    import jax

    if isinstance(mesh, jax.sharding.AbstractMesh):
        return DeviceMesh(mesh.axis_sizes, mesh.axis_names)
    if not isinstance(mesh, jax.sharding.Mesh):
        raise MeshError(f"a mesh is JAX's Mesh or AbstractMesh, got {brief(mesh)}")
    devices = list(mesh.devices.flat)
    there = jax.devices(devices[0].platform) if devices else ()
    places = {device: place for place, device in enumerate(there)}
    missing = [device for device in devices if device not in places]
    if missing:
        raise MeshError(f"a rank is a place in jax.devices(), and {missing[0]} of the mesh is not there")
    return DeviceMesh(mesh.devices.shape, mesh.axis_names, ranks=[places[device] for device in devices])


def _check_even(layout: Layout) -> None:
    for dim, (extent, axes) in enumerate(zip(layout.shape, layout.sharding_axes, strict=True)):
        parts = prod(layout.mesh.shape[a] for a in axes)
        if extent % parts:
            names = ", ".join(f"{layout.mesh.axis_names[a]}={layout.mesh.shape[a]}" for a in axes)
            raise ShardingError(
                f"JAX shards only evenly: dim {dim} of {extent} elements over {names} is {parts} parts. Pad it to "
                f"{-(-extent // parts) * parts}, or shard another dim"
            )
