"""The choice between two ways, on costs that are made up."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from lowshard.comm.node.choice import (
    CLASSES,
    FOLD,
    MESSAGE,
    ROW_WORDS,
    choose_alone,
    learn,
    row_for,
    second_is_next,
)

SIZE = 1 << 20


def play(
    table: np.ndarray, calls: int, second_ns: float, first_ns: float, kind: int = 0, size: int = SIZE
) -> list[bool]:
    """Make calls that take so long by either way; return which they took."""
    row = row_for(table.ctypes.data, kind, size)
    taken = []
    rng = np.random.default_rng(3)
    for _ in range(calls):
        second = bool(second_is_next(row))
        interrupted = 50.0 if rng.random() < 0.02 else 1.0
        learn(
            row,
            second,
            size,
            int((second_ns if second else first_ns) * (1 + 0.1 * rng.random()) * interrupted),
        )
        taken.append(second)
        choose_alone(row)
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
