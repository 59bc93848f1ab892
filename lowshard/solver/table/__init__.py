"""The rule of every op: which operand placements it takes on a mesh axis, what the results then are, how it runs."""

from __future__ import annotations

from lowshard.solver.table import elementwise, index, product, reduction, shape
from lowshard.solver.table.rule import (
    RULES,
    Call,
    Offer,
    Refused,
    Rules,
    check_rules,
    common_kind,
    dtype_error,
    offer,
)

__all__ = [
    "REFUSED", "RULES", "Call", "Offer", "Refused", "Rules", "check_rules", "common_kind", "dtype_error", "offer",
]  # fmt: skip

REFUSED: tuple[Refused, ...] = (
    elementwise.ONE_SIDED,
    index.CROSS,
    product.GROUPED_CHANNELS,
    reduction.CUMSUM,
    reduction.UNEVEN_MEAN,
    shape.CONCAT,
    shape.SPLIT,
    shape.MINOR,
    shape.UNALIGNED,
    shape.REPEATED,
)
"""Published rows that are offered nowhere, because running them gives other values than the unsharded op."""
