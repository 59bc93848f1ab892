"""The NCCL communicator over a stand-in for NCCL: calls, addresses, counts, codes, errors; no GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import mode
from support.case_table import some_cases
from support.comm_cases import Way, cases_for, run_case
from support.comm_kit import refused, same
from support.device_stand_in import DEFAULT_STREAM
from support.nccl_stand_in import (
    Host,
    StandInCommunicator,
    Stuck,
    StuckHost,
    World,
    alone,
    run_stand_in,
    stuck_communicator,
)

from lowshard import DeviceMesh, Layout, Sharded, dtypes, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_over_mpi import crowding, why_unusable
from lowshard.comm.reduction import fold
from lowshard.errors import BufferMismatchError, CommError, MismatchError, PeerFailed, TimedOut


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in mode.sample([2, 3, 4], 1, "NCCL ranks")
        for name in cases_for(Way(size, "nccl", compares=size % 2 == 0), some_cases(25, "NCCL"))
    ],
)
def test_the_contract_holds_over_the_stand_in(name: str, size: int) -> None:
    # Even sizes with a communicator of the host beside it, odd ones without.
    run_stand_in(size, lambda comm: run_case(name, comm), control=size % 2 == 0)


def calls_of(comm: Communicator, call: Any) -> list[tuple[Any, ...]]:
    """Return the NCCL calls that `call` makes."""
    assert comm.transport == "nccl"
    start = len(comm._transport._handle.calls)
    call()
    return list(comm._transport._handle.calls[start:])


# ---- what is called


def test_what_goes_over_the_wire_does_not_depend_on_a_ranks_own_displacements() -> None:
    def check(comm: Communicator) -> list[str]:
        recv = np.zeros(30)
        displs = [0, 4, 8] if comm.rank == 1 else [20, 10, 0]
        return [c[0] for c in calls_of(comm, lambda: comm.all_gather_v(np.zeros(4), recv, [4] * 3, displs))]

    assert run_stand_in(3, check) == [["allGather"]] * 3


@pytest.mark.parametrize("row", dtypes.all_dtypes(), ids=str)
def test_moves_use_the_dtypes_own_code_or_bytes(row: dtypes.DType) -> None:
    codes = {
        "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
        "float32": 7, "float64": 8, "bfloat16": 9,
    }  # fmt: skip

    def check(comm: Communicator) -> None:
        send = np.zeros(6, row.numpy)
        recv = np.ones(12, row.numpy)
        ((_, at, to, count, code, stream),) = calls_of(comm, lambda: comm.all_gather(send, recv))
        assert (at, to, stream) == (send.ctypes.data, recv.ctypes.data, 7)
        if row.name in codes:
            assert (count, code) == (6, codes[row.name])
        else:
            assert (count, code) == (6 * row.itemsize_bytes, 1)
        same(recv, np.zeros(12, row.numpy))

    run_stand_in(2, check)


def test_nccl_reduces_only_what_it_reduces_as_the_contract_says() -> None:
    native = {"float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"}
    ops = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

    def check(comm: Communicator) -> None:
        for row in dtypes.all_dtypes():
            if row.kind in ("scale", "bool"):
                continue
            for op, code in ops.items():
                buf = np.ones(8, row.numpy)
                for order in ("fast", "tree", "rank"):
                    made = calls_of(comm, lambda b=buf, o=op, w=order: comm.all_reduce(b, b, o, w))
                    made += calls_of(
                        comm, lambda b=buf, o=op, w=order: comm.reduce_scatter(b, b[:4].copy(), o, w)
                    )
                    reductions = [c for c in made if c[0] in ("allReduce", "reduceScatter")]
                    wraps = op == "avg" and row.kind != "float"  # NCCL would sum in the narrow type
                    if row.name in native and order == "fast" and not wraps:
                        assert [(c[0], c[3], c[5]) for c in reductions] == [
                            ("allReduce", 8, code),
                            ("reduceScatter", 4, code),
                        ]
                    else:
                        assert not reductions, f"{row} {op} {order}"

    run_stand_in(2, check)


def test_a_bf16_reduction_is_one_exchange_one_fold_and_one_gather() -> None:
    def check(comm: Communicator) -> None:
        rng = np.random.default_rng(comm.rank)
        send = rng.normal(size=4000).astype(dtypes.get("bfloat16").numpy)
        operands = np.zeros((4, 4000), send.dtype)
        comm.all_gather(send, operands)
        expected, recv, part = np.zeros_like(send), np.zeros_like(send), np.zeros(1000, send.dtype)
        fold(list(operands), expected, "sum")
        for call, last in (
            (lambda: comm.all_reduce(send, recv), ["allGather"]),
            (lambda: comm.reduce_scatter(send, part), []),
        ):
            assert [c[0] for c in calls_of(comm, call)] == ["send", "recv"] * 3 + last
        same(recv, expected)
        same(part, expected[1000 * comm.rank :][:1000])
        comm.all_reduce(send, send)
        same(send, expected)

    run_stand_in(4, check)


def test_nccl_reduces_16_bit_floats_itself_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)

    def check(beside: Communicator) -> None:
        comm = stuck_communicator(world, beside)
        for name, code in (("bfloat16", 9), ("float16", 6)):
            for op, number in (("sum", 0), ("avg", 4), ("max", 2)):
                buf = np.ones(8, dtypes.get(name).numpy)
                made = calls_of(comm, lambda b=buf, o=op: comm.all_reduce(b, b, o))
                assert [(c[0], c[3], c[4], c[5]) for c in made] == [("allReduce", 8, code, number)]
                made = calls_of(comm, lambda b=buf, o=op: comm.all_reduce(b, b, o, "tree"))
                assert "allReduce" not in [c[0] for c in made]

    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", "nccl")
    lc.run_loopback(2, check)
    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", "yes")
    comm, _, _ = alone()
    bf16 = np.ones(8, dtypes.get("bfloat16").numpy)
    refused(lambda: comm.all_reduce(bf16, bf16), CommError, "LOWSHARD_NCCL_REDUCE16 is exact or nccl", "yes")


def test_buffers_that_overlap_without_being_in_place_are_copied_first() -> None:
    def check(comm: Communicator) -> None:
        board = np.arange(10.0)
        comm.all_reduce(board[:6], board[2:8])
        same(board, np.array([0, 1, 0, 2, 4, 6, 8, 10, 8, 9.0]))
        board = np.arange(10.0)
        comm.reduce_scatter(board[:8], board[3:7])
        start = 4 * comm.rank
        expected = np.arange(10.0)
        expected[3:7] = 2 * np.arange(start, start + 4.0)
        same(board, expected)

    run_stand_in(2, check)


def test_calls_follow_the_current_stream_and_do_not_wait_for_it() -> None:
    comm, handle, host = alone()
    for stream in (7, 1234):
        host.stream.ptr = stream
        board = np.zeros(4)
        comm.all_reduce(board, board)
        comm.all_gather(board, board)
        comm.broadcast(board)
        comm.all_gather_v(board, board, [4], [0])
        comm.reduce_scatter(board, board, order="tree")
        assert {c[-1] for c in handle.calls} == {stream}
        handle.calls.clear()
    assert host.stream.synchronized == host.synchronized == 0


def test_only_split_and_a_barrier_without_control_wait_for_the_device() -> None:
    comm, handle, host = alone()
    before: list[str] = []
    host.stream.push(lambda: before.append("done"))
    comm.barrier()
    assert [(c[0], c[3], c[4], c[5]) for c in handle.calls] == [("allReduce", 1, 1, 0)]
    assert before == ["done"]
    assert host.synchronized == 0
    group = comm.split(3, key=-4)
    assert handle.calls[-1] == ("commSplit", 3, -4)
    assert (host.stream.synchronized, host.synchronized) == (0, 1)
    assert comm.split(None) is None
    assert handle.calls[-1][:2] == ("commSplit", -1)
    assert group is not None
    (beside,) = lc.loopback(1)
    with_control, handle, host = alone(host=beside)
    host.stream.push(lambda: before.append("not waited for"))
    with_control.barrier()
    assert not handle.calls
    assert before == ["done"]
    assert not beside.traffic.calls


def test_a_group_that_fails_is_ended_and_the_first_error_is_the_one_raised() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        nccl = comm._transport._binding.nccl
        comm._transport._handle.next_error = nccl.NcclError(5)
        with pytest.raises(CommError, match=r"in send: NCCL_ERROR_5"), comm.grouped():
            comm.send(np.zeros(3), 1 - comm.rank)
        assert nccl.queue is None

    run_stand_in(2, check)


def test_grouped_messages_are_one_group_on_the_current_stream() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        # More than NCCL takes before the other side comes: only a group does not stand still here.
        send, recv = np.full(5000, float(comm.rank)), np.zeros(5000)
        groups = comm._transport._binding.nccl.groups
        with comm.grouped():
            comm.send(send, ahead)
            comm.recv(recv, behind)
            assert not comm._transport._handle.calls
        same(recv, np.full(5000, float(behind)))
        assert comm._transport._binding.nccl.groups == groups + 1
        assert [c[0] for c in comm._transport._handle.calls] == ["send", "recv"]
        assert {c[-1] for c in comm._transport._handle.calls} == {DEFAULT_STREAM}
        assert comm.traffic.calls == {"send": 1, "recv": 1}

    run_stand_in(3, check)


# ---- control


def test_control_is_the_host_communicator_and_is_split_with_it() -> None:
    def check(comm: Communicator) -> None:
        assert comm.control.transport == "loopback"
        group = comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        control = group.control
        assert control.transport == "loopback"
        assert (control.rank, control.size) == (group.rank, group.size)
        ranks = np.zeros(control.size, np.int64)
        control.all_gather(np.array([comm.rank]), ranks)
        assert list(ranks) == [r for r in (3, 2, 1, 0) if r % 2 == comm.rank % 2]
        assert not group.traffic.calls

    run_stand_in(4, check)


# ---- refusals and errors


def test_rank_and_size_must_be_those_of_the_nccl_communicator() -> None:
    host = Host()
    handle = StandInCommunicator(World(4), 2, host)
    for rank, size in ((1, 4), (2, 3)):
        with pytest.raises(CommError, match=rf"rank 2 of 4.*rank {rank} of {size}"):
            nccl_communicator(handle, rank, size, binding=host.binding())


def test_a_buffer_on_another_device_is_refused() -> None:
    comm, handle, host = alone()
    far = np.zeros(4)
    host.device_of = lambda array: 3 if np.shares_memory(array, far) else 0
    refused(lambda: comm.all_reduce(far, np.zeros(4)), BufferMismatchError, "send", "device 0", "device 3")
    refused(lambda: comm.all_reduce(np.zeros(4), far), BufferMismatchError, "recv")
    assert not handle.calls


def test_results_that_cupy_cannot_name_become_our_errors() -> None:
    comm, handle, host = alone()
    call = lambda: comm.broadcast(np.zeros(2))  # noqa: E731
    for error, cls, told in (
        (KeyError(7), CommError, "NCCL_COMM_BLOCKING"),
        (KeyError(8), TimedOut, "time-out"),
        (host.nccl.NcclError(6), PeerFailed, "another rank"),
    ):
        handle.next_error = error
        refused(call, cls, "broadcast", told)


def test_without_control_ranks_do_not_compare_what_they_ask_for() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        made = calls_of(comm, lambda: comm.broadcast(np.zeros(2)))
        assert [c[0] for c in made] == ["broadcast"]

    run_stand_in(2, check, control=False)


def test_with_control_ranks_that_ask_for_different_things_are_told_before_nccl_is_called() -> None:
    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        n = 4 + comm.rank
        refused(
            lambda: comm.all_reduce(np.zeros(n), np.zeros(n)), MismatchError, r"float64\[4\]", r"float64\[5\]"
        )
        wrong = np.zeros(4)[::2] if comm.rank else np.zeros(2)
        refused(lambda: comm.broadcast(wrong), BufferMismatchError, "rank 1", "contiguous")
        assert not [c for c in comm._transport._handle.calls if c[0] not in ("rank_id", "size", "device_id")]

    run_stand_in(2, check)


def test_nonblocking_communicators_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.warns(RuntimeWarning, match="NCCL_COMM_BLOCKING=0"):
        alone()
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    alone()


@pytest.mark.parametrize(
    ("status", "end"), [(None, "destroy"), (1, "abort"), (4, "destroy"), (6, "abort"), (7, "abort")]
)
def test_close_aborts_after_a_failure_and_destroys_otherwise(status: int | None, end: str) -> None:
    comm, handle, host = alone()
    if status is not None:
        handle.next_error = KeyError(7) if status == 7 else host.nccl.NcclError(status)
        with pytest.raises(CommError):
            comm.broadcast(np.zeros(2))
    comm.close()
    assert handle.ended == end
    comm.close()


def test_leaving_a_with_block_by_an_error_aborts() -> None:
    comm, handle, _ = alone()
    with pytest.raises(ZeroDivisionError), comm:
        raise ZeroDivisionError
    assert handle.ended == "abort"
    comm, handle, _ = alone()
    with comm:
        comm.barrier()
    assert handle.ended == "destroy"


def test_a_communicator_that_is_not_ours_is_left_alone() -> None:
    (beside,) = lc.loopback(1)
    comm, handle, _ = alone(owned=False, host=beside)
    comm.close()
    assert not handle.ended
    refused(lambda: comm.barrier(), CommError, "closed")
    refused(lambda: beside.barrier(), CommError, "closed")


def test_ranks_that_share_a_gpu_are_refused_unless_nccl_can_and_may() -> None:
    may = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert crowding(["0:1", "0:2"], 22809, {}) is None
    assert crowding(["0:1", "", ""], 22809, {}) is None  # what has no GPU has another error
    for version, environ in ((22809, may), (23007, {}), (23007, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"})):
        error = crowding(["0:1", "0:2", "0:1"], version, environ)
        assert isinstance(error, CommError)
        assert "3 ranks of this node have 2 GPUs" in str(error)
    assert "loaded: 2.28.9" in str(crowding(["0:1", "0:1"], 22809, may))
    assert crowding(["0:1", "0:1"], 23007, may) is None


# ---- plans


def _turned(comm: Communicator) -> Any:
    mesh = DeviceMesh((comm.size,), ("x",))
    rows = Layout(mesh, (6, 4), "float32", (Sharded(0),))
    return plan_redistribute(rows, Layout(mesh, (6, 4), "float32", (Sharded(1),)))


def test_without_control_a_plan_is_compared_the_first_time_it_is_executed_and_never_again() -> None:
    def check(comm: Communicator) -> None:
        plan, local = _turned(comm), np.full((3, 4), comm.rank, np.float32)
        first = calls_of(comm, lambda: execute(plan, local, comm))
        assert [c[0] for c in first if c[0] != "check_async_error"] == ["allGather", "send", "recv"]
        again = calls_of(comm, lambda: execute(_turned(comm), local, comm))
        assert [c[0] for c in again] == ["send", "recv"]
        # Another plan is compared, and told apart.
        other = plan_redistribute(plan.dst, plan.src if comm.rank else plan.dst)
        told = r"asks for the same thing, but ranks \[0\] have .*x=S1 on mesh x=2; ranks \[1\] .*x=S0 on mesh"
        with pytest.raises(MismatchError, match=told):
            execute(other, np.zeros((6, 2), np.float32), comm)

    run_stand_in(2, check, control=False)


def test_a_rank_that_compares_a_plan_alone_waits_until_the_deadline_and_gives_up() -> None:
    host = StuckHost()
    host.handle = Stuck(World(2), 0, host)
    host.default.asked = lambda up_to: False  # type: ignore[method-assign]
    comm = nccl_communicator(host.handle, 0, 2, binding=host.binding(), timeout_s=0.2)
    with pytest.raises(TimedOut, match="what ranks agree on was not done"):
        execute(_turned(comm), np.zeros((3, 4), np.float32), comm)
    assert host.handle.ended == "abort"


# ---- the import, and the real binding


def test_memory_for_types_that_cupy_does_not_have_is_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, _, _ = alone()

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        if dtypes.get(dtype).bits == 8 and not dtypes.get(dtype).in_numpy:
            raise ValueError(f"Unsupported dtype {dtype}")
        return np.empty(shape, dtype)

    xp = SimpleNamespace(ndarray=np.ndarray, empty=empty)
    monkeypatch.setattr(
        comm._transport.buffers, "binding", dataclasses.replace(comm._transport._binding, xp=xp)
    )
    for row in dtypes.all_dtypes():
        made = comm.empty((2, 3), row.name)
        assert made.shape == (2, 3)
        assert made.dtype == (np.uint8 if row.is_float8 or row.kind == "scale" else row.numpy)
    refused(lambda: comm.empty(-1, "e4m3"), BufferMismatchError, "-1")


def test_importing_the_module_does_not_import_cupy() -> None:
    code = "import sys, lowshard.comm.nccl_over_mpi; assert not {'cupy', 'mpi4py'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_keeps_nccl_from_being_used_is_said() -> None:
    reason = why_unusable()
    assert reason is None or any(word in reason for word in ("CuPy", "cuda", "NCCL"))
