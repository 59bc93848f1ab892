"""Many random collectives in random groups, each checked; rank 0 prints what the ranks hold before and after.

Usage: run_soak.py COUNT. After a fifth of the calls everything is given back and counted, and again at the end: what
has grown in between leaks. All ranks draw the same numbers for each step, so those outside a group keep in step.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from support import mode
from support.comm_kit import calls_of, check

from lowshard import comm as lc
from lowshard.comm.work import Worker

WORLD = MPI.COMM_WORLD
LENGTHS = [0, 1, 3, 40, 255, 1024, 1025, 4100, 8192, 20_000, 33_000, 75_000]  # of 4 bytes: up to 300 KB
CALLS = (
    "all_gather", "all_gather_v", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter", "all_reduce",
    "reduce_scatter", "reduce",
)  # fmt: skip
OPS = ("sum", "min", "max")
ORDERS = ("fast", "tree", "rank")
GROUPS = 6


def holdings(comm: lc.Communicator) -> dict[str, int]:
    """Return what this process holds: memory in KiB, files, mappings, and blocks of shared memory."""
    for _ in range(70):  # the record of what a rank was in holds the last calls
        comm.barrier()
    gc.collect()
    end_s = time.monotonic() + 10.0
    while any(
        thread.name.startswith(("lowshard ", "lowshard-subscriber")) for thread in threading.enumerate()
    ):
        assert time.monotonic() < end_s, f"threads that have nothing to do: {threading.enumerate()}"
        time.sleep(0.01)
    comm.barrier()
    time.sleep(0.1)  # a thread that Python has seen the end of ends in the kernel soon after
    # What the C library keeps of freed memory is nobody's: some 5 MB that come and go from sample to sample.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    found = {
        "private_kib": _status_kib("RssAnon"),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": len(os.listdir("/proc/self/task")),
    }
    shared: Any = getattr(comm._transport, "shared", None)
    if shared is not None:
        memory, arena = shared.memory, shared.memory.arena
        memory._take_back()
        arena._take_back()
        sizes = [int(arena.table[2 + 2 * i]) for i in range(int(arena.table[0]))]
        found["arena_bytes"] = sum(sizes) - sum(n for free in arena._free for _, n in free)
        found["segments"] = len(sizes)
        # Pages of these come to be resident one by one, as blocks are handed out.
        found["segments_kib"] = sum(sizes) >> 10
        found["lent"] = len(memory._lent)
    return found


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Soak:
    """Live groups, calls in flight; step by step."""

    def __init__(self, comm: lc.Communicator) -> None:
        self.world = comm
        self.groups: list[lc.Communicator | None] = [comm]
        self.counts: dict[str, int] = {}

    def step(self, number: int) -> None:
        """Make one call, in one of the groups."""
        rng = np.random.default_rng([mode.seed(), number])
        own = np.random.default_rng([mode.seed(), number, WORLD.rank])
        if rng.random() < 0.03:
            self.regroup(rng)
            return
        group = self.groups[int(rng.integers(len(self.groups)))]
        if group is None:
            return
        made = calls_of(
            group, rng, elems=int(rng.choice(LENGTHS)), lent=own.random() < 0.4, in_place=own.random() < 0.4
        )
        name = str(rng.choice(CALLS))
        self.counts[name] = self.counts.get(name, 0) + 1
        root, op, order = int(rng.integers(group.size)), str(rng.choice(OPS)), str(rng.choice(ORDERS))
        calls = [made.make(name, root, op, order)]
        started = rng.random() < 0.1
        if started:
            calls.append(made.make("all_reduce"))
        works = [getattr(group.start if started else group, call.name)(*call.args) for call in calls]
        if started:
            for work in works[::-1]:
                work.wait()
        for call in calls:
            check(call)

    def regroup(self, rng: np.random.Generator) -> None:
        """Split one of the groups, and close or drop an old one."""
        self.counts["split"] = self.counts.get("split", 0) + 1
        parent = self.groups[int(rng.integers(len(self.groups)))]
        colors, keys = rng.integers(-1, 2, WORLD.size), rng.permutation(WORLD.size)
        color = int(colors[WORLD.rank])
        made = None
        if parent is not None:
            made = parent.split(None if color < 0 else color, int(keys[WORLD.rank]))
        if len(self.groups) < GROUPS:
            self.groups.append(made)
            return
        place = int(rng.integers(1, len(self.groups)))
        old, self.groups[place] = self.groups[place], made
        if old is not None and rng.random() < 0.5:
            old.close()

    def give_back(self) -> None:
        """Let go of everything."""
        for group in self.groups[1:]:
            if group is not None:
                group.close()
        self.groups[1:] = []


def main(count: int) -> None:
    Worker._IDLE_S = 0.1  # threads come and go
    comm = lc.from_mpi(WORLD, "cpu")
    soak = Soak(comm)
    warm = count // 5
    before: dict[str, int] = {}
    for number in range(count):
        if number == warm:
            soak.give_back()
            before = holdings(comm)
        soak.step(number)
    soak.give_back()
    after = holdings(comm)
    rows = WORLD.gather((before, after), 0)
    comm.close()
    if rows is not None:
        print(json.dumps({"counts": soak.counts, "ranks": rows}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
