"""What is asked of NCCL: calls, counts and codes, who ends it, how its errors come to a user; whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import Recorded, alone, host_waits, on_gpu, recorded, run_nccl

from lowshard import DeviceMesh, Layout, Sharded, dtypes, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.reduction import fold
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    DependencyError,
    MismatchError,
    PeerFailed,
    TimedOut,
)

CODES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""ncclDataType_t of nccl.h, not from the table under test; and ncclRedOp_t."""
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
ROWS = [row for row in dtypes.all_dtypes() if not row.is_float8 and row.kind != "scale"]


def calls_of(comm: Communicator, call: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Return the NCCL calls that move bytes for `call`."""
    start = len(recorded(comm).moved())
    call()
    return recorded(comm).moved()[start:]


def test_nccl_reduces_only_what_it_reduces_as_the_contract_says() -> None:
    native = {"float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"}

    def check(comm: Communicator) -> None:
        for row in ROWS:
            buf, part = comm.xp.ones(8, row.numpy), comm.xp.ones(4, row.numpy)
            for op, order in ((op, order) for op in OPS for order in ("fast", "tree") if row.kind != "bool"):
                made = calls_of(comm, lambda b=buf, o=op, w=order: comm.all_reduce(b, b, o, w))
                made += calls_of(comm, lambda b=buf, p=part, o=op, w=order: comm.reduce_scatter(b, p, o, w))
                reductions = [(c[0], c[3], c[5]) for c in made if c[0] in ("allReduce", "reduceScatter")]
                wraps = op == "avg" and row.kind != "float"  # NCCL would sum in the narrow type
                its_own = row.name in native and order == "fast" and not wraps
                wanted = [("allReduce", 8, OPS[op]), ("reduceScatter", 4, OPS[op])] if its_own else []
                assert reductions == wanted, f"{row} {op} {order}"

    run_nccl(2, check)


def test_a_bf16_reduction_is_one_exchange_one_fold_and_one_gather() -> None:
    def check(comm: Communicator) -> None:
        values = np.random.default_rng(comm.rank).normal(size=4000).astype(dtypes.get("bfloat16").numpy)
        send, operands = on_gpu(comm, values, np.zeros((4, 4000), values.dtype))
        comm.all_gather(send, operands)
        expected = np.zeros_like(values)
        fold(list(operands.get()), expected, "sum")
        recv, part = on_gpu(comm, np.zeros_like(values), np.zeros(1000, values.dtype))
        for call, last in (
            (lambda: comm.all_reduce(send, recv), ["allGather"]),
            (lambda: comm.reduce_scatter(send, part), []),
        ):
            assert [c[0] for c in calls_of(comm, call)] == ["send", "recv"] * 3 + last
        same(recv, expected)
        same(part, expected[1000 * comm.rank :][:1000])
        comm.all_reduce(send, send)
        same(send, expected)

    run_nccl(4, check)


def test_nccl_reduces_16_bit_floats_itself_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(comm: Communicator) -> None:
        for name in ("bfloat16", "float16"):
            buf = comm.xp.ones(8, dtypes.get(name).numpy)
            for op in ("sum", "avg", "max"):
                made = calls_of(comm, lambda b=buf, o=op: comm.all_reduce(b, b, o))
                assert [(c[0], c[3], c[4], c[5]) for c in made] == [("allReduce", 8, CODES[name], OPS[op])]
                made = calls_of(comm, lambda b=buf, o=op: comm.all_reduce(b, b, o, "tree"))
                assert "allReduce" not in [c[0] for c in made]

    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", "nccl")
    run_nccl(2, check)
    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", "yes")
    with alone() as comm:
        half = comm.xp.ones(8, "float16")
        refused(
            lambda: comm.all_reduce(half, half), CommError, "LOWSHARD_NCCL_REDUCE16 is exact or nccl", "yes"
        )


def test_only_split_and_a_barrier_without_control_wait(cupy: Any) -> None:
    with host_waits(cupy) as waits, alone() as comm, alone(host=lc.loopback(1)[0]) as with_control:
        board = comm.xp.zeros(4)
        comm.all_reduce(board, board)
        comm.reduce_scatter(board, board, order="tree")
        with_control.barrier()
        assert not waits
        assert not recorded(with_control).moved()
        assert [(c[0], *c[3:6]) for c in calls_of(comm, comm.barrier)] == [("allReduce", 1, 1, 0)]
        group = comm.split(3, key=-4)
        assert recorded(comm).calls[-1] == ("commSplit", 3, -4)
        assert waits == ["deviceSynchronize"]
        assert comm.split(None) is None
        assert recorded(comm).calls[-1][:2] == ("commSplit", -1)
        assert group is not None
        group.close()


# ---- refusals, errors, the end


def test_what_is_no_buffer_of_the_device_is_refused(cupy: Any) -> None:
    near, far, host = cupy.zeros(4), cupy.zeros(4), np.zeros(4)
    device = lambda array: int(array.data.ptr == far.data.ptr)  # noqa: E731  # as on a machine of two
    with alone(binding=replace(Binding.load(), device=device)) as comm:
        refused(lambda: comm.all_reduce(far, near), BufferMismatchError, "send", "device 0", "device 1")
        refused(lambda: comm.all_reduce(near, far), BufferMismatchError, "recv")
        refused(
            lambda: comm.all_reduce(host, host), BufferMismatchError, "cupy array, or one of another library"
        )
        assert not recorded(comm).moved()


def test_errors_of_nccl_become_ours_also_those_that_cupy_cannot_name() -> None:
    nccl = Binding.load().nccl
    for error, cls, told in (
        (KeyError(7), CommError, "NCCL_COMM_BLOCKING"),
        (KeyError(8), TimedOut, "time-out"),
        (nccl.NcclError(6), PeerFailed, "another rank"),
        (nccl.NcclError(1), CommError, "NCCL failed in broadcast"),
    ):
        comm = alone()
        buf, recorded(comm).errors["broadcast"] = on_gpu(comm, np.zeros(2)), error
        refused(lambda c=comm, b=buf: c.broadcast(b), cls, "broadcast", told)
        comm.close()
        assert recorded(comm).ended == "abort"


def test_close_destroys_what_is_well_and_ours_once() -> None:
    comm = alone()
    recorded(comm).errors["broadcast"] = Binding.load().nccl.NcclError(4)  # the one that leaves it usable
    buf = on_gpu(comm, np.zeros(2))
    refused(lambda: comm.broadcast(buf), CommError, "broadcast")
    for _ in range(2):
        comm.close()
    assert [c[0] for c in recorded(comm).calls if c[0] in ("destroy", "abort")] == ["destroy"]
    comm = alone()
    with pytest.raises(ZeroDivisionError), comm:
        raise ZeroDivisionError
    assert recorded(comm).ended == "abort"


def test_a_communicator_that_is_not_ours_is_left_alone_and_serves_again() -> None:
    nccl = Binding.load().nccl
    handle = Recorded(nccl.NcclCommunicator(1, nccl.get_unique_id(), 0))
    for _ in range(2):
        comm = lc.from_nccl(handle, 0, 1)
        buf = comm.xp.ones(3)
        comm.broadcast(buf)
        same(buf, np.ones(3))
        comm.close()
        refused(comm.barrier, CommError, "closed")
    assert not handle.ended
    for rank, size in ((1, 4), (0, 2)):
        with pytest.raises(CommError, match=rf"rank 0 of 1.*rank {rank} of {size}"):
            nccl_communicator(handle, rank, size)
    handle.destroy()


def test_a_cupy_without_nccl_serves_staging_and_nothing_else(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    refused(Binding.load, DependencyError, "no NCCL library", "lowshard\\[cuda12\\]")
    assert Binding.load(with_nccl=False).nccl is None


# ---- plans


def turned(size: int) -> Any:
    mesh = DeviceMesh((size,), ("x",))
    rows = Layout(mesh, (6, 4), "float32", (Sharded(0),))
    return plan_redistribute(rows, Layout(mesh, (6, 4), "float32", (Sharded(1),)))


def test_without_control_a_plan_is_compared_the_first_time_it_is_executed_and_never_again() -> None:
    def check(comm: Communicator) -> None:
        plan, local = turned(2), comm.xp.full((3, 4), comm.rank, np.float32)
        first = calls_of(comm, lambda: execute(plan, local, comm))
        assert [c[0] for c in first] == ["allGather", "send", "recv"]
        assert [c[0] for c in calls_of(comm, lambda: execute(turned(2), local, comm))] == ["send", "recv"]
        # Another plan is compared, and told apart.
        other = plan_redistribute(plan.dst, plan.src if comm.rank else plan.dst)
        told = r"asks for the same thing, but ranks \[0\] have .*x=S1 on mesh x=2; ranks \[1\] .*x=S0 on mesh"
        with pytest.raises(MismatchError, match=told):
            execute(other, comm.xp.zeros((6, 2), np.float32), comm)

    run_nccl(2, check, control=False)


SPECS = [  # one dim cut by both axes, in either order, and two dims: what is sent and what comes are many runs each
    ((("a", "b"), None, None), (None, None, ("b", "a"))),
    (("a", "b", None), (None, "a", "b")),
    ((None, ("a", "b"), None), ("b", None, "a")),
]


@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_boxes_are_packed_and_unpacked_by_one_launch_each(specs: tuple[Any, Any], cupy: Any) -> None:
    mesh, shape = DeviceMesh((2, 2), ("a", "b")), (9, 11, 13)
    src, dst = (Layout.from_spec(mesh, shape, "bfloat16", spec) for spec in specs)
    plan = plan_redistribute(src, dst)
    values = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16).view(src.numpy_dtype)

    def part(layout: Layout, rank: int) -> np.ndarray:
        return np.ascontiguousarray(values[tuple(slice(*span) for span in layout.box(rank))])

    def check(comm: Communicator) -> None:
        out, local = on_gpu(comm, np.zeros(dst.local_shape(comm.rank), dst.numpy_dtype), part(src, comm.rank))
        execute(plan, local, comm, out)
        same(out, part(dst, comm.rank))

    run_nccl(4, check)
    if hasattr(cupy, "checker"):  # what is sent, what stays, what has come
        assert 0 < cupy.checker.counts()["launches"] <= 4 * 3 * len(plan.steps)
