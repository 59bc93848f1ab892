"""The staged communicator: pieces, page-locked slots, copies, messages, the bits of the host's sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.comm_kit import same
from support.gpu import alone_staged, on_gpu, run_staged

from lowshard.comm import Communicator


def test_page_locked_memory_is_made_on_first_use_and_bounded(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: dict[int, int] = {}
    runtime = cupy.cuda.runtime
    lock, unlock = runtime.hostRegister, runtime.hostUnregister
    monkeypatch.setattr(
        runtime, "hostRegister", lambda at, n, flags: (lock(at, n, flags), locked.update({at: n}))[0]
    )
    monkeypatch.setattr(runtime, "hostUnregister", lambda at: (unlock(at), locked.pop(at))[0])
    comm = alone_staged(slot_bytes=1 << 16)
    comm.barrier()
    assert not locked
    for elems, n_bytes in ((10, 4096), (100_000, 1 << 16)):
        buf = on_gpu(comm, np.zeros(elems))
        for _ in range(2):
            comm.all_reduce(buf, buf)
        assert list(locked.values()) == [n_bytes] * 2
    comm.close()
    assert not locked


def test_memory_that_cannot_be_locked_is_used_as_it_is(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(801)

    monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", refuse)
    with alone_staged() as comm:
        buf = on_gpu(comm, np.ones(9))
        comm.all_reduce(buf, buf)
        same(buf, np.ones(9))
    if hasattr(cupy, "checker"):
        assert all("pageable" in report for report in cupy.checker.reports())
        cupy.checker.reset()


def test_a_slot_that_another_stream_still_reads_is_waited_for() -> None:
    def check(comm: Communicator) -> None:
        streams = [comm.xp.cuda.Stream(non_blocking=True) for _ in range(3)]
        bufs = []
        for i in range(12):
            with streams[i % 3]:
                bufs.append(on_gpu(comm, np.full(300, float(i + comm.rank))))
                comm.broadcast(bufs[i], i % 2) if i % 3 else comm.all_reduce(bufs[i], bufs[i])
        for i, buf in enumerate(bufs):
            with streams[i % 3]:
                same(buf, np.full(300, float(i + i % 2 if i % 3 else 2 * i + 1)))

    run_staged(2, check, slot_bytes=512)
