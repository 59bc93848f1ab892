"""What an exchange along a cut dim is priced at: the most that one rank receives, counted index by index."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lowshard.box import Interval, split_interval
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.solver.table.op_rule import Call
from lowshard.solver.transition import Collective

Run = tuple[int, int, int, int]
"""Operand, first index there, first index in the result, length."""
Inner = tuple[tuple[Collective, float], ...]
MOST_COUNTED = 1 << 17
"""Shares of a dim: counting these takes some tenths of a second."""


def cutting_sizes(call: Call, dim: int) -> list[int]:
    """Return the sizes of the mesh axes that cut a dim of the first operand; where none does, of the longest axis."""
    layout = call.layouts[0]
    held = [layout.mesh.shape[a] for a in layout.sharding_axes[dim]]
    return held or [max(layout.mesh.shape)]


def shares(extent: int, sizes: Sequence[int], scale: int = 1) -> list[Interval]:
    """Return what each rank has of an extent that mesh axes of these sizes cut, nested, times `scale`."""
    require_countable(sizes)
    found = [(0, extent)]
    for size in sizes:
        found = [split_interval(part, size, i) for part in found for i in range(size)]
    return [(start * scale, stop * scale) for start, stop in found]


def require_countable(sizes: Sequence[int], pieces: int = 1) -> None:
    """Raise LayoutError where ranks along a dim, times the pieces that each wants, are too many to count one by one."""
    if prod(sizes) * pieces > MOST_COUNTED:
        of_each = f" of {pieces:,} pieces each" if pieces > 1 else ""
        raise LayoutError(
            f"an exchange along a dim is priced rank by rank, up to {MOST_COUNTED:,} shares in all; mesh axes of sizes "
            f"{', '.join(map(str, sizes))} have {prod(sizes):,} ranks{of_each}"
        )


def most_received(have: Sequence[Sequence[Interval]], want: Sequence[Interval], runs: Sequence[Run]) -> int:
    """Return the most indices that one rank wants and does not have."""
    most = 0
    for rank, (low, high) in enumerate(want):
        missing = 0
        for operand, source, target, length in runs:
            shift = target - source
            start, stop = max(target, low), min(target + length, high)
            if start >= stop:
                continue
            held = have[operand][rank]
            kept = min(stop, held[1] + shift) - max(start, held[0] + shift)
            missing += stop - start - max(kept, 0)
        most = max(most, missing)
    return most


def index_bytes(layout: Layout, dims: Sequence[int]) -> float:
    """Return the bytes of one index along merged dims, were no other mesh axis to cut the rest."""
    return float(layout.itemsize_bytes * prod(n for d, n in enumerate(layout.shape) if d not in dims))


def exchange(received: float, sizes: Sequence[int]) -> Inner:
    """Return the collective of a row in which the busiest rank receives so many bytes; none where nothing moves."""
    return (("exchange", received * max(sizes)),) if received else ()
