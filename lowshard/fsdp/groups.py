"""The process groups of a sharded model, and the queues in which their collectives run in order."""

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
_REPORTED = "_lowshard_reported"


class Channel:
    """A communicator of this model, with its traffic by purpose and its failures."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sent_bytes: Counter[str] = Counter()
        self.failed: LowshardError | None = None
        """Until this is cleared no call is made: the ranks would not be at the same one."""
        self.failures = 0
        """Failed calls so far: equal on all ranks once each failure has reached the others."""
        self.failing = False
        """Whether a call is being failed, which waits for the other ranks."""
        self._due = 0
        """Failures that were started and are not counted yet."""
        self._count = threading.Lock()
        self._calling = False
        self._worker = Worker("lowshard fsdp failures")

    def call(self, purpose: str, name: str, *args: Any) -> None:
        """Make a collective call and count the bytes this rank sent."""
        if self.failed is not None:
            raise self.failed
        before = self.comm.traffic.sent_bytes
        self._calling = True
        try:
            getattr(self.comm, name)(*args)
        except LowshardError as error:
            setattr(error, _REPORTED, True)
            self.failed = error
            with self._count:
                self.failures += 1
            raise
        finally:
            self._calling = False
        self.sent_bytes[purpose] += self.comm.traffic.sent_bytes - before

    @property
    def idle(self) -> bool:
        """Whether the other ranks have received all failures."""
        return self._worker.idle

    @property
    def expected_failures(self) -> int:
        """Failures, with those that will certainly come."""
        with self._count:
            return self.failures + self._due

    def close(self) -> None:
        """Close the communicator and the thread; all ranks of it call this."""
        self.comm.close()
        self._worker.end()

    def fail_next_call(self, error: LowshardError, again: bool, after: Work) -> Work:
        """Make the group's next call fail, in a thread: ranks may come to several channels in any order."""

        def job() -> None:
            with contextlib.suppress(Exception):
                after.wait()
            while self._calling:  # it ends when another rank fails it
                time.sleep(_POLL_S)
            self._fail_call(error, again)

        if again:
            with self._count:
                self._due += 1
        work = ThreadWork(job, "a failed call")
        self._worker.submit(work)
        return work

    def _fail_call(self, error: LowshardError, again: bool) -> None:
        if self.failed is not None and not again:
            return
        with self._count:
            self.failures += 1
            self._due -= again
        self.failing = True
        try:
            with contextlib.suppress(LowshardError):
                refuse(self.comm, error, "a step of the model")
        finally:
            self.failing = False


def _nothing() -> None:
    """A job that does nothing: it marks a position in a queue."""


_ENDED = ThreadWork(_nothing, "nothing")
_ENDED.run()


def is_reported(error: BaseException) -> bool:
    """Return whether the other ranks raise this error too, or have been told of it."""
    return getattr(error, _REPORTED, False)


def mark_reported(error: BaseException) -> None:
    """Mark an error as known to the other ranks."""
    setattr(error, _REPORTED, True)


class JobQueue(Protocol):
    """Runs jobs one after the other, concurrently with its caller."""

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Queue a job; waiting for the work raises its error."""

    def settle(self) -> None:
        """Return when all jobs have ended."""

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""

    def end(self) -> None:
        """Release the queue's resources."""


class _ThreadQueue:
    """A thread, for host memory: compiled calls release the GIL."""

    def __init__(self, name: str) -> None:
        self._worker = Worker(name)

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        work = ThreadWork(job, text, place=f"{source_line()} ({text})")
        self._worker.submit(work)
        return work

    def settle(self) -> None:
        self._worker.settle()

    @property
    def idle(self) -> bool:
        return self._worker.idle

    def end(self) -> None:
        self._worker.end()


class _InlineQueue:
    """Runs each job at once, for a single rank."""

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        work = ThreadWork(job, text)
        work.run()
        return work

    def settle(self) -> None:
        """Return."""

    @property
    def idle(self) -> bool:
        return True

    def end(self) -> None:
        """Return."""


class _StreamWork:
    """A job that ends with an event of a side stream."""

    def __init__(
        self, binding: Binding, event: Any, error: BaseException | None, result: Any, text: str = "a job"
    ) -> None:
        self._binding, self._event, self._error, self._result = binding, event, error, result
        self._text = text

    def done(self) -> bool:
        return self._error is not None or is_done(self._event, None, None, self._text)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Make the current stream wait for the end; the host does not wait."""
        if self._error is not None:
            raise self._error
        self._binding.stream().wait_event(self._event)
        return self._result


class StreamQueue:
    """A side stream of the GPU: jobs run after the work queued on the caller's stream at submission."""

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
        """Do nothing."""


class Groups:
    """The groups of one rank: `shard` (gathers), `reduce` (reductions), `replica`; None for a group of one."""

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
        self.gather_queue = self._make_queue(f"{name} gathers")
        self.reduce_queue: JobQueue = (
            self._make_queue(f"{name} reductions") if communicators == 2 else self.gather_queue
        )

    def _make_queue(self, name: str) -> JobQueue:
        if self.xp is not np:
            return StreamQueue(self.world.timeout_s)
        return _InlineQueue() if self.grid.world == 1 else _ThreadQueue(name)

    @property
    def channels(self) -> list[tuple[Channel, JobQueue]]:
        """Every channel once, with its queue."""
        found: list[tuple[Channel, JobQueue]] = []
        if self.shard is not None:
            found.append((self.shard, self.gather_queue))
        if self.reduce is not None and self.reduce is not self.shard:
            found.append((self.reduce, self.reduce_queue))
        if self.replica is not None:
            found.append((self.replica, self.reduce_queue))
        return found

    def report_error(self, error: BaseException) -> None:
        """Make the other ranks raise this rank's error at their next call; does not wait for them."""
        # A rank that went on after its call failed, where others could not, fails another call.
        again = is_reported(error)
        mark_reported(error)
        said = error
        if not isinstance(said, LowshardError):
            said = CommError(f"rank {self.grid.rank} failed: {type(error).__name__}: {error}")
        works = []
        for channel, queue in self.channels:
            # If no call has failed here yet, the first meets the failure of another rank, the second its next call.
            times = 2 if again and channel.failed is None else 1
            works += [
                channel.fail_next_call(said, again, queue.submit(_nothing, "a mark")) for _ in range(times)
            ]
        if not again and self.xp is np:  # this rank goes on when all have received the error
            for queue in dict.fromkeys((self.gather_queue, self.reduce_queue)):
                queue.submit(lambda: wait_all(works), "failures")

    def follow(self, after: Any) -> None:
        """Make later jobs wait for work of the GPU: CuPy's event or stream. The host does not wait."""
        if isinstance(self.gather_queue, StreamQueue):
            self.gather_queue.follow(after)

    def settle(self) -> None:
        """Return when all queues are empty."""
        self.gather_queue.settle()
        self.reduce_queue.settle()

    def catch_up(self) -> None:
        """After a failure: make failed calls until all ranks are at the same call on every channel."""
        end = CommError("a step was given up")
        while True:
            idle = self._idle()
            while not idle and not any(channel.failing for channel, _ in self.channels):
                time.sleep(_POLL_S)
                idle = self._idle()
            # Negated counts give the minimum in the same call.
            counts = [channel.expected_failures for channel, _ in self.channels]
            most = self.max_over_ranks([*counts, *(-count for count in counts), 0 if idle else 1])
            n = len(counts)
            for (channel, queue), mine, wanted in zip(self.channels, counts, most[:n], strict=True):
                for _ in range(wanted - mine):
                    channel.fail_next_call(end, True, queue.submit(_nothing, "a mark") if idle else _ENDED)
            if not most[-1] and all(high == -low for high, low in zip(most[:n], most[n:-1], strict=True)):
                break
        for channel, _ in self.channels:
            channel.failed = None

    def _idle(self) -> bool:
        queues = self.gather_queue.idle and self.reduce_queue.idle
        return queues and all(channel.idle for channel, _ in self.channels)

    def max_over_ranks(self, numbers: list[int]) -> list[int]:
        """Return the maximum of each number over all ranks."""
        control = self.world.control
        send = control.xp.asarray(np.array(numbers, np.int64))
        recv = control.xp.empty_like(send)
        control.all_reduce(send, recv, "max")
        return host_of(recv).tolist()  # type: ignore[no-any-return]

    def compare_calls(self, what: str, calls: list[str], digest: bytes) -> None:
        """Raise Disagree on all ranks unless all have made the same calls; `what` names the comparing call."""
        bad, said = False, ""
        for channel, queue in ((self.shard, self.gather_queue), (self.replica, self.reduce_queue)):
            if channel is None:
                continue
            work = queue.submit(partial(self._compare, channel, calls, digest, bad), what)
            group_bad, text = work.wait()
            bad, said = bad or group_bad, said or text
        if bad:
            error = Disagree(
                f"all ranks make the same calls in the same order, but {said or 'another group differs'}"
            )
            mark_reported(error)
            raise error

    def _compare(self, channel: Channel, calls: list[str], digest: bytes, bad: bool) -> tuple[bool, str]:
        """Return, the same on all ranks of a group, whether calls differ here or in a group compared before."""
        record = np.frombuffer(digest + bytes([bad]), np.uint8).copy()
        rows = self.xp.empty((channel.comm.size, record.size), np.uint8)
        channel.call("control", "all_gather", self.xp.asarray(record), rows)
        host = host_of(rows)
        if not host[:, -1].any() and all(row.tobytes() == host[0].tobytes() for row in host):
            return False, ""
        texts = share_text(channel.comm.control, "\n".join(calls))
        return True, _difference(texts, channel.comm.rank)

    def close(self) -> None:
        """Close all groups."""
        self.settle()
        for channel, queue in self.channels:
            channel.close()
            queue.end()


def _difference(texts: list[str], rank: int) -> str:
    """Return the first difference between this rank's calls and another's."""
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
