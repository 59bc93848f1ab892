"""A communicator that two threads of a rank call: at once is an error, one after the other is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Partial, Replicated, execute, plan_redistribute
from lowshard.comm import Communicator, share_text
from lowshard.errors import CommError


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """Run a call in a thread of its own, wait for it, and return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def check_threads(comm: Communicator, meet: Callable[[], object]) -> None:
    """Call from two threads on rank 0 while the others keep its first call waiting; the result stays right.

    Collective: all ranks of the communicator call this.

    Args:
        comm: the communicator.
        meet: returns when all ranks have called it, by another way than the communicator.
    """
    send, out = np.full(8, comm.rank + 1.0), np.zeros(8)
    mesh = DeviceMesh((comm.size,), ("dp",))
    plan = plan_redistribute(
        Layout(mesh, (8,), "float64", (Partial("sum"),)), Layout(mesh, (8,), "float64", (Replicated(),))
    )
    whole = comm.size * (comm.size + 1) / 2
    calls: list[Callable[[Any], object]] = [
        lambda into: comm.all_reduce(send, into),
        lambda into: comm.all_reduce(send, into, "sum", "tree"),
        lambda into: execute(plan, send, comm, into),
    ]
    if comm.rank < 2:  # messages that are known by then
        for _ in range(2):
            comm.send(send, 1) if comm.rank == 0 else comm.recv(out, 0)
    others: list[Callable[[Any], object]] = [
        *calls,
        lambda into: comm.barrier(),
        lambda into: comm.send(send, 1),
        lambda into: comm.send(into, 1),
        lambda into: comm.recv(into, 1),
        lambda into: comm.send_recv(send, 1, into, 1),
        lambda into: comm.split(0),
        lambda into: share_text(comm, "text"),
        lambda into: comm.close(),
    ]
    for call in calls:
        for _ in range(3):  # the first time, and when it is known
            out[...] = 0
            if comm.rank:
                meet()
                call(out)
            else:
                thread = threading.Thread(target=call, args=(out,))
                thread.start()
                while "unlocked" in repr(comm._caller.lock):  # until the thread is in its call
                    time.sleep(0.001)
                for other in others:
                    with pytest.raises(CommError, match="one thread at a time"):
                        other(np.zeros(8))
                meet()
                thread.join()
            assert (out == whole).all(), "the call that was there first is spoiled"
    check_group(comm)
    # One thread after the other, and what was started before, are in turn.
    assert in_thread(lambda: comm.all_reduce(send, out)) is None
    works = [comm.start.all_reduce(send, np.zeros(8)) for _ in range(3)]
    comm.barrier()
    for into in (np.zeros(8), np.zeros(8)):
        comm.all_reduce(send, into)
        execute(plan, send, comm, into)
        assert (into == whole).all()
    for work in works:
        work.wait()


def check_group(comm: Communicator) -> None:
    """Send from a second thread while the first has a group open: it is sent at once, and is no part of the group.

    Collective: all ranks of the communicator call this.
    """
    if comm.rank == 0:
        grouped, alone = np.full(8, 1.0), np.full(8, 2.0)
        with comm.grouped():
            comm.send(grouped, 1)
            assert in_thread(lambda: comm.send(alone, 1)) is None
            alone[...] = 3
    elif comm.rank == 1:
        came = [np.zeros(8), np.zeros(8)]
        for buf in came:
            comm.recv(buf, 0)
        assert [buf.tolist() for buf in came] == [[2.0] * 8, [1.0] * 8]
