"""Bytes a device of a train state under a rule set: parameters, gradients, moments; what replication costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.argument import whole
from lowshard.errors import RulesError
from lowshard.mesh import DeviceMesh
from lowshard.rules.binding import spec_shards
from lowshard.rules.logical_tensor import LogicalTensor, as_tensors, checked_mesh, group_name
from lowshard.rules.rule_table import RuleTable


@dataclass(frozen=True)
class MemoryGroup:
    """The parameters of one name in all layers."""

    name: str
    tensors: int
    elems: int
    """Of the whole parameters."""
    elems_per_device: int
    shards: int
    """Into how many different pieces the devices cut them; the least of the group."""
    parameter_bytes: int
    """A device, as the two below."""
    gradient_bytes: int
    moment_bytes: int
    replication_bytes: int
    """What a device would save in parameters and moments if every device held a different part."""

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients and moments of a device."""
        return self.parameter_bytes + self.gradient_bytes + self.moment_bytes


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on the device that holds most."""

    mesh: DeviceMesh
    groups: tuple[MemoryGroup, ...]
    """Largest first."""
    parameter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    count_bytes: int
    """Step and optimizer counters."""
    parameter_elems: int
    """Of the whole model."""
    partly_replicated_elems: int
    """Elements of parameters that are cut into fewer pieces than there are devices."""
    partly_replicated_bytes: int
    """The bytes of those on a device."""
    replication_bytes: int
    """What a device would save in parameters and moments if every device held a different part."""

    @property
    def state_bytes(self) -> int:
        """The train state of a device: parameters, moments, counters."""
        return self.parameter_bytes + self.moment_bytes + self.count_bytes

    @property
    def total_bytes(self) -> int:
        """The train state and the gradients."""
        return self.state_bytes + self.gradient_bytes

    @property
    def partly_replicated_share(self) -> float:
        """Elements cut into fewer pieces than there are devices, as a share of all (0 to 1)."""
        return self.partly_replicated_elems / self.parameter_elems if self.parameter_elems else 0.0

    @property
    def budget_bytes(self) -> float | None:
        """The bytes a device may use, where the mesh has a budget."""
        return self.mesh.smallest_budget_bytes

    @property
    def within_budget(self) -> bool:
        """False where the total is beyond the mesh's budget."""
        return self.budget_bytes is None or self.total_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "mesh": self.mesh.to_json() | {"ranks": None},
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.gradient_bytes,
            "moment_bytes": self.moment_bytes,
            "count_bytes": self.count_bytes,
            "state_bytes": self.state_bytes,
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "within_budget": self.within_budget,
            "parameter_elems": self.parameter_elems,
            "partly_replicated_elems": self.partly_replicated_elems,
            "partly_replicated_share": self.partly_replicated_share,
            "partly_replicated_bytes": self.partly_replicated_bytes,
            "replication_bytes": self.replication_bytes,
            "groups": [
                {
                    "name": g.name, "tensors": g.tensors, "elems": g.elems, "elems_per_device": g.elems_per_device,
                    "shards": g.shards, "parameter_bytes": g.parameter_bytes, "gradient_bytes": g.gradient_bytes,
                    "moment_bytes": g.moment_bytes, "total_bytes": g.total_bytes,
                    "replication_bytes": g.replication_bytes,
                }
                for g in self.groups
            ],
        }  # fmt: skip


def plan_memory(
    rules: RuleTable,
    mesh: DeviceMesh,
    tensors: object,
    *,
    dtype: object = "float32",
    gradient_dtype: object = None,
    moment_dtype: object = None,
    moments: int = 2,
) -> MemoryReport:
    """Return bytes a device; no array is made.

    A train state (a logical dump with `.opt_state`) counts the moments it holds. Parameters alone count
    `moments` times their shape. An uneven dim counts as the largest shard, ceil(extent / shards).

    Its arguments, and what it raises, are those of `RuleSet.memory`.
    """
    moments = whole(moments, "moments is a whole number >= 0", RulesError, 0)
    given, mesh = as_tensors(tensors, dtype), checked_mesh(mesh)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    has_moments = any(t.role == "moment" for t in given)
    rows: dict[str, list[_Row]] = {}
    cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
    count_bytes = 0
    for tensor in given:
        role = tensor.role
        if role == "count":
            count_bytes += tensor.size_bytes
            continue
        how = (id(rules.resolver(tensor.name)), tensor.names, len(tensor.shape))
        if how not in cuts:
            cuts[how] = _parts(rules, mesh, sizes, tensor)
        row = _row(tensor, cuts[how])
        own = dtypes.get(tensor.dtype)
        moment_bytes = (own if moment_dtype is None else dtypes.get(moment_dtype)).itemsize_bytes
        if role == "moment":
            row.moment_bytes = row.elems_per_device * moment_bytes
            row.replication_bytes = row.saved_elems(mesh.size) * moment_bytes
            row.elems = row.count = 0
        else:
            gradient = own if gradient_dtype is None else dtypes.get(gradient_dtype)
            row.parameter_bytes = row.elems_per_device * own.itemsize_bytes
            row.gradient_bytes = row.elems_per_device * gradient.itemsize_bytes
            row.replication_bytes = row.saved_elems(mesh.size) * own.itemsize_bytes
            if not has_moments:
                row.moment_bytes = moments * row.elems_per_device * moment_bytes
                row.replication_bytes += moments * row.saved_elems(mesh.size) * moment_bytes
        rows.setdefault(group_name(tensor.name), []).append(row)
    groups = sorted((_group(name, found) for name, found in rows.items()), key=lambda g: -g.total_bytes)
    flat = [row for found in rows.values() for row in found]
    part = [row for row in flat if row.shards < mesh.size]
    return MemoryReport(
        mesh,
        tuple(groups),
        sum(r.parameter_bytes for r in flat),
        sum(r.gradient_bytes for r in flat),
        sum(r.moment_bytes for r in flat),
        count_bytes,
        sum(r.elems for r in flat),
        sum(r.elems for r in part),
        sum(r.parameter_bytes for r in part),
        sum(r.replication_bytes for r in flat),
    )


@dataclass
class _Row:
    """One tensor, before it joins its group."""

    elems: int
    elems_per_device: int
    shards: int
    count: int = 1
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    moment_bytes: int = 0
    replication_bytes: int = 0

    def saved_elems(self, devices: int) -> int:
        return self.elems_per_device - -(-self.elems // devices) if self.shards < devices else 0


def _parts(
    rules: RuleTable, mesh: DeviceMesh, sizes: dict[str, int], tensor: LogicalTensor
) -> tuple[int, ...]:
    """Return into how many parts each dim of a tensor is cut."""
    found = rules.bound_spec(mesh, tensor.names, tensor.shape, parameter=tensor.name, uneven=True)
    return spec_shards(found.spec[: len(tensor.shape)], sizes)


def _row(tensor: LogicalTensor, parts: tuple[int, ...]) -> _Row:
    cut = prod(-(-n // k) for n, k in zip(tensor.shape, parts, strict=False))
    return _Row(tensor.size_elems, cut * prod(tensor.shape[len(parts) :]), prod(parts))


def _group(name: str, rows: Sequence[_Row]) -> MemoryGroup:
    parameters = [r for r in rows if r.count]
    return MemoryGroup(
        name,
        len(parameters),
        sum(r.elems for r in parameters),
        sum(r.elems_per_device for r in parameters),
        min(r.shards for r in rows),
        sum(r.parameter_bytes for r in rows),
        sum(r.gradient_bytes for r in rows),
        sum(r.moment_bytes for r in rows),
        sum(r.replication_bytes for r in rows),
    )
