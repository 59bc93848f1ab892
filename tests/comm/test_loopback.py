"""The communicator contract on threads: the case table, and what only a loopback group does."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support import mode
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import carried, operands, same

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.reduction import fold, identity
from lowshard.errors import BufferMismatchError, CommError, PeerFailed, TimedOut
from lowshard.fsdp import FSDP, Param


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in ([1, 2, 3, 4, 8] if mode.full() else [4])
        for name in cases_for(Way(size, "loopback"))
    ],
)
def test_the_contract_holds_on_threads(name: str, size: int) -> None:
    lc.run_loopback(size, lambda comm: run_case(name, comm), timeout_s=60.0)


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_without_ranks_is_refused(size: int) -> None:
    with pytest.raises(CommError, match="at least one rank"):
        lc.loopback(size)


def test_reductions_take_the_ops_of_mpi4py_and_refuse_what_is_no_op() -> None:
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs an MPI library")

    def reduce_all(comm: Communicator) -> list[float]:
        mine, out, part = np.full(2, comm.rank + 2.0), np.zeros(2), np.zeros(1)
        found = []
        for op in (MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD):
            comm.all_reduce(mine, out, op=op)
            found.append(float(out[0]))
        comm.reduce_scatter(mine, part, op=MPI.PROD)
        comm.reduce(mine, out if comm.rank == 0 else None, op=MPI.MAX)
        with pytest.raises(CommError, match=r"got 'MPI\.LAND'"):
            comm.all_reduce(mine, out, op=MPI.LAND)
        for wrong in (MPI.BAND, None, ["sum"], {}, 3, np.zeros(2)):
            with pytest.raises(CommError, match="op is one of sum, avg, min, max, prod"):
                comm.all_reduce(mine, out, op=wrong)  # type: ignore[arg-type]
        return [*found, float(part[0])]

    assert lc.run_loopback(2, reduce_all, timeout_s=30.0) == [[5.0, 3.0, 2.0, 6.0, 6.0]] * 2


def test_marks_and_ways_of_mpi4py_are_refused_with_what_to_pass() -> None:
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs an MPI library")

    def pass_them(comm: Communicator) -> None:
        mine, out, raw = np.zeros(2), np.zeros(2), np.zeros(0, np.uint8)
        calls: list[tuple[Callable[[], object], str]] = [
            (
                lambda: comm.all_reduce(MPI.IN_PLACE, raw),
                "one array",
            ),  # it reads as no bytes: nothing would move
            (lambda: comm.broadcast(MPI.BOTTOM), "one array"),
            (lambda: comm.start.all_reduce(raw, MPI.IN_PLACE).wait(), "one array"),
            (lambda: comm.all_reduce([mine, MPI.DOUBLE], out), "pass the array"),
            (lambda: comm.recv(mine, MPI.ANY_SOURCE), "MPI.ANY_SOURCE"),
        ]
        for call, word in calls:
            with pytest.raises((BufferMismatchError, CommError), match=word):
                call()

    lc.run_loopback(2, pass_them, timeout_s=30.0)


def test_the_first_cause_is_raised_and_not_what_followed_from_it() -> None:
    seen: list[type[BaseException]] = []

    def one_fails(comm: Communicator) -> None:
        if comm.rank == 2:
            time.sleep(0.05)
            raise ZeroDivisionError("the cause")
        try:
            comm.barrier()
        except CommError as error:
            seen.append(type(error))
            raise

    with pytest.raises(ZeroDivisionError, match="the cause") as caught:
        lc.run_loopback(4, one_fails, timeout_s=30.0)
    assert "rank 2 of 4" in "".join(caught.value.__notes__)
    assert seen == [PeerFailed] * 3


def test_ctrl_c_ends_the_waits_of_all_ranks() -> None:
    ends: list[str] = []

    def program(comm: Communicator) -> None:
        comm.barrier()  # both are started
        if comm.rank == 0:
            _thread.interrupt_main()
        try:
            comm.recv(np.zeros(1), 1 - comm.rank)
        except PeerFailed as error:
            ends.append(str(error))

    with pytest.raises(KeyboardInterrupt):
        lc.run_loopback(2, program, timeout_s=20.0)
    end_s = time.monotonic() + 5.0
    while len(ends) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert ends == ["run_loopback was left by KeyboardInterrupt"] * 2


@pytest.mark.parametrize("where", ["collective", "group", "message"])
def test_a_rank_whose_program_has_ended_is_missed_long_before_the_deadline(where: str) -> None:
    def one_leaves(comm: Communicator) -> None:
        group = comm.split(int(comm.rank > 0), key=-comm.rank)
        assert group is not None
        if comm.rank == 1:
            return
        if where == "collective":
            comm.barrier()
        elif where == "group" and comm.rank:
            group.barrier()
        elif where == "message":
            comm.recv(np.zeros(3), 1)

    start = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 1 has ended its program") as caught:
        lc.run_loopback(3, one_leaves, timeout_s=30.0)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize("where", ["collective", "group", "message"])
def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(where: str) -> None:
    def one_stays_away(comm: Communicator) -> None:
        group = comm.split(0, key=-comm.rank)
        assert group is not None
        if comm.rank == 1:
            return
        if where == "collective":
            comm.all_reduce(np.zeros(3), np.zeros(3))
        elif where == "group":
            group.barrier()
        else:
            comm.recv(np.zeros(3), 1)

    with pytest.raises(TimedOut, match=r"\[1\]|rank 1") as caught:
        lc.run_loopback(3, one_stays_away, timeout_s=0.4)
    assert caught.value.ranks == (1,)


def test_communicators_serve_threads_that_the_caller_made() -> None:
    comms = lc.loopback(3)
    sums: list[float] = []

    def work(comm: Communicator) -> None:
        buf = np.array([comm.rank + 1.0])
        comm.all_reduce(buf, buf)
        sums.append(float(buf[0]))

    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sums == [6.0] * 3


def test_no_thread_is_left_where_ranks_end_or_close_their_communicators() -> None:
    def start_calls(comm: Communicator) -> None:
        buf, got = np.ones(2), np.empty(2)
        comm.start.all_reduce(buf, buf).wait()
        for work in (comm.start.send(buf, 1 - comm.rank), comm.start.recv(got, 1 - comm.rank)):
            work.wait()

    def train(comm: Communicator) -> None:
        with FSDP({"u": [Param("w", (4,))]}, comm) as engine:
            engine.fill(lambda name, box: np.zeros(4, np.float32))
            engine.open("u", "forward")
            engine.close("u")

    before = set(threading.enumerate())
    for use in (start_calls, train):
        lc.run_loopback(2, use, 20)
        assert set(threading.enumerate()) <= before, use.__name__
    comms = lc.loopback(2)
    threads = [threading.Thread(target=start_calls, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    for comm in comms:
        comm.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_the_identity_of_an_op_changes_nothing(op: str, rng: np.random.Generator) -> None:
    (comm,) = lc.loopback(1)
    for row in carried(comm):
        if row.kind == "scale":
            continue
        (values,) = operands(rng, 1, 50, row, op)
        nothing = np.full(50, identity(op, row), row.numpy)
        for terms in ([values, nothing], [nothing, values], [nothing, values, nothing]):
            out = np.empty_like(values)
            fold(terms, out, op)
            same(out, values)


def test_a_fold_may_write_over_one_of_its_terms_and_in_blocks(rng: np.random.Generator) -> None:
    terms = rng.standard_normal((3, 200_003)).astype(np.float32)
    expected = (terms[0] + terms[1]) + terms[2]
    for order in ("tree", "rank"):
        out = np.empty_like(expected)
        fold(list(terms), out, "sum", order)
        same(out, expected)
        for i in range(3):
            work = [t.copy() for t in terms]
            fold(work, work[i], "sum", order)
            same(work[i], expected)


def test_a_program_that_ends_without_close_shows_what_nobody_waited_for() -> None:
    code = """
import numpy as np
from lowshard.comm import loopback

closed, told, lost = (loopback(1)[0] for _ in range(3))
short, long = np.zeros(3), np.zeros(4)
for comm in (closed, told, lost):
    work = comm.start.all_reduce(short, long)
    while not work.done():
        pass
    if comm is not lost:
        try:
            closed.close() if comm is closed else work.wait()
        except ValueError:
            pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "lowshard: a call that was started failed, and nobody waited for it: BufferMismatchError: "
    )


def test_a_forked_process_has_no_communicator_of_its_parent() -> None:
    code = """
import os
from lowshard.comm import loopback
from lowshard.errors import CommError

comm = loopback(1)[0]
if os.fork() == 0:
    try:
        comm.barrier()
    except CommError:
        os._exit(3)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
comm.barrier()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
