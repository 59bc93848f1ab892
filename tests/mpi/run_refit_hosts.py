"""What each rank of two hosts does of a refit in which one rank is killed at a numbered step of its own.

Arguments: the folder for notes; the victim's rank; the step at which it kills itself, or -1 for none: then it notes how
many steps there are; "off" or "auto", whether what changed is sent. Ranks 0 and 3 train, others serve; three a
host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from run_refit_fault import die, note

from lowshard import comm as lc
from lowshard.errors import PeerFailed
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan
from lowshard.transfer.mover import RoundMessages

KILLED_AT = 3
VERSIONS = 5
ROWS = 512
STEP = 16
"""Columns from one that changes to the next; each rank serves some of them."""


class Steps:
    """Numbers what a rank does of a refit: before and after each call that meets others, the vote and the switch."""

    def __init__(self, fatal: int) -> None:
        self.fatal, self.count, self.counting = fatal, 0, False

    def watch(self, owner: Any, name: str) -> None:
        """Number the calls of a method."""
        call: Callable[..., Any] = getattr(owner, name)

        def numbered(*args: Any, **kwargs: Any) -> Any:
            self.step()
            try:
                return call(*args, **kwargs)
            finally:
                self.step()

        setattr(owner, name, numbered)

    def step(self) -> None:
        if self.counting:
            if self.count == self.fatal:
                die()
            self.count += 1


def main(folder: Path, victim: int, fatal: int, delta: Any) -> None:
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    votes_agree(comm, folder)
    src = {
        "a": TensorLayout.sharded((ROWS, 64), "float32", {"tp": (2, 3)}, {0: "tp"}),
        "b": TensorLayout.sharded((64, ROWS), "float32", {"dp": (2, 3)}),
    }
    axes = {"dp": (2, 3), "tp": (2, 1)}
    dst = {
        "a": TensorLayout.sharded((ROWS, 64), "float32", axes, {1: "tp"}, offset=1),
        "b": TensorLayout.sharded((64, ROWS), "float32", axes, {1: "tp"}, offset=1),
    }
    mine = {k: np.zeros(x.local_shape(comm.rank), np.float32) for k, x in src.items() if comm.rank in x}
    out = {k: np.zeros(x.local_shape(comm.rank) or (), np.float32) for k, x in dst.items() if comm.rank in x}
    refit = Refit(build_reshard_plan(src, dst), comm, mine, out, version=0, delta=delta)
    steps = Steps(fatal)
    if comm.rank == victim:
        for owner, names in (
            (refit.comm._transport, ("all_gather_v", "compare", "barrier")), (refit._vote, ("decide",)),
            (refit, ("_switch",)), (RoundMessages, ("make_room", "send", "take", "finish")),
        ):  # fmt: skip
            for name in names:
                steps.watch(owner, name)
        if refit._changes is not None:
            names = "_catch_up", "_find", "_exchange_sizes", "_streams", "_copy_missing"
            for name in (*names, "_write", "commit"):
                steps.watch(refit._changes, name)
    step = STEP if delta == "auto" else 1
    done = version = 0
    try:
        for version in range(1, VERSIONS + 1):
            for array in mine.values():
                array[:, ::step] = version
            comm.barrier()
            steps.counting = version == KILLED_AT
            refit.push(version) if mine else refit.pull()
            steps.counting, done = False, version
            assert all((a[:, ::step] == version).all() for a in refit.weights.values())
            if step > 1 and mine and version > 1:
                assert refit.report()["sent_bytes"] < refit.report()["dense_bytes"] / 8
    except PeerFailed as error:
        found = sorted({float(v) for a in refit.weights.values() for v in np.unique(a[:, ::step])})
        assert all(np.count_nonzero(a) in (0, a[:, ::step].size) for a in refit.weights.values())
        note(folder, f"left-{comm.rank}", {
            "error": str(error), "values": found, "version": refit.version, "torn": refit.torn, "done": done,
            "trying": version,
        })  # fmt: skip
        raise
    if comm.rank == victim:
        note(folder, "steps", {"count": steps.count})


def votes_agree(comm: lc.Communicator, folder: Path) -> None:
    """Ranks of a host ask for different ends of an attempt, over and over: they are told the same one."""
    from lowshard.reshard.refit import Vote

    vote = Vote(comm)
    told = []
    for attempt in range(1, 41):
        comm.barrier()
        told.append(vote.decide(attempt, commit=(comm.rank + attempt) % 2 == 0))
    note(folder, f"told-{comm.rank}", {"told": told})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
