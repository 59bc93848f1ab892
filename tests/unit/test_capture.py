"""CUDA graphs: what a capture records, and what refuses before anything is put on the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.comm_kit import refused, same
from support.nccl_stand_in import Host, StandInCommunicator, World, run_stand_in

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
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.staged import staged_communicator
from lowshard.errors import CaptureError
from lowshard.op.action_run import run_action
from lowshard.reshard import Refit, Reshard, TensorLayout, build_reshard_plan, execute_reshard_plan
from lowshard.solver import pick


def host_of(comm: Communicator) -> Host:
    host = comm._transport._binding.select.__self__  # type: ignore[attr-defined]
    assert isinstance(host, Host)
    return host


@pytest.mark.parametrize("control", [False, True])
def test_collectives_and_messages_are_captured_and_ask_nothing_of_the_device(control: bool) -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        host = host_of(comm)
        comm._transport._next_look_s = 0.0
        comm.start.broadcast(np.zeros(3)).wait()  # its event must not be asked for
        events = len(host.log)
        host.captured = host.default  # the stand-in refuses to tell of errors from now on
        buf, other = np.full(4, comm.rank + 1.0), 1 - comm.rank
        comm.all_reduce(buf, buf)
        same(buf, np.full(4, 3.0))
        got = np.zeros(4)
        comm.send_recv(buf, other, got, other)
        with comm.grouped():
            comm.send(buf, other)
            comm.recv(got, other)
        half = np.ones(4, ml_dtypes.bfloat16)
        comm.all_reduce(half, half)
        same(half, np.full(4, 2, ml_dtypes.bfloat16))
        assert len(host.log) == events, "no event is recorded or waited for"
        host.captured = None
        assert host.kept
        assert all(kept is comm._transport.buffers.captured for kept in host.kept), (
            "temporaries live as long as the communicator"
        )
        comm.broadcast(buf)
        comm.close()

    run_stand_in(2, check, control=control)


REFUSED: dict[str, Callable[[Communicator], object]] = {
    "start.all_reduce": lambda comm: comm.start.all_reduce(np.zeros(2), np.zeros(2)),
    "start.send": lambda comm: comm.start.send(np.zeros(2), 1),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "close": lambda comm: comm.close(),
    "all_gather shared": lambda comm: comm.all_gather(np.zeros(2), shared=True),
    "execute": lambda comm: execute(PLAN, np.zeros(2, np.float32), comm),
    "execute_all": lambda comm: execute_all({"w": PLAN}, {"w": np.zeros(2, np.float32)}, comm),
    "redistribute": lambda comm: redistribute(np.zeros(2, np.float32), PLAN.src, PLAN.dst, comm),
    "Reshard": lambda comm: execute_reshard_plan(MOVES, one(), one(), comm),
    "Reshard.run": lambda comm: made_before(comm, lambda: Reshard(MOVES, one(), one(), comm)).run(),
    "Refit.push": lambda comm: made_before(comm, lambda: Refit(MOVES, comm, one(), one())).push(1),
    "Refit.pull": lambda comm: made_before(comm, lambda: Refit(MOVES, comm, one(), one())).pull(),
    "run_action": lambda comm: run_action(pick("relu", [PLAN.src]), [np.zeros(2, np.float32)], comm),
}
WHOLE = {"w": TensorLayout.sharded((2,), "float32", {"x": (1, 1)}, {})}
MOVES = build_reshard_plan(WHOLE, WHOLE)


def one() -> dict[str, np.ndarray]:
    return {"w": np.zeros(2, np.float32)}


def made_before(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Return what is made before the capture begins."""
    assert comm.transport in ("nccl", "staged")
    host = host_of(comm)
    captured, host.captured = host.captured, None
    made = make()
    host.log.clear()
    if comm.transport == "nccl":
        comm._transport._handle.calls.clear()
    host.captured = captured
    return made


MESH = DeviceMesh((1,), ("x",))
PLAN = plan_redistribute(
    Layout(MESH, (2,), "float32", (Sharded(0),)), Layout(MESH, (2,), "float32", (Replicated(),))
)


@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_record_is_refused_before_anything_is_queued(what: str, transport: str) -> None:
    host = Host()
    comm: Communicator
    handle = StandInCommunicator(World(1), 0, host)
    if transport == "nccl":
        comm = nccl_communicator(handle, 0, 1, binding=host.binding())
    else:
        comm = staged_communicator(lc.loopback(1)[0], host.binding(with_nccl=False))
    handle.calls.clear()
    host.captured = host.default
    refused(
        lambda: REFUSED[what](comm),
        CaptureError,
        f"cannot record {what.removesuffix(' shared')}",
        f"over {transport}",
    )
    assert not handle.calls
    assert not host.log
    host.captured = None
    comm.barrier()  # it goes on as if nothing had been
    assert not comm._transport._side._held
    comm.close()


def test_staging_is_refused_and_so_is_a_wait_for_what_was_started_before() -> None:
    host = Host()
    staged = staged_communicator(lc.loopback(1)[0], host.binding(with_nccl=False))
    nccl = nccl_communicator(StandInCommunicator(World(1), 0, host), 0, 1, binding=host.binding())
    buf = np.ones(3)
    work = nccl.start.broadcast(buf)
    host.log.clear()
    host.captured = host.default
    refused(lambda: staged.all_reduce(buf, buf), CaptureError, "cannot record all_reduce over staged")
    refused(work.wait, CaptureError, "the wait for broadcast on rank 0", "wait before the capture")
    assert not host.log
    host.captured = None
    work.wait()
