"""The groups of a sharded model, and what drives them: calls in order, beside the caller's own work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from lowshard.comm import Communicator, refuse, share_text
from lowshard.comm.call import source_line
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import is_done, wait_for
from lowshard.comm.work import ThreadWork, Work, Worker, wait_all
from lowshard.errors import CommError, Disagree, LowshardError
from lowshard.foreign_array import host_of
from lowshard.fsdp.fsdp_strategy import Grid

Array = Any  # a NumPy or CuPy array; CuPy ships no types

_POLL_S = 0.001
_KNOWN_ELSEWHERE = "_lowshard_known_elsewhere"


class Channel:
    """A communicator of this model's own, with its bytes by purpose and its failures."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sent_bytes: Counter[str] = Counter()
        self.failed: LowshardError | None = None
        """It makes no call until this is cleared: the ranks would not be at the same one."""
        self.failures = 0
        """Failed calls and refusals so far: equal on all ranks once each has met the others."""
        self.refusing = False
        """Whether it waits for the others to come and be told."""
        self._due = 0
        """Refusals that were started, will fail for certain, and are not counted among the failures yet."""
        self._count = threading.Lock()
        self._calling = False
        self._teller = Worker("lowshard fsdp refusals")

    def call(self, purpose: str, name: str, *args: Any) -> None:
        """Make a collective call and count what this rank sent."""
        if self.failed is not None:
            raise self.failed
        before = self.comm.traffic.sent_bytes
        self._calling = True
        try:
            getattr(self.comm, name)(*args)
        except LowshardError as error:
            setattr(error, _KNOWN_ELSEWHERE, True)
            self.failed = error
            with self._count:
                self.failures += 1
            raise
        finally:
            self._calling = False
        self.sent_bytes[purpose] += self.comm.traffic.sent_bytes - before

    @property
    def quiet(self) -> bool:
        """Whether all refusals have met the other ranks."""
        return self._teller.idle

    @property
    def failures_to_come(self) -> int:
        """Failures, with those that are certain to come: a refusal that has not begun must not be started again."""
        with self._count:
            return self.failures + self._due

    def close(self) -> None:
        """Give the communicator and the thread back; all ranks of it call this."""
        self.comm.close()
        self._teller.end()

    def start_refusal(self, error: LowshardError, again: bool, after: Work) -> Work:
        """Refuse the next call, in a thread of its own: ranks may come to several channels in any order."""

        def job() -> None:
            with contextlib.suppress(Exception):
                after.wait()
            while self._calling:  # that call ends by a refusal of the others
                time.sleep(_POLL_S)
            self._refuse(error, again)

        if again:
            with self._count:
                self._due += 1
        work = ThreadWork(job, "a refusal")
        self._teller.submit(work)
        return work

    def _refuse(self, error: LowshardError, again: bool) -> None:
        if self.failed is not None and not again:
            return
        with self._count:
            self.failures += 1
            self._due -= again
        self.refusing = True
        try:
            with contextlib.suppress(LowshardError):
                refuse(self.comm, error, "a step of the model")
        finally:
            self.refusing = False


def _nothing() -> None:
    """What marks a place in a lane."""


_ENDED = ThreadWork(_nothing, "nothing")
_ENDED.run()


def known_elsewhere(error: BaseException) -> bool:
    """Say whether the other ranks raise this error too, or have been told of it."""
    return getattr(error, _KNOWN_ELSEWHERE, False)


def note_known(error: BaseException) -> None:
    """Note that the other ranks are told of an error."""
    setattr(error, _KNOWN_ELSEWHERE, True)


class Lane(Protocol):
    """Runs what it is given one after the other, beside its caller."""

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Start a job; what it raises is raised by the work's wait."""

    def settle(self) -> None:
        """Return when all jobs have ended."""

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""

    def end(self) -> None:
        """Give back what runs the jobs; for the last one."""


class ThreadLane:
    """A thread, for host memory: compiled calls release the GIL."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Start a job."""
        work = ThreadWork(job, text, place=f"{source_line()} ({text})")
        self._worker.submit(work)
        return work

    def settle(self) -> None:
        """Return when all jobs have ended."""
        self._worker.settle()

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._worker.idle

    def end(self) -> None:
        """Have the thread end."""
        self._worker.end()


class InlineLane:
    """Runs each job at once: where there is no other rank."""

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Run a job."""
        work = ThreadWork(job, text)
        work.run()
        return work

    def settle(self) -> None:
        """Return."""

    @property
    def idle(self) -> bool:
        """True."""
        return True

    def end(self) -> None:
        """Return."""


class _StreamWork:
    """A job whose end is an event of a side stream."""

    def __init__(
        self, binding: Binding, event: Any, error: BaseException | None, result: Any, text: str = "a job"
    ) -> None:
        self._binding, self._event, self._error, self._result = binding, event, error, result
        self._text = text

    def done(self) -> bool:
        """Say whether it has ended."""
        return self._error is not None or is_done(self._event, None, None, self._text)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Make the current stream wait for the end; the host does not wait."""
        if self._error is not None:
            raise self._error
        self._binding.stream().wait_event(self._event)
        return self._result


class StreamLane:
    """A side stream of the GPU: jobs begin after what the caller's stream holds when they are submitted."""

    def __init__(self, timeout_s: float, binding: Binding | None = None) -> None:
        """Make the stream."""
        self._binding = Binding.load(with_nccl=False) if binding is None else binding
        self._stream, self._timeout_s = self._binding.new_stream(), timeout_s

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Queue a job's kernels and copies."""
        self._stream.wait_event(self._mark(self._binding.stream()))
        error: BaseException | None = None
        result = None
        with self._stream:
            try:
                result = job()
            except BaseException as raised:
                error = raised
        return _StreamWork(self._binding, self._mark(self._stream), error, result, text)

    def _mark(self, stream: Any) -> Any:
        event = self._binding.new_event()
        event.record(stream)
        return event

    def follow(self, after: Any) -> None:
        """Make the current stream wait for an event, or for what a stream holds; the host does not wait."""
        self._binding.stream().wait_event(after if hasattr(after, "record") else self._mark(after))

    def settle(self) -> None:
        """Return when the stream is empty."""
        wait_for(
            self._stream, time.monotonic() + self._timeout_s, None, None, "what a sharded model has queued"
        )

    @property
    def idle(self) -> bool:
        """Whether the stream is empty."""
        return bool(self._stream.done)

    def end(self) -> None:
        """Return: the stream goes with this."""


class Links:
    """The groups of one rank: `shard` (gathers), `reduce` (reductions), `replica`; None where it is alone in one."""

    def __init__(self, comm: Communicator, grid: Grid, communicators: int) -> None:
        self.world, self.grid, self.xp = comm, grid, comm.xp

        def part(color: int, key: int, size: int) -> Channel | None:
            if size == 1:
                return None
            made = comm.split(color, key)
            assert made is not None
            return Channel(made)

        self.shard = part(grid.replica_rank, grid.shard_rank, grid.shards)
        self.reduce = self.shard
        if communicators == 2:
            self.reduce = part(grid.replica_rank, grid.shard_rank, grid.shards)
        self.replica = part(grid.shard_rank, grid.replica_rank, grid.replicas)
        name = f"lowshard fsdp rank {grid.rank}"
        self.gather_lane: Lane = self._lane(f"{name} gathers")
        self.reduce_lane: Lane = self._lane(f"{name} reductions") if communicators == 2 else self.gather_lane

    def _lane(self, name: str) -> Lane:
        if self.xp is not np:
            return StreamLane(self.world.timeout_s)
        return InlineLane() if self.grid.world == 1 else ThreadLane(name)

    @property
    def channels(self) -> list[tuple[Channel, Lane]]:
        """Every channel once, with the lane that drives it."""
        found: list[tuple[Channel, Lane]] = []
        if self.shard is not None:
            found.append((self.shard, self.gather_lane))
        if self.reduce is not None and self.reduce is not self.shard:
            found.append((self.reduce, self.reduce_lane))
        if self.replica is not None:
            found.append((self.replica, self.reduce_lane))
        return found

    def tell(self, error: BaseException) -> None:
        """Let the other ranks raise an error of this rank at their next call; does not wait for them."""
        # A rank that goes on after it was refused, where others could not, is refused again.
        again = known_elsewhere(error)
        note_known(error)
        said = error
        if not isinstance(said, LowshardError):
            said = CommError(f"rank {self.grid.rank} failed: {type(error).__name__}: {error}")
        works = []
        for channel, lane in self.channels:
            # Where this rank was not refused yet one refusal meets that of the rank that was first, one its next call.
            times = 2 if again and channel.failed is None else 1
            works += [
                channel.start_refusal(said, again, lane.submit(_nothing, "a mark")) for _ in range(times)
            ]
        if not again and self.xp is np:  # who goes on does so when all have been told
            for lane in dict.fromkeys((self.gather_lane, self.reduce_lane)):
                lane.submit(lambda: wait_all(works), "refusals")

    def follow(self, after: Any) -> None:
        """Make what is queued from now on wait for work of the GPU: CuPy's event or stream. The host does not wait."""
        if isinstance(self.gather_lane, StreamLane):
            self.gather_lane.follow(after)

    def settle(self) -> None:
        """Return when nothing is under way."""
        self.gather_lane.settle()
        self.reduce_lane.settle()

    def even_out(self) -> None:
        """After a failure: bring all ranks to the same call on every channel."""
        end = CommError("a step was given up")
        while True:
            idle = self._idle()
            while not idle and not any(channel.refusing for channel, _ in self.channels):
                time.sleep(_POLL_S)
                idle = self._idle()
            # The lowest count as a highest, so that one call gives both.
            counts = [channel.failures_to_come for channel, _ in self.channels]
            most = self.highest([*counts, *(-count for count in counts), 0 if idle else 1])
            n = len(counts)
            for (channel, lane), mine, wanted in zip(self.channels, counts, most[:n], strict=True):
                for _ in range(wanted - mine):
                    channel.start_refusal(end, True, lane.submit(_nothing, "a mark") if idle else _ENDED)
            if not most[-1] and all(high == -low for high, low in zip(most[:n], most[n:-1], strict=True)):
                break
        for channel, _ in self.channels:
            channel.failed = None

    def _idle(self) -> bool:
        lanes = self.gather_lane.idle and self.reduce_lane.idle
        return lanes and all(channel.quiet for channel, _ in self.channels)

    def highest(self, numbers: list[int]) -> list[int]:
        """Return the highest of each number over all ranks."""
        control = self.world.control
        send = control.xp.asarray(np.array(numbers, np.int64))
        recv = control.xp.empty_like(send)
        control.all_reduce(send, recv, "max")
        return host_of(recv).tolist()  # type: ignore[no-any-return]

    def same_calls(self, what: str, calls: list[str], digest: bytes) -> None:
        """Raise Disagree on all ranks unless all have made the same calls; `what` is the one that compares them."""
        bad, said = False, ""
        for channel, lane in ((self.shard, self.gather_lane), (self.replica, self.reduce_lane)):
            if channel is None:
                continue
            work = lane.submit(partial(self._compare, channel, calls, digest, bad), what)
            group_bad, text = work.wait()
            bad, said = bad or group_bad, said or text
        if bad:
            error = Disagree(
                f"all ranks make the same calls in the same order, but {said or 'another group differs'}"
            )
            note_known(error)
            raise error

    def _compare(self, channel: Channel, calls: list[str], digest: bytes, bad: bool) -> tuple[bool, str]:
        """Return, on all ranks of a group alike, whether their calls differ or one of them knows of others that do."""
        record = np.frombuffer(digest + bytes([bad]), np.uint8).copy()
        rows = self.xp.empty((channel.comm.size, record.size), np.uint8)
        channel.call("control", "all_gather", self.xp.asarray(record), rows)
        host = host_of(rows)
        if not host[:, -1].any() and all(row.tobytes() == host[0].tobytes() for row in host):
            return False, ""
        texts = share_text(channel.comm.control, "\n".join(calls))
        return True, _difference(texts, channel.comm.rank)

    def close(self) -> None:
        """Give the groups back."""
        self.settle()
        for channel, lane in self.channels:
            channel.close()
            lane.end()


def _difference(texts: list[str], rank: int) -> str:
    """Return where the calls of the first other rank begin to differ from this one's."""
    mine = texts[rank].split("\n")
    for other, text in enumerate(texts):
        theirs = text.split("\n")
        if theirs == mine:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        at = min(len(mine), len(theirs)) if at is None else at
        here, there = (calls[at] if at < len(calls) else "nothing" for calls in (mine, theirs))
        return f"call {at} of the step is '{here}' on rank {rank} of the group and '{there}' on rank {other}"
    return ""
