"""`stream=`: where a call is put, on GPUs; and that a communicator over host memory has none."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.fake_cupy import StreamedCupy
from support.nccl_stand_in import Host, StandInCommunicator, World, run_staged, run_stand_in

from lowshard import DeviceMesh, Layout, execute, execute_all, plan_redistribute, redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.staged import staged_communicator
from lowshard.errors import CommError, StreamError
from lowshard.gpu_stream import on_stream
from lowshard.op.action_run import run_action
from lowshard.pool import BufferPool
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan, execute_reshard_plan
from lowshard.solver import pick

ONE, TWO = np.ones(1), np.ones(2)
CALLS: dict[str, tuple[Any, ...]] = {
    "all_gather": (ONE, TWO), "all_gather_v": (ONE, TWO, [1, 1], [0, 1]), "all_to_all": (TWO, TWO.copy()),
    "all_to_all_v": (TWO, [1, 1], [0, 1], TWO.copy(), [1, 1], [0, 1]), "broadcast": (TWO,), "gather": (ONE, TWO),
    "scatter": (TWO, ONE), "all_reduce": (TWO, TWO), "reduce_scatter": (TWO, ONE), "reduce": (TWO, TWO.copy()),
}  # fmt: skip


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_a_call_runs_on_the_stream_that_it_is_given_and_a_started_one_after_it(transport: str) -> None:
    host = Host()
    handle = StandInCommunicator(World(1), 0, host)
    comm: Communicator
    if transport == "nccl":
        comm = nccl_communicator(handle, 0, 1, binding=host.binding())
    else:
        comm = staged_communicator(lc.loopback(1)[0], host.binding(with_nccl=False))
    user, buf = host.new_stream(), np.arange(3.0)
    comm.all_reduce(buf, buf, stream=user)
    comm.broadcast(buf, stream=user)
    used = {call[-1] for call in handle.calls} if transport == "nccl" else {entry[1] for entry in host.log}
    assert used == {user.ptr}
    host.log.clear()
    comm.start.all_reduce(buf, buf, stream=user).wait(timeout_s=5.0)
    assert host.log[0][:2] == ("record", user.ptr)
    assert host.stream is host.default
    with comm.grouped():
        refused(lambda: comm.send(buf, 0, stream=user), CommError, "current at its end; leave stream= out")


def test_staged_ranks_stage_by_the_stream_that_is_given() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "staged"
        host = comm._transport._binding.select.__self__  # type: ignore[attr-defined]
        user, buf = host.new_stream(), np.ones(2)
        comm.all_reduce(buf, buf, stream=user)
        same(buf, np.full(2, 2.0))
        other = 1 - comm.rank
        comm.send_recv(buf, other, np.zeros(2), other, stream=user)
        assert {entry[1] for entry in host.log} == {user.ptr}

    run_staged(2, check)


def test_host_memory_has_no_streams_and_all_ranks_say_so() -> None:
    def check(comm: Communicator) -> None:
        for name, args in CALLS.items():
            refused(lambda: getattr(comm, name)(*args, stream=7), CommError, "stream= is for", "loopback")  # noqa: B023
        if comm.rank == 0:  # one rank alone
            refused(lambda: comm.all_reduce(TWO, TWO, stream=7), CommError, "stream= is for")
        else:
            refused(lambda: comm.all_reduce(TWO, TWO), CommError)
        for name in ("send", "recv"):
            refused(lambda: getattr(comm, name)(TWO, 1 - comm.rank, stream=7), CommError, "stream= is for")  # noqa: B023
        refused(comm.start.all_reduce(TWO, TWO, stream=7).wait, CommError, "stream= is for")

    lc.run_loopback(2, check)


# ---- calls made of several

MESH = DeviceMesh((2,), ("a",))
ROWS, WHOLE = (Layout.from_spec(MESH, (4, 6), "float32", spec) for spec in (("a", None), (None, None)))
PLAN = plan_redistribute(ROWS, WHOLE)


def reshard_of(comm: Communicator) -> tuple[Any, ...]:
    src = TensorLayout.sharded((4, 6), "float32", {"a": (2, 1)}, {0: "a"})
    dst = TensorLayout.sharded((4, 6), "float32", {"a": (2, 1)}, {1: "a"})
    return (
        build_reshard_plan({"w": src}, {"w": dst}),
        {"w": np.ones((2, 6), np.float32)},
        {"w": np.zeros((4, 3), np.float32)},
    )


def refit_of(comm: Communicator, stream: Any) -> None:
    plan, src, dst = reshard_of(comm)
    with Refit(plan, comm, src, dst) as refit:
        if comm.rank == 0:
            refit.push(1, stream=stream)
        else:
            refit.pull(stream=stream)


def reshard_by(comm: Communicator, stream: Any) -> None:
    plan, src, dst = reshard_of(comm)
    execute_reshard_plan(plan, src, dst, comm, stream=stream)


def act(comm: Communicator, stream: Any) -> None:
    found = pick("matmul", [ROWS, Layout.from_spec(MESH, (6, 4), "float32", ("a", None))])
    run_action(found, [local(), np.ones((3, 4), np.float32)], comm, stream=stream)


def local() -> np.ndarray:
    return np.ones((2, 6), np.float32)


MADE: dict[str, Callable[[Communicator, Any], object]] = {
    "execute": lambda comm, stream: execute(PLAN, local(), comm, stream=stream),
    "execute_all": lambda comm, stream: execute_all({"w": PLAN}, {"w": local()}, comm, stream=stream),
    "redistribute": lambda comm, stream: redistribute(local(), ROWS, WHOLE, comm, stream=stream),
    "run_action": act,
    "execute_reshard_plan": reshard_by,
    "Refit": refit_of,
}


def streams_used(comm: Communicator) -> set[int]:
    """Return the streams that work was put on, and those that started calls follow."""
    host = comm._transport._binding.select.__self__  # type: ignore[attr-defined]
    calls = comm._transport._handle.calls if comm.transport == "nccl" else []
    return {entry[1] for entry in host.log} | {call[-1] for call in calls}


@pytest.mark.parametrize("run", [run_stand_in, run_staged])
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_several_calls_runs_on_the_stream_that_it_is_given(name: str, run: Any) -> None:
    def check(comm: Communicator) -> None:
        host = comm._transport._binding.select.__self__  # type: ignore[attr-defined]
        user = host.new_stream()
        MADE[name](comm, user)
        assert user.ptr in streams_used(comm)
        if name not in ("Refit", "execute_reshard_plan"):  # which lay out their buckets before
            assert streams_used(comm) == {user.ptr}
        assert host.stream is host.default

    run(2, check)


@pytest.mark.parametrize("name", MADE)
def test_one_ranks_wrong_stream_is_refused_by_all(name: str) -> None:
    def on_gpu(comm: Communicator) -> None:
        for wrong in (0, 1):
            given = "no stream" if comm.rank == wrong else None
            refused(lambda: MADE[name](comm, given), StreamError, "a stream of the stand-in, got str")  # noqa: B023
        MADE[name](comm, None)

    def on_host(comm: Communicator) -> None:
        refused(lambda: MADE[name](comm, 7 if comm.rank else None), CommError, "stream= is for", "loopback")
        MADE[name](comm, None)

    run_stand_in(2, on_gpu)
    lc.run_loopback(2, on_host)


# ---- what is made current


def test_streams_of_cupy_and_torch_addresses_and_the_protocol_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = StreamedCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    torchs = SimpleNamespace(cuda_stream=0x20, device=SimpleNamespace(index=1))
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, 0x30))
    given = [(fake.cuda.Stream(0x10, 1), 0x10), (torchs, 0x20), (protocol, 0x30), (0x40, 0x40), (0, 0)]
    for stream, address in given:
        fake.entered.clear()
        with on_stream(stream, 1):
            assert fake.entered == [(address, 1)], "on the buffers' device"
        assert fake.entered[1:] == ["left"]
        assert fake.device == 0
    with on_stream(None, 1):
        assert fake.device == 0
    for stream in (
        fake.cuda.Stream(0x10, 0),
        SimpleNamespace(**{**vars(torchs), "device": SimpleNamespace(index=0)}),
    ):
        refused(lambda: on_stream(stream, 1).__enter__(), StreamError, "on device 1", "belongs to device 0")  # noqa: B023
    for wrong in ("7", 1.5, True, -1):
        refused(lambda: on_stream(wrong, 1).__enter__(), StreamError, "or the address", type(wrong).__name__)  # noqa: B023


def test_new_buffers_of_fp8_and_scales_are_bytes_on_a_gpu_and_themselves_on_a_cpu() -> None:
    """CuPy has no fp8: `cupy.empty` refuses its dtype, as this stand-in does."""
    asked: list[np.dtype[Any]] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        assert not dtype.name.startswith("float8"), "Unsupported dtype"
        asked.append(dtype)

    host = Host()
    binding = dataclasses.replace(host.binding(), xp=SimpleNamespace(empty=empty))  # type: ignore[arg-type]
    comm = nccl_communicator(StandInCommunicator(World(1), 0, host), 0, 1, binding=binding)
    pool = BufferPool(comm)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        comm.empty((2, 3), dtype)
        pool.empty((2, 3), dtype)
        assert lc.loopback(1)[0].empty(3, dtype).dtype.name == dtype
    assert asked == [np.dtype(np.uint8)] * 6
