"""What ranks ask for, compared: how they find out that they differ, and the one error that all of them raise.

The functions work over any transport's primitives. Most transports compare in their own meetings instead, and come
here where something differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np

from lowshard import errors
from lowshard.comm.call import Call, Check, source_line
from lowshard.comm.wait_guard import names_of
from lowshard.errors import LowshardError, MismatchError, TimedOut

ERROR_SIGNATURE = 2
"""In place of a call's signature: this rank's own arguments are wrong."""
STEP_SIGNATURE = 3
"""Of what transports ask of each other beside the users' calls."""

AGREED = ", digest "
"""In the texts of ranks that agree on something, which is not a call that counts."""

_PAIRS_TOLD = 4


class Comparing(Protocol):
    """What a transport gives for this; see `lowshard.comm.transport.Transport`."""

    rank: int
    size: int
    check: Check
    sequence: int

    def compare(self, signature: int) -> bool:
        """Return, on all ranks alike, whether all ranks gave the same signature."""

    def gather_facts(self, record: np.ndarray) -> np.ndarray:
        """Return every rank's record of one length."""


def compare_texts(t: Comparing, text: str) -> None:
    """Return if all ranks ask for this; else raise one error on all of them."""
    if any(other != text for other in share_texts(t, text)):
        differ(t, text)


def verify_counts(t: Comparing, call: Call, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
    """Return if what each rank sends is what each expects; else raise one error on all ranks."""
    if t.check == "off" or t.size == 1:
        return
    rows = t.gather_facts(np.array([*send_counts, *recv_counts], np.int64))
    if not np.array_equal(rows[:, : t.size], rows[:, t.size :].T):
        differ_in_counts(t, call.text, send_counts, recv_counts)


def differ(t: Comparing, text: str) -> NoReturn:
    """Tell each other what was asked for and raise one error on all ranks: see `verdict`."""
    raise verdict([json.loads(row) for row in share_texts(t, json.dumps([text, source_line()]))], t.sequence)


def differ_in_counts(
    t: Comparing, text: str, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> NoReturn:
    """Tell each other the counts of an exchange and raise, on all ranks, which pairs of them do not agree."""
    mine = [source_line(), list(map(int, send_counts)), list(map(int, recv_counts))]
    rows = [json.loads(row) for row in share_texts(t, json.dumps(mine))]
    raise counts_error(text, [row[0] for row in rows], [row[1:] for row in rows], t.sequence)


def share_texts(t: Comparing, text: str) -> list[str]:
    """Return every rank's text, in rank order, by way of two moves."""
    data = np.frombuffer(text.encode(), np.uint8)
    counts = [int(row[0]) for row in t.gather_facts(np.array([data.size], np.int64))]
    padded = np.zeros(max(*counts, 1), np.uint8)
    padded[: data.size] = data
    rows = t.gather_facts(padded)
    return [rows[rank][: counts[rank]].tobytes().decode() for rank in range(t.size)]


def verdict(rows: Sequence[Sequence[str]], number: int) -> LowshardError:
    """Return the one error of all ranks: that of the lowest rank which has one, else a MismatchError.

    A row a rank: what it asked for, its line and, where it came with an error, the error's class and words.
    """
    for rank, (text, _, *said) in enumerate(rows):
        if said:
            cls = getattr(errors, said[0], None)
            if isinstance(cls, type) and issubclass(cls, LowshardError):
                return cls(f"rank {rank}: {said[1]}")
            return LowshardError(f"{text}: rank {rank}: {said[0]}: {said[1]}")
    return mismatch(rows, number)


def mismatch(rows: Sequence[Sequence[str]], number: int) -> MismatchError:
    """Return the error of ranks that asked for different things in their call of that number.

    A row a rank: what it asked for, its line and, where it came with an error, the error's class and words.
    """
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


def late_ranks(behind: Sequence[int], asked: Sequence[str], number: int) -> TimedOut:
    """Return the error of a call that some ranks did not come to; `asked` is its text and line on another rank."""
    text = f"{names_of(behind)} did not come to call #{number}, which others made: {asked[0]} at {asked[1]}"
    return TimedOut(text).about(behind)


def counts_error(
    text: str, lines: Sequence[str], counts: Sequence[Sequence[Sequence[int]]], number: int
) -> MismatchError:
    """Return the error of an exchange in which a rank expects another count than is sent to it."""
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
