"""The kernels on GPU arrays: the bytes of their plain twins, on any stream, without waiting and without allocating."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode
from support.comm_kit import refused
from support.gpu import busy, host_waits

from lowshard.comm.reduction import fold
from lowshard.errors import CommError, KernelError, StreamError
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    SwizzledMXFP8,
    cast,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    sum_into,
    swizzle_scales,
    unpack,
    unpack_dequantize,
    unswizzle_scales,
)
from lowshard.kernels.cuda.cuda_engine import MOST_FOLDED
from lowshard.selftest import fold_cases
from lowshard.selftest.arrays import ordinary, put
from lowshard.selftest.comparisons import Tally, difference
from lowshard.selftest.kernel_cases import FAMILIES

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (6, 50, 320)
BOXES = (
    ((0, 6), (0, 50), (32, 64)), ((1, 2), (3, 4), (0, 32)), ((2, 6), (5, 49), (64, 320)), ((0, 1), (7, 50), (64, 96)),
)  # fmt: skip


@pytest.fixture(params=["default stream", "another stream"])
def stream(request: pytest.FixtureRequest, cupy: Any) -> Iterator[Any]:
    """A stream that is current, and is waited for at the end."""
    made = cupy.cuda.Stream.null if request.param == "default stream" else cupy.cuda.Stream(non_blocking=True)
    with made:
        yield made
        made.synchronize()


def on_gpu(array: np.ndarray) -> Any:
    """Return a copy on the GPU, which is there: the kernel under test may run on another stream."""
    import cupy

    made = put(cupy, array)
    cupy.cuda.get_current_stream().synchronize()
    return made


def on_host(array: Any) -> Any:
    """Return the bytes of a contiguous array of either library."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).view(np.uint8)
    assert array.flags.c_contiguous
    return array.view(np.uint8).get()


def parts(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (MXFP8Tensor, SwizzledMXFP8)):
        return result.data, result.scale
    return result if isinstance(result, tuple) else (result,)


# ---- the same bytes


@pytest.mark.whole
@pytest.mark.parametrize("family", mode.sample(FAMILIES, 4, "families on a GPU"))
def test_a_family_of_kernels_has_the_bytes_of_its_plain_twins(family: Callable[[], Any], stream: Any) -> None:
    tally = Tally()
    for case in mode.sample([*family()], 40, f"cases of {family.__name__}"):
        case.check(on_gpu, tally)
    assert not tally.findings
    assert tally.checks > 10


@pytest.mark.parametrize("dtype", [row for row in fold_cases.DTYPES if not row.startswith("float8")])
def test_folds_have_the_bits_of_plain_numpy(dtype: str, cupy: Any) -> None:
    cases = [*fold_cases.fold_cases(dtype, (1, 2, 3, 8, 9, 33), 61)]
    for case in mode.sample(cases, 12, f"folds {dtype}"):
        terms, expected = [on_gpu(term) for term in case.terms], case.expected()
        found = cupy.empty(expected.shape, expected.dtype)
        fold(terms, found, case.op, case.order)
        how = difference(found, expected, any_nan=True)
        assert not how, f"{case.what}: {how}"
        fold(terms, terms[-1], case.op, case.order)  # in place
        assert not difference(terms[-1], expected, any_nan=True), case.what
    with pytest.raises(CommError, match=f"takes {MOST_FOLDED} operands, got {MOST_FOLDED + 1}"):
        fold([found] * (MOST_FOLDED + 1), found, "max")


# ---- how it is called


def every_call(cupy: Any) -> dict[str, Callable[..., Any]]:
    """Return each public call on GPU arrays, with buffers to write into."""
    table = BoxTable(SHAPE, BOXES)
    total, width = table.total_elems, SHAPE[-1]
    x = on_gpu(ordinary(SHAPE, "bfloat16", "x"))
    back = cupy.empty(SHAPE, BF16)
    q = MXFP8Tensor(cupy.empty(SHAPE, np.uint8), cupy.empty((*SHAPE[:-1], width // 32), np.uint8))
    wire = MXFP8Tensor.over(cupy.empty(MXFP8Tensor.buffer_bytes((total,)), np.uint8), (total,))
    sources = [on_gpu(ordinary(SHAPE, "float16", "x")) for _ in range(9)]
    scale = on_gpu(ordinary((300, 34), "uint8", "scale"))
    tiles, rows = cupy.empty(3 * 9 * 512, np.uint8), cupy.empty((300, 34), np.uint8)
    packed = cupy.empty(total, BF16)
    return {
        "quantize": partial(quantize_mxfp8, x, out=q),
        "dequantize": partial(dequantize_mxfp8, q, out=back),
        "pack": partial(pack, x, table, packed),
        "unpack": partial(unpack, packed, table, back),
        "pack_quantize": partial(pack_quantize, x, table, out=wire),
        "unpack_dequantize": partial(unpack_dequantize, wire, table, back),
        "cast": partial(cast, x, "float32", cupy.empty(SHAPE, np.float32)),
        "sum_into": partial(sum_into, on_gpu(np.zeros(SHAPE, np.float32)), sources, accumulate=False),
        "swizzle": partial(swizzle_scales, scale, tiles),
        "unswizzle": partial(unswizzle_scales, tiles, 300, 34, rows),
    }


def bytes_of(result: Any) -> list[bytes]:
    return [on_host(array).tobytes() for array in parts(result)]


def test_calls_run_on_the_stream_that_is_named_behind_what_is_ahead_and_wait_for_nothing(cupy: Any) -> None:
    stream, calls = cupy.cuda.Stream(non_blocking=True), every_call(cupy)
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
            with host_waits(cupy) as waits:
                result = call(stream=named)
            assert not over.done, f"{name} waited for what was ahead on its stream"
            assert not waits
            with stream:  # behind the call: on another stream the checker sees a race
                assert bytes_of(result) == expected
    x = on_gpu(np.ones((4, 64), np.float32))
    refused(lambda: quantize_mxfp8(x, stream="x"), StreamError, "got str")


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
            np.testing.assert_array_equal(on_host(out), on_host(pack(host, table)))


def test_nothing_is_allocated_after_first_use(cupy: Any) -> None:
    calls, sizes, allocate = every_call(cupy), list[int](), cupy.cuda.get_allocator()
    for call in calls.values():
        call()

    def noting(size: int) -> Any:
        sizes.append(size)
        return allocate(size)

    with cupy.cuda.using_allocator(noting):
        for call in calls.values():
            call()
    assert not sizes


def test_outputs_are_the_arrays_that_were_given_and_lie_in_one_place(cupy: Any) -> None:
    host = np.ones((4, 64), np.float32)
    x, on_cpu = on_gpu(host), quantize_mxfp8(host)
    q = quantize_mxfp8(x)
    assert isinstance(q.data, cupy.ndarray)
    assert quantize_mxfp8(x, out=q) is q
    back = cupy.empty((4, 64), BF16)
    assert dequantize_mxfp8(q, out=back) is back
    assert dequantize_mxfp8(q).dtype == BF16
    for call in (
        lambda: quantize_mxfp8(x, out=on_cpu), lambda: sum_into(x, [host]),
        lambda: dequantize_mxfp8(MXFP8Tensor(on_cpu.data, q.scale)),
    ):  # fmt: skip
        refused(call, KernelError, "one place")
