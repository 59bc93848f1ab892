"""Waits for a GPU: work that is never done, peers that fail, NCCL or CUDA that complains; the abort that follows."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused
from support.gpu import (
    Answers,
    alone,
    on_gpu,
    recorded,
    run_nccl,
)

from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import wait_for
from lowshard.comm.pinned import Slots
from lowshard.errors import CommError, PeerFailed, TimedOut
from lowshard.fsdp.groups import StreamQueue, _StreamWork


class Watch:
    """A side channel that hears of a failure when the test says so; one of several tells the others."""

    def __init__(self, others: list[Any] | None = None) -> None:
        self.flag = np.zeros(1, np.int64)
        self.told: list[str] = []
        self.heard = "rank 1 failed: ValueError('boom')"
        self._all = [] if others is None else others
        self._all.append(self)

    def error(self, where: str) -> CommError:
        return PeerFailed(f"{self.heard}; this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        self.told.append(kind)
        for watch in self._all:
            if watch is not self and not watch.flag[0]:
                watch.heard, watch.flag[0] = f"another rank {kind}: {text}", 1


class Breaks:
    """What a wait needs of a communicator; notes what is done with it."""

    done, asked = False, 0  # and an event of a kernel that does not end

    def __init__(self, error: CommError | None = None) -> None:
        self.error, self.given_up = error, 0

    def ask(self) -> None:
        assert not self.given_up, "asked after the abort"
        self.asked += 1
        if self.error is not None:
            raise self.error

    def give_up(self) -> str:
        self.given_up += 1
        return ""


def test_a_deadline_a_failure_and_an_error_of_nccl_end_a_wait_and_abort() -> None:
    never, watch, begun = Breaks(), Watch(), time.monotonic()
    with pytest.raises(TimedOut, match=r"all_reduce on rank 0 was not done after 0\.(0[4-9]|[1-9])"):
        wait_for(never, begun + 0.05, watch, never, "all_reduce on rank 0")  # type: ignore[arg-type]
    assert (never.given_up, watch.told) == (1, ["timed out"])
    assert never.asked < 60, "the pauses do not grow"
    threading.Timer(0.05, lambda: watch.flag.fill(1)).start()
    never = Breaks()
    with pytest.raises(PeerFailed, match=r"ValueError\('boom'\); this rank was in barrier"):
        wait_for(never, begun + 20.0, watch, never, "barrier")  # type: ignore[arg-type]
    assert never.given_up == 1
    never = Breaks(PeerFailed("NCCL lost another rank"))
    with pytest.raises(PeerFailed, match="lost another rank"):
        wait_for(never, begun + 20.0, None, never)
    assert never.given_up == 1
    assert time.monotonic() - begun < 5.0


def test_an_error_of_the_gpu_is_not_taken_for_work_that_goes_on(answers: Answers) -> None:
    binding, says = Binding.load(with_nccl=False), "cudaError"
    for awaited in (binding.new_event(), binding.new_stream()):
        for answers.status, done in ((0, True), (600, False), (900, False), (908, False)):
            assert awaited.done is done
            binding.check(binding.new_stream())
        answers.status = Answers.ILLEGAL_ADDRESS
        refused(lambda: binding.check(binding.new_stream()), CommError, says)
        refused(lambda: awaited.done, CommError, "the GPU reports", says, "CUDA_LAUNCH_BLOCKING=1")  # noqa: B023
    watch, begun = Watch(), time.monotonic()
    with pytest.raises(CommError, match="all_reduce on rank 1: the GPU reports cudaError"):
        wait_for(binding.new_event(), begun + 60.0, watch, None, "all_reduce on rank 1")  # type: ignore[arg-type]
    assert (time.monotonic() - begun < 1.0, watch.told) == (True, ["failed"])
    slots, queue = Slots(binding, lambda n: np.empty(n, np.uint8), 60.0), StreamQueue(60.0)
    refused(lambda: slots._wait(binding.new_event(), "broadcast"), CommError, "broadcast: the copy", says)
    refused(lambda: queue.idle, CommError, says)
    refused(queue.settle, CommError, "what a sharded model has queued: the GPU reports", says)
    work = _StreamWork(binding, binding.new_event(), None, None, "gather of l0")
    refused(work.done, CommError, "gather of l0: the GPU reports", says)


# ---- what an NCCL communicator does with it


def test_a_barrier_that_hangs_is_aborted_and_closing_does_not_destroy(answers: Answers) -> None:
    comm = alone(timeout_s=0.05)
    answers.status = Answers.NEVER
    refused(comm.barrier, TimedOut, "barrier was not done")
    assert recorded(comm).ended == "abort"
    refused(comm.barrier, CommError, "was aborted after an error")
    refused(lambda: comm.start.barrier().wait(), CommError, "was aborted after an error")
    comm.close()
    assert [name for name, *_ in recorded(comm).calls].count("abort") == 1


def test_a_communicator_that_is_not_ours_is_not_aborted_and_its_maker_is_told_to(answers: Answers) -> None:
    comm = alone(timeout_s=0.02, owned=False)
    answers.status = Answers.NEVER
    refused(comm.barrier, TimedOut, "maker's: abort it there")
    assert not recorded(comm).ended


def test_a_started_call_that_is_not_done_in_a_given_time_goes_on_until_the_deadline(answers: Answers) -> None:
    comm = alone(timeout_s=0.2)
    work = comm.start.broadcast(on_gpu(comm, np.arange(3.0)))
    answers.status = Answers.NEVER
    for _ in range(2):
        refused(
            lambda: work.wait(timeout_s=0.03),
            TimedOut,
            "broadcast on rank 0 has not ended",
            "wait for it again",
        )
    assert not recorded(comm).ended
    answers.status = None
    work.wait(timeout_s=0.1)
    answers.status = Answers.NEVER
    refused(lambda: work.wait(timeout_s=30.0), TimedOut, r"broadcast on rank 0 was not done after 0\.2")
    assert recorded(comm).ended == "abort"


def test_an_error_that_shows_while_waiting_and_the_side_channel_abort(answers: Answers) -> None:
    comm, nccl = alone(timeout_s=20.0), Binding.load().nccl
    answers.status = Answers.NEVER
    recorded(comm).errors["check_async_error"] = nccl.NcclError(6)
    refused(comm.barrier, PeerFailed, "lost another rank in check_async_error")
    assert recorded(comm).ended == "abort"
    answers.status, watch = None, Watch()
    comm = alone(watch=watch)
    work = comm.start.broadcast(on_gpu(comm, np.zeros(3)))
    work.wait()
    watch.flag[0] = 1
    refused(work.wait, PeerFailed, "boom")
    comm.close()
    assert recorded(comm).ended == "abort"


def test_a_rank_that_does_not_come_to_a_split_is_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", "off")  # else the check of the call finds it

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            refused(lambda: comm.split(0), TimedOut, r"\[1\]")
            assert "commSplit" not in [name for name, *_ in recorded(comm).calls]
        comm._transport._nccl.failed = True  # type: ignore[attr-defined]  # no destroy: the ranks do not come to it together

    run_nccl(2, check, timeout_s=0.2)


@pytest.mark.parametrize(("kind", "how"), [("nccl", "call"), ("cuda", "wait")])
def test_an_error_of_one_ranks_gpu_is_raised_by_its_next_call_and_reaches_all_ranks(
    kind: str, how: str, answers: Answers
) -> None:
    watches: list[Watch] = []

    def check(comm: Communicator) -> None:
        comm._transport._nccl.watch = Watch(watches)  # type: ignore[attr-defined]
        me, buf = threading.get_ident(), on_gpu(comm, np.ones(5))
        comm.all_reduce(buf, buf)
        work = comm.start.all_reduce(buf, buf)
        comm.control.barrier()
        if comm.rank == 0:
            answers.of_threads[me] = Answers.NEVER
            begun = time.monotonic()
            refused(lambda: work.wait(timeout_s=20.0), PeerFailed, "another rank failed: .*all_reduce")
            assert time.monotonic() - begun < 2.0
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
