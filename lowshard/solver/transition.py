"""One placement to another on one mesh axis: which collective does it, and the bytes it is priced at.

Two price lists. "published" is the one of MAX's GreedyReshard (modular/modular, max.experimental.sharding): bytes of
the whole tensor, whatever the other mesh axes cut; an all-to-all costs what an all-gather costs; R to P is impossible.
"volume" is what a rank really sends on a ring: bytes of the part that the other mesh axes leave to a group, an
all-to-all at its true volume. No price of "volume" is above the published one.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from lowshard.placement import Partial, Placement, Replicated, Sharded

Prices = Literal["published", "volume"]
Collective = Literal[
    "noop",
    "local_slice",
    "keep_one_copy",
    "all_gather",
    "all_to_all",
    "all_reduce",
    "reduce_scatter",
    "exchange",
    "infeasible",
]


def collective_of(src: Placement, dst: Placement, prices: Prices = "published") -> Collective:
    """Return the collective that takes `src` to `dst` on one mesh axis."""
    # "published" knows no R to P, and does not reduce min, max or prod; "volume" does both.
    if src == dst:
        return "noop"
    if isinstance(src, Partial):
        if prices == "published" and src.op not in ("sum", "avg"):
            return "infeasible"
        if isinstance(dst, Replicated):
            return "all_reduce"
        return "reduce_scatter" if isinstance(dst, Sharded) else "infeasible"
    if isinstance(src, Replicated):
        if isinstance(dst, Sharded):
            return "local_slice"
        return "keep_one_copy" if prices == "volume" else "infeasible"
    if isinstance(dst, Replicated):
        return "all_gather"
    return "all_to_all" if isinstance(dst, Sharded) else "infeasible"


def price_bytes(
    collective: Collective, size: int, tensor_bytes: float, prices: Prices = "published"
) -> float:
    """Return the bytes a collective over `size` ranks is priced at; 0 over one rank, infinite if infeasible."""
    # Ring volumes of B bytes that a group holds together: Thakur, Rabenseifner, Gropp, Optimization of Collective
    # Communication Operations in MPICH, 2005.
    if size == 1 or collective in ("noop", "local_slice", "keep_one_copy"):
        return 0.0
    if collective == "infeasible":
        return inf
    if collective == "exchange":  # B is the busiest rank's bytes times N
        return tensor_bytes / size
    ring = tensor_bytes * (size - 1) / size
    if collective == "all_reduce":
        return 2 * ring
    return ring / size if collective == "all_to_all" and prices == "volume" else ring
