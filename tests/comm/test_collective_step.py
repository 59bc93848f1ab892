"""`collective_step`: all ranks go on or raise one error; a rank that does not come is named, and so is the call.

What any rank's error and digests that differ lead to is in support.check_cases, over every transport. Run by MPI
ranks, with a folder, this file has rank 1 stay away from one call after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.comm_kit import outcome
from support.starting import start_ranks

from lowshard import DeviceMesh, Layout, Replicated, Sharded, execute, plan_redistribute, redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator, collective_step
from lowshard.errors import CheckpointError, PeerFailed, PlanError, TimedOut
from lowshard.fsdp import FSDP, Param
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan, digest
from lowshard.weights import load, plan_load, save

ABSENT, LATE_S = 1, 1.5
"""Which rank does not come, and the deadline, which what comes before has too: a save, on a busy machine."""
Act = Callable[[], Any]


def moved(comm: Communicator, folder: Path) -> dict[str, Act]:
    mesh = DeviceMesh((comm.size,), ("x",))
    src, dst = (Layout(mesh, (12, 4), "float32", (p,)) for p in (Sharded(0), Replicated()))
    plan, local = plan_redistribute(src, dst), np.ones(src.local_shape(comm.rank), np.float32)
    whole = TensorLayout.sharded((12, 4), "float32", {"tp": (comm.size, 1)}, {0: "tp"})
    refit = Refit(build_reshard_plan({"w": whole}, {"w": whole}), comm, {"w": local}, {"w": local.copy()})
    save(folder, {"w": (src, local)}, comm)
    loaded = plan_load(folder, {"w": src})
    engine = FSDP({"u": [Param("w", (40,))]}, comm)
    engine.fill(lambda name, box: 1.0)
    return {
        "execute": lambda: execute(plan, local, comm),
        "redistribute": lambda: redistribute(local, src, dst, comm),
        "save": lambda: save(folder, {"w": (src, local)}, comm),
        "load": lambda: load(folder, loaded, comm),
        "digest": lambda: digest({"w": (src, local)}, comm),
        "Refit": lambda: Refit(refit.plan, comm, {"w": local}, {"w": local.copy()}),
        "Refit.push": lambda: refit.push(1),
        "FSDP": lambda: FSDP({"u": [Param("w", (40,))]}, comm),
        "fill": lambda: engine.fill(lambda name, box: 1.0),
        "gather of unit 'u'": lambda: engine.open("u"),
        "join": engine.join,
    }


CALLS = (
    "execute", "redistribute", "save", "load", "digest", "Refit", "Refit.push", "FSDP", "fill", "gather of unit 'u'",
    "join",
)  # fmt: skip


def require_named(ends: tuple[str, str], call: str) -> None:
    name, text = ends
    assert name in ("TimedOut", "PeerFailed"), (call, ends)
    assert f"{call}: " in text, (call, text)
    assert "rank 1" in text or "ranks [1]" in text, (call, text)


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_does_not_come_is_named_with_the_call_on_threads(call: str, tmp_path: Path) -> None:
    here = threading.Barrier(3)

    def job(comm: Communicator) -> None:
        act = moved(comm, tmp_path)[call]
        if comm.rank != ABSENT:
            require_named(outcome(act), call)
        here.wait(20)

    lc.run_loopback(3, job, LATE_S)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full_only)])
def test_a_rank_that_does_not_come_is_named_with_the_call_on_mpi(ranks: int, tmp_path: Path) -> None:
    start_ranks(Path(__file__), ranks, [str(tmp_path)], env={"LOWSHARD_ON_FAILURE": "raise"}).ok()


def stay_away(folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for call in CALLS if mode.full() else CALLS[::4]:
        acts = moved(lc.from_mpi(world, "cpu", timeout_s=LATE_S), folder)
        world.Barrier()
        ends = ("", "") if world.rank == ABSENT else outcome(acts[call])
        for rank, row in enumerate(world.allgather(ends)):
            if rank != ABSENT:
                require_named(row, call)
    world.Barrier()


# ---- what a block does


def test_ranks_in_different_steps_are_told_of_both_and_go_on() -> None:
    def job(comm: Communicator) -> str:
        step = collective_step(comm, "save" if comm.rank else "load")
        name, text = outcome(lambda: step.__exit__(None, None, None))
        assert (name, "ranks [0] have load; ranks [1, 2] have save" in text) == ("MismatchError", True)
        with collective_step(comm, "next"):
            pass
        return text

    assert len(set(lc.run_loopback(3, job, 10))) == 1


def test_it_takes_one_meeting_and_no_words_where_all_is_well() -> None:
    def job(comm: Communicator) -> None:
        met: list[str] = []
        meet = comm._transport.meet  # type: ignore[attr-defined]
        comm._transport.meet = lambda mine: (met.append(""), meet(mine))[1]  # type: ignore[attr-defined]
        with collective_step(comm, "call", b"digest", lambda: str(_raise(AssertionError("not asked for")))):
            pass
        assert len(met) == 1

    lc.run_loopback(2, job, 10)


def test_after_the_first_error_nothing_is_attempted_any_more() -> None:
    (comm,), done = lc.loopback(1), list[int]()
    step = collective_step(comm, "call", meets=True)
    assert step.attempt(len, "abc") == 3
    for number in range(3):
        step.attempt(done.append, number)
        step.attempt(_raise, PlanError(f"number {number}"))
    with pytest.raises(PlanError, match="call: rank 0: number 0"), step:
        pass
    assert done == [0]


def test_what_a_block_with_meetings_raises_leaves_it_at_once_and_so_does_ctrl_c() -> None:
    def job(comm: Communicator) -> None:
        for meets, kind in ((True, ZeroDivisionError), (False, KeyboardInterrupt)):
            if comm.rank == 0:  # nobody else comes
                with pytest.raises(kind), collective_step(comm, "call", meets=meets):
                    raise kind

    lc.run_loopback(2, job, 10)


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_the_system_refuses_of_files_is_an_error_of_the_checkpoint(is_alone: bool) -> None:
    comm = None if is_alone else lc.loopback(1)[0]
    for kept in (True, False):
        with (
            pytest.raises(CheckpointError, match=r"/a/b: save failed: .*no room") as caught,
            collective_step(comm, "save", path=Path("/a/b")) as step,
        ):
            step.attempt(_raise, OSError("no room")) if kept else _raise(OSError("no room"))
        assert type(caught.value.__cause__) is OSError
    for error in (TimedOut("late"), PeerFailed("gone")):  # which are the system's errors to Python
        with pytest.raises(type(error)), collective_step(comm, "save", path="/a"):
            raise error


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    stay_away(Path(sys.argv[1]))
