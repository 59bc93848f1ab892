"""The rule of every op: which operand placements it takes on a mesh axis, what the results then are, how it runs."""

from __future__ import annotations

from lowshard.solver.table import elementwise_rules, index_rules, product_rules, reduction_rules, shape_rules
from lowshard.solver.table.op_rule import (
    RULES,
    Call,
    Offer,
    Refused,
    Rules,
    check_names,
    check_rules,
    common_kind,
    dtype_error,
    find_rule,
    offer,
)

__all__ = [
    "REFUSED", "RULES", "Call", "Offer", "Refused", "Rules", "check_names", "check_rules", "common_kind",
    "dtype_error", "find_rule", "offer",
]  # fmt: skip

REFUSED: tuple[Refused, ...] = (
    elementwise_rules.ONE_SIDED,
    index_rules.CROSS,
    product_rules.GROUPED_CHANNELS,
    reduction_rules.CUMSUM,
    reduction_rules.UNEVEN_MEAN,
    shape_rules.CONCAT,
    shape_rules.SPLIT,
    shape_rules.MINOR,
    shape_rules.UNALIGNED,
    shape_rules.REPEATED,
)
"""Published rows that are offered nowhere, because running them gives other values than the unsharded op."""
