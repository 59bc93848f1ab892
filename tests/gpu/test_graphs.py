"""CUDA graphs: what a capture records, and what refuses before anything is put on the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import alone, alone_staged, on_gpu, recorded, run_nccl

from lowshard import (
    DeviceMesh,
    Layout,
    Replicated,
    Sharded,
    execute,
    execute_all,
    plan_redistribute,
    redistribute,
)
from lowshard.comm import Communicator
from lowshard.errors import CaptureError
from lowshard.op.action_run import run_action
from lowshard.reshard import Refit, Reshard, TensorLayout, build_reshard_plan, execute_reshard_plan
from lowshard.solver import pick

RELAXED = 2
"""cudaStreamCaptureModeRelaxed: other threads, and this one on other streams, may do what they like."""


@contextmanager
def capture(cupy: Any, into: list[Any]) -> Iterator[Any]:
    """Record what is put on a stream of its own, which is current; the graph lands in a list."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(RELAXED)
        try:
            yield stream
        finally:
            into.append(stream.end_capture())


@pytest.mark.parametrize("control", [False, True])
def test_a_graph_repeats_collectives_and_messages_on_new_values(control: bool) -> None:
    def check(comm: Communicator) -> None:
        xp, peer = comm.xp, 1 - comm.rank
        buf, total, got = on_gpu(comm, np.full(4, comm.rank + 1.0), np.zeros(4), np.zeros(4))
        half = xp.ones(4, ml_dtypes.bfloat16)
        halves = xp.zeros(4, ml_dtypes.bfloat16)
        comm.all_reduce(half, halves)  # its tables go up before the capture
        comm.start.broadcast(buf).wait()  # its event must not be asked for in the capture
        buf.fill(comm.rank + 1.0)
        stream = xp.cuda.get_current_stream()
        stream.synchronize()
        comm._transport._next_look_s = 0.0  # type: ignore[attr-defined]
        comm.control.barrier() if control else None
        stream.begin_capture(RELAXED)
        comm.all_reduce(buf, total)
        comm.send_recv(total, peer, got, peer)
        with comm.grouped():
            comm.send(total, peer)
            comm.recv(got, peer)
        comm.all_reduce(half, halves)
        graph = stream.end_capture()
        assert comm._transport.buffers.captured, "temporaries live as long as the communicator"  # type: ignore[attr-defined]
        for turn in range(3):
            graph.launch(stream)
            buf += 1
            same(got, np.full(4, 3.0 + 2 * turn))
            same(halves, np.full(4, 2, ml_dtypes.bfloat16))
        del graph
        comm.broadcast(buf)

    run_nccl(2, check, control=control)


MESH = DeviceMesh((1,), ("x",))
PLAN = plan_redistribute(
    Layout(MESH, (2,), "float32", (Sharded(0),)), Layout(MESH, (2,), "float32", (Replicated(),))
)
MOVES = build_reshard_plan(*[{"w": TensorLayout.sharded((2,), "float32", {"x": (1, 1)}, {})}] * 2)
Made = Callable[[Communicator, Any], Callable[[], object]]
REFUSED: dict[str, Made] = {
    "start.all_reduce": lambda comm, w: lambda: comm.start.all_reduce(w, w),
    "start.send": lambda comm, w: lambda: comm.start.send(w, 1),
    "barrier": lambda comm, w: comm.barrier,
    "split": lambda comm, w: lambda: comm.split(0),
    "close": lambda comm, w: comm.close,
    "all_gather shared": lambda comm, w: lambda: comm.all_gather(w, shared=True),
    "execute": lambda comm, w: lambda: execute(PLAN, w, comm),
    "execute_all": lambda comm, w: lambda: execute_all({"w": PLAN}, {"w": w}, comm),
    "redistribute": lambda comm, w: lambda: redistribute(w, PLAN.src, PLAN.dst, comm),
    "Reshard": lambda comm, w: lambda: execute_reshard_plan(MOVES, {"w": w}, {"w": w}, comm),
    "Reshard.run": lambda comm, w: Reshard(MOVES, {"w": w}, {"w": w + 0}, comm).run,
    "Refit.push": lambda comm, w: partial(Refit(MOVES, comm, {"w": w}, {"w": w + 0}).push, 1),
    "Refit.pull": lambda comm, w: Refit(MOVES, comm, {"w": w}, {"w": w + 0}).pull,
    "run_action": lambda comm, w: lambda: run_action(pick("relu", [PLAN.src]), [w], comm),
}


@pytest.mark.whole
@pytest.mark.parametrize("make", [alone, alone_staged])
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_record_is_refused_before_anything_is_queued(
    what: str, make: Callable[[], Communicator], cupy: Any
) -> None:
    comm, graphs = make(), list[Any]()
    weights = cupy.zeros(2, np.float32)
    call = REFUSED[what](comm, weights)
    cupy.cuda.Device().synchronize()
    if make is alone:
        recorded(comm).calls.clear()
    with capture(cupy, graphs):
        over = "nccl" if make is alone else "staged"
        refused(call, CaptureError, f"cannot record {what.removesuffix(' shared')}", f"over {over}")
    assert make is alone_staged or not recorded(comm).moved()
    comm.barrier()  # it goes on as if nothing had been
    assert not comm._transport._side._held  # type: ignore[attr-defined]
    comm.close()


def test_staging_is_refused_and_so_is_a_wait_for_what_was_started_before(cupy: Any) -> None:
    with alone_staged() as staged, alone() as nccl:
        buf = on_gpu(nccl, np.ones(3))
        work = nccl.start.broadcast(buf)
        cupy.cuda.Device().synchronize()
        with capture(cupy, []):
            refused(lambda: staged.all_reduce(buf, buf), CaptureError, "cannot record all_reduce over staged")
            refused(work.wait, CaptureError, "the wait for broadcast on rank 0", "wait before the capture")
        work.wait()
