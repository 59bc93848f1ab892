"""Waits for a GPU: work that is never done, peers that fail, NCCL or CUDA that complains; the abort that follows."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support.comm_kit import refused
from support.gpu import Answers, alone, on_gpu, recorded, run_nccl

from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.pinned import Slots
from lowshard.errors import CommError, PeerFailed, TimedOut
from lowshard.fsdp.groups import StreamQueue, _StreamWork


class Watch:
    """A side channel that hears of a failure when the test says so; one of several tells the others."""

    def __init__(self, others: list[Watch]) -> None:
        self.flag, self.heard = np.zeros(1, np.int64), "rank 1 failed: ValueError('boom')"
        self._all = others
        self._all.append(self)

    def error(self, where: str) -> CommError:
        return PeerFailed(f"{self.heard}; this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        for watch in self._all:
            if watch is not self and not watch.flag[0]:
                watch.heard, watch.flag[0] = f"another rank {kind}: {text}", 1


def test_an_error_of_the_gpu_is_not_taken_for_work_that_goes_on(answers: Answers) -> None:
    binding, says = Binding.load(with_nccl=False), "cudaError"
    for awaited in (binding.new_event(), binding.new_stream()):
        for answers.status, done in ((0, True), (600, False), (900, False), (908, False)):
            assert awaited.done is done
            binding.check(binding.new_stream())
        answers.status = Answers.ILLEGAL_ADDRESS
        refused(lambda: binding.check(binding.new_stream()), CommError, says)
        refused(lambda: awaited.done, CommError, "the GPU reports", says, "CUDA_LAUNCH_BLOCKING=1")  # noqa: B023
    slots, queue = Slots(binding, lambda n: np.empty(n, np.uint8), 60.0), StreamQueue(60.0)
    refused(lambda: slots._wait(binding.new_event(), "broadcast"), CommError, "broadcast: the copy", says)
    refused(lambda: queue.idle, CommError, says)
    refused(queue.settle, CommError, "what a sharded model has queued: the GPU reports", says)
    work = _StreamWork(binding, binding.new_event(), None, None, "gather of l0")
    refused(work.done, CommError, "gather of l0: the GPU reports", says)


def test_a_barrier_that_hangs_is_aborted_and_closing_does_not_destroy(answers: Answers) -> None:
    comm, answers.status = alone(timeout_s=0.05), Answers.NEVER
    refused(comm.barrier, TimedOut, r"barrier was not done after 0\.(0[4-9]|[1-9])")
    refused(comm.barrier, CommError, "was aborted after an error")
    refused(lambda: comm.start.barrier().wait(), CommError, "was aborted after an error")
    comm.close()
    assert [name for name, *_ in recorded(comm).calls if name in ("abort", "destroy")] == ["abort"]


def test_a_communicator_that_is_not_ours_is_not_aborted_and_its_maker_is_told_to(answers: Answers) -> None:
    comm, answers.status = alone(timeout_s=0.02, owned=False), Answers.NEVER
    refused(comm.barrier, TimedOut, "maker's: abort it there")
    assert not recorded(comm).ended


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


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("what", ["nccl", "peer"])
def test_an_error_that_shows_while_waiting_and_the_side_channel_abort(
    what: str, started: bool, answers: Answers
) -> None:
    watch, begun = Watch([]), time.monotonic()
    comm = alone(timeout_s=20.0, watch=watch)
    work = comm.start.broadcast(on_gpu(comm, np.zeros(3)))
    answers.status = Answers.NEVER
    if what == "nccl":
        recorded(comm).errors["check_async_error"] = Binding.load().nccl.NcclError(6)
    else:
        threading.Timer(0.05, lambda: watch.flag.fill(1)).start()
    told = "lost another rank in check_async_error" if what == "nccl" else "boom.*this rank was in b"
    refused(lambda: work.wait(20.0) if started else comm.barrier(), PeerFailed, told)
    assert (recorded(comm).ended, time.monotonic() - begun < 5.0) == ("abort", True)
    answers.status = None
    comm.xp.cuda.Device().synchronize()


def test_a_rank_that_does_not_come_to_a_split_is_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", "off")  # else the check of the call finds it

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            refused(lambda: comm.split(0), TimedOut, r"\[1\]")
            assert "commSplit" not in [name for name, *_ in recorded(comm).calls]
        comm._transport._nccl.failed = True  # type: ignore[attr-defined]  # no destroy: they do not come together

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
