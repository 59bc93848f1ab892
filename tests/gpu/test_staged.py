"""The staged communicator: pieces, page-locked slots, copies, messages, the bits of the host's sums."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.comm_kit import get, operands, put, refused, same
from support.gpu import alone_staged, on_gpu, run_staged

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.pinned import Round, Slots
from lowshard.errors import BufferMismatchError, CommError

N, SLOT_BYTES = 3, 480


def lengths(width: int) -> list[int]:
    piece = SLOT_BYTES // (width * 8)
    return [0, 1, piece - 1, piece, piece + 1, 2 * piece, 3 * piece + 2]


def test_every_collective_is_exact_at_lengths_around_a_piece() -> None:
    def data(rank: int, elems: int, salt: int) -> np.ndarray:
        return np.random.default_rng([rank, elems, salt]).integers(0, 1 << 40, elems)

    def check(comm: Communicator) -> None:
        me = comm.rank
        for k in sorted({k for width in (1, N, N + 1, 2 * N) for k in lengths(width)}):
            everyone, wide = [data(r, k, 1) for r in range(N)], [data(r, N * k, 2) for r in range(N)]
            own, spread, recv, part = on_gpu(
                comm, everyone[me], wide[me], np.zeros(N * k, int), np.zeros(k, int)
            )
            comm.all_gather(own, recv)
            same(recv, np.concatenate(everyone))
            comm.all_to_all(spread, recv)
            same(recv, np.concatenate([w[k * me : k * (me + 1)] for w in wide]))
            comm.reduce_scatter(spread, part, "max", "tree")
            same(part, np.maximum.reduce(wide)[k * me : k * (me + 1)])
            comm.all_reduce(own, part)
            same(part, np.sum(everyone, axis=0))
            for root in (0, N - 1):
                is_root, buf = me == root, on_gpu(comm, everyone[me])
                comm.broadcast(buf, root)
                same(buf, everyone[root])
                comm.gather(own, recv if is_root else None, root)
                comm.scatter(spread if is_root else None, part, root)
                same(part, wide[root][k * me : k * (me + 1)])
                comm.reduce(own, part if is_root else None, "min", root)
                if is_root:
                    same(recv, np.concatenate(everyone))
                    same(part, np.minimum.reduce(everyone))
            if me == 0:
                comm.send(own, 1)
            elif me == 1:
                comm.recv(part, 0)
                same(part, everyone[0])

    run_staged(N, check, slot_bytes=SLOT_BYTES)


@pytest.mark.parametrize("order", ["tree", "rank", "fast"])
def test_sums_have_the_bits_of_the_hosts_communicator(order: Any, rng: np.random.Generator) -> None:
    rows = [dtypes.get(name) for name in ("float32", "float16", "bfloat16", "float64", "int32")]
    terms = {row.name: operands(rng, 3, 700, row, "sum") for row in rows}

    def reduce(comm: Communicator) -> list[bytes]:
        results = []
        for row in rows:
            for op in ("sum", "avg", "min"):
                out = put(comm, terms[row.name][comm.rank])
                comm.all_reduce(out, out, op, order)  # type: ignore[arg-type]
                results.append(get(out).tobytes())
        return results

    assert run_staged(3, reduce, slot_bytes=1000) == lc.run_loopback(3, reduce)


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


def test_started_messages_wait_for_one_rank_only() -> None:
    def check(comm: Communicator) -> None:
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        send, recv, total = on_gpu(comm, np.full(300, float(comm.rank)), np.zeros(300), np.ones(3))
        came = comm.start.recv(recv, behind)
        comm.all_reduce(total, total)  # the message is not in turn with it
        sent = comm.start.send(send, ahead)
        came.wait(timeout_s=20.0)
        sent.wait(timeout_s=20.0)
        assert came.done()
        same(recv, np.full(300, float(behind)))
        same(total, np.full(3, 3.0))

    run_staged(3, check, slot_bytes=256)
    for thread in threading.enumerate():
        if thread.name in ("lowshard send", "lowshard recv"):
            thread.join(5.0)
            assert not thread.is_alive()
