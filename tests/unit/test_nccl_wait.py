"""Waits for a GPU: events that are never done, peers that fail, NCCL that complains; the abort that follows."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.comm_kit import refused
from support.device_stand_in import StandInEvent
from support.fake_cupy import Cupy
from support.nccl_stand_in import CudaError, Host, StandInCommunicator, alone, run_stand_in

from lowshard.comm import Communicator
from lowshard.comm.nccl import nccl_communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import InThread, wait_for
from lowshard.comm.pinned import Slots
from lowshard.errors import CommError, PeerFailed, TimedOut
from lowshard.fsdp.groups import StreamQueue, _StreamWork


class Never:
    """An event of a kernel that does not end."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return False


class Watch:
    """A side channel that hears of a failure when the test says so."""

    def __init__(self) -> None:
        self.flag = np.zeros(1, np.int64)
        self.told: list[tuple[str, str]] = []

    def error(self, where: str) -> CommError:
        return PeerFailed(f"rank 1 failed: ValueError('boom'); this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        self.told.append((kind, text))


class Breaks:
    """A communicator that notes what is done with it."""

    def __init__(self, error: CommError | None = None, hindered: str = "") -> None:
        self.error, self.hindered = error, hindered
        self.given_up = 0

    def ask(self) -> None:
        assert not self.given_up, "asked after the abort"
        if self.error is not None:
            raise self.error

    def give_up(self) -> str:
        self.given_up += 1
        return self.hindered


def soon(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds


def test_what_is_done_is_not_waited_for() -> None:
    host = Host()
    event = StandInEvent(host)
    wait_for(event, time.monotonic() - 1.0, None, Breaks(TimedOut("not asked")))
    host.stream.push(lambda: None)
    event.record(host.stream)
    assert not event.done
    wait_for(event, soon(), None)
    assert event.done


def test_a_deadline_aborts_then_raises_and_tells_the_others() -> None:
    breaks, watch, never = Breaks(), Watch(), Never()
    begun = time.monotonic()
    with pytest.raises(TimedOut, match=r"all_reduce on rank 0 was not done after 0\.(0[5-9]|[1-9])"):
        wait_for(never, soon(), watch, breaks, "all_reduce on rank 0")
    assert 0.05 <= time.monotonic() - begun < 1.0
    assert breaks.given_up == 1
    assert [kind for kind, _ in watch.told] == ["timed out"]
    assert never.asked < 100 + 60, "the pauses do not grow"


def test_a_failure_that_the_side_channel_knows_ends_the_wait() -> None:
    breaks, watch = Breaks(), Watch()
    timer = threading.Timer(0.05, lambda: watch.flag.fill(1))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(PeerFailed, match=r"ValueError\('boom'\); this rank was in barrier"):
        wait_for(Never(), soon(20.0), watch, breaks, "barrier")
    assert time.monotonic() - begun < 2.0
    assert breaks.given_up == 1
    assert not watch.told


def test_an_error_of_nccl_ends_the_wait() -> None:
    breaks = Breaks(PeerFailed("NCCL lost another rank"))
    with pytest.raises(PeerFailed, match="lost another rank"):
        wait_for(Never(), soon(20.0), None, breaks)
    assert breaks.given_up == 1


def test_a_call_in_a_thread_gives_its_result_or_its_error() -> None:
    hold = threading.Event()
    call = InThread(lambda: hold.wait(5.0) and 7)
    assert not call.done
    hold.set()
    wait_for(call, soon(5.0), None)
    assert call.result() == 7
    broken = InThread(lambda: 1 // 0)
    wait_for(broken, soon(5.0), None)
    with pytest.raises(ZeroDivisionError):
        broken.result()


ILLEGAL_ADDRESS = 700


def test_an_error_of_the_gpu_is_not_taken_for_work_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Cupy(available=False)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    binding = Binding.load(with_nccl=False)
    for awaited in (binding.new_event(), binding.new_stream()):
        for status, done in ((0, True), (600, False), (900, False), (908, False)):
            fake.status = status
            assert awaited.done is done
            binding.check(binding.new_stream())
        fake.status = ILLEGAL_ADDRESS
        refused(lambda: binding.check(binding.new_stream()), CommError, "cudaError700: said by the driver")
        refused(lambda: awaited.done, CommError, "cudaError700: said by the driver", "CUDA_LAUNCH_BLOCKING=1")  # noqa: B023
    watch = Watch()
    begun = time.monotonic()
    with pytest.raises(CommError, match="all_reduce on rank 1: the GPU reports cudaError700"):
        wait_for(binding.new_event(), begun + 60.0, watch, None, "all_reduce on rank 1")
    assert time.monotonic() - begun < 1.0
    assert [kind for kind, _ in watch.told] == ["failed"]
    slots = Slots(binding, lambda n: np.empty(n, np.uint8), 60.0)
    refused(
        lambda: slots._wait(binding.new_event(), "broadcast"),
        CommError,
        "broadcast: the copy",
        "cudaError700",
    )
    queue = StreamQueue(60.0)
    refused(lambda: queue.idle, CommError, "cudaError700")
    refused(queue.settle, CommError, "what a sharded model has queued: the GPU reports cudaError700")
    work = _StreamWork(binding, binding.new_event(), None, None, "gather of l0")
    refused(work.done, CommError, "gather of l0: the GPU reports cudaError700")


def test_a_lane_of_a_sharded_model_settles_by_its_deadline() -> None:
    host = Host()
    queue = StreamQueue(0.05, host.binding(with_nccl=False))
    assert queue.submit(lambda: 7, "a gather").wait() == 7
    queue.settle()
    queue._stream.asked = lambda up_to: False  # type: ignore[method-assign]
    refused(queue.settle, TimedOut, "what a sharded model has queued was not done")


# ---- what an NCCL communicator does with it


def hang(host: Host) -> threading.Event:
    """Keep the stream's events from being done until the returned event is set."""
    release = threading.Event()
    ask = host.default.asked
    host.default.asked = lambda up_to: release.is_set() and ask(up_to)  # type: ignore[method-assign]
    return release


def test_a_barrier_that_hangs_is_aborted_and_closing_does_not_destroy() -> None:
    comm, handle, host = alone(timeout_s=0.05)
    hang(host)
    refused(comm.barrier, TimedOut, "barrier was not done")
    assert handle.ended == "abort"
    refused(comm.barrier, CommError, "was aborted after an error")
    refused(lambda: comm.start.barrier().wait(), CommError, "was aborted after an error")
    comm.close()  # the stand-in refuses a second end
    assert handle.ended == "abort"


def test_an_error_that_shows_while_waiting_aborts() -> None:
    comm, handle, host = alone(timeout_s=20.0)
    hang(host)
    handle.next_error, handle.error_in = host.nccl.NcclError(6), "check_async_error"
    refused(comm.barrier, PeerFailed, "lost another rank in check_async_error")
    assert handle.ended == "abort"


def test_a_communicator_that_is_not_ours_is_not_aborted_and_its_maker_is_told_to() -> None:
    comm, handle, host = alone(timeout_s=0.02, owned=False)
    hang(host)
    refused(comm.barrier, TimedOut, "maker's: abort it there")
    assert not handle.ended


def test_no_abort_beside_another_threads_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowshard.comm.nccl_handle._ABORT_LOCK_S", 0.05)
    comm, handle, _ = alone()
    inside, leave = threading.Event(), threading.Event()

    def stuck() -> None:
        inside.set()
        leave.wait(10.0)

    thread = threading.Thread(target=lambda: comm._transport._nccl.call(stuck))
    thread.start()
    try:
        assert inside.wait(5.0)
        comm._transport._nccl.ask()  # does not wait for the other thread either
        assert "another thread is inside an NCCL call" in comm._transport._nccl.give_up()
        assert not handle.ended
    finally:
        leave.set()
        thread.join(10.0)
    comm.close()
    assert handle.ended == "abort"


def test_a_rank_that_does_not_come_to_a_split_is_found_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", "off")  # else the check of the call finds it

    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        if comm.rank == 0:
            refused(lambda: comm.split(0), TimedOut, r"\[1\]")
            assert not [call for call in comm._transport._handle.calls if call[0] == "commSplit"]

    run_stand_in(2, check, timeout_s=0.2)


@pytest.mark.parametrize("what", ["synchronize", "commSplit", "destroy"])
def test_calls_that_block_have_the_deadline_and_the_device_of_the_communicator(what: str) -> None:
    comm, handle, host = alone(timeout_s=0.05)
    leave = threading.Event()

    def block(*args: object) -> None:
        leave.wait(10.0)

    if what == "synchronize":
        object.__setattr__(comm._transport._binding, "synchronize", block)
    else:
        setattr(handle, what, block)
    call: Callable[[], object] = comm.close if what == "destroy" else lambda: comm.split(0)
    try:
        refused(call, TimedOut, "close" if what == "destroy" else "split")
    finally:
        leave.set()
    assert host.selected
    assert all(device == 0 and "MainThread" not in name for name, device in host.selected)
    # No abort beside a destroy or a call that is stuck.
    assert handle.ended == ("abort" if what == "synchronize" else "")


def test_the_side_channel_is_looked_at_by_started_work() -> None:
    watch = Watch()
    comm, _, _ = alone(watch=watch)
    work = comm.start.broadcast(np.zeros(3))
    work.wait()
    watch.flag[0] = 1
    refused(work.wait, PeerFailed, "boom")
    comm.close()
    assert comm._transport._handle.ended == "abort"


# ---- connections


def test_a_group_is_connected_when_it_is_made() -> None:
    def check(comm: Communicator) -> None:
        part = comm.split(0)
        assert part.transport == "nccl"
        names = [name for name, *_ in part._transport._handle.calls]
        for name in ("send", "recv"):
            peers = [call[4] for call in part._transport._handle.calls if call[0] == name]
            assert peers == [rank for rank in range(comm.size) if rank != comm.rank]
        assert names.count("allReduce") == names.count("allGather") == 1
        assert part.traffic.calls == {}

    run_stand_in(3, check)


def test_a_rank_that_never_comes_to_the_first_call_ends_the_split_by_its_deadline() -> None:
    """NCCL connects in the first call: without a connection ahead the call itself would wait, past any deadline."""
    end = threading.Event()

    def check(comm: Communicator) -> None:
        assert comm.transport == "nccl"
        if comm.rank == 1:
            split = comm._transport._handle.commSplit

            def gone(color: int, key: int) -> StandInCommunicator:
                part = split(color, key)
                assert part is not None
                part.run = lambda batch: end.wait(20.0)  # type: ignore[assignment, method-assign, return-value]
                return part

            comm._transport._handle.commSplit = gone  # type: ignore[method-assign]
        assert comm._transport.host is not None
        made, split_host = [], comm._transport.host.split
        comm._transport.host.split = lambda *args: made.append(split_host(*args)) or made[0]  # type: ignore[func-returns-value, method-assign]
        begun = time.monotonic()
        refused(lambda: comm.split(0), TimedOut, f"NCCL connecting rank {comm.rank} to 1 others was not done")
        assert time.monotonic() - begun < 5.0
        assert [host.closed for host in made] == [True], "the group's communicator of the host stays open"
        comm._transport._nccl.failed = True  # no destroy: the group's first call is still under way
        if comm.rank == 0:
            end.set()

    run_stand_in(2, check, timeout_s=0.5)


# ---- errors that come late


FAULT = "cudaErrorIllegalAddress: an illegal memory access was encountered"


class Line:
    """A side channel between the ranks of one process: what one tells the others hear."""

    def __init__(self, ranks: list[Line], rank: int) -> None:
        self.flag = np.zeros(1, np.int64)
        self.heard = ""
        self._ranks, self._rank = ranks, rank
        ranks.append(self)

    def error(self, where: str) -> CommError:
        return PeerFailed(f"{self.heard}; this rank was in {where}")

    def tell(self, kind: str, text: str) -> None:
        for line in self._ranks:
            if not line.flag[0]:
                line.heard, line.flag[0] = f"rank {self._rank} {kind}: {text}", 1


@pytest.mark.parametrize(("kind", "how"), [("nccl", "call"), ("cuda", "wait")])
def test_an_error_of_one_ranks_gpu_is_raised_by_its_next_call_and_reaches_all_ranks(
    kind: str, how: str
) -> None:
    lines: list[Line] = []

    def check(plain: Communicator) -> None:
        host = plain._transport._binding.select.__self__  # type: ignore[attr-defined]
        line, handle = Line(lines, plain.rank), plain._transport._handle
        comm = nccl_communicator(
            handle, plain.rank, 2, plain.control, binding=plain._transport._binding, watch=line
        )  # type: ignore[arg-type]
        buf = np.ones(5)
        comm.all_reduce(buf, buf)
        work = comm.start.all_reduce(buf, buf)
        plain.control.barrier()
        if comm.rank == 0 or how == "wait":
            hang(host)
            comm._transport._side._stream.asked = host.default.asked
        if comm.rank == 0:
            begun = time.monotonic()
            refused(lambda: work.wait(timeout_s=20.0), PeerFailed, "rank 1 failed: all_reduce")
            assert time.monotonic() - begun < 2.0
        else:
            time.sleep(0.05)
            if kind == "cuda":
                host.fault = FAULT
            else:
                handle.next_error, handle.error_in = host.nccl.NcclError(1), "check_async_error"
            call = work.wait if how == "wait" else lambda: comm.broadcast(buf)
            refused(call, CommError, FAULT if kind == "cuda" else "NCCL_ERROR_1", "all_reduce")
        assert handle.ended == "abort"

    run_stand_in(2, check)


def test_what_cuda_refuses_in_a_call_is_our_error_with_the_calls_name() -> None:
    comm, handle, _ = alone()
    handle.next_error, handle.error_in = CudaError(FAULT), "broadcast"
    refused(lambda: comm.broadcast(np.ones(3)), CommError, "CUDA refuses broadcast float64", FAULT)
