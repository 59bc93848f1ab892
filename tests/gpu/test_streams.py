"""Streams: which one a call is put on, what waits for what, what is kept alive; started calls and messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone, alone_staged, busy, host_waits, on_gpu, recorded, run_nccl, run_staged

from lowshard import DeviceMesh, Layout, execute, kernels, plan_redistribute, redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import InThread
from lowshard.errors import BufferMismatchError, CommError, KernelError, StreamError
from lowshard.gpu_stream import on_stream
from lowshard.kernels.cuda.cuda_module import CuPyLauncher
from lowshard.op.action_run import run_action
from lowshard.pool import BufferPool
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan
from lowshard.solver import pick

both = pytest.mark.parametrize("make", [alone, alone_staged])
both_ways = pytest.mark.parametrize("run", [run_nccl, run_staged])


def side_of(comm: Communicator) -> int:
    """Return the address of the stream that started calls run on."""
    return int(comm._transport._side._stream.ptr)  # type: ignore[attr-defined]


# ---- which stream


@both
def test_a_call_runs_on_the_current_stream_or_the_one_it_is_given(
    make: Callable[[], Communicator], cupy: Any
) -> None:
    with make() as comm:
        user = cupy.cuda.Stream(non_blocking=True)
        with user:
            buf = on_gpu(comm, np.arange(3.0))
        for stream in (user, user.ptr):
            comm.all_reduce(buf, buf, stream=stream)
            with user:
                buf *= 2  # after the call, or the checker sees a race
        with user:
            comm.broadcast(buf)
            same(buf, np.arange(3.0) * 4)
        if make is alone:
            assert {call[-1] for call in recorded(comm).moved()} == {user.ptr}
        comm.start.all_reduce(buf, buf, stream=user).wait(timeout_s=5.0)
        same(buf, np.arange(3.0) * 4)
        with comm.grouped():
            refused(
                lambda: comm.send(buf, 0, stream=user), CommError, "current at its end; leave stream= out"
            )


MESH = DeviceMesh((2,), ("a",))
ROWS, WHOLE = (Layout.from_spec(MESH, (4, 6), "float32", spec) for spec in (("a", None), (None, None)))
PLAN = plan_redistribute(ROWS, WHOLE)


def local(comm: Communicator, *shape: int) -> Any:
    made = comm.xp.ones(shape or (2, 6), np.float32)
    if comm.xp is not np:  # the call may be on another stream
        comm.xp.cuda.get_current_stream().synchronize()
    return made


def reshard_of(comm: Communicator) -> tuple[Any, ...]:
    src, dst = (TensorLayout.sharded((4, 6), "float32", {"a": (2, 1)}, {dim: "a"}) for dim in (0, 1))
    plan = build_reshard_plan({"w": src}, {"w": dst})
    return plan, {"w": local(comm)}, {"w": local(comm, 4, 3)}


def refit_of(comm: Communicator, stream: Any) -> None:
    plan, src, dst = reshard_of(comm)
    with Refit(plan, comm, src, dst) as refit:
        refit.push(1, stream=stream) if comm.rank == 0 else refit.pull(stream=stream)


def act(comm: Communicator, stream: Any) -> None:
    found = pick("matmul", [ROWS, Layout.from_spec(MESH, (6, 4), "float32", ("a", None))])
    run_action(found, [local(comm), local(comm, 3, 4)], comm, stream=stream)


MADE: dict[str, Callable[[Communicator, Any], object]] = {
    "execute": lambda comm, stream: execute(PLAN, local(comm), comm, stream=stream),
    "redistribute": lambda comm, stream: redistribute(local(comm), ROWS, WHOLE, comm, stream=stream),
    "run_action": act,
    "Refit": refit_of,
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_several_calls_runs_on_the_stream_that_all_ranks_give(name: str) -> None:
    def check(comm: Communicator) -> None:
        user = comm.xp.cuda.Stream(non_blocking=True)
        before = len(recorded(comm).calls)
        MADE[name](comm, user)
        made = recorded(comm).calls[before:]
        if name != "Refit":  # which lays out its buckets before
            assert {call[-1] for call in made if call in recorded(comm).moved()} == {user.ptr}
        user.synchronize()
        for wrong in (0, 1):
            given = "no stream" if comm.rank == wrong else None
            refused(lambda g=given: MADE[name](comm, g), StreamError, "stream is a stream of CuPy", "got str")
        MADE[name](comm, None)

    run_nccl(2, check)
    lc.run_loopback(2, lambda comm: refused(
        lambda: MADE[name](comm, 7 if comm.rank else None), CommError, "stream= is for", "loopback"))  # fmt: skip


CALLS = [name for name in kernels.__all__ if isinstance(getattr(kernels, name), FunctionType)]


def test_every_kernel_call_takes_a_stream_and_refuses_it_for_host_arrays() -> None:
    for name in CALLS:
        call, arrays = getattr(kernels, name), [np.zeros(32, np.float32)] * 2
        assert inspect.signature(call).parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY
        told = f"stream= of {name}", "none of these lies on a GPU"
        refused(lambda: call(*arrays, stream=7), KernelError, *told)  # noqa: B023


def test_streams_of_cupy_and_torch_addresses_and_the_protocol_are_taken(cupy: Any) -> None:
    own = cupy.cuda.Stream(non_blocking=True)
    current = cupy.cuda.get_current_stream
    torchs = SimpleNamespace(cuda_stream=own.ptr, device=SimpleNamespace(index=0))
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, own.ptr))
    before = current().ptr
    for stream, address in [
        (own, own.ptr),
        (torchs, own.ptr),
        (protocol, own.ptr),
        (own.ptr, own.ptr),
        (0, 0),
    ]:
        with on_stream(stream, 0):
            assert current().ptr == address
        assert current().ptr == before
    for other in (
        SimpleNamespace(ptr=1, device_id=1),
        SimpleNamespace(cuda_stream=1, device=SimpleNamespace(index=1)),
    ):
        refused(
            lambda o=other: on_stream(o, 0).__enter__(), StreamError, "on device 0", "belongs to device 1"
        )
    for wrong in ("7", 1.5, True, -1):
        refused(
            lambda w=wrong: on_stream(w, 0).__enter__(), StreamError, "or the address", type(wrong).__name__
        )


def test_the_default_streams_of_two_threads_are_two(cupy: Any) -> None:
    launcher, told = CuPyLauncher(0), []

    def look() -> None:
        with cupy.cuda.Stream.ptds:
            told.append(launcher.current_stream)
        told.append(launcher.current_stream)

    look()
    InThread(look)._thread.join(10.0)
    (mine, default), (others, again) = told[:2], told[2:]
    assert mine != others
    assert default == again


def test_new_buffers_of_fp8_and_scales_are_bytes() -> None:
    with alone() as comm:
        for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
            assert comm.empty((2, 3), dtype).dtype == BufferPool(comm).empty((2, 3), dtype).dtype == np.uint8
        refused(lambda: comm.empty(-1, "e4m3"), BufferMismatchError, "-1")


# ---- started calls


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter", "send_recv", "grouped"])
@both_ways
def test_the_next_call_follows_what_was_started_without_a_wait(run: Any, name: str) -> None:
    """Over NCCL the last of a fold in tree order is a kernel of ours, which NCCL's next one does not wait for."""

    def check(comm: Communicator) -> None:
        peer, send = 1 - comm.rank, on_gpu(comm, np.full(100, 1.0))
        total, back = on_gpu(comm, np.zeros(50), np.zeros(100))
        work = comm.start.reduce_scatter(send, total, order="tree")
        if name == "send_recv":
            comm.send_recv(total, peer, back[:50], peer)
        elif name == "grouped":
            with comm.grouped():
                comm.send(total, peer)
                comm.recv(back[:50], peer)
        elif name == "reduce_scatter":
            comm.reduce_scatter(total, back[:25], order="tree")
            total += 1
        else:
            getattr(comm, name)(total, back[:50] if name == "all_to_all" else back)
        same(back[:25], np.full(25, 4.0 if name == "reduce_scatter" else 2.0))
        work.wait()

    run(2, check)


@both
def test_a_started_call_follows_the_callers_stream_and_wait_makes_it_follow_the_call(
    make: Callable[[], Communicator], cupy: Any
) -> None:
    with make() as comm, cupy.cuda.Stream(non_blocking=True) as user:
        buf = on_gpu(comm, np.arange(3.0))
        buf += 1
        with host_waits(cupy) as waits:
            work = comm.start.all_reduce(buf, buf)
            again = comm.start.broadcast(buf)
            work.wait()
            again.wait()
        assert not waits or make is alone_staged
        buf *= 2
        same(buf, np.arange(1.0, 4.0) * 2)
        assert side_of(comm) != user.ptr
        if make is alone:
            assert {call[-1] for call in recorded(comm).moved()} == {side_of(comm)}
            assert comm.traffic.calls == {"all_reduce": 1, "broadcast": 1}


@pytest.mark.parametrize(
    "how", ["wait", "done", "collective", "started", "message", "grouped", "close", "other"]
)
@pytest.mark.whole
def test_started_messages_begin_together_and_with_the_next_call(how: str) -> None:
    def check(comm: Communicator) -> None:
        other, peer = comm.split(0), 1 - comm.rank
        send, recv, again = on_gpu(comm, np.full(4000, float(comm.rank)), np.zeros(4000), np.zeros(4000))
        recorded(comm).calls.clear()
        # In this order a send would wait for ever for a recv that is started behind a send.
        works = [comm.start.send(send, peer), comm.start.recv(recv, peer)]
        assert not recorded(comm).moved()
        if how == "wait":
            works[1].wait()
            assert (comm.traffic.calls["send"], comm.traffic.calls["recv"]) == (1, 1)
            assert (comm.traffic.sent_bytes, comm.traffic.received_bytes) == (32000, 32000)
        elif how == "grouped":
            with comm.grouped():
                comm.send(send, peer)
                comm.recv(again, peer)
        elif how == "message":
            (comm.send if comm.rank else comm.recv)(again, peer)
        else:
            {
                "done": works[0].done, "collective": comm.barrier, "close": comm.close,
                "started": lambda: comm.start.broadcast(again).wait(), "other": other.barrier,
            }[how]()  # fmt: skip
        names = [call[0] for call in recorded(comm).moved()]
        assert names[:2] == ["send", "recv"], names
        if how != "close":
            for work in works:
                work.wait()
        else:
            comm.xp.cuda.Device().synchronize()
        same(recv, np.full(4000, float(peer)))

    run_nccl(2, check)


@pytest.mark.parametrize("started", [False, True])
@both
def test_a_thread_whose_current_device_is_another_one_launches_on_the_communicators(
    make: Callable[..., Communicator], started: bool, two_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins on device 0."""
    two_gpus.setDevice(1)
    with_nccl = Binding.load(with_nccl=make is alone)
    comm = make(device=1, binding=replace(with_nccl, device=lambda array: 1))
    buf, found, used = on_gpu(comm, np.full(3, 2.0)), list[int](), set[int]()
    for kind in (comm.xp.cuda.Stream, comm.xp.cuda.Event):
        made = kind.__init__
        noting = lambda *args, m=made, **kinds: (used.add(two_gpus.getDevice()), m(*args, **kinds))[1]  # noqa: E731
        monkeypatch.setattr(kind, "__init__", noting)

    def work() -> None:
        comm.start.all_reduce(buf, buf).wait() if started else comm.all_reduce(buf, buf)
        comm.broadcast(buf)
        comm.barrier()
        found.append(two_gpus.getDevice())

    InThread(work)._thread.join(20.0)
    assert found == [0], "the thread's own device is put back"
    assert used == ({1} if started or make is alone else used)
    comm.close()


# ---- a stream that is busy


@both
def test_a_started_call_waits_for_what_is_before_it_and_runs_beside_what_comes_later(
    make: Callable[[], Communicator], cupy: Any
) -> None:
    busy(cupy, 0.0)
    with make() as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        buf = cupy.full(100_000, 3.0)
        comm.all_reduce(buf, buf)  # NCCL makes its connections on first use
        stream.synchronize()
        busy(cupy, 0.1)
        buf += 1
        work = comm.start.all_reduce(buf, buf)
        assert not work.done(), "it did not wait for what was queued before it"
        busy(cupy, 0.4)
        queued = stream.record()
        work.wait(timeout_s=20.0)
        assert not queued.done, "it waited for what was queued after it"
        result = buf + 1
        stream.synchronize()
        same(result[:3], np.full(3, 5.0))
