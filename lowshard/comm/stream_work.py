"""Collectives that run beside the caller's stream: the side stream they run on, and the work handed back.

The order is kept by events alone, so the host waits for nothing: the side stream waits for what the
caller's stream was given before `start`, and `wait`, and the communicator's next call, make the caller's stream wait
for the collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lowshard.comm.check import wait_s
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.work import FirstFailure
from lowshard.errors import CaptureError


class Waiting(Protocol):
    """What a work needs of the communicator that started it."""

    def ask(self) -> None:
        """Raise what has gone wrong so far."""

    def has_ended(self, event: Any, what: str) -> bool:
        """Say whether `event` is done; raise what keeps it from being done."""

    def wait_on_host(self, awaited: Any, timeout_s: float, what: str) -> None:
        """Return once `awaited` is done; raise what keeps it from being done."""


class SideStream:
    """A stream of a communicator's own, made on first use."""

    def __init__(self, binding: Binding, has_ended: Callable[[Any, str], bool]) -> None:
        """Describe the stream."""
        self._binding, self._has_ended = binding, has_ended
        self._stream: Any = None
        self._held: deque[tuple[Any, str, object]] = deque()

    def fork(self) -> Any:
        """Make what follows on the side stream follow what the current stream has been given; return it."""
        if self._stream is None:
            self._stream = self._binding.new_stream()
        ready = self._binding.new_event()
        ready.record(self._binding.stream())
        self._stream.wait_event(ready)
        return self._stream

    def run(self, call: Callable[[], Any], what: str) -> tuple[Any, Any]:
        """Make a call with the side stream current; return an event that is done when its work is, and its result."""
        with self._stream:
            result = call()
        done = self._binding.new_event()
        done.record(self._stream)
        self.drop()
        # CuPy may hand the memory of a dropped array to the next taker on the stream it was made on, while
        # the side stream still uses it. The call holds its arrays, so it is held until it is over.
        self._held.append((done, what, (call, result)))
        return done, result

    def precede(self) -> None:
        """Make what follows on the current stream follow what was started; the host does not wait."""
        stream = self._binding.stream()
        if self._held and not self._binding.capturing(stream):
            stream.wait_event(self._held[-1][0])

    def drop(self) -> None:
        """Let go of the buffers of calls that are over; what has failed stays held, for the GPU may still use it."""
        while self._held and self._has_ended(*self._held[0][:2]):
            self._held.popleft()


class StreamWork:
    """A call under way on a side stream.

    Attributes:
        told: whether somebody who waited was told of its error.
    """

    def __init__(
        self, communicator: Waiting, binding: Binding, what: str, begin: Callable[[], None] | None = None,
        failure: FirstFailure | None = None,
    ) -> None:  # fmt: skip
        """Describe what is started."""
        self.told, self._failure = False, failure
        self._communicator, self._binding, self.what = communicator, binding, what
        self._begin = begin
        self._event: Any = None
        self._result: Any = None
        self._error: BaseException | None = None

    def begun(self, event: Any, result: Any = None) -> StreamWork:
        """Take the event that is done when the call is, and what the call returned."""
        self._event, self._result, self._begin = event, result, None
        return self

    def failed(self, error: BaseException) -> StreamWork:
        """Take what the call raised."""
        self._error, self._begin = error, None
        if self._failure is not None:
            self._failure.add(self, error)
        return self

    def wait(self, timeout_s: float | None = None) -> Any:
        """Make the current stream wait for the call; the host waits only if `timeout_s` is given.

        Without a time an error that shows later is raised by a later call. The results may be used on the
        current stream, and the buffers be reused there, once this has returned. Waiting twice is safe.
        """
        if self._begin is not None:
            self._begin()
        if self._error is not None:
            self.told = True
            raise self._error
        timeout_s = wait_s(timeout_s)
        if self._binding.capturing(self._binding.stream()):
            raise CaptureError(
                f"a CUDA graph cannot record the wait for {self.what}, which was started before it; "
                "wait before the capture"
            )
        if timeout_s is None:
            self._communicator.has_ended(self._event, self.what)  # raises what is known to have gone wrong
            self._communicator.ask()
        else:
            self._communicator.wait_on_host(self._event, timeout_s, self.what)
        self._binding.stream().wait_event(self._event)
        return self._result

    def done(self) -> bool:
        """Say whether the call has ended, well or not; does not wait."""
        if self._begin is not None:
            self._begin()
        return self._error is not None or self._communicator.has_ended(self._event, self.what)
