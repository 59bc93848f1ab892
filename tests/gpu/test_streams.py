"""Streams and CUDA graphs: what a call is put on, what waits for what, what a capture records or refuses."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone, alone_staged, has_gpu, host_waits, on_gpu, recorded, run_nccl, run_staged

import lowshard as ls
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import InThread
from lowshard.errors import CaptureError, CommError, StreamError
from lowshard.gpu_stream import on_stream
from lowshard.op.action_run import run_action
from lowshard.reshard import Refit, Reshard, TensorLayout, build_reshard_plan, execute_reshard_plan
from lowshard.solver import pick

both = pytest.mark.parametrize("make", [alone, alone_staged])


@both
def test_calls_run_on_the_current_or_given_stream_and_started_ones_beside_it(make: Any, cupy: Any) -> None:
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
            with host_waits(cupy) as waits:
                works = [comm.start.all_reduce(buf, buf), comm.start.broadcast(buf)]
                for work in works:
                    work.wait()
            assert not waits or make is alone_staged
            buf *= 2
        comm.start.all_reduce(buf, buf, stream=user).wait(timeout_s=5.0)
        same(buf, np.arange(3.0) * 8)
        if make is alone:
            used = [call[-1] for call in recorded(comm).moved()]
            assert used[:3] == [user.ptr] * 3
            assert len({user.ptr, *used[3:]}) == 2
            assert comm.traffic.calls == {"all_reduce": 4, "broadcast": 2}
        with comm.grouped():
            refused(partial(comm.send, buf, 0, stream=user), CommError, "at its end; leave stream= out")


MESH = ls.DeviceMesh((2,), ("a",))
ROWS, COLS = (ls.Layout.from_spec(MESH, (4, 4), "float32", spec) for spec in (("a", None), (None, "a")))


def refit(comm: Communicator, rows: Any, stream: Any) -> None:
    out = {"w": comm.empty((4, 2), "float32")}
    with Refit(build_reshard_plan({"w": ROWS}, {"w": COLS}), comm, {"w": rows}, out) as made:
        made.push(1, stream=stream) if comm.rank == 0 else made.pull(stream=stream)


MADE: dict[str, Any] = {
    "execute": lambda comm, rows, at: ls.execute(ls.plan_redistribute(ROWS, COLS), rows, comm, stream=at),
    "redistribute": lambda comm, rows, at: ls.redistribute(rows, ROWS, COLS, comm, stream=at),
    "run_action": lambda comm, rows, at: run_action(pick("matmul", [ROWS] * 2), [rows] * 2, comm, stream=at),
    "Refit": refit,
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_several_calls_runs_on_the_stream_that_all_ranks_give(name: str) -> None:
    def check(comm: Communicator) -> None:
        user, rows = comm.xp.cuda.Stream(non_blocking=True), comm.xp.ones((2, 4), np.float32)
        comm.xp.cuda.get_current_stream().synchronize()
        MADE[name](comm, rows, user)
        if name != "Refit":  # which lays out its buckets before
            assert {call[-1] for call in recorded(comm).moved()} == {user.ptr}
        user.synchronize()
        for wrong in (0, 1):
            given = "no stream" if comm.rank == wrong else None
            refused(partial(MADE[name], comm, rows, given), StreamError, "is a stream of CuPy", "got str")
        MADE[name](comm, rows, None)

    run_nccl(2, check)


def test_streams_of_cupy_and_torch_addresses_and_the_protocol_are_taken(cupy: Any) -> None:
    own, current = cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream
    torchs: Any = SimpleNamespace(cuda_stream=own.ptr, device=SimpleNamespace(index=0))
    protocol, before = SimpleNamespace(__cuda_stream__=lambda: (0, own.ptr)), current().ptr
    for stream in (own, torchs, protocol, own.ptr, 0):
        with on_stream(stream, 0):
            assert current().ptr == (own.ptr if stream else 0)
        assert current().ptr == before
    torchs.device.index = 1
    for other in (SimpleNamespace(ptr=1, device_id=1), torchs):
        refused(on_stream(other, 0).__enter__, StreamError, "on device 0", "belongs to device 1")
    for wrong in ("7", 1.5, True, -1):
        refused(on_stream(wrong, 0).__enter__, StreamError, "or the address", type(wrong).__name__)


# ---- started calls


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter", "send_recv", "grouped"])
@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_the_next_call_follows_what_was_started_without_a_wait(run: Any, name: str) -> None:
    """Over NCCL the last of a fold in tree order is our kernel, which NCCL's next one does not wait for."""

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


@pytest.mark.parametrize("started", [False, True])
@both
def test_a_thread_on_another_device_launches_on_the_communicators(
    make: Any, started: bool, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_gpu():
        pytest.skip("two GPUs are needed; the checker's are one, of which threads choose the number")
    runtime, here, used = cupy.cuda.runtime, threading.local(), set[int]()
    monkeypatch.setattr(runtime, "getDevice", lambda: getattr(here, "number", 0))
    monkeypatch.setattr(runtime, "setDevice", lambda number: setattr(here, "number", number))
    runtime.setDevice(1)
    comm = make(device=1, binding=replace(Binding.load(with_nccl=make is alone), device=lambda array: 1))
    buf, found = on_gpu(comm, np.full(3, 2.0)), list[int]()
    for kind in (cupy.cuda.Stream, cupy.cuda.Event):
        made = kind.__init__
        noting = lambda *args, do=made, **how: used.add(runtime.getDevice()) or do(*args, **how)  # noqa: E731
        monkeypatch.setattr(kind, "__init__", noting)

    def work() -> None:
        comm.start.all_reduce(buf, buf).wait() if started else comm.all_reduce(buf, buf)
        comm.barrier()
        found.append(runtime.getDevice())

    InThread(work)._thread.join(20.0)  # it begins on device 0
    assert found == [0], "the thread's own device is put back"
    assert used == ({1} if started or make is alone else used)
    comm.close()


RELAXED = 2  # cudaStreamCaptureModeRelaxed: others, and this thread on other streams, may do what they like


@pytest.mark.parametrize("control", [False, True])
def test_a_graph_repeats_collectives_and_messages_on_new_values(control: bool) -> None:
    def check(comm: Communicator) -> None:
        peer, stream = 1 - comm.rank, comm.xp.cuda.get_current_stream()
        buf, total, got = on_gpu(comm, np.full(4, comm.rank + 1.0), np.zeros(4), np.zeros(4))
        half, halves = on_gpu(comm, np.ones(4, ml_dtypes.bfloat16), np.zeros(4, ml_dtypes.bfloat16))
        comm.all_reduce(half, halves)  # its tables go up before the capture
        comm.start.broadcast(buf).wait()  # its event must not be asked for in the capture
        buf.fill(comm.rank + 1.0)
        stream.synchronize()
        comm._transport._next_look_s = 0.0  # type: ignore[attr-defined]
        if control:
            comm.control.barrier()
        stream.begin_capture(RELAXED)
        comm.all_reduce(buf, total)
        comm.send_recv(total, peer, got, peer)
        with comm.grouped():
            comm.send(total, peer)
            comm.recv(got, peer)
        comm.all_reduce(half, halves)
        graph = stream.end_capture()
        for turn in range(3):
            graph.launch(stream)
            buf += 1
            same(got, np.full(4, 3.0 + 2 * turn))
            same(halves, np.full(4, 2, ml_dtypes.bfloat16))
        del graph
        comm.broadcast(buf)

    run_nccl(2, check, control=control)


ONE = ls.DeviceMesh((1,), ("x",))
CUT, WHOLE = (ls.Layout(ONE, (2,), "float32", (how,)) for how in (ls.Sharded(0), ls.Replicated()))
PLAN = ls.plan_redistribute(CUT, WHOLE)
MOVES = build_reshard_plan(*[{"w": TensorLayout.sharded((2,), "float32", {"x": (1, 1)}, {})}] * 2)


def refused_calls(comm: Communicator, w: Any) -> dict[str, Any]:
    refit = partial(Refit, MOVES, comm, {"w": w})
    return {
        "start.all_reduce": lambda: comm.start.all_reduce(w, w), "start.send": lambda: comm.start.send(w, 1),
        "barrier": comm.barrier, "split": lambda: comm.split(0), "close": comm.close,
        "execute": lambda: ls.execute(PLAN, w, comm),
        "execute_all": lambda: ls.execute_all({"w": PLAN}, {"w": w}, comm),
        "redistribute": lambda: ls.redistribute(w, CUT, WHOLE, comm),
        "Reshard": lambda: execute_reshard_plan(MOVES, {"w": w}, {"w": w}, comm),
        "Reshard.run": Reshard(MOVES, {"w": w}, {"w": w + 0}, comm).run,
        "Refit.push": partial(refit({"w": w + 0}).push, 1), "Refit.pull": refit({"w": w + 0}).pull,
        "run_action": lambda: run_action(pick("relu", [CUT]), [w], comm),
    } | ({"all_reduce": lambda: comm.all_reduce(w, w)} if comm.transport == "staged" else {})  # fmt: skip


@pytest.mark.parametrize("make", [alone, alone_staged])
def test_what_a_graph_cannot_record_is_refused_before_anything_is_queued(make: Any, cupy: Any) -> None:
    comm, weights = make(), cupy.zeros(2, np.float32)
    calls, work = refused_calls(comm, weights), comm.start.broadcast(cupy.zeros(3))
    cupy.cuda.Device().synchronize()
    moved = len(recorded(comm).moved()) if make is alone else 0
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for what, call in calls.items():
            stream.begin_capture(RELAXED)
            refused(call, CaptureError, f"cannot record {what}.* over {comm.transport}")
            if make is alone:
                refused(work.wait, CaptureError, "the wait for broadcast on rank 0")
            stream.end_capture()
    assert make is alone_staged or len(recorded(comm).moved()) == moved
    work.wait()
    comm.barrier()  # it goes on as if nothing had been
    comm.close()
