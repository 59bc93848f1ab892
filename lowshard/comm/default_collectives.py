"""How each collective runs on a transport that only moves: checks between ranks, exchanges, folds.

A plan is made once a kind of call (`_plan_*` gives a function of the buffers) and run at every such call. A
transport that knows a better way overrides the plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from lowshard import dtypes, errors
from lowshard.box import split_interval
from lowshard.comm.call import Call, source_line
from lowshard.comm.reduction import divide, fold
from lowshard.comm.transport import Transport
from lowshard.comm.wait_guard import names_of
from lowshard.errors import CommError, LowshardError, MismatchError, cause_of

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Run = Callable[..., Any]

NO_ARRAY = "[?]"
"""In the text of a call: this argument is no array, or none of a dtype of the table."""

ERROR_SIGNATURE = 2
"""In place of a call's signature: this rank's own arguments are wrong."""

AGREED = ", digest "
"""In the texts of ranks that agree on something, which is no call that counts."""

# Below this a reduction gathers whole operands and folds them locally: one message instead of two.
_ONE_MESSAGE_BYTES = 4096

_PAIRS_TOLD = 4


class Algorithms(Transport):
    """Plans of the collectives over a transport's primitives, and what happens where ranks differ."""

    _started_at: str | None = None  # the source line of the call that the communicator's thread runs

    # ---- checks between ranks

    def _verify(self, call: Call) -> None:
        """Return if all ranks make this call; else raise one error on all of them."""
        if self._check == "off" or self.size == 1:
            return
        if self._check == "full":
            texts = self._share_texts(call.text)
            if any(text != call.text for text in texts):
                self._differ(call.text)
        elif not self._compare(call.signature):
            self._differ(call.text)

    def _verify_counts(self, call: Call, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        """Return if what each rank sends is what each expects; else raise one error on all ranks."""
        if self._check == "off" or self.size == 1:
            return
        rows = self._gather_facts(np.array([*send_counts, *recv_counts], np.int64))
        if not np.array_equal(rows[:, : self.size], rows[:, self.size :].T):
            self._differ_in_counts(call.text, send_counts, recv_counts)

    def _refuse(self, error: LowshardError, text: str) -> NoReturn:
        """Raise what is wrong with this rank's arguments, on all ranks; `text` is what it asked for."""
        if self._check == "off" or self.size == 1 or self._closed:
            raise error
        self._enter(text.removesuffix(NO_ARRAY))
        try:
            self._sequence += 1  # on the others this is a call like any
            if self._check == "full":
                self._share_texts("")
            else:
                self._compare(ERROR_SIGNATURE)
            self._differ(text, error)
        finally:
            self._turn.release()

    def _differ(self, text: str, error: LowshardError | None = None) -> NoReturn:
        """Tell each other what was asked for and raise the same error on all ranks.

        Raises:
            MismatchError: ranks asked for different things.
            LowshardError: all asked for the same, but the arguments of some are wrong: the lowest such rank's error.
        """
        mine = [
            text,
            self._started_at or source_line(),
            *([] if error is None else [type(error).__name__, str(error)]),
        ]
        rows = [json.loads(row) for row in self._share_texts(json.dumps(mine))]
        raise verdict_of(rows, self._sequence) from cause_of(error)

    def _differ_in_counts(
        self, text: str, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> NoReturn:
        """Tell each other the counts of an exchange and raise, on all ranks, which pairs of them do not agree.

        Raises:
            MismatchError: always.
        """
        mine = [self._started_at or source_line(), list(map(int, send_counts)), list(map(int, recv_counts))]
        rows = [json.loads(row) for row in self._share_texts(json.dumps(mine))]
        raise counts_error(text, [row[0] for row in rows], [row[1:] for row in rows], self._sequence)

    def _agree(self, signature: int, text: str, error: Exception | None) -> list[list[str]]:
        """Return nothing where all ranks come with this signature and no error; else what each of them came with.

        That is a text, a source line and, where it has an error, its class and words.

        Raises:
            MismatchError: some rank makes another call meanwhile; the same on all ranks.
        """
        if self._check != "full" and self._compare(signature if error is None else ERROR_SIGNATURE):
            if error is None:
                return []
        elif self._check == "full" and error is None and set(self._share_texts(text)) == {text}:
            return []
        elif self._check == "full" and error is not None:
            self._share_texts("")
        mine = [text, self._started_at or source_line()]
        mine += [] if error is None else [type(error).__name__, str(error)]
        rows = [json.loads(row) for row in self._share_texts(json.dumps(mine))]
        return self._only_agreements(rows, error)

    def _only_agreements(self, rows: list[list[str]], error: Exception | None) -> list[list[str]]:
        """Return what ranks came with to agree on, or raise MismatchError where some of them called something else."""
        if not all(AGREED in row[0] for row in rows):
            raise _mismatch(rows, self._sequence + 1) from cause_of(error)
        return rows

    def _share_texts(self, text: str) -> list[str]:
        """Return every rank's text, in rank order, by way of two moves."""
        data = np.frombuffer(text.encode(), np.uint8)
        size = self.size
        lengths = self._gather_facts(np.array([data.size], np.int64))
        counts = [int(row[0]) for row in lengths]
        longest = max(*counts, 1)
        padded = np.zeros(longest, np.uint8)
        padded[: data.size] = data
        rows = self._gather_facts(padded)
        return [rows[rank][: counts[rank]].tobytes().decode() for rank in range(size)]

    def _gather_facts(self, record: np.ndarray) -> np.ndarray:
        """Return every rank's record of one length `[size, n]`, moved by the primitives: no traffic of the user's."""
        xp, n = self.xp, record.size
        recv = xp.empty((self.size, n), record.dtype)
        self._all_gather_v(
            xp.asarray(record), recv.reshape(-1), [n] * self.size, [n * i for i in range(self.size)]
        )
        return self._to_host(recv)

    # ---- plans of moves

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        counts, displs = [elems] * self.size, [elems * i for i in range(self.size)]

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            self._all_gather_v(send.reshape(-1), recv.reshape(-1), counts, displs)

        return run

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        each = elems // self.size
        counts, displs = [each] * self.size, [each * i for i in range(self.size)]

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            self._all_to_all_v(send.reshape(-1), counts, displs, recv.reshape(-1), counts, displs)

        return run

    def _plan_broadcast(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        def run(buf: Array) -> None:
            self._verify(call)
            self._broadcast(buf.reshape(-1), root)

        return run

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        def run(send: Array, recv: Array | None) -> None:
            self._verify(call)
            self._gather(send.reshape(-1), None if recv is None else recv.reshape(-1), root)

        return run

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        def run(send: Array | None, recv: Array) -> None:
            self._verify(call)
            self._scatter(None if send is None else send.reshape(-1), recv.reshape(-1), root)

        return run

    def _plan_barrier(self, call: Call) -> Run:
        def run() -> None:
            self._verify(call)
            self._barrier()

        return run

    def _run_all_gather_v(
        self, call: Call, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]
    ) -> None:
        self._verify(call)
        self._all_gather_v(send, recv, counts, displs)

    def _run_all_to_all_v(
        self, call: Call, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        self._verify(call)
        self._verify_counts(call, send_counts, recv_counts)
        self._all_to_all_v(send, send_counts, send_displs, recv, recv_counts, recv_displs)

    # ---- plans of reductions

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        counts, displs = self._cut(elems)
        small = elems * dtype.itemsize <= _ONE_MESSAGE_BYTES
        size = self.size

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            s, r = send.reshape(-1), recv.reshape(-1)
            if order == "fast" and self._native(self._native_all_reduce, s, r, op):
                return
            if small:
                terms = self.xp.empty((size, elems), dtype)
                self._all_gather_v(s, terms.reshape(-1), [elems] * size, [elems * i for i in range(size)])
                fold(list(terms), r, op, order)
                return
            own = r[displs[self.rank] : displs[self.rank] + counts[self.rank]]
            fold(self._terms(s, counts, displs), own, op, order)
            self._all_gather_v(own, r, counts, displs)

        return run

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        counts, displs = [elems] * self.size, [elems * i for i in range(self.size)]

        def run(send: Array, recv: Array) -> None:
            self._verify(call)
            s, r = send.reshape(-1), recv.reshape(-1)
            if order == "fast" and self._native(self._native_reduce_scatter, s, r, op):
                return
            fold(self._terms(s, counts, displs), r, op, order)

        return run

    def _plan_reduce(self, call: Call, dtype: Any, elems: int, op: str, root: int, order: str) -> Run:
        counts, displs = self._cut(elems)
        zero = [0] * self.size

        def run(send: Array, recv: Array | None) -> None:
            self._verify(call)
            own = self.xp.empty(counts[self.rank], dtype)
            fold(self._terms(send.reshape(-1), counts, displs), own, op, order)
            to_root = [own.size if i == root else 0 for i in range(self.size)]
            if recv is None:
                self._all_to_all_v(own, to_root, zero, own[:0], zero, zero)
            else:
                self._all_to_all_v(own, to_root, zero, recv.reshape(-1), counts, displs)

        return run

    def _native(self, call: Callable[[Array, Array, str], bool], send: Array, recv: Array, op: str) -> bool:
        """Try the transport's own reduction; an average is its sum, divided."""
        if op != "avg":
            return call(send, recv, op)
        # The sum of integers might wrap in their own width, which the exchange sums in 64 bits.
        if send.dtype.kind in "iu" or not call(send, recv, "sum"):
            return False
        divide(recv, self.size)
        return True

    def _terms(self, send: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Array]:
        """Return every rank's operand for this rank's part, in rank order: an exact exchange."""
        n = counts[self.rank]
        terms = self.xp.empty((self.size, n), send.dtype)
        self._all_to_all_v(
            send, counts, displs, terms.reshape(-1), [n] * self.size, [n * i for i in range(self.size)]
        )
        return list(terms)

    def _cut(self, elems: int) -> tuple[list[int], list[int]]:
        """Return the balanced split of elements over ranks as counts and displacements."""
        parts = [split_interval((0, elems), self.size, i) for i in range(self.size)]
        return [stop - start for start, stop in parts], [start for start, _ in parts]

    # ---- results that the ranks of a node share; without shared memory each has its own

    def _common(self, elems: int, dtype: Any) -> Array | None:
        """Return an array that all ranks see, the same memory on each, or None where there is no such thing.

        Collective: all ranks of the communicator call this.
        """
        return None

    def _shared_all_gather(self, call: Call, send: Array) -> Array:
        self._verify(call)
        result, n = self._common(send.size * self.size, send.dtype), send.size
        if result is None:
            result = self.xp.empty(n * self.size, send.dtype)
            self._all_gather_v(send, result, [n] * self.size, [n * i for i in range(self.size)])
        else:
            result[n * self.rank : n * (self.rank + 1)] = send
            self._barrier()
        return result

    def _shared_all_reduce(self, call: Call, send: Array, op: str, order: str) -> Array:
        self._verify(call)
        result = self._common(send.size, send.dtype)
        if result is None:
            result = self.xp.empty(send.size, send.dtype)
            self._plan_all_reduce(call, send.dtype, send.size, op, order)(send, result)
            return result
        counts, displs = self._cut(send.size)
        own = result[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        fold(self._terms(send, counts, displs), own, op, order)
        self._barrier()
        return result

    def _shared_broadcast(self, call: Call, buf: Array | None, root: int) -> Array:
        self._verify(call)
        about = "" if buf is None or self.rank != root else json.dumps([buf.dtype.name, list(buf.shape)])
        name, shape = json.loads(self._share_texts(about)[root])
        dtype, elems = dtypes.get(name).numpy, math.prod(shape)
        common = self._common(elems, dtype)
        result = self.xp.empty(elems, dtype) if common is None else common
        if self.rank == root:
            result[...] = buf.reshape(-1)  # type: ignore[union-attr]
        if common is None:
            self._broadcast(result, root)
        else:
            self._barrier()
        return result.reshape(shape)


def verdict_of(rows: Sequence[Sequence[str]], number: int) -> LowshardError:
    """Return the one error of all ranks for a call of that number that they did not make alike.

    Args:
        rows: of each rank what it asked for, its source line and, where its arguments are wrong, the error's class and
            words.
        number: of the call on the communicator.

    Returns:
        A MismatchError where they asked for different things; where all asked for the same, but the arguments of some
        are wrong, the lowest such rank's error.
    """
    wrong = [rank for rank, row in enumerate(rows) if len(row) > 2]
    # What is no array at all, or names an op or a root that there is not, says nothing of what was asked for; neither
    # does the digest of an agreement where a rank has none, for an error.
    asked_for = {
        row[0].partition(AGREED)[0] if wrong else row[0]
        for row in rows
        if NO_ARRAY not in row[0] and row[2:3] != [CommError.__name__]
    }
    if wrong and len(asked_for) <= 1:
        name, said = rows[wrong[0]][2:]
        cls = getattr(errors, name, None)
        if isinstance(cls, type) and issubclass(cls, LowshardError):
            return cls(f"rank {wrong[0]}: {said}")
        return LowshardError(f"rank {wrong[0]}: {name}: {said}")
    return _mismatch(rows, number)


def _mismatch(rows: Sequence[Sequence[str]], number: int) -> MismatchError:
    """Return the error of ranks that asked for different things, in their call of that number."""
    by_row: dict[tuple[str, str], list[int]] = {}
    for rank, row in enumerate(rows):
        also = f" (wrong in itself: {row[3]})" if len(row) > 2 else ""
        by_row.setdefault((row[0], row[1] + also), []).append(rank)
    asked = "; ".join(
        f"{names_of(ranks)} asked for {what} at {line}" for (what, line), ranks in by_row.items()
    )
    return MismatchError(
        f"all ranks of a communicator make the same call with the same dtype, counts, reduction and root, but in "
        f"call #{number} {asked}"
    )


def counts_error(
    text: str, lines: Sequence[str], counts: Sequence[Sequence[Sequence[int]]], number: int
) -> MismatchError:
    """Return the error of an exchange in which a rank expects another count than is sent to it.

    Args:
        text: of the call.
        lines: of each rank, where it made the call.
        counts: of each rank, its send_counts and its recv_counts.
        number: of the call on the communicator.
    """
    sent, expected = zip(*counts, strict=True)
    size = len(lines)
    pairs = [
        f"rank {i} sends {sent[i][j]} elements to rank {j} (send_counts={sent[i]} at {lines[i]}), which expects "
        f"{expected[j][i]} (recv_counts={expected[j]} at {lines[j]})"
        for i in range(size)
        for j in range(size)
        if sent[i][j] != expected[j][i]
    ]
    more = f"; and {len(pairs) - _PAIRS_TOLD} more pairs" if len(pairs) > _PAIRS_TOLD else ""
    return MismatchError(
        f"{text}: send_counts[j] on rank i is recv_counts[i] on rank j, but in call #{number} "
        f"{'; '.join(pairs[:_PAIRS_TOLD])}{more}"
    )
