"""Boxes read out of another process's memory: a process may always read its own, which is all the kernel asks."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from lowshard.kernels.buffer import address
from lowshard.transfer.spans import (
    LONG_BYTES,
    Span,
    can_read,
    is_worth_it,
    packed_span,
    read_boxes,
    run_table,
    span_of,
)

ME = os.getpid()


def box_of(rng: np.random.Generator, shape: tuple[int, ...], extents: tuple[int, ...]) -> tuple:
    return tuple((a := int(rng.integers(0, n - e + 1)), a + e) for n, e in zip(shape, extents, strict=True))


def test_boxes_arrive_whole_and_nothing_beside_them(rng: np.random.Generator) -> None:
    for _ in range(60):
        dims = int(rng.integers(0, 5))
        extents = tuple(rng.integers(1, 9, dims).tolist())
        if dims and rng.random() < 0.5:
            extents = (*extents[:-1], int(rng.integers(1, 3 * LONG_BYTES)))
        sources, targets, expected, arrays = [], [], [], []
        for _ in range(3):
            shapes = [tuple(e + int(rng.integers(0, 4)) for e in extents) for _ in range(2)]
            src, dst = rng.integers(0, 256, shapes[0], np.uint8), np.full(shapes[1], 7, np.uint8)
            src_box, dst_box = (box_of(rng, shape, extents) for shape in shapes)
            wanted = dst.copy()
            wanted[tuple(slice(*b) for b in dst_box)] = src[tuple(slice(*b) for b in src_box)]
            sources.append(span_of(src, src_box))
            targets.append(span_of(dst, dst_box))
            expected.append(wanted)
            arrays.append((src, dst))
        assert read_boxes(ME, run_table(sources, targets))
        assert all(np.array_equal(dst, wanted) for (_, dst), wanted in zip(arrays, expected, strict=True))


def test_more_rows_than_a_call_takes_arrive() -> None:
    src = np.arange(3 << 21, dtype=np.uint32).reshape(-1, 512)
    dst = np.zeros((len(src), 1024), np.uint32)
    whole = ((0, len(src)), (0, 512))
    from_begin = [[Span(0, *span_of(array, whole)[1:])] for array in (src, dst)]
    assert read_boxes(ME, run_table(*from_begin), address(src), address(dst))
    assert np.array_equal(dst[:, :512], src)
    assert not dst[:, 512:].any()


def test_memory_that_cannot_be_read_is_said_to_be() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    pid = ended.pid
    here = np.zeros(4096, np.uint8)
    mine = (here.ctypes.data, here.nbytes)
    assert can_read(ME, [mine]) == [True]
    assert can_read(ME, [mine, (4096, 8), (mine[0] + 1, 7)]) == [True, False, True]
    ended.wait()
    assert can_read(pid, [mine, mine]) == [False, False]
    spans = [packed_span(here.ctypes.data, (16,), 1)]
    assert not read_boxes(pid, run_table(spans, spans))


def test_many_short_rows_are_left_to_their_owner() -> None:
    src, dst = np.zeros((64, 64), np.uint8), np.zeros((64, 128), np.uint8)
    whole, columns = ((0, 64), (0, 64)), ((0, 64), (0, 9))
    assert is_worth_it(span_of(src, whole), span_of(src, whole))
    assert not is_worth_it(span_of(src, whole), span_of(dst, whole))  # side by side there, apart here
    assert not is_worth_it(span_of(src, columns), span_of(dst, columns))
    assert is_worth_it(span_of(src, ((3, 4), (0, 9))), span_of(dst, ((5, 6), (1, 10))))
    assert is_worth_it(span_of(src, ((3, 3), (0, 9))), span_of(dst, ((5, 5), (1, 10))))
    long = np.zeros((3, 2 * LONG_BYTES), np.uint8)
    assert is_worth_it(span_of(long, ((0, 3), (0, LONG_BYTES))), span_of(long, ((0, 3), (5, LONG_BYTES + 5))))
    three = np.zeros((4, 3, LONG_BYTES), np.uint8)
    assert is_worth_it(
        span_of(three, ((1, 3), (0, 2), (0, LONG_BYTES))), span_of(three, ((0, 2), (0, 2), (0, LONG_BYTES)))
    )
