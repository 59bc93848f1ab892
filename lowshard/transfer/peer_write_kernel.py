"""Strips copied to their places in other processes of the node, or in this one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from lowshard.comm.node import atomic
from lowshard.comm.node.atomic import field, poke, write_process_from
from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.emitted import copy_bytes
from lowshard.transfer import cross_constants
from lowshard.transfer.cross_constants import AT, COLUMNS, FAR, HIGH, LOW, MOST_PLACES, NEAR, PID, RUN, STEP


@cache
def write_across() -> Any:
    """Return the compiled function."""
    name = (
        f"write_strips_{digest_of([Path(__file__), Path(cross_constants.__file__), Path(atomic.__file__)])}"
    )
    return load_compiled(name, lambda: write_strips, Signature((INT,) * 7))


def write_strips(
    strips: int, number: int, first: int, rows: int, row_bytes: int, scratch: int, vectors: int
) -> int:
    """Copy strips of some rows to their places, in this process or in others; 0, or the process that refused."""
    there = vectors + 16 * MOST_PLACES
    for s in range(number):
        strip = strips + 8 * COLUMNS * s
        pid, run, step = field(strip, PID), field(strip, RUN), field(strip, STEP)
        begin, at = field(strip, LOW), field(strip, AT)
        low, high = max(first, begin), min(first + rows, field(strip, HIGH))
        near = scratch + field(strip, NEAR) + (low - first) * row_bytes
        far = at + field(strip, FAR) + (low - begin) * step
        done = 0 if at else high
        while done < high - low:
            count = min(MOST_PLACES, high - low - done)
            for i in range(count):
                source, target = near + (done + i) * row_bytes, far + (done + i) * step
                if pid == 0:
                    copy_bytes(target, source, run)
                else:
                    poke(vectors + 16 * i, source)
                    poke(vectors + 16 * i + 8, run)
                    poke(there + 16 * i, target)
                    poke(there + 16 * i + 8, run)
            if pid:
                targets = count
                if step == run:  # side by side there: one stretch
                    targets = 1
                    poke(there + 8, count * run)
                if write_process_from(pid, vectors, count, there, targets) != count * run:
                    return int(pid)
            done += count
    return 0
