"""The kernels on a GPU: the bytes of the host's, on any stream, without waiting and without allocating."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.host_kernels import DTYPES, ELEMS, MODES, parts

from lowshard.errors import KernelError
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
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
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.kernel_cases import FAMILIES, KernelCase


def why_unusable() -> str | None:
    """Return why no kernel can run on a GPU here, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None


def gpus() -> int:
    """Return the number of GPUs that CuPy can use."""
    if why_unusable() is not None:
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


REASON = why_unusable()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"no GPU can be used here: {REASON}"),
    pytest.mark.filterwarnings("ignore:Numba cannot be imported:RuntimeWarning"),  # the GPU does without it
]

BF16 = DTYPES["bfloat16"]
SHAPE = (6, 50, 320)
BOXES = (
    ((0, 6), (0, 50), (32, 64)),
    ((1, 2), (3, 4), (0, 32)),
    ((2, 6), (5, 49), (64, 320)),
    ((0, 1), (7, 50), (64, 96)),
)
# Spins for some tenths of a second, so that what follows it on a stream has to wait.
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
SPIN_CYCLES = 600_000_000


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


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


def moved(value: Any) -> Any:
    """Return arguments with every array copied to the GPU."""
    if isinstance(value, np.ndarray):
        return on_gpu(value)
    if isinstance(value, MXFP8Tensor):
        return MXFP8Tensor(on_gpu(value.data), on_gpu(value.scale), value.elem)
    return [moved(item) for item in value] if isinstance(value, list) else value


def assert_as_on_the_host(call: Callable[..., Any], *args: Any) -> None:
    """Make a call on the host and on the GPU; every array it returns has the same bytes."""
    there = [moved(arg) for arg in args]
    expected, found = parts(call(*args)), parts(call(*there))
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


def tensor(rng: np.random.Generator, shape: tuple[int, ...], elem: Any) -> MXFP8Tensor:
    blocks = (*shape[:-1], shape[-1] // 32)
    return MXFP8Tensor(rng.integers(0, 256, shape, np.uint8), rng.integers(0, 256, blocks, np.uint8), elem)


# ------------------------------------------------------------------------------------------ the same bytes
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_kernels_has_the_bytes_of_its_plain_twins(
    family: Callable[[], Iterator[KernelCase]], stream: Any
) -> None:
    tally = Tally()
    for case in family():
        case.check(on_gpu, tally)
    assert not tally.findings
    assert tally.checks > 10


def other_cases(rng: np.random.Generator, dtype: str, elem: Any) -> Iterator[tuple[Any, ...]]:
    """Yield calls and arguments that the selftest has not: much work, other strides, scales that lie apart."""
    for shape in ((1024, 1024), (4096, 4096)):
        x = floats(rng, dtype, shape, True)
        yield quantize_mxfp8, x, elem
        yield partial(quantize_mxfp8, scale_layout="128x4"), x, elem
    wide = floats(rng, dtype, (9, 20, 200), True)
    for view in (wide[:, ::2, 8:168], wide.transpose(1, 0, 2)[..., 1:193]):
        yield from ((quantize_mxfp8, view, elem, "rceil", None, lowest) for lowest in (0, 1, 254))
    yield dequantize_mxfp8, tensor(rng, (1000, 992), elem), dtype
    table, x = BoxTable(SHAPE, BOXES), floats(rng, dtype, SHAPE)
    for view in (np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2), x[:, ::-1]):
        yield pack, view, table
        yield pack_quantize, view, table, elem
    x = floats(rng, dtype, (257, 515))
    for view, target in product((x, x.T, x.reshape(-1)[:-3]), DTYPES):
        yield cast, view, target
    tiled = partial(quantize_mxfp8, scale_layout="128x4")
    yield lambda x: dequantize_mxfp8(tiled(x, elem), "float32"), floats(rng, dtype, (300, 1056))
    # Arrays that are copied first, by CuPy's kernels: they need the headers of a CUDA toolkit (cupy-cuda13x[ctk]).
    x, q = floats(rng, dtype, (6, 128), True), tensor(rng, (6, 128), elem)
    yield quantize_mxfp8, x[:, ::2], elem
    yield dequantize_mxfp8, MXFP8Tensor(q.data, np.asfortranarray(q.scale), q.elem), dtype
    yield sum_into, x.copy(), [np.asfortranarray(x)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elem", ELEMS)
def test_bytes_are_those_of_the_host(dtype: str, elem: Any, stream: Any, rng: np.random.Generator) -> None:
    for call, *args in other_cases(rng, dtype, elem):
        assert_as_on_the_host(call, *args)


@pytest.mark.parametrize("elem", ELEMS)
def test_every_bf16_pattern_as_block_maximum(elem: Any, stream: Any, rng: np.random.Generator) -> None:
    pattern = np.arange(1 << 16)[:, None]
    block = rng.integers(0, (pattern & 0x7FFF) + 1, (1 << 16, 32)) | rng.integers(0, 2, (1 << 16, 32)) << 15
    block[:, 5] = pattern[:, 0]
    x = block.astype(np.uint16).view(BF16)
    for scale_mode in MODES:
        assert_as_on_the_host(quantize_mxfp8, x, elem, scale_mode)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int64", "complex128"])
def test_any_widths_are_packed(dtype: str, stream: Any, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (7, 33, 61 * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    boxes = [((1, 5), (2, 31), (3, 60)), ((0, 7), (0, 33), (0, 1)), ((6, 7), (0, 33), (0, 61))]
    assert_as_on_the_host(pack, x, boxes)


def test_many_small_boxes(stream: Any, rng: np.random.Generator) -> None:
    x = floats(rng, "bfloat16", (512, 3200), True)
    rows, columns = rng.integers(0, 512, 20_000), rng.integers(0, 100, 20_000) * 32
    boxes = [((int(r), int(r) + 1), (int(c), int(c) + 32)) for r, c in zip(rows, columns, strict=True)]
    table = BoxTable(x.shape, tuple(boxes))
    assert_as_on_the_host(pack, x, table)
    assert_as_on_the_host(pack_quantize, x, table)


@pytest.mark.parametrize("shape", [(300, 33), (4096, 128)])
def test_swizzled_bytes(shape: tuple[int, int], stream: Any, rng: np.random.Generator) -> None:
    scale = rng.integers(0, 256, shape, np.uint8)
    tiles = swizzle_scales(scale)
    assert_as_on_the_host(swizzle_scales, np.asfortranarray(scale))
    assert_as_on_the_host(unswizzle_scales, tiles, *shape)
    assert_as_on_the_host(unswizzle_scales, np.repeat(tiles, 2)[::2], *shape)


# ------------------------------------------------------------------------------------- how it is called
def every_call(cupy: Any, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return each public call on GPU arrays, with buffers to write into."""
    table = BoxTable(SHAPE, BOXES)
    total = table.total_elems
    x = on_gpu(floats(rng, "bfloat16", SHAPE, True))
    back = cupy.empty(SHAPE, BF16)
    q = MXFP8Tensor(cupy.empty(SHAPE, np.uint8), cupy.empty((*SHAPE[:-1], SHAPE[-1] // 32), np.uint8))
    packed = cupy.empty(total, BF16)
    wire = MXFP8Tensor.over(cupy.empty(MXFP8Tensor.buffer_bytes((total,)), np.uint8), (total,))
    wide = cupy.empty(SHAPE, np.float32)
    sources = [on_gpu(floats(rng, "float16", SHAPE, True)) for _ in range(9)]
    total_of = on_gpu(np.zeros(SHAPE, np.float32))
    scale = on_gpu(rng.integers(0, 255, (300, 34), np.uint8))
    tiles, rows = cupy.empty(3 * 9 * 512, np.uint8), cupy.empty((300, 34), np.uint8)
    return {
        "quantize": partial(quantize_mxfp8, x, out=q),
        "dequantize": partial(dequantize_mxfp8, q, out=back),
        "pack": partial(pack, x, table, packed),
        "unpack": partial(unpack, packed, table, back),
        "pack_quantize": partial(pack_quantize, x, table, out=wire),
        "unpack_dequantize": partial(unpack_dequantize, wire, table, back),
        "cast": partial(cast, x, "float32", wide),
        "sum_into": partial(sum_into, total_of, sources, accumulate=False),
        "swizzle": partial(swizzle_scales, scale, tiles),
        "unswizzle": partial(unswizzle_scales, tiles, 300, 34, rows),
    }


def bytes_of(result: Any) -> list[Any]:
    return [on_host(array) for array in parts(result)]


def test_calls_return_while_the_stream_is_busy_and_run_after_what_is_ahead(
    cupy: Any, rng: np.random.Generator
) -> None:
    spin = cupy.RawKernel(SPIN, "spin")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls = every_call(cupy, rng)
        expected = {name: bytes_of(call()) for name, call in calls.items()}
        stream.synchronize()
        for name, call in calls.items():
            spin((1,), (1,), (SPIN_CYCLES,))
            over = stream.record()
            result = call()
            assert not over.done, f"{name} waited for what was ahead on its stream"
            stream.synchronize()
            for a, b in zip(bytes_of(result), expected[name], strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_call_runs_on_the_stream_that_is_named(cupy: Any, rng: np.random.Generator) -> None:
    spin = cupy.RawKernel(SPIN, "spin")
    calls = every_call(cupy, rng)
    stream = cupy.cuda.Stream(non_blocking=True)

    def clear(call: Callable[[], Any]) -> None:
        for array in parts(call()):
            array.view(np.uint8).fill(0)

    for name, call in calls.items():
        clear(call)
        expected = bytes_of(call())
        for named in (stream, stream.ptr):
            clear(call)
            cupy.cuda.Device().synchronize()
            with stream:
                spin((1,), (1,), (SPIN_CYCLES,))
            result = call(stream=named)
            early = [
                array.tobytes() for array in bytes_of(result)
            ]  # over the default stream, which waits for nothing
            assert not stream.done, f"{name} waited for what was ahead on the stream"
            stream.synchronize()
            late = [array.tobytes() for array in bytes_of(result)]
            assert late == [array.tobytes() for array in expected]
            assert early != late, f"{name} ran on another stream"


def test_a_new_table_goes_up_without_waiting(cupy: Any, rng: np.random.Generator) -> None:
    spin = cupy.RawKernel(SPIN, "spin")
    host = floats(rng, "float32", SHAPE)
    x = on_gpu(host)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.empty(BoxTable(SHAPE, BOXES).total_elems, np.float32)
        pack(x, list(BOXES), out)  # CuPy's pools have memory of this size from here on
        stream.synchronize()
        spin((1,), (1,), (SPIN_CYCLES,))
        over = stream.record()
        for _ in range(3):  # bare boxes: a table a call, freed while kernels that read it still wait
            pack(x, list(BOXES), out)
        assert not over.done
        stream.synchronize()
        np.testing.assert_array_equal(on_host(out), on_host(pack(host, list(BOXES))))


def test_a_table_serves_several_streams(cupy: Any, rng: np.random.Generator) -> None:
    spin = cupy.RawKernel(SPIN, "spin")
    table = BoxTable(SHAPE, BOXES)
    host = floats(rng, "float32", SHAPE)
    x = on_gpu(host)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    found = []
    cupy.cuda.Device().synchronize()
    for index, stream in enumerate(streams):
        with stream:
            if index == 0:
                spin((1,), (1,), (SPIN_CYCLES,))  # the first upload is late; nobody else may read it
            found.append(pack(x, table))
    for stream, out in zip(reversed(streams), reversed(found), strict=True):
        stream.synchronize()
        np.testing.assert_array_equal(on_host(out), on_host(pack(host, table)))


def test_nothing_is_allocated_after_first_use(cupy: Any, rng: np.random.Generator) -> None:
    class Count(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "count"

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def alloc_preprocess(self, **given: Any) -> None:
            self.sizes.append(given["mem_size"])

        def malloc_preprocess(self, **given: Any) -> None:
            self.sizes.append(given["mem_size"])

    calls = every_call(cupy, rng)
    for call in calls.values():
        call()
    with Count() as count:
        for call in calls.values():
            call()
    assert count.sizes == []


def test_outputs_are_the_arrays_that_were_given(cupy: Any, rng: np.random.Generator) -> None:
    x = on_gpu(floats(rng, "bfloat16", (4, 64), True))
    q = quantize_mxfp8(x)
    assert isinstance(q.data, cupy.ndarray)
    assert quantize_mxfp8(x, out=q) is q
    back = cupy.empty((4, 64), BF16)
    assert dequantize_mxfp8(q, out=back) is back
    assert back.dtype == BF16
    assert dequantize_mxfp8(q).dtype == BF16


def test_host_and_device_arrays_do_not_mix(cupy: Any) -> None:
    x = np.ones((4, 64), np.float32)
    there = on_gpu(x)
    q = quantize_mxfp8(x)
    with pytest.raises(KernelError, match="one place"):
        quantize_mxfp8(there, out=q)
    with pytest.raises(KernelError, match="one place"):
        sum_into(there, [x])
    with pytest.raises(KernelError, match="one place"):
        dequantize_mxfp8(MXFP8Tensor(q.data, cupy.asarray(q.scale)))


NEEDED_GIB = 44
"""Two rows of 2^31 elements in bf16, their codes, what they give again, and what lies beside these for a time."""


def test_offsets_and_totals_beyond_32_bits(cupy: Any, rng: np.random.Generator) -> None:
    width = (1 << 31) + 4096
    free_bytes = int(cupy.cuda.runtime.memGetInfo()[0]) if REASON is None else 0
    if free_bytes < NEEDED_GIB << 30:
        pytest.skip(f"{free_bytes >> 30} GiB of GPU memory are free; {NEEDED_GIB} are needed")
    host = floats(rng, "bfloat16", (2, 4096), True)
    expected = quantize_mxfp8(host)
    x = cupy.zeros((2, width), np.uint16).view(BF16)
    ends = [((0, 2), (width - 4096, width))]
    unpack(on_gpu(host.reshape(-1)), ends, x)
    found = pack_quantize(x, ends)
    np.testing.assert_array_equal(on_host(found.data), on_host(expected.data).reshape(-1))
    q = quantize_mxfp8(x)  # one run of more than 2^32 elements
    assert not on_host(q.data[0, : 1 << 20]).any()
    np.testing.assert_array_equal(on_host(pack(q.data, ends)), on_host(expected.data).reshape(-1))
    scales = [((0, 2), ((width - 4096) // 32, width // 32))]
    np.testing.assert_array_equal(on_host(pack(q.scale, scales)), on_host(expected.scale).reshape(-1))
    back = dequantize_mxfp8(q)
    np.testing.assert_array_equal(on_host(pack(back, ends)), on_host(dequantize_mxfp8(expected)).reshape(-1))


@pytest.mark.skipif(gpus() < 2, reason=f"this machine has {gpus()} GPU(s) that CuPy can use; 2 are needed")
def test_arrays_of_another_gpu_than_the_current_one(cupy: Any, rng: np.random.Generator) -> None:
    host = floats(rng, "float32", (8, 64), True)
    with cupy.cuda.Device(1):
        x, out = on_gpu(host), MXFP8Tensor(cupy.empty((8, 64), np.uint8), cupy.empty((8, 2), np.uint8))
        cupy.cuda.Device().synchronize()
    with cupy.cuda.Device(0):
        quantize_mxfp8(x, out=out)
        with pytest.raises(KernelError, match="one place"):
            quantize_mxfp8(on_gpu(host), out=out)
    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        np.testing.assert_array_equal(on_host(out.data), on_host(quantize_mxfp8(host).data))
