"""What the operands of an op take on a device, and how the least of it is told when nothing fits."""

from __future__ import annotations

from collections.abc import Sequence

from lowshard.placement import Sharded
from lowshard.solver.action import ActionSet
from lowshard.solver.assignment import AxisAssignment


def smallest_budget(action_set: ActionSet) -> float | None:
    """Return the least memory budget that a device of the mesh has, in bytes, or None."""
    budget = action_set.mesh.smallest_budget_bytes
    return None if budget is None else float(budget)


def needed_bytes(action_set: ActionSet, rows: Sequence[AxisAssignment]) -> float:
    """Return the bytes that the operands, as the rows need them, take on a device: the mean over the shards."""
    return sum(operand_bytes(action_set, rows))


def operand_bytes(action_set: ActionSet, rows: Sequence[AxisAssignment]) -> list[float]:
    """Return the bytes of each operand on a device, as the rows need it: the mean over its shards."""
    found = []
    for k, layout in enumerate(action_set.layouts):
        share = float(layout.size_bytes)
        for row, size in zip(rows, action_set.mesh.shape, strict=True):
            if isinstance(row.needed_inputs[k], Sharded):
                share /= size
        found.append(share)
    return found


def budget_text(action_set: ActionSet, least: Sequence[AxisAssignment], budget: float) -> str:
    """Return why nothing fits into a budget: the tightest tensor, and the smallest budget that would do."""
    shares = operand_bytes(action_set, least)
    tightest = max(range(len(shares)), key=shares.__getitem__)
    parts = ", ".join(f"operand {k} {share:,.0f}" for k, share in enumerate(shares))
    needs = ",".join(str(row.needed_inputs[tightest]) for row in least)
    return (
        f"no action fits into the memory budget of {budget:,.0f} bytes a device: the operands take "
        f"{sum(shares):,.0f} bytes at the least ({parts}). The tightest tensor is operand {tightest}, "
        f"{action_set.layouts[tightest]}: {shares[tightest]:,.0f} bytes a device even as {needs}. The smallest "
        f"budget that would do is {_up(sum(shares))} bytes: give the mesh "
        f"memory_budget_bytes_per_device={_up(sum(shares))}, or more ranks"
    )


def _up(value: float) -> int:
    return -int(-value // 1)
