"""Calls beside their caller, one at a time: refits and saves that are not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from lowshard.comm.work import FirstFailure, ThreadWork, Work


class Splits(Protocol):
    """The communicator that something runs beside."""

    rank: int
    _backgrounds: WeakSet[Background]

    def split(self, color: int | None, key: int = 0) -> Any:
        """Return a communicator of a group of its ranks."""


class Background:
    """Runs one call at a time in a thread of its own, over a communicator that nothing else uses.

    Each of the call's waits for other ranks has the communicator's deadline. The process does not end before the call
    has, and neither does `close` of the communicator that this one is made from.

    Collective: all ranks of the communicator make it and close it.

    Attributes:
        comm: a `Communicator` of the same ranks, for the calls.
        memory: what a call has set aside for the next one, or None.
    """

    def __init__(self, comm: Splits, name: str) -> None:
        self.comm: Any = comm.split(0, comm.rank)
        self.memory: Any = None
        self._name = f"{name} rank {comm.rank}"
        self._work: ThreadWork | None = None
        comm._backgrounds.add(self)

    @property
    def idle(self) -> bool:
        """Whether the last call has ended."""
        return self._work is None or self._work.done()

    def settle(self) -> Exception | None:
        """Wait for the last call; return what went wrong in it, unless its work has told so already."""
        work = self._work
        if work is None:
            return None
        told, error = work.told, None
        try:
            work.wait()
        except Exception as found:
            error = None if told else found
        self._work = None
        return error

    def start(self, call: Callable[[], Any], text: str) -> Work:
        """Start a call once the last one was settled."""
        work = ThreadWork(call, text, failure=FirstFailure())
        if threading.main_thread().is_alive():
            threading.Thread(target=work.run, name=self._name).start()
        else:  # Python ends, and waits for no thread that starts this late
            work.run()
        self._work = work  # there is a thread to wait for
        return work

    def close(self) -> None:
        """Wait for the last call, and give the communicator back. Closing twice is safe."""
        error = self.settle()
        self.memory = None
        self.comm.close()
        if error is not None:
            raise error
