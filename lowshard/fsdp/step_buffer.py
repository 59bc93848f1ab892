"""The model's one buffer: sized from the plan at construction, divided into parts, never grown."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.fsdp.fsdp_strategy import MXFP8
from lowshard.fsdp.unit_layout import Part, PoolPlan, Shape, UnitPlan
from lowshard.kernels import MXFP8Tensor
from lowshard.kernels.buffer import address

Array = Any  # a NumPy or CuPy array; CuPy ships no types

PART_ALIGN_BYTES = 64


def plan_pool(shape: Shape) -> PoolPlan:
    """Return the parts of the pool; see `PoolPlan` for the formula."""
    parts: list[Part] = []

    def add(name: str, nbytes: int) -> None:
        if nbytes:
            parts.append(Part(name, -(-nbytes // PART_ALIGN_BYTES) * PART_ALIGN_BYTES))

    units, shards = shape.model.units, shape.grid.shards
    for unit in units:
        whole = unit.elems if shape.rests_whole(unit) else unit.elems // shards
        add(f"master:{unit.name}", whole * unit.formats.item("master"))
        add(f"grad:{unit.name}", unit.grad_elems // shards * unit.formats.item("master"))
        for param in unit.ignored:
            add(f"ignored:{unit.name}.{param.name}", param.elems * unit.formats.item("compute"))
    largest_open = max((unit.elems * unit.formats.item("compute") for unit in units), default=0)
    largest_grad = max((unit.grad_elems * unit.formats.item("grad") for unit in units), default=0)
    for unit in units:
        if shape.keeps and not shape.rests_whole(unit):
            add(f"open:{unit.name}", unit.elems * unit.formats.item("compute"))
        if (not shape.grad_slots and not shape.own_grad(unit)) or (
            shape.grad_slots and unit.name in shape.model.shared
        ):
            add(f"grads:{unit.name}", unit.grad_elems * unit.formats.item("grad"))
    for slot in range(shape.open_slots):
        add(f"open#{slot}", largest_open)
    for slot in range(shape.grad_slots):
        add(f"grads#{slot}", largest_grad)
    add("wire", max((wire_bytes(shape, unit) for unit in units), default=0))
    add("reduce", max((reduce_bytes(shape, unit) for unit in units), default=0))
    return PoolPlan(tuple(parts))


def wire_bytes(shape: Shape, unit: UnitPlan) -> int:
    """Return the staging bytes of a gather of the unit: only if the wire has a dtype of its own."""
    formats, shards = unit.formats, shape.grid.shards
    if formats.wire == MXFP8:
        each = [MXFP8Tensor.buffer_bytes((s.plan.shard_elems,)) for s in unit.segments]
        return shards * max(each, default=0)
    if formats.wire == formats.compute:
        return 0
    widest = max((segment.plan.size for segment in unit.segments), default=0)
    return widest * dtypes.get(formats.wire).itemsize_bytes


def reduce_bytes(shape: Shape, unit: UnitPlan) -> int:
    """Return the staging bytes of a reduction: operands and results that are not reduced in place."""
    formats, shards = unit.formats, shape.grid.shards
    if unit.trained is None or shape.own_grad(unit):
        return 0
    item = formats.item("reduce")
    operand = 0 if formats.grad == formats.reduce else unit.grad_elems * item
    result = 0 if formats.reduce == formats.master else unit.grad_elems // shards * item
    return operand + result


class Pool:
    """The buffer itself, `array` uint8 [total_bytes], and its parts."""

    def __init__(self, plan: PoolPlan, comm: Communicator) -> None:
        self.plan = plan
        block = comm.empty(plan.total_bytes + PART_ALIGN_BYTES, "uint8")
        skip = -address(block) % PART_ALIGN_BYTES
        self.array = block[skip : skip + plan.total_bytes]
        self.array[...] = 0
        self._at: dict[str, tuple[int, int]] = {}
        at = 0
        for part in plan.parts:
            self._at[part.name] = at, part.bytes
            at += part.bytes

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def part(self, name: str, dtype: str, elems: int, skip_bytes: int = 0) -> Array:
        """Return a view of a part: so many elements, from so many bytes on."""
        numpy_dtype: np.dtype[Any] = dtypes.get(dtype).numpy
        if not elems:
            return self.array[:0].view(numpy_dtype)
        at, size = self._at[name]
        nbytes = elems * numpy_dtype.itemsize
        assert skip_bytes + nbytes <= size, (name, elems, dtype, size)
        return self.array[at + skip_bytes : at + skip_bytes + nbytes].view(numpy_dtype)
