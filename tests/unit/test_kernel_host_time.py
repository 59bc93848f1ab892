"""What a kernel call on CuPy arrays costs the host before anything is launched; no GPU, but CuPy for its arrays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.cuda import cuda_engine as cuda_engine

LIMIT_US = 15.0
"""Of a quiet machine; a test run is none, so twice that is allowed here."""
CALLS, ROUNDS = 200, 15


class StillLauncher:
    """Counts launches and starts none."""

    multiprocessors, current_stream = 132, 7

    def __init__(self) -> None:
        self.launches = 0

    def to_device(self, words: Any) -> Any:
        return words

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        self.launches += 1


def host_us(call: Callable[[], object]) -> float:
    call()
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - begun) / CALLS * 1e6)
    return statistics.median(rounds)


def test_quantising_costs_the_host_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; its arrays are what is looked at")
    launcher = StillLauncher()
    engine = cuda_engine.CudaEngine(launcher)
    monkeypatch.setattr(cuda_engine, "device_engine", lambda device: engine)
    taken = 1 << 40  # addresses that nothing reads

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        nonlocal taken
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(taken, size_bytes, None, 0)
        taken += size_bytes
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    x, back = (array((4096, 8192), ml_dtypes.bfloat16) for _ in range(2))
    q = MXFP8Tensor(array((4096, 8192), np.uint8), array((4096, 256), np.uint8))
    tiled = SwizzledMXFP8(q.data, array((4096 * 256,), np.uint8))
    figures = {
        "quantize_mxfp8": host_us(lambda: quantize_mxfp8(x, out=q)),
        "quantize_mxfp8 into tiles": host_us(lambda: quantize_mxfp8(x, out=tiled, scale_layout="128x4")),
        "dequantize_mxfp8": host_us(lambda: dequantize_mxfp8(q, out=back)),
    }
    assert launcher.launches == len(figures) * (1 + CALLS * ROUNDS)
    print({name: round(us, 1) for name, us in figures.items()})
    assert max(figures.values()) <= 2 * LIMIT_US, figures
