"""A collective in one record, and what is promised of it on every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.comm_kit import put, refused, same

from lowshard.comm import Communicator, check
from lowshard.comm.call import Call
from lowshard.comm.collectives import Asked, Collective, text_of
from lowshard.comm.transport import Run, Transport
from lowshard.errors import BufferMismatchError, CommError, MismatchError
from lowshard.foreign_array import host_of


def _check(t: Transport, send: Any, recv: Any, by: int) -> Asked:
    s, r = t.buffers.flat(send, "send"), t.buffers.flat(recv, "recv", writes=True)
    check.same_dtype(s, r)
    check.need(r.size == s.size, "shift", "recv holds as many elements as send", s.size, r.size)
    if type(by) is not int:
        raise CommError(f"shift goes by a number of ranks, got {by!r}")
    moved = s.nbytes if by % t.size else 0
    return Asked(s.dtype, s.size, moved, moved)


def shift_plan(t: Transport, call: Call, dtype: Any, elems: int, by: int) -> Run:
    to, come, zero = [0] * t.size, [0] * t.size, [0] * t.size
    to[(t.rank + by) % t.size] = come[(t.rank - by) % t.size] = elems

    def run(send: Any, recv: Any) -> None:
        t.verify(call)
        t.all_to_all_v(send.reshape(-1), to, zero, recv.reshape(-1), come, zero)

    return run


SHIFT = Collective("shift", lambda send, recv, by: f"shift {text_of(send)} by {by}", _check, shift_plan)
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
    same(put(comm, host_of(recv)), data[(me - 1) % size])
    group = comm.split(0, key=-me)
    assert group is not None
    group.call(SHIFT, put(comm, data[me]), recv, 1)
    comm.barrier()
    same(recv, data[(me + 1) % size])
    group.close()
    wrong = put(comm, np.zeros(5, np.float32))
    refused(lambda: comm.call(SHIFT, recv, wrong, 1), BufferMismatchError, "shift: recv holds as many")
    refused(lambda: comm.call(SHIFT, recv, recv, "far"), CommError, "number of ranks")
    if size > 1 and by_the_host and comm.transport != "nccl":
        refused(lambda: comm.call(SHIFT, recv, recv, me), MismatchError, r"shift float32\[6\] by 1")
    with comm.grouped():
        refused(lambda: comm.call(SHIFT, recv, recv, 1), CommError, "only send and recv")
    comm.close()
    refused(lambda: comm.call(SHIFT, recv, recv, 1), CommError, "closed")
