"""How each pair of a communicator's ranks is reached, and why: what `Communicator.explain` says."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from lowshard.comm.transport import Transport

_SHOWN_PAIRS = 12
"""Of one way, in the text."""


def ways_of_ranks(transport: Transport) -> dict[str, Any]:
    """Return the facts as plain data, from what this rank knows."""
    pairs: list[dict[str, Any]] = []
    for pair in combinations(range(transport.size), 2):
        way, why = transport.way_between(*pair)
        pairs.append({"ranks": list(pair), "way": way, "why": why})
    return {"transport": transport.name, "rank": transport.rank, "size": transport.size, "pairs": pairs}


def ways_text(said: dict[str, Any]) -> str:
    """Return the same as text: the pairs of each way together."""
    lines = [f"{said['size']} rank{'s' * (said['size'] != 1)}, transport {said['transport']}"]
    if not said["pairs"]:
        lines.append("  there is no other rank to reach")
    by_way: dict[tuple[str, str], list[str]] = {}
    for pair in said["pairs"]:
        by_way.setdefault((pair["way"], pair["why"]), []).append("{}-{}".format(*pair["ranks"]))
    for (way, why), pairs in by_way.items():
        more = len(pairs) - _SHOWN_PAIRS
        shown = ", ".join(pairs[:_SHOWN_PAIRS]) + (f" and {more} more pairs" if more > 0 else "")
        lines.append(f"  ranks {shown}: {way}, since {why}")
    return "\n".join(lines)
