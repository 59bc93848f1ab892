"""The staged communicator: pieces, page-locked slots, copies, messages, the bits of the host's sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone_staged, on_gpu, run_staged

from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.pinned import Round, Slots
from lowshard.errors import BufferMismatchError, CommError


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


def test_the_host_works_on_one_slot_while_the_device_fills_the_other_and_a_failure_leaves_both_usable(
    cupy: Any,
) -> None:
    binding = Binding.load(with_nccl=False)
    slots = Slots(binding, lambda n: np.empty(n, np.uint8), 10.0)
    device = cupy.asarray(np.arange(40, dtype=np.uint8))
    at, seen = binding.pointer(device), []

    def work(slot: np.ndarray) -> None:
        seen.append(slot.tolist())
        slot += 100

    def fail(slot: np.ndarray) -> None:
        raise CommError("the peer is gone")

    parts = [((at + 10 * i, 0, 10),) for i in range(4)]
    with pytest.raises(CommError, match="gone"):
        slots.run([Round(10, part, fail, ()) for part in parts], "test")
    slots.run([Round(10, part, work, part) for part in parts], "test")
    assert seen == np.arange(40).reshape(4, 10).tolist()
    same(device, np.arange(100, 140, dtype=np.uint8))
    slots.close()


def test_messages_of_another_length_are_refused_also_where_they_take_several_pieces() -> None:
    piece = 8

    def check(comm: Communicator) -> None:
        for sent, expected in (
            (3, 4),
            (piece, piece + 1),
            (2 * piece, piece),
            (3 * piece, 2 * piece),
            (0, 1),
        ):
            group = comm.split(0)
            assert group is not None
            buf = on_gpu(comm, np.zeros(sent if comm.rank == 0 else expected))
            if comm.rank == 0:
                group.send(buf, 1)
            else:
                refused(lambda g=group, b=buf: g.recv(b, 0), BufferMismatchError, "elements")
            comm.barrier()

    run_staged(2, check, slot_bytes=8 * piece)
