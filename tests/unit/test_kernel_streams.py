"""`stream=` of the kernel calls: what is made current, and what tells two streams apart."""

from __future__ import annotations

import inspect
import sys
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused
from support.fake_cupy import StreamedCupy

from lowshard import kernels
from lowshard.errors import KernelError, StreamError
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8
from lowshard.kernels.cuda.cuda_module import CuPyLauncher
from lowshard.kernels.kernel_stream import Stream, takes_stream

CALLS = [name for name in kernels.__all__ if isinstance(getattr(kernels, name), FunctionType)]


class GPUArray:
    """What is asked of an array to find its GPU."""

    __module__ = "cupy"
    __cuda_array_interface__ = None

    def __init__(self, device: int) -> None:
        self.device = SimpleNamespace(id=device)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StreamedCupy:
    fake = StreamedCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_call_takes_a_stream_and_refuses_it_for_host_arrays(name: str) -> None:
    call = getattr(kernels, name)
    parameters = inspect.signature(call).parameters
    assert parameters["stream"].default is None
    assert parameters["stream"].kind is inspect.Parameter.KEYWORD_ONLY
    arrays = [np.zeros(32, np.float32)] * 2
    refused(lambda: call(*arrays, stream=7), KernelError, f"stream= of {name}", "none of these lies on a GPU")


def test_the_call_runs_with_the_stream_current_on_the_gpu_of_its_arrays(cupy: StreamedCupy) -> None:
    seen: list[Any] = []

    @takes_stream
    def call(x: Any, sources: Any = None, *, out: Any = None, stream: Stream = None) -> str:
        seen.append((stream, list(cupy.entered), cupy.device))
        return "result"

    on_host, on_gpu = np.zeros(2), GPUArray(3)
    q = MXFP8Tensor.__new__(MXFP8Tensor)
    object.__setattr__(q, "data", on_gpu)
    tiled = SwizzledMXFP8.__new__(SwizzledMXFP8)
    object.__setattr__(tiled, "data", on_gpu)
    for args, options in [
        ((on_gpu,), {}),
        ((q,), {}),
        ((tiled,), {}),
        ((on_host, [on_gpu]), {}),
        ((on_host,), {"out": on_gpu}),
    ]:
        cupy.entered.clear()
        assert call(*args, stream=0x40, **options) == "result"
        assert seen.pop() == (None, [(0x40, 3)], 3)
        assert cupy.entered == [(0x40, 3), "left"]
        assert cupy.device == 0
    assert call(on_gpu) == "result"
    assert seen.pop() == (None, [(0x40, 3), "left"], 0), "without a stream nothing is touched"
    refused(lambda: call(on_gpu, stream="x"), StreamError, "got str")
    refused(lambda: call(on_gpu, stream=cupy.cuda.Stream(0x50, 1)), StreamError, "on device 3", "to device 1")
    assert not seen


def test_the_default_streams_of_two_threads_are_two(cupy: StreamedCupy) -> None:
    launcher = CuPyLauncher(0)
    told: dict[int, list[Any]] = {}

    def look(address: int) -> None:
        cupy.address = address
        told.setdefault(address, []).append(launcher.current_stream)

    for address in (0x40, 1, 2):  # one that is made, the default one, and each thread's own default
        look(address)
        thread = threading.Thread(target=look, args=(address,))
        thread.start()
        thread.join()
    assert told[0x40] == [0x40] * 2
    assert told[1] == [1] * 2
    assert told[2][0] != told[2][1]
