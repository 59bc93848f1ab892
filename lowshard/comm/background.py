"""Calls beside their caller, one at a time: refits and saves that are not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lowshard.comm.work import ThreadWork, Work


class Background:
    """Runs one call at a time in a thread of its own, over a communicator that nothing else uses meanwhile.

    The process ends no earlier than the call. Each of its waits for other ranks has the communicator's deadline.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: ThreadWork | None = None

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
        """Start a call once the last one was settled.

        Args:
            call: what the thread runs.
            text: its name, for messages.
        """
        self._work = work = ThreadWork(call, text)
        threading.Thread(target=work.run, name=self._name).start()
        return work
