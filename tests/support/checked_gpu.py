"""The GPU checker for tests: CuPy and NCCL without a GPU, in this process or in processes that a test starts."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from lowshard import foreign_array
from lowshard.kernels.cuda import cuda_changes, cuda_engine

CHECKER_PATH = Path(__file__).with_name("gpu_checker")  # on PYTHONPATH it makes the package cupy the checker
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
"""Environment of ranks that share the one GPU."""

_kept: dict[str, ModuleType] = {}


@contextmanager
def checked_gpu() -> Iterator[ModuleType]:
    """Have `import cupy` import the checker, of which a process has one; return it, with no reports and counts."""
    others = _take_modules()
    sys.modules.update(_kept)
    try:
        with patch.dict(os.environ, SHARED_GPU), patch.object(sys, "path", [str(CHECKER_PATH), *sys.path]):
            cupy = importlib.import_module("cupy")
            cupy.checker.reset()
            yield cupy
    finally:
        _kept.update(_take_modules())
        sys.modules.update(others)


def _take_modules() -> dict[str, ModuleType]:
    """Take CuPy away, and what lowshard keeps of its arrays and types."""
    for kept in (cuda_engine.device_engine, cuda_changes.device_search, foreign_array._way_to_see):
        kept.cache_clear()
    names = [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]
    return {name: sys.modules.pop(name) for name in names}


def checker_env(report: Path | str, counts: Path | str = "", **more: str) -> dict[str, str]:
    """Return what the environment of a process that is to use the checker has beside: see `cupy.checker`."""
    path = (str(CHECKER_PATH), str(CHECKER_PATH.parents[1]), os.environ.get("PYTHONPATH", ""))
    files = {"LOWSHARD_CHECKER_REPORT": str(report), "LOWSHARD_CHECKER_COUNTS": str(counts)}
    return {**SHARED_GPU, **files, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}
