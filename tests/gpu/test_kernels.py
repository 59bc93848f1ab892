"""The kernels on GPU arrays: the bytes of their plain twins, on any stream, without waiting and without allocating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode
from support.comm_kit import refused
from support.gpu import busy, host_waits

from lowshard import kernels as lk
from lowshard.errors import KernelError, StreamError
from lowshard.foreign_array import host_of
from lowshard.kernels import BoxTable, MXFP8Tensor, pack
from lowshard.selftest.arrays import ordinary, put
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.kernel_cases import FAMILIES

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (6, 50, 320)
BOXES = (((0, 6), (0, 50), (32, 64)), ((1, 2), (3, 4), (0, 32)), ((2, 6), (5, 49), (64, 320)))


def on_gpu(array: np.ndarray) -> Any:
    """Return a copy on the GPU, which is there: the kernel under test may run on another stream."""
    import cupy

    made = put(cupy, array)
    cupy.cuda.get_current_stream().synchronize()
    return made


@pytest.mark.whole
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("family", mode.sample(FAMILIES, 4, "families on a GPU"))
def test_a_family_of_kernels_has_the_bytes_of_its_plain_twins(family: Any, blocking: bool, cupy: Any) -> None:
    tally = Tally()
    with cupy.cuda.Stream.null if blocking else cupy.cuda.Stream(non_blocking=True) as stream:
        for case in mode.sample([*family()], 40, f"cases of {family.__name__}"):
            case.check(on_gpu, tally)
        stream.synchronize()
    assert not tally.findings
    assert tally.checks > 10


def every_call(cupy: Any) -> dict[str, Callable[..., Any]]:
    """Return each public call on GPU arrays, with buffers to write into."""
    table, empty, u8 = BoxTable(SHAPE, BOXES), cupy.empty, np.uint8
    total, x = table.total_elems, on_gpu(ordinary(SHAPE, "bfloat16", "x"))
    back, packed = empty(SHAPE, BF16), empty(total, BF16)
    q = MXFP8Tensor(empty(SHAPE, u8), empty((*SHAPE[:-1], SHAPE[-1] // 32), u8))
    wire = MXFP8Tensor.over(empty(MXFP8Tensor.buffer_bytes((total,)), u8), (total,))
    sources = [on_gpu(ordinary(SHAPE, "float16", "x")) for _ in range(9)]
    tiles, rows = empty(3 * 9 * 512, u8), empty((300, 34), u8)
    return {
        "quantize": partial(lk.quantize_mxfp8, x, out=q),
        "dequantize": partial(lk.dequantize_mxfp8, q, out=back),
        "pack": partial(pack, x, table, packed),
        "unpack": partial(lk.unpack, packed, table, back),
        "pack_quantize": partial(lk.pack_quantize, x, table, out=wire),
        "unpack_dequantize": partial(lk.unpack_dequantize, wire, table, back),
        "cast": partial(lk.cast, x, "float32", empty(SHAPE, np.float32)),
        "sum_into": partial(lk.sum_into, on_gpu(np.zeros(SHAPE, "f")), sources, accumulate=False),
        "swizzle": partial(lk.swizzle_scales, on_gpu(ordinary((300, 34), "uint8", "scale")), tiles),
        "unswizzle": partial(lk.unswizzle_scales, tiles, 300, 34, rows),
    }


def bytes_of(result: Any) -> list[bytes]:
    parts = (result.data, result.scale) if isinstance(result, MXFP8Tensor) else (result,)
    return [host_of(array).tobytes() for array in parts]


def test_calls_run_on_the_stream_that_is_named_and_neither_wait_nor_allocate(cupy: Any) -> None:
    stream, calls = cupy.cuda.Stream(non_blocking=True), every_call(cupy)
    sizes, allocate = list[int](), cupy.cuda.get_allocator()
    noting = lambda size: (sizes.append(size), allocate(size))[1]  # noqa: E731
    with stream:
        busy(cupy, 0.0)
    for call in calls.values():  # tables and sources go up
        call(stream=stream)
        stream.synchronize()
    for name, call in calls.items():
        expected = bytes_of(call())
        for named in (stream, stream.ptr):
            cupy.cuda.Device().synchronize()
            with stream:
                busy(cupy, 0.03)
                over = stream.record()
            with host_waits(cupy) as waits, cupy.cuda.using_allocator(noting):
                result = call(stream=named)
            assert not over.done, f"{name} waited for what was ahead on its stream"
            assert (waits, sizes) == ([], [])
            with stream:  # behind the call: on another stream the checker sees a race
                assert bytes_of(result) == expected
    refused(lambda: lk.quantize_mxfp8(on_gpu(np.ones((4, 64), "f")), stream="x"), StreamError, "got str")


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_goes_up_once_a_stream_without_waiting_and_serves_several(kept: bool, cupy: Any) -> None:
    host = ordinary(SHAPE, "float32", "x")
    x, table = on_gpu(host), BoxTable(SHAPE, BOXES)
    streams, found = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)], []
    for index, stream in enumerate(streams):
        with stream:
            out = cupy.empty(table.total_elems, np.float32)
            pack(x, list(BOXES), out)  # CuPy's pools have memory of this size from here on
            stream.synchronize()
            busy(cupy, 0.1 if index == 0 else 0.0)  # the first upload is late; nobody else may read it
            over = stream.record()
            # Bare boxes: a table a call, freed while kernels that read it still wait.
            found += [pack(x, table if kept else list(BOXES), out) for _ in range(3)]
            assert not over.done or index
    for index, out in reversed([*enumerate(found)]):
        with streams[index // 3]:
            assert bytes_of(out) == bytes_of(pack(host, table))


def test_arrays_of_a_call_lie_in_one_place() -> None:
    host = np.ones((4, 64), np.float32)
    x, q = on_gpu(host), lk.quantize_mxfp8(host)
    for call in (partial(lk.quantize_mxfp8, x, out=q), partial(lk.sum_into, x, [host])):
        refused(call, KernelError, "one place")
