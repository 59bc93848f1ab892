"""Tests of the GPU path: on a GPU where there is one, else over a CuPy that checks how it is used.

What the checker reports of a test fails it; one that asks for a report takes it away by `checker.reset()`.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.checked_gpu import checked_gpu
from support.gpu import Answers, has_gpu

has_gpu()  # the truth, before there is a checker


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    """CuPy: the real one, or the checker, which is gone again for the tests elsewhere."""
    if has_gpu():
        yield pytest.importorskip("cupy")
        return
    if shutil.which("g++") is None:
        pytest.skip("g++, which builds the kernels for the host, is not on PATH")
    with checked_gpu() as checked:
        gc.freeze()  # what stays costs no test's collection anything
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_misused(cupy: Any) -> Iterator[None]:
    checker = getattr(cupy, "checker", SimpleNamespace(reset=list, reports=list))
    checker.reset()
    with np.errstate(all="ignore"):
        yield
    gc.collect()
    assert not checker.reports()


@pytest.fixture
def answers(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What CUDA answers; by default the truth."""
    return Answers(cupy, monkeypatch)
