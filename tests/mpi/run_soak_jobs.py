"""Redistributions in groups, refits, saves and loads for some time, each checked; rank 0 prints what the ranks hold.

Usage: run_soak_jobs.py SECONDS EVERY_S. Every so many seconds everything is given back and counted. All ranks draw the
same numbers for each step, so those outside a group keep in step; rank 0's clock decides when it is over.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI
from run_soak import Soak, holdings
from support import mode
from support.checkpoints import attention_and_more, local_of, same, state_of, values_of
from support.moves import check_move, random_pair
from support.reshard_cases import arrays_of, random_case

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm.work import Worker
from lowshard.compiled import origins
from lowshard.errors import DTypeError
from lowshard.reshard import Refit
from lowshard.weights import load, nodes_of, plan_load, save
from lowshard.weights.load_plan import STRATEGIES

WORLD = MPI.COMM_WORLD
VERSIONS = 3
STEPS_BETWEEN_CLOCKS = 10


class Jobs:
    """The jobs, in the groups of a `Soak`; step by step."""

    def __init__(self, soak: Soak, folder: Path) -> None:
        self.soak, self.folder = soak, folder

    def step(self, number: int) -> None:
        """Do one job, in one of the groups, or change the groups."""
        rng = np.random.default_rng([mode.seed(), 7, number])
        kind = rng.choice(["collectives", "redistribute", "refit", "save"], p=[0.3, 0.45, 0.15, 0.1])
        if kind == "collectives":
            self.soak.step(number)
            return
        self.soak.counts[kind] = self.soak.counts.get(kind, 0) + 1
        place = int(rng.integers(len(self.soak.groups)))
        group = self.soak.groups[place]
        if group is not None:
            getattr(self, kind)(group, rng, number, f"group{place}")

    def redistribute(self, group: lc.Communicator, rng: np.random.Generator, number: int, name: str) -> None:
        """Move an array between two layouts of any kind."""
        src, dst = random_pair(random.Random(int(rng.integers(1 << 30))), group.size)
        check_move(group, src, dst, number)

    def refit(self, group: lc.Communicator, rng: np.random.Generator, number: int, name: str) -> None:
        """Take some versions of tensors in layouts of any kind."""
        case = random_case(rng, group.size)
        mine = arrays_of(case.src, group.rank, case.whole, group if rng.random() < 0.5 else None)
        out = {
            n: np.zeros(layout.local_shape(group.rank) or (), case.whole[n].dtype)
            for n, layout in case.dst.items()
            if group.rank in layout
        }
        way = {"way": case.way, "staging_bytes": case.staging_bytes}
        with Refit(
            case.plan, group, mine, out, buffering=str(rng.choice(["double", "in_place"])), **way
        ) as refit:
            for version in range(VERSIONS):
                whole = {n: np.roll(w, version) for n, w in case.whole.items()}
                for n, array in arrays_of(case.src, group.rank, whole).items():
                    mine[n][...] = array
                refit.push(version) if mine else refit.pull()
                for n, right in arrays_of(case.dst, group.rank, whole).items():
                    assert same(refit.weights[n], right), (n, version)

    def save(self, group: lc.Communicator, rng: np.random.Generator, number: int, name: str) -> None:
        """Save a checkpoint over that of an earlier step, and load it."""
        path = self.folder / f"{name}-{group.size}-{'.'.join(map(str, group_ranks(group)))}"
        merged, strategy = bool(rng.random() < 0.5), str(rng.choice(STRATEGIES))
        tilings = attention_and_more(group.size)
        values = values_of(tilings, number % 1000)
        save(path, state_of(values, tilings, group.rank), group, merged=merged)
        plan = plan_load(path, tilings, strategy=strategy, nodes=nodes_of(group))  # type: ignore[arg-type]
        found = load(path, plan, group)
        for n, tiling in tilings.items():
            right = local_of(values[n], tiling, group.rank)
            assert right is None or same(found[n], right), (n, strategy)
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        group.barrier()


def group_ranks(group: lc.Communicator) -> list[int]:
    """Return the world's ranks of a group: what its files are named by."""
    own, every = np.array([WORLD.rank]), np.empty(group.size, np.int64)
    group.all_gather(own, every)
    return [int(rank) for rank in every]


def use_compiled_code(comm: lc.Communicator) -> None:
    """Reduce every dtype by every op: a process that compiles something holds some 50 MB more from then on."""
    for row in dtypes.all_dtypes():
        for op in ("sum", "avg", "min", "max", "prod"):
            send = np.zeros(8, row.numpy)
            with suppress(DTypeError):  # an op that makes no sense for the dtype
                comm.all_reduce(send, send.copy(), op, "tree")  # type: ignore[arg-type]


def main(seconds: float, every_s: float) -> None:
    Worker._IDLE_S = 0.1  # threads come and go
    with tempfile.TemporaryDirectory(prefix="lowshard-soak-") as own_folder:
        folder = Path(WORLD.bcast(own_folder, 0))
        comm = lc.from_mpi(WORLD, "cpu")
        soak = Soak(comm)
        use_compiled_code(comm)
        jobs = Jobs(soak, folder)
        samples: list[dict[str, float]] = []
        number, start_s = 0, time.monotonic()
        at_s = 0.0
        while at_s < seconds:
            for _ in range(STEPS_BETWEEN_CLOCKS):
                jobs.step(number)
                number += 1
            at_s = WORLD.bcast(time.monotonic() - start_s, 0)
            if at_s >= every_s * (len(samples) + 1):
                soak.give_back()
                compiled = sum(origin in ("compiled", "memory") for origin in origins.values())
                samples.append(
                    {"at_s": round(at_s, 1), "steps": number, "compiled": compiled, **holdings(comm)}
                )
        rows = WORLD.gather(samples, 0)
        comm.close()
        if rows is not None:
            print(json.dumps({"counts": soak.counts, "ranks": rows}), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
