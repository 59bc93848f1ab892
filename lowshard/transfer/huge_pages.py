"""Puts existing memory into huge pages: madvise(2), MADV_COLLAPSE of Linux 6.1.

The kernel looks up every page of another process's memory that it copies: 4 KB pages take twice as long as huge ones,
and NumPy asks for huge ones only from 4 MiB an array on. Addresses and content stay, also while the memory is used.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lowshard.kernels.buffer import Array, address
from lowshard.settings import HUGE_PAGES

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_COLLAPSE = 25
_LEAST_SHARE = 0.9
"""Least used share of a huge page: the rest would be filled with zeros."""


def settle(arrays: Iterable[Array]) -> int:
    """Put host arrays into huge pages that they fill, alone or together; return the bytes of these."""
    page_bytes = _huge_page_bytes()
    if not page_bytes or HUGE_PAGES.choice() == "off":
        return 0
    used: Counter[int] = Counter()
    for array in arrays:
        first, last = address(array), address(array) + array.nbytes
        for page in range(first // page_bytes, -(-last // page_bytes)):
            used[page] += min(last, (page + 1) * page_bytes) - max(first, page * page_bytes)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    asked = [page for page, size_bytes in sorted(used.items()) if size_bytes >= _LEAST_SHARE * page_bytes]
    return page_bytes * sum(not madvise(page * page_bytes, page_bytes, _MADV_COLLAPSE) for page in asked)


@cache
def _huge_page_bytes() -> int:
    """Return the size of a huge page, or 0 where the system has none or gives none."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text(encoding="ascii"):
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
