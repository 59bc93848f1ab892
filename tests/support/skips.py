"""What a run has skipped, in a few lines, by what was missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MISSING = {
    "a GPU with CuPy": r"CuPy|cupy|\bGPUs?\b|CUDA device|NCCL",
    "CUDA's compilers (nvcc, NVRTC, nvdisasm)": r"nvcc|NVRTC|nvdisasm",
    "a library that is not installed": r"is not installed|pip install|could not import",
    "the demo's weights, which `lowshard demo` fetches": r"not in the cache",
}


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each thing that tests wanted; what fits none has its reason as it is."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        text = reason.removeprefix("Skipped: ")
        counts[next((name for name, pattern in MISSING.items() if re.search(pattern, text)), text)] += 1
    return [f"skipped {number}: needs {what}" if what in MISSING else f"skipped {number}: {what}"
            for what, number in counts.most_common()]  # fmt: skip
