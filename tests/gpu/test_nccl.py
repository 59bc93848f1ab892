"""What is asked of NCCL: calls, who ends it, how its errors come to a user; whoever made it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import Recorded, alone, host_waits, on_gpu, recorded, run_nccl

from lowshard import DeviceMesh, Layout, dtypes, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import why_unusable
from lowshard.errors import CommError, DependencyError, MismatchError, PeerFailed, TimedOut

OPS: tuple[Any, ...] = ("sum", "max", "avg")
ORDERS: tuple[Any, ...] = ("fast", "tree")


def calls_of(comm: Communicator, call: Callable[[], object]) -> list[str]:
    """Return the names of the NCCL calls that move bytes for `call`."""
    start = len(recorded(comm).moved())
    call()
    return [name for name, *_ in recorded(comm).moved()[start:]]


@pytest.mark.parametrize("reduce16", ["exact", "nccl", "yes"])
def test_nccl_reduces_what_it_does_as_the_contract_says_and_the_rest_is_exchanged_once(
    reduce16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = {"float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"}
    native |= {"bfloat16", "float16"} if reduce16 == "nccl" else set()

    def check(comm: Communicator) -> None:
        half = comm.xp.ones(8, "float16")
        if reduce16 == "yes":
            refused(lambda: comm.all_reduce(half, half), CommError, "LOWSHARD_NCCL_REDUCE16 is exact or nccl")
            return
        for row in (
            row for row in dtypes.all_dtypes() if not row.is_float8 and row.kind not in ("scale", "bool")
        ):
            buf, part = comm.xp.ones(6000, row.numpy), comm.xp.ones(2000, row.numpy)
            for op, order in product(OPS, ORDERS):
                wraps = op == "avg" and row.kind != "float"  # NCCL would sum in the narrow type
                its_own, exchange = row.name in native and order == "fast" and not wraps, ["send", "recv"] * 2
                made = calls_of(comm, partial(comm.all_reduce, buf, buf, op, order))
                assert made == (["allReduce"] if its_own else [*exchange, "allGather"]), (row, op, order)
                made = calls_of(comm, partial(comm.reduce_scatter, buf, part, op, order))
                assert made == (["reduceScatter"] if its_own else exchange), (row, op, order)

    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", reduce16)
    run_nccl(3, check)


def test_only_split_and_a_barrier_without_control_wait(cupy: Any) -> None:
    with host_waits(cupy) as waits, alone() as comm, alone(host=lc.loopback(1)[0]) as with_control:
        board = comm.xp.zeros(4)
        comm.all_reduce(board, board)
        comm.reduce_scatter(board, board, order="tree")
        with_control.barrier()
        assert (waits, recorded(with_control).moved()) == ([], [])
        assert calls_of(comm, comm.barrier) == ["allReduce"]
        group = comm.split(3, key=-4)
        assert recorded(comm).calls[-1] == ("commSplit", 3, -4)
        assert waits == ["deviceSynchronize"]
        assert comm.split(None) is None
        assert group is not None
        group.close()


def test_errors_of_nccl_become_ours_and_what_is_not_well_is_aborted() -> None:
    nccl = Binding.load().nccl
    for error, cls, told, ended in (
        (KeyError(7), CommError, "NCCL_COMM_BLOCKING", "abort"),  # which CuPy cannot name
        (KeyError(8), TimedOut, "time-out", "abort"),
        (nccl.NcclError(6), PeerFailed, "another rank", "abort"),
        (nccl.NcclError(1), CommError, "NCCL failed in broadcast", "abort"),
        (nccl.NcclError(4), CommError, "broadcast", "destroy"),  # the one that leaves it usable
    ):
        comm = alone()
        buf, recorded(comm).errors["broadcast"] = on_gpu(comm, np.zeros(2)), error
        refused(partial(comm.broadcast, buf), cls, "broadcast", told)
        for _ in range(2):
            comm.close()
        assert [c[0] for c in recorded(comm).calls if c[0] in ("destroy", "abort")] == [ended]
    comm = alone()
    with pytest.raises(ZeroDivisionError), comm:
        raise ZeroDivisionError
    assert recorded(comm).ended == "abort"


def test_a_communicator_that_is_not_ours_is_left_alone_and_serves_again() -> None:
    nccl = Binding.load().nccl
    handle = Recorded(nccl.NcclCommunicator(1, nccl.get_unique_id(), 0))
    for _ in range(2):
        with lc.from_nccl(handle, 0, 1) as comm:
            buf = comm.xp.ones(3)
            comm.broadcast(buf)
            same(buf, np.ones(3))
        refused(comm.barrier, CommError, "closed")
    for rank, size in ((1, 4), (0, 2)):
        refused(partial(lc.from_nccl, handle, rank, size), CommError, f"rank 0 of 1.*rank {rank} of {size}")
    assert not handle.ended
    handle.destroy()


def test_what_is_missing_is_named_with_what_installs_it(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    refused(Binding.load, DependencyError, "no NCCL library", r"lowshard\[cuda12\]")
    assert Binding.load(with_nccl=False).nccl is None  # it serves staging
    monkeypatch.setitem(sys.modules, "cupy", None)
    for with_nccl in (True, False):
        refused(lambda: Binding.load(with_nccl=with_nccl), DependencyError, r"CuPy.*lowshard\[cuda12\]")  # noqa: B023
    assert "CuPy" in str(why_unusable())


# ---- plans


def test_without_control_a_plan_is_compared_the_first_time_it_is_executed_and_never_again() -> None:
    mesh = DeviceMesh((2,), ("x",))
    rows, cols = (Layout.from_spec(mesh, (6, 4), "float32", spec) for spec in (("x", None), (None, "x")))

    def check(comm: Communicator) -> None:
        local = comm.xp.ones((3, 4), np.float32)
        for first in (True, False):
            made = calls_of(comm, lambda: execute(plan_redistribute(rows, cols), local, comm))
            assert made == ["allGather"] * first + ["send", "recv"]
        other = plan_redistribute(cols, rows if comm.rank else cols)
        told = r"ranks \[0\] have .*x=S1 on mesh x=2; ranks \[1\] .*x=S0 on mesh"
        refused(lambda: execute(other, comm.xp.ones((6, 2), "f"), comm), MismatchError, told)

    run_nccl(2, check, control=False)


def test_boxes_are_packed_and_unpacked_by_one_launch_each(cupy: Any) -> None:
    """One dim cut by both axes, in either order: what is sent and what comes are many runs each."""
    mesh, specs = DeviceMesh((2, 2), ("a", "b")), ((("a", "b"), None, None), (None, None, ("b", "a")))
    src, dst = (Layout.from_spec(mesh, (9, 11, 13), "bfloat16", spec) for spec in specs)
    plan = plan_redistribute(src, dst)
    run_nccl(4, lambda comm: execute(plan, comm.xp.zeros(src.local_shape(comm.rank), src.numpy_dtype), comm))
    if hasattr(cupy, "checker"):  # what is sent, what stays, what has come
        assert 0 < cupy.checker.counts()["launches"] <= 4 * 3 * len(plan.steps)
