"""Calls that are not waited for: a `Work` each, driven in order by a thread of the communicator."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from lowshard.comm.call import source_place, started
from lowshard.comm.check import wait_s
from lowshard.errors import LowshardError, TimedOut

if TYPE_CHECKING:
    from mpi4py.MPI import Op as MpiOp

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Stream = Any  # CuPy's, torch's, any with `__cuda_stream__`, or an address
Op: TypeAlias = "Literal['sum', 'avg', 'min', 'max', 'prod'] | MpiOp"
Order = Literal["fast", "tree", "rank"]


class Work(Protocol):
    """A call that was started: its buffers belong to it until it is done."""

    def done(self) -> bool:
        """Say whether it has ended, well or not; never waits."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end, and return what the call returns.

        On a GPU CuPy's current stream waits, and the host only where a time is given.

        Args:
            timeout_s: seconds to wait at most; None leaves it to the communicator's own deadline.

        Raises:
            TimedOut: it has not ended in time; it goes on, and may be waited for again.
            CommError: timeout_s is not a number of seconds.
            LowshardError: what the call raised.
        """


class StartedCall(Protocol):
    """What may have an error to tell.

    Attributes:
        told: whether somebody who waited was told of it.
    """

    told: bool


class FirstFailure:
    """The first call that a communicator has started, that has failed, and whose error nobody was told of.

    It is shown at the end of the program where the communicator is not closed before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[StartedCall, BaseException] | None = None

    def add(self, work: StartedCall, error: BaseException) -> None:
        """Keep a call that has failed, unless an earlier one waits to be told."""
        with self._lock:
            if self._first is None or self._first[0].told:
                self._first = work, error
                _failures.add(self)

    def take(self) -> BaseException | None:
        """Return its error, once; None where there is none, or somebody was told."""
        with self._lock:
            first, self._first = self._first, None
            _failures.discard(self)
        return None if first is None or first[0].told else first[1]


_failures: set[FirstFailure] = set()
"""Those with something to tell."""


class ThreadWork:
    """A call that a thread runs.

    Attributes:
        told: whether somebody who waited was told of its error.

    Args:
        call: what the thread runs.
        text: its name, for messages.
        place: where the program started it, for messages; by default the line that makes this.
        failure: keeps it if it fails; None for one that is sure to be waited for.
    """

    def __init__(
        self, call: Callable[[], Any], text: str, *, place: str = "", failure: FirstFailure | None = None
    ) -> None:
        self._failure = failure
        self._call, self._text = call, text
        self._place = place or source_place()
        self.told = False
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call and keep what comes of it."""
        before, started.place = started.place, self._place
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
            if self._failure is not None:
                self._failure.add(self, error)
        finally:
            started.place = before
            self._call = _nothing  # the buffers are free
            self._ended.set()

    def done(self) -> bool:
        """Say whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end; see `Work.wait`."""
        timeout_s = wait_s(timeout_s)
        if not self._ended.wait(timeout_s):
            raise TimedOut(
                f"{self._text} has not ended within {timeout_s:g} s; it goes on, wait for it again"
            )
        if self._error is not None:
            self.told = True
            raise self._error
        return self._result


@atexit.register
def _show_untold() -> None:
    """Write errors that nobody was told of. The exit code stays: Python lets nobody change it this late."""
    for error in [failure.take() for failure in list(_failures)]:
        if error is not None:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            with suppress(Exception):  # there may be no stderr any more
                sys.stderr.write(
                    f"lowshard: a call that was started failed, and nobody waited for it: {line}\n"
                )


def failed_work(name: str, error: LowshardError, failure: FirstFailure | None = None) -> ThreadWork:
    """Return a work that could not be started: waiting for it raises the error."""

    def fail() -> None:
        raise error

    work = ThreadWork(fail, name, failure=failure)
    work.run()
    return work


class Worker:
    """The thread that runs a communicator's started calls, one after the other.

    It ends by itself after a while without work, and at once where it is told to.
    """

    _IDLE_S = 5.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[ThreadWork | None] = queue.SimpleQueue()  # None ends the thread
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: ThreadWork | None = None

    def submit(self, work: ThreadWork) -> None:
        """Queue a call."""
        with self._lock:
            self._last = work
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name=self._name, daemon=True)
                self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all queued calls have ended."""
        return self._last is None or self._last.done()

    def is_current(self) -> bool:
        """Say whether the caller is the worker's own thread."""
        return threading.current_thread() is self._thread

    def settle(self) -> None:
        """Wait until all queued calls have ended; at once in the worker's own thread."""
        last = self._last
        if last is None or last.done() or self.is_current():
            return
        last._ended.wait()

    def end(self) -> None:
        """Have the thread end after what was queued, and wait for that where there is nothing to wait for."""
        with self._lock:
            thread, is_idle = self._thread, self.idle
            if thread is not None:
                self._queue.put(None)
        if thread is not None and is_idle and not self.is_current():
            thread.join()

    def _drive(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=self._IDLE_S)
            except queue.Empty:
                work = None
            if work is not None:
                work.run()
                continue
            with self._lock:
                if self._queue.empty():
                    self._thread = None
                    return


def _nothing() -> None:
    """What an ended work holds in place of its call."""
