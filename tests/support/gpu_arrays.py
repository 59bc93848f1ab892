"""CuPy's arrays without a GPU: NumPy memory that Python code reaches as it reaches a GPU's, and no other way.

Kernels are the CUDA sources compiled for the host (`cuda_host`), streams and page-locked memory those of
`device_stand_in`. What CuPy refuses, as NumPy arrays in the place of its own, is refused.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cuda_host import host_cuda_engine
from support.nccl_stand_in import Host

from lowshard.comm.nccl_bindings import Binding
from lowshard.kernels.cuda import cuda_changes, cuda_engine

_SAME = ("shape", "dtype", "strides", "size", "nbytes", "ndim", "flags", "ctypes", "itemsize")


class ndarray:
    """An array on the GPU of the stand-in."""

    __cuda_array_interface__: Any = None

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        if name in _SAME:
            return getattr(self._memory, name)
        raise AttributeError(f"the stand-in for CuPy's arrays has no {name}")

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._memory.ctypes.data)

    @property
    def device(self) -> Any:
        return _Device()

    def get(self) -> np.ndarray:
        return self._memory.copy()

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._memory.reshape(*shape))

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self._memory.view(dtype))

    def copy(self) -> ndarray:
        return ndarray(self._memory.copy())

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray(self._memory[_inside(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._memory[_inside(key)] = _own(value)

    def __floordiv__(self, other: Any) -> ndarray:
        return ndarray(self._memory // other)


ndarray.__module__ = "cupy"


class _Device:
    id = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def _own(value: Any) -> Any:
    """Return the memory of an array of the GPU; refuse one of the host."""
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    return value._memory if isinstance(value, ndarray) else value


def _inside(key: Any) -> Any:
    return tuple(map(_own, key)) if isinstance(key, tuple) else _own(key)


class _Unwrapping:
    """An engine of host builds, given arrays of the stand-in."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return lambda *args, **options: found(*map(_memory_of, args), **options)


def _memory_of(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._memory
    assert not isinstance(value, np.ndarray), "a kernel of the GPU is given memory of the host"
    return value


def _module() -> ModuleType:
    cupy = ModuleType("cupy")
    made: dict[str, Any] = {
        "ndarray": ndarray,
        "empty": _empty,
        "asarray": lambda a: a if isinstance(a, ndarray) else ndarray(np.array(a)),
    }  # fmt: skip
    cupy.__dict__.update(made)
    return cupy


def _empty(shape: Any, dtype: Any) -> ndarray:
    memory = np.empty(shape, dtype)
    memory.reshape(-1).view(np.uint8).fill(0xA5)
    return ndarray(memory)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Host]:
    """Have CuPy be the stand-in for a test; return it and the device."""
    cupy, host, engine = _module(), Host(), _Unwrapping(host_cuda_engine())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Binding, "load", lambda *args, **options: host.binding(with_nccl=False))
    monkeypatch.setattr(cuda_engine, "device_engine", lambda device: engine)
    monkeypatch.setattr(cuda_changes, "device_search", lambda device: cuda_changes.DeviceSearch(engine, cupy))  # type: ignore[arg-type]
    return cupy, host
