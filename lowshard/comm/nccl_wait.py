"""Waits for a GPU: never for ever, and never blind to a peer that has failed.

`stream.synchronize()` alone would wait for a dead peer for ever: NCCL's kernels keep spinning, and network
errors show only through its own query. So every wait of the host is a loop over four questions: is the
work done, has the failure channel heard of a failure, has NCCL, is the time over.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from lowshard.comm.wait_guard import Watching
from lowshard.errors import CommError, LowshardError, MismatchError, TimedOut, again

T = TypeVar("T")

_LIBRARY = "libnccl.so.2"
_AT_ONCE = 100  # queries without a pause: what is as good as done costs no sleep
_FIRST_PAUSE_S = 2e-5
_LONGEST_PAUSE_S = 1e-3


class Awaited(Protocol):
    """What can be waited for: CuPy's events and streams, an `InThread`."""

    @property
    def done(self) -> bool:
        """Whether it is over; asking does not block."""


class Breakable(Protocol):
    """What a wait needs of an NCCL communicator."""

    def ask(self) -> None:
        """Raise what NCCL knows to have gone wrong."""

    def explain(self) -> LowshardError | None:
        """Return why a wait was in vain, or None."""

    def give_up(self) -> str:
        """End what is under way, so that the device is free again; return what could not be done, or ""."""


def wait_for(
    awaited: Awaited, deadline: float, watch: Watching | None, communicator: Breakable | None = None, what: str =
    "work on the GPU", *, final: bool = True,
) -> None:  # fmt: skip
    """Return once `awaited` is done; give the communicator up and raise if that will not be.

    Args:
        awaited: an event or a stream.
        deadline: on the clock of `time.monotonic`, seconds.
        watch: the failure channel, or None where there is none.
        communicator: the NCCL communicator whose work it is, or None for work of other kinds.
        what: what is waited for, for the message.
        final: whether a deadline that passes is the end; else what is waited for goes on and may be waited for again.
    """
    begun = time.monotonic()
    asked, pause_s = 0, _FIRST_PAUSE_S
    while not is_done(awaited, watch, communicator, what):
        asked += 1
        if asked <= _AT_ONCE:
            time.sleep(0)  # other threads may run
            continue
        if watch is not None and watch.flag[0]:
            error = watch.error(what)
            raise _with_cause(error, _give_up(communicator))
        if communicator is not None:
            try:
                communicator.ask()
            except CommError as failed:
                if watch is not None:
                    watch.tell("failed", f"{what}: {failed}")
                raise _with_cause(failed, _give_up(communicator)) from failed.__cause__
        now = time.monotonic()
        if now >= deadline and not final:
            raise TimedOut(f"{what} has not ended within {now - begun:.3g} s; it goes on, wait for it again")
        if now >= deadline:
            said = last_error() if communicator is not None else ""
            text = f"{what} was not done after {now - begun:.3g} s" + (
                f"; NCCL's last message: {said}" if said else ""
            )
            why = None if communicator is None else communicator.explain()
            if why is not None:
                if watch is not None:
                    watch.tell("disagreed" if isinstance(why, MismatchError) else "timed out", str(why))
                raise again(why, f"{why}; {text}{_give_up(communicator)}")
            if watch is not None:
                watch.tell("timed out", text)
            raise TimedOut(text + _give_up(communicator))
        time.sleep(min(pause_s, max(0.0, deadline - now)))
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def is_done(awaited: Awaited, watch: Watching | None, communicator: Breakable | None, what: str) -> bool:
    """Say whether `awaited` is done; does not wait. Arguments and errors: as for `wait_for`.

    Where the GPU has failed the failure channel tells the other ranks, and the communicator is given up.
    """
    try:
        return awaited.done
    except CommError as failed:
        error = CommError(f"{what}: {failed}")
        if watch is not None:
            watch.tell("failed", str(error))
        raise _with_cause(error, _give_up(communicator)) from failed.__cause__


def _give_up(communicator: Breakable | None) -> str:
    left = "" if communicator is None else communicator.give_up()
    return f"; {left}" if left else ""


def _with_cause(error: CommError, more: str) -> CommError:
    return type(error)(f"{error}{more}") if more else error


def last_error() -> str:
    """Return what the NCCL library loaded in this process last complained of, or ""."""
    try:
        # NOLOAD: the one that CuPy has loaded, wherever it lies, or none.
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        function = library.ncclGetLastError
    except (OSError, AttributeError):
        return ""
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
    text: bytes | None = function(None)  # the communicator it takes is not looked at
    return (text or b"").decode(errors="replace").strip()


class InThread(Generic[T]):
    """A call that may block, made by a thread of its own, so that the caller can keep a deadline."""

    def __init__(self, call: Callable[[], T], name: str = "lowshard blocking call") -> None:
        self._call = call
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the call has come back."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; only once it is done."""
        if self._error is not None:
            raise self._error
        return self._result
