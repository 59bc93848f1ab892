"""A collective in one record works on every transport: checked, compared, counted, started, on groups, and by a plan of
a transport's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import mode
from support.case_table import LIMIT_S
from support.comm_kit import get, put, refused, same
from support.nccl_stand_in import run_staged, run_stand_in
from support.starting import start_ranks

from lowshard import comm as lc
from lowshard.comm import Communicator, check
from lowshard.comm.call import Call
from lowshard.comm.collectives import Asked, Collective, text_of
from lowshard.comm.loopback import LoopbackTransport
from lowshard.comm.transport import Run, Transport
from lowshard.errors import BufferMismatchError, CommError, MismatchError


def _check(t: Transport, send: Any, recv: Any, by: int) -> Asked:
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    check.same_dtype(s, r)
    check.need(r.size == s.size, "shift", "recv holds as many elements as send", s.size, r.size)
    if type(by) is not int:
        raise CommError(f"shift goes by a number of ranks, got {by!r}")
    moved = s.nbytes if by % t.size else 0
    return Asked(s.dtype, s.size, r.size, moved, moved)


def _plan(t: Transport, call: Call, dtype: Any, elems: int, by: int) -> Run:
    to, come, zero = [0] * t.size, [0] * t.size, [0] * t.size
    to[(t.rank + by) % t.size] = come[(t.rank - by) % t.size] = elems

    def run(send: Any, recv: Any) -> None:
        t.verify(call)
        t.all_to_all_v(send.reshape(-1), to, zero, recv.reshape(-1), come, zero)

    return run


SHIFT = Collective("shift", lambda send, recv, by: f"shift {text_of(send)} by {by}", _check, _plan)
"""Send to the rank so many further on, and receive from the one so many before."""


def every_promise(comm: Communicator, by_the_host: bool = True) -> None:
    """Check what is promised of a collective; all ranks call this."""
    me, size = comm.rank, comm.size
    data = np.arange(6 * size, dtype=np.float32).reshape(size, 6)
    comm.traffic.clear()
    for by in (1, 0, -1, 1, size + 2, 1):
        recv = put(comm, np.zeros(6, np.float32))
        comm.call(SHIFT, put(comm, data[me]), recv, by)
        same(recv, data[(me - by) % size])
    assert comm.traffic.calls["shift"] == 6
    moves = sum(1 for by in (1, 0, -1, 1, size + 2, 1) if by % size)
    assert comm.traffic.sent_bytes == comm.traffic.received_bytes == 24 * moves
    buf = put(comm, data[me])
    comm.call(SHIFT, buf, buf, 1)  # in place
    same(buf, data[(me - 1) % size])
    recv = put(comm, np.zeros(6, np.float32))
    work = comm.start.call(SHIFT, put(comm, data[me]), recv, 1)
    work.wait()
    comm.barrier()
    same(put(comm, get(recv)), data[(me - 1) % size])
    group = comm.split(0, key=-me)
    assert group is not None
    group.call(SHIFT, put(comm, data[me]), recv, 1)
    comm.barrier()
    same(recv, data[(me + 1) % size])
    group.close()
    wrong = put(comm, np.zeros(5, np.float32))
    refused(lambda: comm.call(SHIFT, recv, wrong, 1), BufferMismatchError, "shift: recv holds as many")
    refused(lambda: comm.call(SHIFT, recv, recv, "far"), CommError, "number of ranks")
    if size > 1 and by_the_host:
        refused(lambda: comm.call(SHIFT, recv, recv, me), MismatchError, r"shift float32\[6\] by 1")
        only = wrong if me == 1 else put(comm, np.zeros(6, np.float32))
        refused(lambda: comm.call(SHIFT, recv, only, 1), BufferMismatchError, "rank 1: shift: recv holds")
    with comm.grouped():
        refused(lambda: comm.call(SHIFT, recv, recv, 1), CommError, "only send and recv")
    comm.close()
    refused(lambda: comm.call(SHIFT, recv, recv, 1), CommError, "closed")


Runner = Callable[..., object]


@pytest.mark.parametrize("size", [1, 2, 3, 8] if mode.full() else [3])
@pytest.mark.parametrize("run", [lc.run_loopback, run_staged, run_stand_in])
def test_one_record_is_a_collective_of_a_transport(run: Runner, size: int) -> None:
    run(size, every_promise)


@pytest.mark.mpi
@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.parametrize(
    ("path", "node_size"),
    mode.sample([("auto", ""), ("mpi", ""), ("auto", "2"), ("mpi", "2")], 1, "toy ways"),
)
def test_one_record_is_a_collective_of_processes(path: str, node_size: str) -> None:
    env = {"LOWSHARD_CPU_PATH": path, "LOWSHARD_NODE_SIZE": node_size}
    start_ranks(__file__, 4 if node_size else 3, timeout_s=60, env=env).ok()


def test_a_transport_may_have_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def plan(t: Transport, call: Call, dtype: Any, elems: int, by: int) -> Run:
        made.append(by)
        return _plan(t, call, dtype, elems, by)

    monkeypatch.setattr(LoopbackTransport, "plans", {**LoopbackTransport.plans, "shift": plan})
    lc.run_loopback(2, every_promise)
    assert set(made) == {1, 0, -1, 4}


if __name__ == "__main__":
    from mpi4py import MPI

    every_promise(lc.from_mpi(MPI.COMM_WORLD, "cpu"))
