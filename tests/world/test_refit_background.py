"""Refits in the background, over threads: what goes on beside them, what they refuse, and how they end."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from lowshard.comm import run_loopback
from lowshard.errors import LowshardError, MismatchError, PeerFailed, PlanError, TimedOut, VerificationError
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

LIMIT_S = 20.0
ROWS = 64
SRC = {
    "a": TensorLayout.sharded((ROWS, 4096), "float32", {"tp": (2, 1)}, {0: "tp"}),
    "b": TensorLayout.sharded((300,), "float32", {"dp": (2, 1)}),
}
DST = {
    "a": TensorLayout.sharded((ROWS, 4096), "float32", {"tp": (2, 1)}, {1: "tp"}, offset=2),
    "b": TensorLayout.sharded((300,), "float32", {"dp": (2, 1)}, offset=2),
}
PLAN = build_reshard_plan(SRC, DST)
"""Ranks 0 and 1 train, 2 and 3 serve."""


def arrays(layouts: Any, rank: int) -> dict[str, np.ndarray]:
    return {n: np.zeros(x.local_shape(rank), np.float32) for n, x in layouts.items() if rank in x}


def refit_of(comm: Any, **settings: Any) -> tuple[Refit, dict[str, np.ndarray]]:
    mine = arrays(SRC, comm.rank)
    return Refit(PLAN, comm, mine, arrays(DST, comm.rank), version=0, **settings), mine


def begin(refit: Refit, mine: Any, version: int, wait: bool = False) -> Any:
    return refit.push(version, wait=wait) if mine else refit.pull(wait=wait)


def set_to(arrays: dict[str, np.ndarray], value: float) -> None:
    for array in arrays.values():
        array[...] = value


def check(refit: Refit, version: int) -> None:
    assert refit.version == version
    assert all((a == version).all() for a in refit.weights.values())


@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_versions_come_in_the_background_and_each_rank_chooses_for_itself(buffering: Any) -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm, buffering=buffering)
        for version in range(1, 9):
            set_to(mine, version)
            begun = begin(refit, mine, version, wait=bool(version >> comm.rank & 1))
            report = begun if version >> comm.rank & 1 else begun.wait(LIMIT_S)
            assert report.sent_bytes == PLAN.sent_bytes(comm.rank)
            check(refit, version)
            assert list(refit.report()["phases"]) == ["readers", "agree", "move", "sources", "vote"]
            comm.barrier()  # sources change again
        refit.close()
        check(refit, 8)

    run_loopback(4, work, LIMIT_S)


def test_other_calls_of_the_communicator_go_on_meanwhile() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        set_to(mine, 1)
        works = [] if comm.rank == 3 else [begin(refit, mine, 1)]
        for _ in range(50):  # rank 3 has not come to the refit, which cannot have ended
            total = np.ones(1000, np.float32)
            comm.all_reduce(total, total)
            assert (total == 4).all()
            assert not any(w.done() for w in works)
            assert refit.version == 0
        works = works or [begin(refit, mine, 1)]
        works[0].wait(LIMIT_S)
        check(refit, 1)
        refit.close()

    run_loopback(4, work, LIMIT_S)


def test_the_next_version_waits_for_the_one_that_is_under_way() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        for version in range(1, 6):
            if comm.rank == 3:
                time.sleep(0.02)
            begin(refit, mine, version, wait=False)  # sources stay as they are
        begin(refit, mine, 6, wait=True)
        assert refit.version == 6
        begin(refit, mine, 7)
        refit.close()  # also waits
        assert refit.version == 7

    run_loopback(4, work, LIMIT_S)


def test_an_error_is_raised_by_every_ranks_wait_and_the_next_version_works() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        wrong = refit.push(1 + comm.rank, wait=False) if mine else refit.pull(wait=False)
        with pytest.raises(MismatchError, match=r"pushed \[1, 2\]"):
            wrong.wait(LIMIT_S)
        wrong = refit.push(-5, wait=False) if comm.rank == 1 else begin(refit, mine, 1)
        with pytest.raises(PlanError, match="from 0 to"):
            wrong.wait(LIMIT_S)
        set_to(mine, 1)
        begin(refit, mine, 1).wait(LIMIT_S)
        check(refit, 1)
        with pytest.raises(PlanError, match="rank 2: wait of pull is True or False"):
            begin(refit, mine, 2, wait="no" if comm.rank == 2 else True)  # type: ignore[arg-type]
        check(refit, 1)
        refit.close()

    run_loopback(4, work, LIMIT_S)


def test_an_error_that_one_rank_has_not_heard_of_is_raised_on_all_by_the_next_call() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        failing = refit.push(1 + comm.rank, wait=False) if mine else refit.pull(wait=False)
        if comm.rank != 2:
            with pytest.raises(MismatchError):
                failing.wait(LIMIT_S)
        with pytest.raises(MismatchError, match=r"rank \d: Refit: one version .*pushed \[1, 2\]"):
            begin(refit, mine, 3, wait=True)
        set_to(mine, 3)
        begin(refit, mine, 3, wait=True)
        check(refit, 3)
        refit.close()

    run_loopback(4, work, LIMIT_S)


@pytest.mark.parametrize("moment", ["before anything moves", "after all has moved"])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_source_that_is_changed_meanwhile_is_found_and_no_rank_switches(
    moment: str, checksums: bool, rng: np.random.Generator
) -> None:
    changed = {n: rng.random(x.local_shape(1)) < 0.01 for n, x in SRC.items()}  # 1 % of the elements
    for elems in changed.values():
        elems.reshape(-1)[0] = True

    def work(comm: Any) -> None:
        refit, mine = refit_of(comm, checksums=checksums)

        def change(*_: object) -> None:
            for name, elems in changed.items():
                mine[name][elems] = 7

        set_to(mine, 1)
        begin(refit, mine, 1).wait(LIMIT_S)
        mover = refit._movers[1 - refit._now.at]
        if comm.rank == 1 and moment == "after all has moved":
            run = mover.run
            mover.run = lambda version: (run(version), change())[0]  # type: ignore[method-assign]
        begun = None if comm.rank == 3 else begin(refit, mine, 2)
        if comm.rank == 1 and moment == "before anything moves":
            change()
        comm.barrier()
        begun = begun or begin(refit, mine, 2)
        with pytest.raises(
            VerificationError, match="2 sources of rank 1 were changed while they were pushed"
        ):
            begun.wait(LIMIT_S)
        check(refit, 1)
        assert refit.report()["phases"]
        mover.__dict__.pop("run", None)
        comm.barrier()
        set_to(mine, 3)
        begin(refit, mine, 3).wait(LIMIT_S)
        check(refit, 3)
        refit.close()

    run_loopback(4, work, LIMIT_S)


def test_who_reads_a_version_keeps_it_whole_and_the_refit_that_would_write_it_waits() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        held, go_on, seen = threading.Event(), threading.Event(), []

        def read() -> None:
            with refit.reading() as (version, weights):
                held.set()
                go_on.wait(LIMIT_S)
                seen.append((version, {float(v) for a in weights.values() for v in (a.min(), a.max())}))

        set_to(mine, 1)
        begin(refit, mine, 1).wait(LIMIT_S)
        comm.barrier()
        reader = threading.Thread(target=read)
        if comm.rank == 2:
            reader.start()
            assert held.wait(LIMIT_S)
        set_to(mine, 2)
        begin(refit, mine, 2).wait(LIMIT_S)  # goes to the other arrays
        check(refit, 2)
        comm.barrier()
        set_to(mine, 3)
        begun = begin(refit, mine, 3)
        time.sleep(0.2)
        assert not begun.done()
        check(refit, 2)
        comm.barrier()  # all have looked
        go_on.set()
        begun.wait(LIMIT_S)
        check(refit, 3)
        if comm.rank == 2:
            reader.join(LIMIT_S)
            assert seen == [(1, {1.0})]
            assert refit.report()["phases"]["readers"] >= 0.15
        refit.close()

    run_loopback(4, work, LIMIT_S)


@pytest.mark.parametrize("wait", [True, False])
def test_who_reads_for_too_long_is_an_error_on_every_rank_and_the_next_version_works(wait: bool) -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        set_to(mine, 1)
        with refit.reading() as (version, weights):
            assert (version, set(weights)) == (0, set() if mine else {"a", "b"})
            begin(refit, mine, 1).wait(LIMIT_S)
            if comm.rank == 3:
                refused(refit, mine, wait)
        if comm.rank != 3:
            refused(refit, mine, wait)
        check(refit, 1)
        begin(refit, mine, 3).wait(LIMIT_S)
        assert refit.version == 3
        refit.close()

    def refused(refit: Refit, mine: Any, wait: bool) -> None:
        with pytest.raises(TimedOut, match="rank 3 still reads arrays that the next version is written to"):
            begin(refit, mine, 2, wait).wait(LIMIT_S)

    run_loopback(4, work, 2.0)


def test_a_rank_that_fails_ends_the_others_waits_and_closing_does_not_hang() -> None:
    ended: dict[int, tuple[str, float]] = {}

    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        begun = None if comm.rank == 3 else begin(refit, mine, 1)
        comm.barrier()
        if comm.rank == 3:
            raise ValueError("it has failed")
        start_s = time.monotonic()
        try:
            begun.wait()
        except LowshardError as error:
            refit.close()
            check(refit, 0)
            ended[comm.rank] = type(error).__name__, time.monotonic() - start_s
            raise

    with pytest.raises(ValueError, match="it has failed"):
        run_loopback(4, work, LIMIT_S)
    assert set(ended) == {0, 1, 2}
    assert {name for name, _ in ended.values()} == {PeerFailed.__name__}
    assert max(span_s for _, span_s in ended.values()) < LIMIT_S / 2


def test_a_block_that_ends_by_an_exception_does_not_wait_for_what_is_under_way() -> None:
    def work(comm: Any) -> None:
        refit, mine = refit_of(comm)
        set_to(mine, 1)
        works: list[Any] = []

        def interrupted() -> None:
            with refit:
                works.append(begin(refit, mine, 1))
                raise KeyboardInterrupt

        if comm.rank != 3:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert not works[0].done()  # nobody has waited for rank 3
        comm.barrier()
        if comm.rank == 3:
            works.append(begin(refit, mine, 1))
        works[0].wait(LIMIT_S)  # it goes on, and ends
        check(refit, 1)

    run_loopback(4, work, LIMIT_S)
