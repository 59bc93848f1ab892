"""What is asked of NCCL, how its errors come to a user, who ends it; waits that end by an abort."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from support import mode
from support.comm_kit import refused, same
from support.gpu import Answers, Recorded, alone, on_gpu, recorded, run_nccl
from support.mismatch import Board, line_of, mismatches

from lowshard import DeviceMesh, Layout, dtypes, execute, plan_redistribute
from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import why_unusable
from lowshard.errors import CommError, DependencyError, MismatchError, PeerFailed, TimedOut
from lowshard.fsdp.groups import StreamQueue, _StreamWork
from lowshard.transfer.pinned import Slots

ROWS = [row for row in dtypes.all_dtypes() if not row.is_float8 and row.kind not in ("scale", "bool")]


def calls_of(comm: Communicator, call: Callable[[], object]) -> list[str]:
    """Return the names of the NCCL calls that move bytes for `call`."""
    start = len(recorded(comm).moved())
    call()
    return [name for name, *_ in recorded(comm).moved()[start:]]


@pytest.mark.parametrize("reduce16", ["exact", "nccl"])
def test_nccl_reduces_what_the_contract_allows_and_the_rest_is_exchanged(
    reduce16: str, monkeypatch: Any
) -> None:
    native = {"float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"}
    native |= {"bfloat16", "float16"} if reduce16 == "nccl" else set()

    def check(comm: Communicator) -> None:
        for row, op, order in product(ROWS, ("max", "avg"), ("fast", "tree")):
            buf, part = comm.xp.ones(6000, row.numpy), comm.xp.ones(2000, row.numpy)
            wraps = op == "avg" and row.kind != "float"  # NCCL would sum in the narrow type
            its_own, exchange = row.name in native and order == "fast" and not wraps, ["send", "recv"] * 2
            made = calls_of(comm, partial(comm.all_reduce, buf, buf, op, order))
            assert made == (["allReduce"] if its_own else [*exchange, "allGather"]), (row, op, order)
            made = calls_of(comm, partial(comm.reduce_scatter, buf, part, op, order))
            assert made == (["reduceScatter"] if its_own else exchange), (row, op, order)

    monkeypatch.setenv("LOWSHARD_NCCL_REDUCE16", reduce16)
    run_nccl(3, check)


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
        refused(partial(Binding.load, with_nccl=with_nccl), DependencyError, r"CuPy.*lowshard\[cuda12\]")
    assert "CuPy" in str(why_unusable())


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


class Watch:
    """One of several failure channels, which tell each other."""

    def __init__(self, all_of_them: list[Watch]) -> None:
        self.flag, self.heard, self.all = np.zeros(1, np.int64), "", all_of_them
        self.all.append(self)

    def error(self, where: str) -> CommError:
        return PeerFailed(f"{self.heard}; this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        for watch in self.all:
            watch.heard, watch.flag[0] = f"another rank {kind}: {text}", watch is not self


def test_an_error_of_the_gpu_is_not_taken_for_work_that_goes_on(answers: Answers) -> None:
    binding = Binding.load(with_nccl=False)
    event, stream = binding.new_event(), binding.new_stream()
    for answers.status, done in ((0, True), (600, False), (900, False), (908, False)):
        assert (event.done, stream.done) == (done, done)
        binding.check(stream)
    answers.status = Answers.ILLEGAL_ADDRESS
    slots, queue = Slots(binding, lambda n: np.empty(n, np.uint8), 60.0), StreamQueue(60.0)
    work = _StreamWork(binding, event, None, None, "gather of l0")
    for call, said in (
        (lambda: event.done, "CUDA_LAUNCH_BLOCKING=1"), (lambda: stream.done, ""),
        (lambda: binding.check(stream), ""),
        (lambda: slots._wait(event, "broadcast"), "broadcast: the copy"),
        (queue.settle, "what a sharded model has queued: "), (work.done, "gather of l0: "),
    ):  # fmt: skip
        refused(call, CommError, "cudaError", said)


@pytest.mark.parametrize("owned", [True, False])
def test_a_barrier_that_hangs_is_aborted_and_closing_does_not_destroy(owned: bool, answers: Answers) -> None:
    comm, answers.status = alone(timeout_s=0.05, owned=owned), Answers.NEVER
    refused(comm.barrier, TimedOut, "barrier was not done after 0", "" if owned else "maker's: abort it")
    if owned:
        refused(comm.barrier, CommError, "was aborted after an error")
        refused(lambda: comm.start.barrier().wait(), CommError, "was aborted after an error")
    comm.close()
    assert [name for name, *_ in recorded(comm).calls if name in ("abort", "destroy")] == ["abort"] * owned


def test_a_started_call_that_is_not_done_in_a_given_time_goes_on_until_the_deadline(answers: Answers) -> None:
    comm = alone(timeout_s=0.2)
    work = comm.start.broadcast(on_gpu(comm, np.arange(3.0)))
    answers.status = Answers.NEVER
    for _ in range(2):
        told = "broadcast on rank 0 has not ended", "wait for it again"
        refused(lambda: work.wait(timeout_s=0.03), TimedOut, *told)
    assert not recorded(comm).ended
    answers.status = None
    work.wait(timeout_s=0.1)
    answers.status = Answers.NEVER
    refused(lambda: work.wait(timeout_s=30.0), TimedOut, r"broadcast on rank 0 was not done after 0\.2")
    assert recorded(comm).ended == "abort"


@pytest.mark.parametrize(("kind", "how"), [("nccl", "call"), ("cuda", "wait")])
def test_an_error_of_one_rank_is_raised_by_its_next_call_on_all(kind: str, how: str, answers: Any) -> None:
    watches: list[Watch] = []

    def check(comm: Communicator) -> None:
        comm._transport._nccl.watch = Watch(watches)  # type: ignore[attr-defined]
        me, buf = threading.get_ident(), on_gpu(comm, np.ones(5))
        comm.all_reduce(buf, buf)
        work = comm.start.all_reduce(buf, buf)
        comm.control.barrier()
        if comm.rank == 0:
            answers.of_threads[me] = Answers.NEVER
            refused(lambda: work.wait(timeout_s=20.0), PeerFailed, "another rank failed: .*all_reduce")
        else:
            time.sleep(0.05)
            if kind == "cuda":
                answers.of_threads[me] = Answers.ILLEGAL_ADDRESS
            else:
                recorded(comm).errors["check_async_error"] = Binding.load().nccl.NcclError(1)
            call = work.wait if how == "wait" else lambda: comm.broadcast(buf)
            refused(call, CommError, "cudaError" if kind == "cuda" else "NCCL", "all_reduce")
        assert recorded(comm).ended == "abort"
        answers.of_threads.pop(me, None)

    run_nccl(2, check)


@pytest.mark.whole
@pytest.mark.parametrize("place", mode.sample(range(34), 6, "mismatches over NCCL"))
def test_calls_that_differ_are_named_when_a_wait_has_failed(place: int, answers: Answers) -> None:
    def check(comm: Communicator) -> None:
        entry, buf = mismatches(Board(comm))[place], on_gpu(comm, np.zeros(4))
        answers.status = Answers.NEVER

        def work() -> None:
            (entry.other if comm.rank else entry.one)()
            comm.start.all_reduce(buf, buf).wait(timeout_s=60.0)

        refused(
            work, MismatchError, "call #1", f"{entry.one_says}[^;]* at {line_of(entry.one)}", entry.other_says
        )
        assert recorded(comm).ended == "abort"
        refused(lambda: comm.all_reduce(buf, buf), CommError, "aborted")

    run_nccl(2, check, still=True, timeout_s=0.8)


@pytest.mark.parametrize("end", ["barrier", "split", "close"])
def test_calls_that_differ_are_found_where_the_hosts_meet(end: str) -> None:
    def check(comm: Communicator) -> None:
        buf = on_gpu(comm, np.zeros(3 + comm.rank))
        comm.all_reduce(buf, buf)
        calls: dict[str, Callable[[], object]] = {
            "barrier": comm.barrier, "split": lambda: comm.split(0), "close": comm.close,
        }  # fmt: skip
        mine = [
            rf"rank {rank} asked for all_reduce float64\[{3 + rank}\] sum fast at test_nccl.py:"
            for rank in (0, 1)
        ]
        refused(calls[end], MismatchError, "call #1", *mine)
        assert recorded(comm).ended == "abort"

    run_nccl(2, check, still=True)


def test_ranks_that_do_not_come_are_named_at_the_deadline(answers: Answers) -> None:
    def check(comm: Communicator) -> None:
        buf = on_gpu(comm, np.zeros(4))
        answers.status = Answers.NEVER
        comm.all_reduce(buf, buf)
        for _ in range(0 if comm.rank else 2):
            comm.broadcast(buf)
        refused(
            lambda: comm.start.send(buf, 1 - comm.rank).wait(timeout_s=60.0),
            TimedOut,
            "rank 1 .*call #2",
            "broadcast",
        )

    run_nccl(2, check, still=True, timeout_s=0.8)
