"""CUDA graphs: what a capture records, and what refuses before anything is put on the stream."""

from __future__ import annotations

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


MESH = DeviceMesh((1,), ("x",))
CUT, WHOLE = (Layout(MESH, (2,), "float32", (how,)) for how in (Sharded(0), Replicated()))
PLAN = plan_redistribute(CUT, WHOLE)
MOVES = build_reshard_plan(*[{"w": TensorLayout.sharded((2,), "float32", {"x": (1, 1)}, {})}] * 2)


def refused_calls(comm: Communicator, w: Any) -> dict[str, Any]:
    refit = partial(Refit, MOVES, comm, {"w": w})
    return {
        "start.all_reduce": lambda: comm.start.all_reduce(w, w), "start.send": lambda: comm.start.send(w, 1),
        "barrier": comm.barrier, "split": lambda: comm.split(0), "close": comm.close,
        "all_gather": lambda: comm.all_gather(w, shared=True), "execute": lambda: execute(PLAN, w, comm),
        "execute_all": lambda: execute_all({"w": PLAN}, {"w": w}, comm),
        "redistribute": lambda: redistribute(w, CUT, WHOLE, comm),
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
                refused(
                    work.wait, CaptureError, "the wait for broadcast on rank 0", "wait before the capture"
                )
            stream.end_capture()
    assert make is alone_staged or len(recorded(comm).moved()) == moved
    work.wait()
    comm.barrier()  # it goes on as if nothing had been
    comm.close()
