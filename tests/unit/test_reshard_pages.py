"""Memory put into huge pages: content and addresses stay, half-used pages are left alone, and it can be turned off."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from lowshard import settings
from lowshard.transfer import huge_pages
from lowshard.transfer.huge_pages import settle

HUGE = huge_pages._huge_page_bytes()


def huge_bytes() -> int:
    """Return the private bytes of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


def small_pages(size_bytes: int) -> np.ndarray:
    """Return bytes in small pages, from a multiple of a huge page on."""
    whole = np.frombuffer(
        mmap.mmap(-1, size_bytes + 2 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    found = whole[-whole.ctypes.data % HUGE :][:size_bytes]
    advise(found, 15)  # no huge pages while they are first touched
    found[:] = np.arange(size_bytes) % 251
    advise(found, 14)
    return found


def advise(array: np.ndarray, advice: int) -> None:
    place, size_bytes = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    assert ctypes.CDLL(None).madvise(place, size_bytes, advice) == 0


def collapses() -> bool:
    return bool(HUGE) and settle([small_pages(HUGE)]) == HUGE


needs_collapse = pytest.mark.skipif(
    not collapses(), reason="this kernel joins no pages (before Linux 6.1, or forbidden)"
)


@needs_collapse
def test_arrays_that_fill_huge_pages_together_lie_in_them_afterwards() -> None:
    memory = small_pages(4 * HUGE)
    right = memory.copy()
    parts = [memory[i : i + HUGE // 4] for i in range(0, memory.size, HUGE // 4)]
    before, places = huge_bytes(), [p.ctypes.data for p in parts]
    assert settle(parts) == 4 * HUGE
    assert huge_bytes() - before == 4 * HUGE
    assert np.array_equal(memory, right)
    assert places == [p.ctypes.data for p in parts]
    assert settle(parts) == 4 * HUGE  # once more changes nothing


@needs_collapse
def test_pages_that_are_used_in_part_are_left_alone() -> None:
    memory = small_pages(3 * HUGE)
    assert settle([memory[HUGE // 2 : HUGE], memory[2 * HUGE : 2 * HUGE + HUGE // 2]]) == 0
    assert settle([memory[HUGE // 2 : 2 * HUGE]]) == HUGE


@needs_collapse
def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.HUGE_PAGES.name, "off")
    assert settle([small_pages(HUGE)]) == 0


@pytest.mark.parametrize("said", ["always madvise [never]", "", None])
def test_where_the_system_gives_none_nothing_is_asked(
    said: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if said is not None:
        (tmp_path / "enabled").write_text(said)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n" if said else "none\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    huge_pages._huge_page_bytes.cache_clear()
    try:
        assert settle([np.ones(8 << 20, np.uint8)]) == 0
    finally:
        huge_pages._huge_page_bytes.cache_clear()


def test_empty_arrays_are_nothing() -> None:
    assert settle([]) == settle([np.empty(0, np.uint8)]) == 0
