"""The engines that every kernel test runs through, and how large a test may be on each.

A module asks for them with `engine = engines.fixture()` at its top level: from then on all public calls on NumPy arrays
in its tests run through one engine after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from support import mode

from lowshard.kernels import engine as engine_module
from lowshard.kernels.engine import Engine
from lowshard.kernels.plain import PlainEngine

STREAMING = "numba past the caches"
LABELS = ("plain", "numba", STREAMING, "cuda on host")

# For properties of small arrays; conftest.py has loaded the profile that the rest comes from.
many = settings(max_examples=1000 if mode.full() else 40)

T = TypeVar("T")


@dataclass(frozen=True)
class TestedEngine:
    """An engine under test. The CUDA sources run on the host at some two million elements a second."""

    label: str
    engine: Engine

    @property
    def slow(self) -> bool:
        """Whether a default run gives it samples only."""
        return self.label == "cuda on host" and not mode.full()

    def pick(self, usual: T, few: T) -> T:
        """Return `usual`, or `few` where the engine is slow."""
        return few if self.slow else usual

    def rows(self, array: npt.NDArray[Any], few: int, name: str) -> npt.NDArray[np.intp]:
        """Return the indices of all rows, or, where the engine is slow, a sorted sample from the run's seed."""
        if not self.slow or len(array) <= few:
            return np.arange(len(array))
        return np.sort(mode.rng(name).choice(len(array), few, replace=False))


def fixture(labels: Sequence[str] = LABELS) -> Any:
    """Return the fixture that runs every test of a module once an engine; it gives a `TestedEngine`."""

    @pytest.fixture(scope="module", autouse=True, params=labels)
    def engine(request: pytest.FixtureRequest) -> Iterator[TestedEngine]:
        tested = started(request.param)
        with pytest.MonkeyPatch.context() as patch:
            # engine_for looks the name up in its own module.
            patch.setattr(engine_module, "host_engine", lambda: tested.engine)
            if tested.label == STREAMING:  # what large outputs alone would do otherwise
                patch.setattr(tested.engine, "stream_from_bytes", 0)
            yield tested

    return engine


def started(label: str) -> TestedEngine:
    """Return an engine by its label, or skip the test where what it needs is not here."""
    reason = _missing(label)
    if reason:
        pytest.skip(reason)
    return _started(label)


@cache
def _started(label: str) -> TestedEngine:
    if label == "plain":
        return TestedEngine(label, PlainEngine())
    # Looked up before: whatever fails from here on is an error, not a reason to skip.
    if label in ("numba", STREAMING):
        return TestedEngine(label, importlib.import_module("lowshard.kernels.cpu.cpu_engine").NumbaEngine())
    return TestedEngine(label, importlib.import_module("support.cuda_host").host_cuda_engine())


def _missing(label: str) -> str | None:
    if label in ("numba", STREAMING):
        for module in ("numba", "lowshard.kernels.cpu.cpu_engine"):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not there to be imported"
    if label == "cuda on host":
        if shutil.which("g++") is None:
            return "g++ is not on PATH"
        if importlib.util.find_spec("support.cuda_host") is None:
            return "tests/support/cuda_host.py, which runs the CUDA sources on the host, is not there"
    return None
