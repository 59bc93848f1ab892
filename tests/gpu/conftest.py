"""The tests here are of the GPU path: on a GPU where there is one, else over a CuPy that checks how it is used.

What the checker reports of a test fails it: a race between streams, memory that is freed or not there, a broken rule of
NCCL's. A test that asks for a report takes it away by `cupy.checker.reset()`.
"""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.checked_gpu import checked_gpu
from support.gpu import Answers, why_no_gpu

why_no_gpu()  # the truth, before there is a checker


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    """CuPy: the real one, or the checker, which is gone again for the tests elsewhere."""
    if why_no_gpu() is None:
        import cupy

        yield cupy
        return
    if shutil.which("g++") is None:
        pytest.skip("g++, which builds the kernels for the host, is not on PATH")
    with checked_gpu() as checked:
        gc.freeze()  # what stays costs no test's collection anything
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_misused(cupy: Any) -> Iterator[None]:
    checker = getattr(cupy, "checker", None)
    if checker is not None:
        checker.reset()
    with np.errstate(all="ignore"):
        yield
    if checker is not None:
        gc.collect()
        assert not checker.reports()


@pytest.fixture
def answers(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What CUDA answers; by default the truth."""
    return Answers(cupy, monkeypatch)


@pytest.fixture
def two_gpus(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's runtime where there are two GPUs; the checker's are one, of which threads choose the number."""
    runtime = cupy.cuda.runtime
    if why_no_gpu() is not None:
        here = threading.local()
        monkeypatch.setattr(runtime, "getDevice", lambda: getattr(here, "number", 0))
        monkeypatch.setattr(runtime, "setDevice", lambda number: setattr(here, "number", number))
    elif int(runtime.getDeviceCount()) < 2:
        pytest.skip("this machine has one GPU; 2 are needed")
    yield runtime
    runtime.setDevice(0)
