"""What ranks ask for, compared a little after they have asked, so that no call on a GPU waits for another host.

Calls are noted as they are made. A thread of the communicator compares them over a communicator of the host that is
its own: the first call at once, what comes meanwhile together, up to 64 calls in one meeting. Ranks need not be equally
far: what all of them have called is compared, the rest waits for its turn. So the ranks' threads meet in one order,
whatever the ranks do: each meets the others once it has calls that are not compared, and takes what comes of it.

This is promised:

- Ranks whose calls differ, or of which one has wrong arguments, all raise the one error that names the calls, their
  number and their lines: in the next call, or the next wait of the host (`Work.wait(timeout_s)`, though NCCL's kernels
  hang on the device), and at the latest in `barrier`, `split`, `close` or what exchanges facts on the host
  (`shared=True`, agreements), which wait until all calls before them are compared.
- NCCL may have been called by then. Its work is given up (aborted, where the NCCL communicator is ours), what it was to
  write is undefined, and the communicator raises that error from then on. Where all ranks refuse their arguments,
  nothing has begun, and the communicator is as before.
- A rank that does not call while others do ends in TimedOut, and one that has failed in PeerFailed, named as far as the
  host's communicator knows it, within the deadline of that communicator from the call that it misses.
- Calls of `control` are compared among themselves, before they are made. A rank that calls it while others call NCCL is
  one that does not call.
- A rank that is 4096 calls ahead of the comparison waits for it.

`LOWSHARD_CHECK=full` compares texts before a call is given to NCCL, and so waits for the other hosts at each call;
`off` compares nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from lowshard.comm.call import Call, place_text, source_place
from lowshard.comm.call_comparison import ERROR_SIGNATURE, counts_error, share_texts, verdict_of
from lowshard.comm.transport import Transport
from lowshard.errors import CommError, LowshardError, again

MOST_AHEAD = 4096
"""Calls that a rank may be ahead of the comparison; then it waits."""
_AT_ONCE = 64
_PERIOD_S = 0.02
"""Between two meetings, unless somebody waits for them: calls that are made meanwhile are compared together."""
_IDLE_S = 5.0
_EXIT_S = 5.0
"""For which the end of a program waits for ranks that have not made the last calls, as after an error."""


class _Noted(NamedTuple):
    """A call that this rank has made."""

    number: int
    call: Call
    place: tuple[str, int] | str
    counts: tuple[Sequence[int], Sequence[int]] | None = None
    error: Exception | None = None
    waits: bool = False

    @property
    def line(self) -> str:
        return place_text(self.place)

    def row(self) -> str:
        """Return what the others are told of it where calls differ: whether it waits, and as for `verdict_of`."""
        words = [] if self.error is None else [type(self.error).__name__, str(self.error)]
        return json.dumps([self.waits, self.call.text, self.line, *words])


class LateComparison:
    """The calls of one rank on one communicator, compared with the others' by a thread."""

    def __init__(self, host: Transport, give_up: Callable[[LowshardError], LowshardError]) -> None:
        """Begin with no call noted.

        Args:
            host: moves host memory between the same ranks, for nothing but this; `close` closes it.
            give_up: called once, in the thread, with what keeps the communicator from going on; returns it with what
                is left to do.
        """
        self._host, self._give_up = host, give_up
        self._noted: deque[_Noted] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._idle = True  # set before the thread looks for calls: who notes one sees it, or is seen
        self._waiters = 0
        self._error: LowshardError | None = None
        self._told = False
        self._judged = False  # whether the ranks have found out together what is wrong
        self._rows: list[list[str]] = []
        _open.add(self)

    # ---- the caller's side

    def note(
        self,
        number: int,
        call: Call,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Note a call that is about to be made; waits for nobody, unless thousands of calls are not compared yet.

        Args:
            number: of the call on its communicator.
            call: the call.
            counts: of an exchange: what this rank sends to each, and expects from each.

        Raises:
            LowshardError: what came of an earlier call.
        """
        if self._error is not None:
            self._raise()
        if len(self._noted) >= MOST_AHEAD:
            self.settle()
        self._add(_Noted(number, call, source_place(), counts))

    def agree(self, number: int, text: str, signature: int, error: Exception | None) -> list[list[str]]:
        """Return nothing where all ranks come with this signature and no error; else what each of them came with.

        This rank waits for the others, so the communicator is as before. Where some have made a call instead, they
        learn of it late, and nothing more can be done with the communicator.

        Args:
            number: as for `note`.
            text: what to agree on.
            signature: of it.
            error: what is wrong on this rank, if anything is.

        Returns:
            Rows as `verdict_of` takes them.

        Raises:
            LowshardError: as `settle`.
        """
        if self._error is not None:
            self._raise()
        self._rows = []
        call = Call("agree", text, signature if error is None else ERROR_SIGNATURE)
        self._add(_Noted(number, call, source_place(), error=error, waits=True))
        self.settle()
        return self._rows

    def settle(self) -> None:
        """Return once all calls of this rank are compared; waits for the other ranks.

        Raises:
            MismatchError: ranks have made different calls.
            PeerFailed: a rank has failed.
            TimedOut: a rank did not make these calls in time.
            LowshardError: what was wrong with the arguments of one.
        """
        with self._condition:
            self._waiters += 1
            try:
                self._condition.notify_all()
                while self._noted and self._error is None:
                    self._condition.wait()
            finally:
                self._waiters -= 1
        if self._error is not None:
            self._raise()

    def close(self, number: int, failed: bool) -> None:
        """Compare that all ranks close, and close the host's communicator; nothing of this where a call has failed.

        Raises:
            LowshardError: as `settle`, unless it was raised before.
        """
        if failed or (self._error is not None and self._told):
            return  # the thread may be in a meeting, and ends when that does
        self.note(number, Call("close", "close", _CLOSE_SIGNATURE))
        self.settle()
        self._host.close()

    def _add(self, noted: _Noted) -> None:
        self._noted.append(noted)
        if self._idle:
            with self._condition:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="lowshard comparison", daemon=True)
                    self._thread.start()
                self._condition.notify_all()

    def _raise(self) -> NoReturn:
        assert self._error is not None
        self._told = True
        raise again(self._error)

    def _finish(self, limit_s: float) -> None:
        """Let the thread compare what is left, for so long at most; after that it has nothing to do."""
        with self._condition:
            self._waiters += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._noted or self._error is not None, limit_s)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._calls_came():
                self._meet()
                with self._condition:
                    self._condition.notify_all()
                    self._condition.wait_for(self._is_pressed, _PERIOD_S)
        except LowshardError as error:
            self._end(error)
        except BaseException as error:
            self._end(CommError(f"calls could not be compared: {type(error).__name__}: {error}"))

    def _is_pressed(self) -> bool:
        return bool(self._noted) and (self._waiters > 0 or len(self._noted) >= _AT_ONCE)

    def _calls_came(self) -> bool:
        """Wait for a call; return False where there was none for long, and the thread is to end."""
        with self._condition:
            self._idle = True
            while not self._noted:
                if not self._condition.wait(_IDLE_S) and not self._noted:
                    self._thread = None
                    return False
            self._idle = False
        return True

    def _end(self, error: LowshardError) -> None:
        if self._noted and not self._judged:
            first = self._noted[0]
            error = again(
                error,
                f"{error}; this rank called {first.call.text} at {first.line} (call #{first.number}), which is not "
                "known to have been called by all",
            )
        error = self._give_up(error)
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _meet(self) -> None:
        """Compare the calls that all ranks have made; raise where they differ."""
        mine = [self._noted[i] for i in range(min(len(self._noted), _AT_ONCE))]
        agreed, differs = self._compare(mine)
        self._compare_counts([noted for noted in mine[:agreed] if noted.counts is not None])
        if differs:
            noted = mine[agreed]
            said = [json.loads(text) for text in share_texts(self._host, noted.row())]
            rows = [row[1:] for row in said]
            if not all(row[0] for row in said):
                self._judged = True
                raise verdict_of(rows, noted.number)
            self._rows = rows  # nobody has made a call: all of them wait in `agree`
            agreed += 1
        with self._condition:
            for _ in range(agreed):
                self._noted.popleft()

    def _compare(self, mine: Sequence[_Noted]) -> tuple[int, bool]:
        """Return how many calls, from the first, all ranks have made alike, and whether they differ in the next one."""
        signatures = np.array([noted.call.signature for noted in mine], np.int64)
        refuses = any(
            noted.error is not None for noted in mine
        )  # on all ranks, where signatures are the same
        if self._host.compare(_digest(signatures)) and not refuses:
            return len(mine), False
        record = np.zeros(1 + _AT_ONCE, np.int64)
        record[0], record[1 : 1 + len(mine)] = len(mine), signatures
        records = self._host.gather_facts(record)
        made = records[:, 1 : 1 + int(records[:, 0].min())]  # by all ranks
        wrong = (made != made[0]).any(axis=0) | (made[0] == ERROR_SIGNATURE)
        return (int(wrong.argmax()), True) if wrong.any() else (made.shape[1], False)

    def _compare_counts(self, exchanges: Sequence[_Noted]) -> None:
        """Compare what each rank sends with what each expects, in exchanges that all ranks have made."""
        if not exchanges:
            return
        size = self._host.size
        flat = [n for noted in exchanges for counts in noted.counts or () for n in counts]
        table = self._host.gather_facts(np.array(flat, np.int64)).reshape(size, len(exchanges), 2, size)
        for i, noted in enumerate(exchanges):
            if not np.array_equal(table[:, i, 0], table[:, i, 1].T):
                lines = share_texts(self._host, noted.line)
                self._judged = True
                raise counts_error(noted.call.text, lines, table[:, i].tolist(), noted.number)


_CLOSE_SIGNATURE = 3
"""Of the end of a communicator, which is not a call of the table."""


_open: weakref.WeakSet[LateComparison] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Finish before the program ends: what a thread waits with, MPI and memory that ranks share, goes with it."""
    end_s = time.monotonic() + _EXIT_S
    for comparison in list(_open):
        comparison._finish(max(0.0, end_s - time.monotonic()))


def _digest(signatures: np.ndarray) -> int:
    """Return one number for many: positive, below 2^62, and none of the small ones that have a meaning."""
    digest = hashlib.blake2b(signatures.tobytes(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 16
