"""Memory that the processes of a node share: blocks and arrays out of segments, what peers see of them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.errors import CommError

pytest.importorskip("numba")
from lowshard.comm.node.arena import ALIGN_BYTES, PAGE_BYTES, Arena, Block, PeerMemory
from lowshard.comm.node.node_memory import SEGMENTS, NodeMemory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no anonymous files")

FIRST = 66 << 20

Maker = Callable[[int], Arena]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes arenas, which live as long as the process elsewhere, and closes their files."""
    made: list[Arena] = []

    def new(segments: int = 8) -> Arena:
        made.append(Arena(segments))
        return made[-1]

    yield new
    close(made)


def close(arenas: list[Arena]) -> None:
    for arena in arenas:
        listed = arena.segments[0].bytes[:PAGE_BYTES].view(np.int64)
        for number in range(len(arena.segments)):
            with suppress(OSError):  # a test has written another there
                os.close(int(listed[1 + 2 * number]))


def free_bytes(arena: Arena) -> list[int]:
    """Return what is free in each segment, after a look at how it is kept."""
    arena._take_back()
    for free in arena._free:
        assert free == sorted(free)
        for (at, length), (after, _) in pairwise(free):
            assert at + length < after, "pieces that touch are one"
    return [sum(length for _, length in free) for free in arena._free]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- blocks


def test_blocks_lie_apart_on_lines_and_whole_pages_on_pages(rng: np.random.Generator, make: Maker) -> None:
    arena = make(8)
    start = free_bytes(arena)
    live: list[Block] = []
    for _ in range(3000):
        if live and rng.random() < 0.48:
            arena.free(live.pop(int(rng.integers(len(live)))))
        else:
            size = int(rng.choice([0, 1, 63, 64, 65, 4095, 4096, 4097, int(rng.integers(1, 300_000))]))
            block = arena.allocate(size)
            assert block.size_bytes >= max(size, 1)
            assert block.address == arena.segments[block.segment].address + block.offset
            assert block.offset % ALIGN_BYTES == 0
            assert size < PAGE_BYTES or block.offset % PAGE_BYTES == 0
            live.append(block)
    by_place = sorted(live, key=lambda b: (b.segment, b.offset))
    for a, b in pairwise(by_place):
        assert a.segment != b.segment or a.offset + a.size_bytes <= b.offset
    used = sum(b.size_bytes for b in live)
    assert sum(free_bytes(arena)) == sum(start) - used
    for i in rng.permutation(len(live)):
        arena.free(live[i])
    assert free_bytes(arena) == start
    assert all(len(free) == 1 for free in arena._free)


def test_a_block_that_came_back_is_given_out_again_and_neighbours_join(make: Maker) -> None:
    arena = make(8)
    blocks = [arena.allocate(100_000) for _ in range(6)]
    for i in (1, 3, 2):  # the middle one joins both sides
        arena.free(blocks[i])
    wide = arena.allocate(300_000)
    assert wide.offset == blocks[1].offset
    arena.free(blocks[5])
    assert arena.allocate(100_000).offset == blocks[5].offset


def test_segments_are_made_as_needed_and_up_to_the_most(make: Maker) -> None:
    arena = make(3)
    assert int(arena.table[0]) == 1
    whole = arena.allocate(FIRST)  # does not fit beside the list
    assert whole.segment == 1
    assert int(arena.table[0]) == 2
    sizes = [int(arena.table[2 + 2 * i]) for i in range(2)]
    assert sizes == [FIRST, 258 << 20]
    assert [int(arena.table[1 + 2 * i]) for i in range(2)] == [
        arena.segments[0].address,
        arena.segments[1].address,
    ]
    large = arena.allocate(400 << 20)
    assert (large.segment, large.offset) == (2, 0)
    before = descriptors()
    with pytest.raises(CommError, match="at most 3 segments"):
        arena.allocate(300 << 20)
    assert descriptors() == before
    assert arena.allocate(1000).segment == 0
    arena.free(whole)
    assert arena.allocate(200 << 20).segment == 1


def test_what_the_system_does_not_have_is_refused_and_costs_nothing(make: Maker) -> None:
    arena = make(8)
    before, free = descriptors(), free_bytes(arena)
    for _ in range(3):
        with pytest.raises((MemoryError, OSError)):
            arena.allocate(1 << 61)
        with pytest.raises((MemoryError, OSError)):
            arena.array(1 << 60, np.dtype(np.uint8))
    assert descriptors() == before
    assert free_bytes(arena) == free
    later = arena.allocate(100 << 20)  # a new segment, which peers must find in the list
    assert PeerMemory(os.getpid(), arena.descriptor).segments()[later.segment]


# ---- arrays


def test_arrays_hold_their_block_and_parts_of_them_do_too(make: Maker) -> None:
    arena = make(8)
    free = free_bytes(arena)
    for shape in (5, (2, 3), (), 0, (4, 0), np.int64(7)):
        made = arena.array(shape, np.dtype(np.float32))  # type: ignore[arg-type]
        assert made.flags.writeable
        assert made.flags.c_contiguous
        part = made.reshape(-1)[1:]
        view = memoryview(part)  # type: ignore[arg-type]
        del made
        assert free_bytes(arena) != free
        del part
        assert free_bytes(arena) != free
        view.release()
        del view
        assert free_bytes(arena) == free


def test_blocks_come_back_from_other_threads_and_while_others_are_taken(make: Maker) -> None:
    arena = make(8)
    free = free_bytes(arena)
    failures: list[str] = []

    def work(number: int) -> None:
        own = np.random.default_rng(number)
        kept: list[np.ndarray] = []
        for _ in range(400):
            made = arena.array(int(own.integers(1, 3000)), np.dtype(np.int64))
            made[:] = number
            kept.append(made)
            if len(kept) > 5:
                old = kept.pop(int(own.integers(5)))
                if not (old == number).all():
                    failures.append(f"thread {number}: {set(old.tolist())}")
                del old
            del made

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert free_bytes(arena) == free


def test_where_finds_what_lies_wholly_in_a_segment(make: Maker) -> None:
    arena = make(8)
    arena.allocate(70 << 20)
    for number in (0, 1):
        base, size = arena.segments[number].address, int(arena.table[2 + 2 * number])
        assert arena.where(base, 1) == (number, 0)
        assert arena.where(base + size - 5, 5) == (number, size - 5)
        assert arena.where(base + size - 5, 6)[0] in (-1, 1 - number)  # segments may touch
        assert arena.where(base + 64, 0) == (number, 64)
    own = np.zeros(10)
    assert arena.where(own.ctypes.data, own.nbytes) == (-1, 0)


# ---- what peers see


def test_a_peer_sees_one_memory_and_finds_new_segments(make: Maker) -> None:
    arena = make(8)
    peer = PeerMemory(os.getpid(), arena.descriptor)
    near = arena.array(1000, np.dtype(np.int64))
    near[:] = 5
    segment, offset = arena.where(near.ctypes.data, near.nbytes)
    assert segment == 0
    there = ctypes.c_int64.from_address(peer.segments()[0].address + offset + 8 * 999)
    assert there.value == 5
    there.value = 6
    assert near[999] == 6
    far = arena.array(10 << 20, np.dtype(np.int64))
    segment, offset = arena.where(far.ctypes.data, far.nbytes)
    assert segment == 1
    far[-1] = 9
    assert ctypes.c_int64.from_address(peer.segments()[1].address + offset + far.nbytes - 8).value == 9


def test_a_segment_that_cannot_be_mapped_is_a_named_error(make: Maker) -> None:
    arena = make(8)
    peer = PeerMemory(os.getpid(), arena.descriptor)
    arena.array(10 << 20, np.dtype(np.int64))
    listed = arena.segments[0].bytes[:PAGE_BYTES].view(np.int64)
    listed[3] = 1 << 20  # the second segment's descriptor, as if its process were gone
    with pytest.raises(CommError, match=f"the memory of process {os.getpid()} cannot be mapped"):
        peer.segments()


@contextmanager
def memories(size: int) -> Iterator[list[NodeMemory]]:
    """Give the memories of some ranks, which are threads of this process here."""
    made = lc.run_loopback(size, lambda comm: NodeMemory(comm.rank, exchange_over(comm)), timeout_s=30.0)
    yield made
    close([memory.arena for memory in made])


def exchange_over(comm: lc.Communicator) -> Callable[[Any], list[Any]]:
    def exchange(mine: Any) -> list[Any]:
        found = comm._transport.meet(mine)  # type: ignore[attr-defined]
        comm._transport.leave()  # type: ignore[attr-defined]
        return list(found)

    return exchange


def test_ranks_map_each_other_and_read_across(monkeypatch: pytest.MonkeyPatch) -> None:
    with memories(3) as made:
        for memory in made:
            assert memory.reads_across
            assert memory.pids == [os.getpid()] * 3
            assert memory.cores == len(os.sched_getaffinity(0))
            assert memory.maps.shape == (3, SEGMENTS)
            assert [bool(row[0]) for row in memory.maps] == [peer != memory.rank for peer in range(3)]
            assert not memory.maps[:, 1:].any()
        far = made[2].arena.array(100 << 20, np.dtype(np.uint8))
        far[123] = 45
        segment, offset = made[2].arena.where(far.ctypes.data, far.nbytes)
        assert segment == 1
        assert not made[0].maps[2, 1]
        made[0].map_new()
        assert ctypes.c_uint8.from_address(int(made[0].maps[2, 1]) + offset + 123).value == 45
        at = made[1].address(2, segment, offset)  # maps by itself
        assert ctypes.c_uint8.from_address(at + 123).value == 45
        assert made[2].address(2, segment, offset) == far.ctypes.data
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off")
    with memories(2) as made:
        assert not any(memory.reads_across for memory in made)


def test_a_rank_that_makes_no_memory_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    create, texts = os.memfd_create, []

    def fails(name: str, flags: int = 0) -> int:
        if threading.current_thread().name == "rank 1":
            raise OSError(24, "too many open files")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", fails)

    def refused(comm: lc.Communicator) -> None:
        with pytest.raises(
            CommError, match=r"on its rank 1 no anonymous file can be made: .*too many"
        ) as caught:
            NodeMemory(comm.rank, exchange_over(comm))
        texts.append(str(caught.value))

    lc.run_loopback(3, refused, timeout_s=30.0)
    assert len(set(texts)) == 1
    assert len(texts) == 3


# ---- blocks that several ranks use


def test_nothing_is_left_behind_in_the_file_system(make: Maker) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    arena = make(8)
    arena.allocate(100 << 20)
    assert not Path("/dev/shm").exists() or set(os.listdir("/dev/shm")) - before == set()
