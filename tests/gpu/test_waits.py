"""Waits for a GPU: work that is never done, peers that fail, differ or do not come, NCCL or CUDA that complains; the
abort that follows. A still NCCL does nothing, as where the calls of ranks differ, until it is aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.comm_kit import outcome, refused
from support.gpu import Answers, alone, on_gpu, recorded, run_nccl

from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.pinned import Slots
from lowshard.errors import CommError, MismatchError, PeerFailed, TimedOut
from lowshard.fsdp.groups import StreamQueue, _StreamWork

SOON_S = 5.0
"""Much less than the deadline of a wait, much more than a comparison of calls takes."""


class Watch:
    """One of several side channels, which tell each other."""

    def __init__(self, all_of_them: list[Watch]) -> None:
        self.flag, self.heard, self._all = np.zeros(1, np.int64), "", all_of_them
        self._all.append(self)

    def error(self, where: str) -> CommError:
        return PeerFailed(f"{self.heard}; this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        for watch in self._all:
            if watch is not self and not watch.flag[0]:
                watch.heard, watch.flag[0] = f"another rank {kind}: {text}", 1


def test_an_error_of_the_gpu_is_not_taken_for_work_that_goes_on(answers: Answers) -> None:
    binding, says = Binding.load(with_nccl=False), "cudaError"
    event, stream = binding.new_event(), binding.new_stream()
    for answers.status, done in ((0, True), (600, False), (900, False), (908, False)):
        assert (event.done, stream.done) == (done, done)
        binding.check(stream)
    answers.status = Answers.ILLEGAL_ADDRESS
    slots, queue = Slots(binding, lambda n: np.empty(n, np.uint8), 60.0), StreamQueue(60.0)
    work = _StreamWork(binding, event, None, None, "gather of l0")
    refused(lambda: event.done, CommError, "the GPU reports", says, "CUDA_LAUNCH_BLOCKING=1")
    refused(lambda: stream.done, CommError, says)
    refused(lambda: binding.check(stream), CommError, says)
    refused(lambda: slots._wait(event, "broadcast"), CommError, "broadcast: the copy", says)
    refused(lambda: queue.idle, CommError, says)
    refused(queue.settle, CommError, "what a sharded model has queued: the GPU reports", says)
    refused(work.done, CommError, "gather of l0: the GPU reports", says)


@pytest.mark.parametrize("owned", [True, False])
def test_a_barrier_that_hangs_is_aborted_and_closing_does_not_destroy(owned: bool, answers: Answers) -> None:
    comm, answers.status = alone(timeout_s=0.05, owned=owned), Answers.NEVER
    refused(
        comm.barrier, TimedOut, "barrier was not done after 0", "" if owned else "maker's: abort it there"
    )
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


def test_a_rank_that_does_not_come_to_a_split_is_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", "off")  # else the check of the call finds it

    def check(comm: Communicator) -> None:
        if comm.rank == 0:
            refused(lambda: comm.split(0), TimedOut, r"\[1\]")
            assert "commSplit" not in [name for name, *_ in recorded(comm).calls]
        comm._transport._nccl.failed = True  # type: ignore[attr-defined]  # no destroy: they do not come together

    run_nccl(2, check, timeout_s=0.2)


@pytest.mark.parametrize(("kind", "how"), [("nccl", "call"), ("cuda", "wait")])
def test_an_error_of_one_rank_is_raised_by_its_next_call_and_reaches_who_waits(
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


# ---- calls that are compared after they were made


def told(call: Callable[[], object], cls: str, *says: str) -> None:
    """Check that a call raises an error soon, or after some such calls, as it comes late."""
    found, end_s = outcome(call), time.monotonic() + SOON_S
    while not found[0] and time.monotonic() < end_s:
        time.sleep(0.01)
        found = outcome(call)
    assert (found[0], [text for text in says if text not in found[1]]) == (cls, []), found


@pytest.mark.whole
@pytest.mark.parametrize("end", ["all_reduce", "wait", "barrier", "split", "close", "shared"])
def test_calls_that_differ_end_in_one_error_on_all_ranks_and_nccl_is_aborted(
    end: str, answers: Answers
) -> None:
    """A next call tells of it, and what waits for the other ranks compares first."""

    def check(comm: Communicator) -> None:
        buf, begun = on_gpu(comm, np.zeros(3 + comm.rank)), time.monotonic()
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(buf, buf), "barrier": comm.barrier,
            "split": lambda: comm.split(0), "close": comm.close,
            "shared": lambda: comm.broadcast(None if comm.rank else buf, shared=True),
            "wait": lambda: comm.start.broadcast(buf).wait(timeout_s=60.0),
        }  # fmt: skip
        comm.control.barrier()

        def work() -> None:
            if end == "wait":
                answers.status = Answers.NEVER
            elif comm.rank == 1:
                comm.broadcast(buf)
            calls[end]()

        asked = "broadcast" if end in ("shared", "wait") else end
        mine = "rank 1 asked for broadcast float64[4] root=0 at test_waits.py:"
        told(work, "MismatchError", "call #1", mine, f"rank 0 asked for {asked}")
        assert (recorded(comm).ended, time.monotonic() - begun < SOON_S) == ("abort", True)
        if end != "close":  # every later call and wait says it again
            refused(comm.barrier, MismatchError, "call #1")
            refused(lambda: comm.start.broadcast(buf).wait(), MismatchError, "call #1")

    run_nccl(2, check, still=True, late=True)


def test_a_rank_goes_on_and_those_that_do_not_call_are_named_when_the_time_is_over() -> None:
    stop = threading.Event()

    def check(comm: Communicator) -> None:
        buf, other = on_gpu(comm, np.zeros(4), np.zeros(4))
        nccl = comm._transport._nccl  # type: ignore[attr-defined]
        if comm.rank == 1:
            stop.wait(SOON_S)
            nccl.failed = True  # no destroy beside an abort
            return
        for _ in range(100):
            comm.all_reduce(buf, buf)
            comm.all_to_all_v(buf, [1, 1], [0, 1], other, [1, 1], [0, 1])
        time.sleep(0.3)
        told(nccl.ask, "TimedOut", "ranks [1] did not come", "called all_reduce float64[4]", "call #1")
        assert recorded(comm).ended == "abort"
        stop.set()

    run_nccl(2, check, still=True, late=True, timeout_s=0.5)
