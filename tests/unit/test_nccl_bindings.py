"""The binding to CuPy and NCCL: what is missing is named."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused
from support.fake_cupy import Cupy

from lowshard.comm.nccl_bindings import Binding, _lock
from lowshard.errors import DependencyError


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    refused(Binding.load, DependencyError, "CuPy", r"pip install 'lowshard\[cuda12\]'")
    refused(lambda: Binding.load(with_nccl=False), DependencyError, "CuPy")


def test_a_cupy_without_nccl_serves_staging_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Cupy(available=False)
    for name, module in (("cupy", fake), ("cupy.cuda", fake.cuda), ("cupy.cuda.nccl", fake.nccl)):
        monkeypatch.setitem(sys.modules, name, module)
    refused(Binding.load, DependencyError, "no NCCL library", "lowshard\\[cuda12\\]")
    assert Binding.load(with_nccl=False).nccl is None
    fake.nccl.available = True
    assert Binding.load().nccl is fake.nccl


def test_memory_that_cannot_be_locked_is_used_as_it_is() -> None:
    calls: list[tuple[Any, ...]] = []

    def register(*args: int) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise RuntimeError("cudaErrorNotSupported")

    memory = np.zeros(8192, np.uint8)
    runtime = SimpleNamespace(hostRegister=register, hostUnregister=lambda at: calls.append(("undone", at)))
    at = memory.ctypes.data
    _lock(runtime, memory)()
    assert calls == [(at, 8192, 0), ("undone", at)]
    _lock(runtime, memory)()
    assert len(calls) == 3
