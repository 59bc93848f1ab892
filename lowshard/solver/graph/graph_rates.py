"""What a graph's ops and moves are priced at: seconds by a cluster profile, or the byte prices of the per-op solvers.

Seconds of an op on a device are max(flops / flops_per_s, bytes / memory_bytes_per_s), bytes being what it reads and
writes there (the roofline of Williams, Waterman, Patterson: CACM 52, 2009), plus its inner collectives. Seconds of a
move are those of the plan that will be executed (`predict_redistribute`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal

from lowshard.argument import instance, number
from lowshard.cost import ClusterProfile, Level
from lowshard.errors import ProfileError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Sharded
from lowshard.redistribute_plan import predict_redistribute
from lowshard.solver.assignment import (
    AxisAssignment,
    Prices,
    collective_of,
    cut_by_others,
    group_bytes,
    price_bytes,
)
from lowshard.step_cost import prices_of

Objective = Literal["seconds", "volume", "published"]
_VIEWS = frozenset(("reshape", "flatten", "unsqueeze", "squeeze", "rebind", "interleaved_complex"))


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one device computes; the defaults are a CPU core's order of magnitude, as the default profile's are."""

    flops_per_s: float = 5e10
    memory_bytes_per_s: float = 1e10

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "memory_bytes_per_s"):
            number(getattr(self, name), f"{name} is a number of at least 1", ProfileError, least=1.0)

    @classmethod
    def of(cls, profile: ClusterProfile | None) -> Rates:
        """Return the rates that a profile states as facts (flops_per_s, memory_bytes_per_s), else the defaults."""
        if profile is not None:
            instance(profile, ClusterProfile, "profile is a ClusterProfile or None", ProfileError)
        facts = dict(() if profile is None else profile.machine)
        known = {n: float(facts[n]) for n in ("flops_per_s", "memory_bytes_per_s") if n in facts}
        return cls(**known)


@dataclass(frozen=True)
class Timing:
    """Prices for one solve."""

    objective: Objective = "seconds"
    profile: ClusterProfile | None = None
    rates: Rates = Rates()
    node_size: int | None = None  # None: one node
    allow_partial_to_sharded: bool = True

    @property
    def reuses(self) -> bool:
        """Whether a copy that was moved once serves every later use."""
        return self.objective == "seconds"

    def move(self, src: Layout, dst: Layout) -> float:
        """Return the price of bringing a tensor from one layout to another; infinite where it cannot be."""
        if src == dst:
            return 0.0
        pairs = list(zip(src.placements, dst.placements, strict=True))
        for a, b in pairs:
            if isinstance(a, Partial) and isinstance(b, Sharded) and not self.allow_partial_to_sharded:
                return inf
            if isinstance(b, Partial) and a != b and (isinstance(a, (Sharded, Partial)) or b.op == "prod"):
                return inf  # nobody needs what was whole to become terms of another kind
        if self.objective == "seconds":
            return predict_redistribute(src, dst, self.profile, self.node_size)
        prices: Prices = "published" if self.objective == "published" else "volume"
        held = group_bytes(src, prices)
        sizes = src.mesh.shape
        return sum(
            price_bytes(collective_of(a, b, prices), n, held[i], prices)
            for i, ((a, b), n) in enumerate(zip(pairs, sizes, strict=True))
            if a != b
        )

    def inner(self, rows: Sequence[AxisAssignment], first: Layout) -> float:
        """Return the price of the collectives inside an op whose first operand lies in `first`."""
        total = 0.0
        mesh = first.mesh
        for axis, row in enumerate(rows):
            size = mesh.shape[axis]
            if not row.inner or size == 1:
                continue
            share = cut_by_others(first, axis)
            if self.objective != "seconds":
                listed: Prices = "published" if self.objective == "published" else "volume"
                total += row.inner_bytes(size, listed) / share
                continue
            prices, level = prices_of(self.profile), self._level(mesh, axis)
            for name, own in row.inner:
                mine = own / share
                if name == "exchange":
                    total += prices.exchange(size - 1, mine / size, level)
                else:
                    whole = mine * size if name == "all_gather" else mine
                    total += prices.seconds(name, size, round(whole), level)
        return total

    def _level(self, mesh: DeviceMesh, axis: int) -> Level:
        size = self.node_size
        if size is None:
            return "node"
        groups = mesh.groups([mesh.axis_names[axis]])
        return "network" if any(len({r // size for r in g}) > 1 for g in groups) else "node"

    def compute(
        self, op: str, args: Mapping[str, Any], inputs: Sequence[Layout], outputs: Sequence[Layout]
    ) -> float:
        """Return the seconds that an op takes on the device with the largest shards; 0 where bytes are the price."""
        if self.objective != "seconds" or op in _VIEWS:
            return 0.0
        ins, outs = [largest_shape(x) for x in inputs], [largest_shape(x) for x in outputs]
        moved = sum(prod(s) * x.itemsize_bytes for s, x in zip(ins, inputs, strict=True))
        if op in ("gather", "embedding"):  # reads the rows that it returns
            moved = prod(ins[1]) * inputs[1].itemsize_bytes + prod(outs[0]) * outputs[0].itemsize_bytes
        moved += sum(prod(s) * x.itemsize_bytes for s, x in zip(outs, outputs, strict=True))
        flops = op_flops(op, args, ins, outs)
        return max(flops / self.rates.flops_per_s, moved / self.rates.memory_bytes_per_s)


def largest_shape(layout: Layout) -> tuple[int, ...]:
    """Return the local shape at mesh coordinate 0: no shard is larger."""
    sizes = layout.mesh.shape
    shape = []
    for extent, axes in zip(layout.shape, layout.sharding_axes, strict=True):
        for a in axes:
            extent = -(-extent // sizes[a])
        shape.append(extent)
    return tuple(shape)


def largest_bytes(layout: Layout) -> int:
    """Return the bytes of the largest shard."""
    return prod(largest_shape(layout)) * layout.itemsize_bytes


def op_flops(
    op: str, args: Mapping[str, Any], inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
) -> float:
    """Return the floating-point operations of an op on local shapes: 2 a multiply-add, 1 an element elsewhere."""
    if op == "matmul":
        return 2.0 * prod(outputs[0]) * inputs[0][-1]
    if op == "einsum":
        extent: dict[str, int] = {}
        terms = str(args["subscripts"]).replace(" ", "").partition("->")[0].split(",")
        for term, shape in zip(terms, inputs, strict=True):
            for label, n in zip(term, shape, strict=True):
                extent[label] = max(n, extent.get(label, 0))
        return 2.0 * prod(extent.values())
    if op == "attention":
        q, _, v = inputs
        keys = inputs[1][2]
        return 2.0 * prod(q[:3]) * keys * (q[3] + v[3])
    if op == "grouped_matmul":
        return 2.0 * prod(outputs[0]) * inputs[0][-1]
    if op.startswith("conv"):
        return 2.0 * prod(outputs[0]) * prod(inputs[1][:-1])
    return float(sum(prod(s) for s in outputs))


def temporary_bytes(op: str, inputs: Sequence[Layout]) -> int:
    """Return the bytes an op needs beside operands and results: attention's scores, in the accumulator's type."""
    if op != "attention":
        return 0
    q, k = largest_shape(inputs[0]), largest_shape(inputs[1])
    return prod(q[:3]) * k[2] * max(4, inputs[0].itemsize_bytes)
