"""The C library's settings for ranks: kept memory has a bound, and the user's own settings stay."""

from __future__ import annotations

import pytest

from lowshard.errors import LaunchError
from lowshard.launch.allocator import allocator_environment

GIB = 1 << 30
KEEP = {"LOWSHARD_MALLOC": "keep"}


def kept_bytes(ranks: int, memory_bytes: int) -> int:
    settings = allocator_environment(KEEP, ranks, memory_bytes)["GLIBC_TUNABLES"].split(":")
    assert "glibc.malloc.mmap_max=0" in settings
    (kept,) = [s.split("=")[1] for s in settings if s.startswith("glibc.malloc.trim_threshold=")]
    return int(kept)


@pytest.mark.parametrize(
    ("ranks", "memory_bytes", "expected_bytes"),
    [(1, 2048 * GIB, GIB), (4, 32 * GIB, GIB), (8, 32 * GIB, GIB // 2), (64, 16 * GIB, 64 << 20)],
)
def test_all_ranks_together_keep_an_eighth_of_the_memory(
    ranks: int, memory_bytes: int, expected_bytes: int
) -> None:
    assert kept_bytes(ranks, memory_bytes) == expected_bytes


def test_the_machine_is_asked_for_its_memory() -> None:
    assert 64 << 20 <= int(allocator_environment(KEEP, 2)["GLIBC_TUNABLES"].rsplit("=", 1)[1]) <= GIB


@pytest.mark.parametrize(
    "own",
    [{"GLIBC_TUNABLES": "", **KEEP}, {"MALLOC_ARENA_MAX": "2", **KEEP}, {"LOWSHARD_MALLOC": "system"}, {}],
)
def test_what_the_user_has_set_stays(own: dict[str, str]) -> None:
    assert allocator_environment(own, 2) == {}


def test_another_word_is_refused() -> None:
    with pytest.raises(LaunchError, match="system or keep, got 'kept'"):
        allocator_environment({"LOWSHARD_MALLOC": "kept"}, 2)
