"""Data whose result is known: exact integers in every type, tolerances that hold, wrong elements that are counted."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowshard import dtypes
from lowshard.bench.collective_case import ALL_REDOPS, DTYPES, MORE_DTYPES, OPERATIONS, uneven
from lowshard.bench.value_pattern import PERIOD, Pattern, Segment, spoil
from lowshard.comm.reduction import fold
from lowshard.errors import LowshardError

FLOATS = ("float16", "float32", "float64", "bfloat16")


def buffer(pattern: Pattern, rank: int, elems: int) -> np.ndarray[Any, Any]:
    made = np.empty(elems, pattern.dtype)
    pattern.fill(made, rank)
    return made


def test_a_rank_fills_its_values_over_and_over() -> None:
    pattern = Pattern("float32", 3, None)
    for elems in (0, 1, PERIOD, 2 * PERIOD + 5, 70 * PERIOD):
        got = buffer(pattern, 2, elems)
        assert np.array_equal(got, pattern.values[2][np.arange(elems) % PERIOD])
    assert not np.array_equal(pattern.values[0], pattern.values[1])
    assert not np.array_equal(pattern.values, Pattern("float32", 3, None, seed=1).values)


@pytest.mark.parametrize("redop", ALL_REDOPS)
@pytest.mark.parametrize("dtype", [*DTYPES, *MORE_DTYPES])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_exact_results_are_whole_numbers_that_any_order_of_sums_gives(
    dtype: str, redop: str, ranks: int
) -> None:
    pattern = Pattern(dtype, ranks, redop)
    want, bound = pattern.reduced
    assert bound is None
    terms = [np.array(values) for values in pattern.values]
    for order in ("tree", "rank"):
        out = np.empty(PERIOD, pattern.dtype)
        fold(terms, out, redop, order)
        assert np.array_equal(out, want)
    wide = pattern.values.astype(np.float64)
    by_hand = {"sum": wide.sum(0), "prod": wide.prod(0), "min": wide.min(0), "max": wide.max(0)}.get(redop)
    if by_hand is not None:
        assert np.array_equal(want.astype(np.float64), by_hand)  # nothing wrapped, nothing was rounded
        assert np.array_equal(by_hand, np.round(by_hand))
    assert len(np.unique(want.astype(np.float64))) > 1
    if redop == "sum" and dtypes.get(dtype).kind == "float":  # in the type itself, whatever the order
        one_by_one = reduce(lambda a, b: (a + b).astype(pattern.dtype), terms[::-1])
        assert np.array_equal(one_by_one, want)


def test_a_type_too_narrow_for_so_many_ranks_is_refused() -> None:
    with pytest.raises(LowshardError, match="int8 holds no sum of them over 128 ranks"):
        Pattern("int8", 128, "sum")
    Pattern("int8", 127, "sum")


@pytest.mark.parametrize("redop", ALL_REDOPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_results_in_any_order_are_within_the_tolerance(dtype: str, redop: str) -> None:
    for ranks in (2, 5, 8):
        pattern = Pattern(dtype, ranks, redop, exact=False)
        assert not pattern.exact
        terms = [np.array(values) for values in pattern.values]
        segment = (Segment(0, PERIOD, None),)
        for order in ("tree", "rank"):
            out = np.empty(PERIOD, pattern.dtype)
            fold(terms, out, redop, order)
            assert pattern.wrong(out, segment) == 0
            fold(terms[::-1], out, redop, order)
            assert pattern.wrong(out, segment) == 0
        if redop in ("sum", "prod") and dtype != "bfloat16":  # rounded at every step, not once
            step = np.add if redop == "sum" else np.multiply
            assert pattern.wrong(reduce(step, terms), segment) == 0
        # One operand left out, and one unit in the last places off, are seen.
        out = np.empty(PERIOD, pattern.dtype)
        fold(terms[:-1], out, redop)
        assert pattern.wrong(out, segment) > PERIOD // 10
        fold(terms, out, redop)
        far = (out.astype(np.float64) * (1 + 40 * ranks * np.finfo(np.float64).eps)).astype(pattern.dtype)
        if dtype == "float64" and redop not in ("min", "max"):
            assert pattern.wrong(far, segment) > PERIOD // 10


def test_each_wrong_element_is_counted_once_wherever_it_lies() -> None:
    pattern = Pattern("bfloat16", 2, None)
    elems = 65 * PERIOD  # two blocks
    got = buffer(pattern, 1, elems)
    segment = (Segment(0, elems, 1),)
    assert pattern.wrong(got, segment) == 0
    for place in (0, PERIOD, 64 * PERIOD - 1, 64 * PERIOD, elems - 1):
        got[place] = ml_dtypes.bfloat16(float(got[place]) + 1)
    assert pattern.wrong(got, segment) == 5
    got[7] = np.nan
    assert pattern.wrong(got, segment) == 6


def test_a_segment_begins_anywhere_in_its_rank() -> None:
    pattern = Pattern("int16", 3, None)
    whole = buffer(pattern, 2, 3 * PERIOD)
    for first in (0, 1, PERIOD - 1, PERIOD, PERIOD + 3):
        got = np.concatenate([np.zeros(4, np.int16), whole[first : first + PERIOD]])
        assert pattern.wrong(got, (Segment(4, PERIOD, 2, first),)) == 0
        assert pattern.wrong(got, (Segment(4, PERIOD, 2, first + 1),)) > PERIOD // 2
    two = np.concatenate([buffer(pattern, 0, 10), buffer(pattern, 1, 10)])
    assert pattern.wrong(two, (Segment(0, 10, 0), Segment(10, 10, 1))) == 0
    assert pattern.wrong(two, (Segment(0, 10, 1), Segment(10, 10, 0))) > 10


def test_nan_is_outside_every_tolerance() -> None:
    pattern = Pattern("float32", 2, "sum", exact=False)
    got = pattern.values.sum(axis=0, dtype=np.float32)
    segment = (Segment(0, PERIOD, None),)
    assert pattern.wrong(got, segment) == 0
    got[3] = np.nan
    assert pattern.wrong(got, segment) == 1


@pytest.mark.parametrize("dtype", [*DTYPES, *MORE_DTYPES])
@pytest.mark.parametrize("redop", [None, *ALL_REDOPS])
def test_no_result_looks_like_a_spoilt_buffer(dtype: str, redop: str | None) -> None:
    pattern = Pattern(dtype, 2, redop)
    got = np.zeros(PERIOD, pattern.dtype)
    spoil(got)
    segment = Segment(0, PERIOD, 0 if redop is None else None)
    assert pattern.wrong(got, (segment,)) == PERIOD


# ---- shapes


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("all_reduce", (256, 256, 256, 1024)),
        ("all_gather", (64, 256, 64, 1024)),
        ("reduce_scatter", (256, 64, 64, 1024)),
        ("all_to_all", (256, 256, 64, 1024)),
        ("all_to_all_v", (256, 256, 64, 1024)),
        ("broadcast", (256, 256, 256, 1024)),
        ("reduce", (256, 256, 256, 1024)),
        ("gather", (64, 256, 64, 1024)),
        ("scatter", (256, 64, 64, 1024)),
        ("send_recv", (256, 256, 256, 1024)),
        ("barrier", (0, 0, 0, 0)),
    ],
)
def test_a_size_is_that_of_the_larger_buffer(op: str, sizes: tuple[int, ...]) -> None:
    found = OPERATIONS[op].sizes(1024, 4, 4)
    assert (found.send, found.recv, found.count, found.size_bytes) == sizes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_an_uneven_exchange_fits_together_and_moves_as_much_as_the_even_one(ranks: int) -> None:
    each = 100
    all_of_them = [uneven(each, rank, ranks) for rank in range(ranks)]
    for rank, mine in enumerate(all_of_them):
        assert sum(mine.send_counts) == sum(mine.recv_counts) == each * ranks
        assert mine.recv_counts == tuple(peer.send_counts[rank] for peer in all_of_them)
        assert mine.peer_displs == tuple(peer.send_displs[rank] for peer in all_of_them)
        assert mine.recv_displs == tuple(sum(mine.recv_counts[:peer]) for peer in range(ranks))
    if ranks > 1:
        assert {75, 125} <= set(all_of_them[0].send_counts)
