"""The kernels on GPU arrays: the bytes of their plain twins, on any stream, without waiting and without allocating."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
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
from lowshard.kernels.buffer import address, address_range
from lowshard.kernels.cuda.cuda_engine import MOST_FOLDED
from lowshard.kernels.mxfp8 import FLOATS
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.reference import ELEMS
from lowshard.selftest import fold_cases
from lowshard.selftest.comparisons import Tally, difference
from lowshard.selftest.kernel_cases import FAMILIES, through

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BF16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
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


def on_gpu(array: Any) -> Any:
    """Return a copy on the GPU with the same strides, made by bytes: CuPy itself is not under test."""
    import cupy

    low, high = address_range(array)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    made = cupy.asarray(memory)
    cupy.cuda.get_current_stream().synchronize()  # the kernel under test may run on another one
    return cupy.ndarray(array.shape, array.dtype, made.data + (address(array) - low), array.strides)


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


def moved(value: Any) -> Any:
    """Return arguments with every array copied to the GPU."""
    if isinstance(value, np.ndarray):
        return on_gpu(value)
    if isinstance(value, MXFP8Tensor):
        return MXFP8Tensor(on_gpu(value.data), on_gpu(value.scale), value.elem)
    return [moved(item) for item in value] if isinstance(value, list) else value


def assert_as_plain(call: Callable[..., Any], *args: Any) -> None:
    """Make a call on the GPU and through the plain engine; every array it returns has the same bytes."""
    found = parts(call(*map(moved, args)))
    with through(PlainEngine()):
        expected = parts(call(*args))
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(on_host(a), on_host(b))


def floats(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], finite: bool = False) -> Any:
    """Return any bit patterns, or numbers of all sizes."""
    size = DTYPES[dtype].itemsize
    if not finite:
        bits = rng.integers(0, 1 << (8 * size), shape, np.uint32 if size == 4 else np.uint16)
        return bits.view(DTYPES[dtype])
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 5, shape)).astype(DTYPES[dtype])


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


def other_cases(rng: np.random.Generator, dtype: str, elem: Any) -> Iterator[tuple[Any, ...]]:
    """Yield calls and arguments that the selftest has not: other strides, scales that lie apart, many boxes."""
    yield partial(quantize_mxfp8, scale_layout="128x4"), floats(rng, dtype, (256, 1024), True), elem
    wide = floats(rng, dtype, (9, 20, 200), True)
    for view in (wide[:, ::2, 8:168], wide.transpose(1, 0, 2)[..., 1:193]):
        yield from ((quantize_mxfp8, view, elem, "rceil", None, lowest) for lowest in (0, 1, 254))
    q = MXFP8Tensor(
        rng.integers(0, 256, (100, 992), np.uint8), rng.integers(0, 256, (100, 31), np.uint8), elem
    )
    yield dequantize_mxfp8, q, dtype
    table, x = BoxTable(SHAPE, BOXES), floats(rng, dtype, SHAPE)
    for view in (np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2), x[:, ::-1]):
        yield pack, view, table
        yield pack_quantize, view, table, elem
    x = floats(rng, dtype, (57, 515))
    yield from ((cast, view, target) for view, target in product((x, x.T, x.reshape(-1)[:-3]), DTYPES))
    rows, columns = rng.integers(0, 64, 2_000).tolist(), rng.integers(0, 10, 2_000).tolist()
    many = [((r, r + 1), (32 * c, 32 * c + 32)) for r, c in zip(rows, columns, strict=True)]
    x = floats(rng, dtype, (64, 320), True)
    yield pack, x, BoxTable(x.shape, tuple(many))
    yield pack_quantize, x, BoxTable(x.shape, tuple(many))
    # Arrays that are copied first, by CuPy's kernels: they need the headers of a CUDA toolkit (cupy-cuda13x[ctk]).
    yield quantize_mxfp8, x[:, ::5], elem
    yield dequantize_mxfp8, MXFP8Tensor(q.data, np.asfortranarray(q.scale), q.elem), dtype
    yield sum_into, x.copy(), [np.asfortranarray(x)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("elem", ELEMS)
def test_bytes_are_those_of_the_host(dtype: str, elem: Any, stream: Any, rng: np.random.Generator) -> None:
    for call, *args in mode.sample([*other_cases(rng, dtype, elem)], 12, f"other cases {dtype} {elem}"):
        assert_as_plain(call, *args)


# ---- how it is called


def every_call(cupy: Any, rng: np.random.Generator) -> dict[str, Callable[..., Any]]:
    """Return each public call on GPU arrays, with buffers to write into."""
    table = BoxTable(SHAPE, BOXES)
    total, width = table.total_elems, SHAPE[-1]
    x = on_gpu(floats(rng, "bfloat16", SHAPE, True))
    back = cupy.empty(SHAPE, BF16)
    q = MXFP8Tensor(cupy.empty(SHAPE, np.uint8), cupy.empty((*SHAPE[:-1], width // 32), np.uint8))
    wire = MXFP8Tensor.over(cupy.empty(MXFP8Tensor.buffer_bytes((total,)), np.uint8), (total,))
    sources = [on_gpu(floats(rng, "float16", SHAPE, True)) for _ in range(9)]
    scale = on_gpu(rng.integers(0, 255, (300, 34), np.uint8))
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


def test_calls_run_on_the_stream_that_is_named_behind_what_is_ahead_and_wait_for_nothing(
    cupy: Any, rng: np.random.Generator
) -> None:
    stream, calls = cupy.cuda.Stream(non_blocking=True), every_call(cupy, rng)
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
def test_a_table_goes_up_once_a_stream_without_waiting_and_serves_several(
    kept: bool, cupy: Any, rng: np.random.Generator
) -> None:
    host = floats(rng, "float32", SHAPE)
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


def test_nothing_is_allocated_after_first_use(cupy: Any, rng: np.random.Generator) -> None:
    calls, sizes, allocate = every_call(cupy, rng), list[int](), cupy.cuda.get_allocator()
    for call in calls.values():
        call()
    with cupy.cuda.using_allocator(lambda size: (sizes.append(size), allocate(size))[1]):
        for call in calls.values():
            call()
    assert not sizes


def test_outputs_are_the_arrays_that_were_given_and_lie_in_one_place(
    cupy: Any, rng: np.random.Generator
) -> None:
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
