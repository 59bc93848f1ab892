"""The choice between two ways, on costs that are made up."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from lowshard.comm.node.copy_choice import (
    CLASSES,
    FOLD,
    MESSAGE,
    ROW_WORDS,
    follow_choice,
    hear_choice,
    learn,
    row_for,
    say_choice,
    second_is_next,
    tell_choice,
)
from lowshard.comm.node.node_rendezvous import CARD_BYTES, CARDS, CONTEXT_WORDS, ME, STAMP

SIZE = 1 << 20


def play(
    table: np.ndarray,
    calls: int,
    second_ns: float,
    first_ns: float,
    kind: int = 0,
    size: int = SIZE,
    slow: range = range(0),
) -> list[bool]:
    """Make calls that take so long by either way, ten times as long in a range of them; return which they took."""
    row = row_for(table.ctypes.data, kind, size)
    taken = []
    rng = np.random.default_rng(3)
    for i in range(calls):
        second = bool(second_is_next(row))
        say_choice(row)
        interrupted = 50.0 if rng.random() < 0.02 else 1.0
        took_ns = (second_ns if second else first_ns) * (1 + 0.1 * rng.random()) * interrupted
        learn(row, second, size, int(took_ns * (10 if i in slow else 1)))
        taken.append(second)
    return taken


@pytest.fixture
def table() -> np.ndarray:
    return np.zeros(CLASSES * ROW_WORDS, np.int64)


@pytest.mark.parametrize(("second_ns", "first_ns"), [(160e3, 480e3), (130e3, 66e3)])
def test_the_faster_way_is_found_and_the_other_is_rarely_tried(
    table: np.ndarray, second_ns: float, first_ns: float
) -> None:
    taken = play(table, 4000, second_ns, first_ns)
    assert set(taken[:8]) == {True, False}
    right = second_ns < first_ns
    assert np.mean(np.array(taken[20:]) == right) > 0.95


def test_it_changes_when_the_cores_do(table: np.ndarray) -> None:
    play(table, 1000, 130e3, 66e3)
    taken = play(table, 1000, 130e3, 500e3)
    assert np.mean(taken[-500:]) > 0.95
    taken = play(table, 1000, 130e3, 66e3)
    assert np.mean(taken[-400:]) < 0.05


@pytest.mark.parametrize(("second_ns", "first_ns"), [(66e3, 130e3), (130e3, 66e3)])
def test_what_the_first_calls_take_is_soon_forgotten(
    table: np.ndarray, second_ns: float, first_ns: float
) -> None:
    # Another program has run while the better way was tried, in both trials that a class begins with.
    right = second_ns < first_ns
    slow = [i for i in range(12) if (i % 6 < 3) == right]
    row = row_for(table.ctypes.data, 0, SIZE)
    taken = []
    for i in range(150):
        second = bool(second_is_next(row))
        say_choice(row)
        learn(row, second, SIZE, int((second_ns if second else first_ns) * (10 if i in slow else 1)))
        taken.append(second)
    assert taken[14] != right  # as it was found
    assert np.mean(np.array(taken[24:]) == right) > 0.85


@pytest.mark.parametrize("slow", [range(20, 220), range(27, 30)])
def test_a_busy_while_does_not_change_what_was_found(table: np.ndarray, slow: range) -> None:
    play(table, 1000, 130e3, 66e3)
    taken = play(
        table, 250, 130e3, 66e3, slow=slow
    )  # the trial of call 1024 within it, or its better way alone
    assert sum(taken) == 3


def test_kinds_and_sizes_are_learned_apart(table: np.ndarray) -> None:
    play(table, 400, 1e5, 2e5)
    play(table, 400, 2e5, 1e5, kind=1)
    play(table, 400, 2e5, 1e5, size=8 * SIZE)
    assert np.mean(play(table, 100, 1e5, 2e5)) > 0.9
    assert np.mean(play(table, 100, 2e5, 1e5, kind=1)) < 0.1
    assert np.mean(play(table, 100, 2e5, 1e5, size=8 * SIZE)) < 0.1


@pytest.mark.parametrize("size", [0, 1, 64 << 10, 1 << 40])
def test_every_size_has_a_row_within_the_table(table: np.ndarray, size: int) -> None:
    begin = table.ctypes.data
    for kind in (FOLD, MESSAGE):
        row = row_for(begin, kind, size)
        assert begin <= row <= begin + table.nbytes - 8 * ROW_WORDS
        assert (row - begin) % (8 * ROW_WORDS) == 0


def test_ranks_that_measure_otherwise_take_the_same_way_as_the_first() -> None:
    tables = [np.zeros(CLASSES * ROW_WORDS, np.int64) for _ in range(3)]
    cards = np.zeros(3 * CARD_BYTES // 8, np.int64)
    contexts = [np.zeros(CONTEXT_WORDS, np.int64) for _ in range(3)]
    rows = [row_for(table.ctypes.data, FOLD, SIZE) for table in tables]
    taken = []
    for stamp in range(600):
        ways = []
        for rank, (ctx, row) in enumerate(zip(contexts, rows, strict=True)):
            ctx[[ME, CARDS, STAMP]] = rank, cards.ctypes.data, stamp
            tell_choice(ctx.ctypes.data, row)
            ways.append(bool(second_is_next(row)))
        for rank, (ctx, row) in enumerate(zip(contexts, rows, strict=True)):
            hear_choice(ctx.ctypes.data, row)
            # The second way is the faster one for the first rank alone.
            learn(row, ways[rank], SIZE, 100_000 if ways[rank] == (rank == 0) else 200_000)
        assert len(set(ways)) == 1, stamp
        taken.append(ways[0])
    assert np.mean(taken[12:]) > 0.95


def test_a_first_rank_that_does_not_choose_leaves_it_to_each() -> None:
    table, cards = np.zeros(CLASSES * ROW_WORDS, np.int64), np.zeros(2 * CARD_BYTES // 8, np.int64)
    first, other = np.zeros(CONTEXT_WORDS, np.int64), np.zeros(CONTEXT_WORDS, np.int64)
    row = row_for(table.ctypes.data, FOLD, SIZE)
    for stamp in range(100):
        for rank, ctx in enumerate((first, other)):
            ctx[[ME, CARDS, STAMP]] = rank, cards.ctypes.data, stamp
        tell_choice(first.ctypes.data, 0)
        second = bool(second_is_next(row))
        hear_choice(other.ctypes.data, row)
        learn(row, second, SIZE, 100_000 if second else 200_000)
    assert second_is_next(row)


def test_ranks_that_send_to_each_other_leave_a_mixture_of_ways_that_is_slower_than_either() -> None:
    tables = [np.zeros(CLASSES * ROW_WORDS, np.int64) for _ in range(2)]
    rows = [row_for(table.ctypes.data, MESSAGE, SIZE) for table in tables]
    mixed, ways = 0, [False, False]
    for _ in range(2000):
        for rank, row in enumerate(rows):
            ways[rank] = bool(second_is_next(row))
        words = [say_choice(row) for row in rows]
        follow_choice(rows[1], words[0])
        follow_choice(rows[0], 0)  # no word from a rank after it
        mixed += ways[0] != ways[1]
        for rank, row in enumerate(rows):
            # As quick the one way as the other, to one rank a little quicker this way and to the other that way.
            took_ns = 200_000 if ways[0] != ways[1] else 100_000 + 1000 * (ways[rank] == (rank == 0))
            learn(row, ways[rank], SIZE, took_ns)
    assert mixed == 0
