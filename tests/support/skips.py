"""What a run has skipped, in a few lines, by what was missing; and tests on GPUs, left out where there is none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

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


class WithoutGpu:
    """A plugin that leaves tests marked `gpu` out of a run where no GPU can be used, and says how many, and why."""

    def __init__(self) -> None:
        self._left, self._reason = 0, ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        from support.gpu import why_no_gpu

        left = [item for item in items if item.get_closest_marker("gpu")]
        reason = why_no_gpu() if left else None
        if reason is None:
            return
        self._left, self._reason = len(left), reason
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a process of pytest-xdist has left out; each of them collects everything."""
        self._left, self._reason = getattr(node, "workeroutput", {}).get("without_gpu", (0, ""))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["without_gpu"] = self._left, self._reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_line(f"left out {self._left} tests on GPUs: {self._reason}")
