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

from lowshard.comm import Communicator, collective_step
from lowshard.comm.call import source_line
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import is_done, wait_for
from lowshard.comm.work import ThreadWork, Work, Worker
from lowshard.errors import CommError, LowshardError, StepError
from lowshard.foreign_array import host_of
from lowshard.fsdp.fsdp_strategy import Grid

Array = Any  # a NumPy or CuPy array; CuPy ships no types


class Channel:
    """A communicator of this model: its traffic by purpose, and how a failure of one rank becomes that of all.

    Before each call its ranks compare which call it is. A rank that has failed brings its error there once; from then
    on no rank makes a call, until all have called `mend`. Over NCCL alone, where such a meeting stops the GPU, calls
    are compared the first time, and a failure reaches the others at their deadline.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.sent_bytes: Counter[str] = Counter()
        self._is_nccl_alone = comm.xp is not np and comm.control is comm
        self._error: LowshardError | None = None
        """Why no call is made."""
        self._is_told = False
        """Whether all ranks have raised it."""
        self._turn = threading.Lock()
        self._failing = threading.Lock()
        self._teller: threading.Thread | None = None

    def call(self, text: str, purpose: str, name: str, *args: Any) -> None:
        """Make a collective call and count the bytes that this rank sent; `text` is equal on all ranks."""
        with self._turn:
            self._compare(text)
            before = self.comm.traffic.sent_bytes
            try:
                getattr(self.comm, name)(*args)
            except LowshardError as error:
                self._error, self._is_told = error, True
                raise
            self.sent_bytes[purpose] += self.comm.traffic.sent_bytes - before

    def meet(self, text: str) -> None:
        """Return when all ranks have come to this call."""
        with self._turn:
            self._compare(text)

    def _compare(self, text: str) -> None:
        if self._error is not None:
            raise self._error
        try:
            with collective_step(self.comm, text, once=self._is_nccl_alone):
                pass
        except LowshardError as error:
            self._error, self._is_told = error, True
            raise

    def fail(self, error: LowshardError) -> None:
        """Make no call any more, and have all ranks raise an error, in a thread: they come to channels in any order."""
        with self._failing:
            self._error = self._error or error
            if self._teller is None and not self._is_told:
                self._teller = threading.Thread(target=self._tell, name="lowshard fsdp failure", daemon=True)
                self._teller.start()

    def _tell(self) -> None:
        with self._turn:  # after the call that is under way
            if not self._is_told and not self._is_nccl_alone:
                with contextlib.suppress(LowshardError), collective_step(self.comm, "a step") as step:
                    step.error = self._error
            self._is_told = True

    def wait_until_told(self) -> None:
        """Return when all ranks have raised the error."""
        if self._teller is not None:
            self._teller.join()

    def mend(self) -> None:
        """Make calls again."""
        self._error, self._is_told, self._teller = None, False, None


class JobQueue(Protocol):
    """Runs jobs one after the other, concurrently with its caller."""

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        """Queue a job; waiting for the work raises its error."""

    def settle(self) -> None:
        """Return when all jobs have ended."""

    def end(self) -> None:
        """Release the queue's resources."""


class _ThreadQueue:
    """A thread, for host memory: compiled calls release the GIL."""

    def __init__(self, name: str, fail: Callable[[BaseException], object]) -> None:
        self._worker, self._fail = Worker(name), fail

    def submit(self, job: Callable[[], Any], text: str) -> Work:
        def run() -> Any:
            try:
                return job()
            except BaseException as error:
                self._fail(error)  # before the jobs behind it begin
                raise

        work = ThreadWork(run, text, place=f"{source_line()} ({text})")
        self._worker.submit(work)
        return work

    def settle(self) -> None:
        self._worker.settle()

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
        return _InlineQueue() if self.grid.world == 1 else _ThreadQueue(name, self.fail)

    @property
    def channels(self) -> list[Channel]:
        """Every channel once."""
        return [c for c in dict.fromkeys((self.shard, self.reduce, self.replica)) if c is not None]

    def fail(self, error: BaseException) -> None:
        """Have the other ranks raise this rank's error at their next call; does not wait for them."""
        if not isinstance(error, LowshardError):
            error = CommError(f"rank {self.grid.rank} failed: {type(error).__name__}: {error}")
        for channel in self.channels:
            channel.fail(error)

    def follow(self, after: Any) -> None:
        """Make later jobs wait for work of the GPU: CuPy's event or stream. The host does not wait."""
        if isinstance(self.gather_queue, StreamQueue):
            self.gather_queue.follow(after)

    def settle(self) -> None:
        """Return when all queues are empty."""
        self.gather_queue.settle()
        self.reduce_queue.settle()

    def mend(self) -> None:
        """Give up what is under way, with all other ranks, and make calls again."""
        self.fail(StepError("this rank has called reset()"))  # unless it has failed: others may wait for it
        for channel in self.channels:
            channel.wait_until_told()
        self.settle()
        for channel in self.channels:
            channel.mend()

    def max_over_ranks(self, numbers: list[int]) -> list[int]:
        """Return the maximum of each number over all ranks."""
        control = self.world.control
        send = control.xp.asarray(np.array(numbers, np.int64))
        recv = control.xp.empty_like(send)
        control.all_reduce(send, recv, "max")
        return host_of(recv).tolist()  # type: ignore[no-any-return]

    def enter(self, text: str) -> None:
        """Return when all ranks have come to this call, after the jobs before it; else all raise what is wrong."""
        for channel, queue in ((self.shard, self.gather_queue), (self.replica, self.reduce_queue)):
            if channel is not None:
                queue.submit(partial(channel.meet, text), text).wait()

    def close(self) -> None:
        """Close all groups."""
        self.settle()
        for channel in self.channels:
            channel.comm.close()
        for queue in (self.gather_queue, self.reduce_queue):
            queue.end()
