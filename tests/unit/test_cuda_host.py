"""The CUDA sources, run on the host, give the bytes of the plain engine: same files and launches, no GPU."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from support import mode
from support.cuda_host import HostCudaEngine, HostFault, host_cuda_engine, host_library
from support.host_kernels import (
    DTYPES,
    ELEMS,
    WAYS,
    any_dtype,
    any_elem,
    any_mode,
    assert_as_plain,
    assert_same,
    at_offset,
    blocks,
    engine_that_runs,
    floats,
    needs_compiler,
    parts,
    strided,
    through,
)

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
from lowshard.kernels import engine as engine_module
from lowshard.kernels.cuda import cuda_engine as cuda_engine
from lowshard.kernels.cuda import cuda_table as cuda_table
from lowshard.kernels.cuda.cuda_module import SOURCES, source
from lowshard.kernels.mxfp8 import quantize_into_tiles
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.runs import RunTable
from lowshard.selftest.arrays import bits

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test expects, and what it prepares, comes from the plain engine."""
    plain = PlainEngine()
    monkeypatch.setattr(engine_module, "host_engine", lambda: plain)


@pytest.fixture(scope="module")
def engine() -> HostCudaEngine:
    return host_cuda_engine()


@pytest.fixture(scope="module", params=WAYS)
def any_engine(request: pytest.FixtureRequest) -> HostCudaEngine:
    return engine_that_runs(request.param)


# ------------------------------------------------------------------------------------------------ the build
def test_the_sources_compile_without_a_warning() -> None:
    assert host_library()[1] == ""


def test_a_source_handed_to_the_compiler_includes_no_file() -> None:
    for name in SOURCES:
        assert not re.search(r"^\s*#\s*(include|pragma once)", source(name), re.MULTILINE)
        assert "typedef unsigned int u32;" in source(name)


def test_the_engine_can_be_imported_without_cupy_and_numba() -> None:
    code = (
        "import sys; sys.modules['cupy'] = sys.modules['numba'] = None\n"
        "import lowshard.kernels, lowshard.kernels.cuda.cuda_engine, lowshard.kernels.cuda.cuda_module\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_misaligned_an_outside_and_a_wrong_access_are_found(engine: HostCudaEngine) -> None:
    words = np.zeros(64, np.int64)
    base, name = words.ctypes.data, "sum_bf16_bf16_8"
    with pytest.raises(HostFault, match="no multiple"):
        engine.launcher.launch(name, 1, 256, (base + 8, 8, 0, 1, 0, base + 8, *[0] * 8))
    engine.launcher.ranges = [(base, base + 32)]
    try:
        with pytest.raises(HostFault, match="outside"):
            engine.launcher.launch(name, 1, 256, (base, 24, 0, 1, 0, base, *[0] * 8))
    finally:
        engine.launcher.ranges = None
    with pytest.raises(HostFault, match="no kernel takes"):
        engine.launcher.launch(name, 1, 256, (base,))
    out = np.ones(4, np.float32)
    with through(engine):  # and the fibers are whole again
        assert sum_into(out, [np.ones(4, np.float32)]).tolist() == [2, 2, 2, 2]


# ------------------------------------------------------------------------------------------------ quantise
@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def every_pattern(request: pytest.FixtureRequest) -> Any:
    """Blocks in which each 16-bit pattern is the largest once, and is an element under many scales."""
    rng = mode.rng(f"every {request.param}")
    pattern = np.arange(1 << 16)[:, None]
    below = rng.integers(0, (pattern & 0x7FFF) + 1, (1 << 16, 32)) | rng.integers(0, 2, (1 << 16, 32)) << 15
    near = np.maximum((pattern & 0x7FFF) - rng.integers(0, 0x600, (1 << 16, 32)), 0)
    block = np.where(rng.random((1 << 16, 1)) < 0.5, below, near | below & 0x8000)
    block[np.arange(1 << 16), rng.integers(0, 32, 1 << 16)] = pattern[:, 0]
    return floats(np.concatenate([block, rng.permutation(1 << 16).reshape(-1, 32)]), request.param)


@any_elem
@any_mode
def test_every_16_bit_pattern_as_element_and_as_block_maximum(
    every_pattern: Any, elem: Any, scale_mode: Any, engine: HostCudaEngine
) -> None:
    assert_as_plain(engine, quantize_mxfp8, every_pattern, elem, scale_mode)
    assert engine.launcher.launches[-1][0].endswith(f"{elem}_linear")


@any_dtype
@any_elem
@any_mode
def test_blocks_of_every_scale(
    dtype: str, elem: Any, scale_mode: Any, any_engine: HostCudaEngine, rng: np.random.Generator, full: bool
) -> None:
    x = blocks(rng, dtype, 300_000 if full else 8_000)
    # Warps go another way where one of their 32 blocks is special: so both among each other and sorted.
    largest = (bits(x) << 1).max(axis=1)
    for order in (slice(None), np.argsort(largest)):
        assert_as_plain(any_engine, quantize_mxfp8, x[order], elem, scale_mode)


@any_dtype
@any_elem
def test_every_lowest_scale_byte(
    dtype: str, elem: Any, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    edges = [0, 1, 2, 16, 17, 18, 19, 126, 127, 128, 240, 247, 248, 252, 253, 254]
    for lowest in edges if mode.full() else [254, 253, *rng.choice(edges, 3)]:
        x = blocks(rng, dtype, 1_000)
        assert_as_plain(any_engine, quantize_mxfp8, x, elem, "rceil", None, int(lowest))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 31, 32, 33, 255, 256, 257])
@any_dtype
def test_any_number_of_blocks_leaves_what_lies_behind(
    count: int, dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    x = blocks(rng, dtype, count)

    def call() -> Any:
        space = np.full((count + 1) * 33, 0xA5, np.uint8)
        data, scale = space[: count * 32].reshape(count, 32), space[(count + 1) * 32 :][:count]
        quantize_mxfp8(x, out=MXFP8Tensor(data, scale.reshape(count, 1)))
        return space

    assert_as_plain(any_engine, call)


@any_dtype
def test_quantised_arrays_may_lie_backwards(
    dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    x = blocks(rng, dtype, 3 * 5 * 40).reshape(3, 5, 1280)

    def call() -> Any:
        data, scale = np.zeros((3, 5, 1280), np.uint8), np.zeros((3, 5, 40), np.uint8)
        q = quantize_mxfp8(x, out=MXFP8Tensor(data[::-1, ::-1], scale[::-1, ::-1]))
        return data, scale, dequantize_mxfp8(q, dtype)

    assert_as_plain(any_engine, call)


# ---------------------------------------------------------------------------------------------- dequantise
@any_dtype
@any_elem
def test_blocks_of_one_code_under_every_scale(dtype: str, elem: Any, any_engine: HostCudaEngine) -> None:
    # One code a block, and zeros: a warp goes another way where a code is special. The selftest has them side by side.
    code = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    alone = np.repeat(code[:, :, None], 32, axis=2).reshape(256, -1)
    zeros = code & 0x80
    for data in (alone, zeros):
        scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], data.shape[1] // 32, axis=1)
        q = MXFP8Tensor(data, scale, elem)
        assert_as_plain(any_engine, dequantize_mxfp8, q, dtype)


# --------------------------------------------------------------------------------------------------- boxes
def random_boxes(rng: np.random.Generator, shape: tuple[int, ...], count: int, block: int) -> list[Any]:
    """Return boxes at multiples of `block` in the last dim, empty ones among them."""
    grid = (*shape[:-1], shape[-1] // block)
    boxes = []
    for _ in range(count):
        cut = [sorted(int(i) for i in rng.integers(0, n + 1, 2)) for n in grid]
        cut[-1] = [block * i for i in cut[-1]]
        boxes.append(tuple((a, b) for a, b in cut))
    return boxes


def disjoint_boxes(rng: np.random.Generator, shape: tuple[int, ...], block: int) -> list[Any]:
    """Return a grid of boxes with random edges, in random order, some left out."""
    edges = []
    for dim, n in enumerate(shape):
        step = block if dim == len(shape) - 1 else 1
        inner = np.unique(rng.integers(0, n // step + 1, 3)) * step
        edges.append(np.unique([0, *inner.tolist(), n]))
    counts = [len(e) - 1 for e in edges]
    chosen = [i for i in np.ndindex(*counts) if rng.random() < 0.7]
    rng.shuffle(chosen)
    return [tuple((int(e[i]), int(e[i + 1])) for e, i in zip(edges, index, strict=True)) for index in chosen]


@any_dtype
@pytest.mark.parametrize("outer", [1, 2, 3, 4])
def test_strided_boxes_in_one_launch(
    dtype: str, outer: int, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    shape = ((9, 160), (6, 5, 128), (4, 5, 3, 128), (3, 4, 3, 4, 96))[outer - 1]
    rounds = 6 if mode.full() else 2
    for elem in ELEMS * rounds:
        x = strided(rng, blocks(rng, dtype, int(np.prod(shape)) // 32).reshape(shape))
        whole = tuple((0, n) for n in shape[:-1])
        boxes = [*random_boxes(rng, shape, 40, 32), (*whole, (32, 64))]
        before = len(any_engine.launcher.launches)
        q = assert_as_plain(any_engine, pack_quantize, x, boxes, elem)
        if q.data.size:
            assert len(any_engine.launcher.launches) == before + 1

        table = BoxTable(shape, disjoint_boxes(rng, shape, 32))
        packed = pack_quantize(x, table, elem)

        def into_boxes(packed: Any, table: BoxTable) -> Any:
            target = strided(np.random.default_rng(1), np.zeros(shape, DTYPES[dtype]))
            return unpack_dequantize(packed, table, target)

        assert_as_plain(any_engine, into_boxes, packed, table)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "complex128", "S3", "S24"])
@pytest.mark.parametrize("outer", [1, 2, 3, 4])
def test_strided_boxes_are_copied_in_one_launch(
    dtype: str, outer: int, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    shape = ((31, 150), (6, 7, 67), (4, 5, 3, 64), (3, 4, 3, 4, 33))[outer - 1]
    kind = np.dtype(dtype) if dtype[0] != "S" else np.dtype((np.void, int(dtype[1:])))
    for _ in range(4 if mode.full() else 1):
        content = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
        array = strided(rng, content.view(kind).reshape(shape))
        boxes = random_boxes(rng, shape, 40, 1)
        before = len(any_engine.launcher.launches)
        assert_as_plain(any_engine, pack, array, boxes)
        assert len(any_engine.launcher.launches) == before + 1
        table = BoxTable(shape, disjoint_boxes(rng, shape, 1))
        packed = pack(array, table)

        def into_boxes(packed: Any, table: BoxTable) -> Any:
            return unpack(packed, table, strided(np.random.default_rng(1), np.zeros(shape, kind)))

        assert_as_plain(any_engine, into_boxes, packed, table)


def test_thousands_of_boxes_and_a_large_one(any_engine: HostCudaEngine, rng: np.random.Generator) -> None:
    x = blocks(rng, "bfloat16", 6_000).reshape(60, 3200)
    rows, columns = rng.integers(0, 60, 5_000), rng.integers(0, 100, 5_000) * 32
    boxes = [((int(r), int(r) + 1), (int(c), int(c) + 32)) for r, c in zip(rows, columns, strict=True)]
    boxes.insert(2_500, ((0, 60), (32, 3200)))
    assert_as_plain(any_engine, pack_quantize, x, boxes)
    assert_as_plain(any_engine, pack, x, boxes)


def test_boxes_too_large_for_31_bits_are_cut(
    engine: HostCudaEngine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = blocks(rng, "float16", 960).reshape(8, 6, 5, 128)
    boxes = [
        ((0, 8), (1, 6), (0, 4), (32, 128)),
        ((3, 4), (0, 6), (1, 2), (0, 128)),
        ((0, 8), (0, 6), (0, 5), (0, 128)),
    ]
    runs = BoxTable(x.shape, tuple(boxes)).runs(x.strides, 2, 1, 1, False)
    for most in (1, 2, 3, 7, 50):
        monkeypatch.setattr(cuda_table, "MAX_BOX_UNITS", most)
        units = cuda_table.unit_table(runs, 32)
        assert units.boxes >= runs.total_elems // 32 / most
        assert units.units == runs.total_elems // 32
        assert_as_plain(engine, lambda: (pack(x, boxes), *parts(pack_quantize(x, boxes))))


def test_the_divisors_divide_exactly(rng: np.random.Generator) -> None:
    divisors = np.unique([*range(1, 70), *(2**k + d for k in range(2, 31) for d in (-1, 0, 1)), 2**31 - 1])
    words = np.zeros((len(divisors), 4), np.uint32)
    cuda_table._set_divisor(words, divisors.astype(np.int64))
    for divisor, (_, magic, shift, _) in zip(divisors.tolist(), words.tolist(), strict=True):
        near = divisor * np.append(rng.integers(0, 2**31 // divisor + 1, 500), 2**31 // divisor)
        n = np.concatenate([near, near - 1, near + divisor - 1, rng.integers(0, 2**31, 500), [2**31 - 1]])
        n = n[(n >= 0) & (n < 2**31)].astype(np.uint64)
        quotient = ((2 * n * np.uint64(magic)) >> np.uint64(32)) >> np.uint64(shift)
        np.testing.assert_array_equal(quotient, n // np.uint64(divisor))


def reserved(count: int, dtype: Any) -> Any:
    """Return an array of address space that costs memory only where it is touched."""
    dtype = np.dtype(dtype)
    if sys.platform != "linux":
        pytest.skip(f"{sys.platform}: address space without memory is asked for as Linux does")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return np.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), np.uint8).view(dtype)


def test_offsets_beyond_32_bits(engine: HostCudaEngine, rng: np.random.Generator) -> None:
    rows, width = 5, 1 << 30
    x = reserved(rows * width, np.uint16).reshape(rows, width)  # 10 GiB of addresses
    boxes = [((0, 5), (width - 64, width)), ((4, 5), (width - 96, width)), ((1, 4), (0, 32))]
    for (r0, r1), (c0, c1) in boxes:
        x[r0:r1, c0:c1] = rng.integers(0, 1 << 16, (r1 - r0, c1 - c0), np.uint16)
    bf16 = x.view(DTYPES["bfloat16"])
    assert_as_plain(engine, pack, x, boxes)
    assert_as_plain(engine, pack_quantize, bf16, boxes)
    assert_as_plain(engine, cast, bf16[:, width - 64 :], "float32")
    packed = pack(x, boxes)
    expected = x[:, width - 64 :].copy()
    x[:, width - 64 :] = 0
    with through(engine):
        unpack(packed[: 5 * 64], boxes[:1], x)
    np.testing.assert_array_equal(x[:, width - 64 :], expected)


def test_totals_beyond_32_bits(rng: np.random.Generator) -> None:
    engine = host_cuda_engine(multiprocessors=10**9)
    launcher = engine.launcher
    elems = (1 << 32) + 8192 + 96
    x = reserved(elems, DTYPES["bfloat16"])
    data, scale = reserved(elems, np.uint8), reserved(elems // 32, np.uint8)
    tail = slice(elems - 8192 - 96, None)
    x[tail] = blocks(rng, "bfloat16", 259).reshape(-1)
    expected = quantize_mxfp8(x[tail])
    ctas = -(-elems // 8192)
    with through(engine):
        launcher.only_ctas = (ctas - 2, ctas)
        quantize_mxfp8(x, out=MXFP8Tensor(data, scale))
        assert launcher.launches[-1] == ("quantize_bf16_e4m3_linear", ctas)
        back = reserved(elems, DTYPES["bfloat16"])
        dequantize_mxfp8(MXFP8Tensor(data, scale), out=back)
    assert_same((data[tail], scale[-259:]), (expected.data, expected.scale))
    assert_same(back[tail], dequantize_mxfp8(expected))

    # A box of 2^33 units of which only the addresses repeat, and one behind it that is looked at.
    src, dst = rng.integers(0, 256, 4096, np.uint8), np.zeros(4096, np.uint8)
    columns = np.array(
        [[0, 1024], [0, 1024], [1, 3001], [1 << 16, 1], [0, 0], [0, 0], [1 << 17, 1], [0, 0], [0, 0]]
    )
    runs = RunTable(columns.astype(np.int64), 1, 1)
    engine._placed(runs, 1, bytes_as_items=True)
    ctas = -(-((1 << 33) + 3001) // 1024)
    launcher.only_ctas = (ctas - 4, ctas)
    src, dst = at_offset(src, 1), at_offset(dst, 1)
    engine.copy(src, dst, runs)
    assert launcher.launches[-1] == ("copy_1", ctas)
    np.testing.assert_array_equal(dst[1024:4025], src[1024:4025])
    assert not dst[4025:].any()


# ----------------------------------------------------------------------------------------------- alignment
@any_dtype
def test_arrays_at_any_address(dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator) -> None:
    names = set()
    for offset in mode.sample(range(17), 6, f"offsets {dtype}"):
        for other in (0, int(rng.integers(1, 17))):
            x = at_offset(blocks(rng, dtype, 37), offset)
            elem = ELEMS[int(rng.integers(2))]

            def quantised(x: Any, elem: Any, other: int) -> Any:
                data, scale = np.zeros((37, 32), np.uint8), np.zeros((37, 1), np.uint8)
                return quantize_mxfp8(x, elem, out=MXFP8Tensor(at_offset(data, other), scale, elem))

            q = assert_as_plain(any_engine, quantised, x, elem, other)
            names.add(any_engine.launcher.launches[-1][0].rpartition("_")[2])

            def onto(call: Callable[..., Any], x: Any, how: Any, shape: Any, kind: str, other: int) -> Any:
                return call(x, how, at_offset(np.zeros(shape, DTYPES[kind]), other))

            q = MXFP8Tensor(at_offset(q.data, offset), q.scale, elem)
            assert_as_plain(any_engine, onto, dequantize_mxfp8, q, dtype, q.shape, dtype, other)
            for target in DTYPES:
                flat = x.reshape(-1)[: int(rng.integers(1, 1184))]
                assert_as_plain(any_engine, onto, cast, flat, target, flat.shape, target, other)
            assert_as_plain(any_engine, onto, pack, x, [((3, 30), (5, 29))], 648, dtype, other)
    assert "any" in names


def test_the_widest_units_that_addresses_allow_are_taken(engine: HostCudaEngine) -> None:
    # [rows, row bytes], first column, address, expected unit.
    cases = [
        (64, 0, 0, 16), (64, 16, 0, 16), (64, 8, 0, 8), (64, 4, 0, 4), (64, 2, 0, 2), (64, 1, 0, 1),
        (64, 0, 1, 1), (64, 0, 2, 2), (64, 0, 8, 8), (63, 0, 0, 1), (62, 0, 0, 2), (60, 0, 0, 4),
        (56, 0, 0, 8), (48, 0, 0, 16),
    ]  # fmt: skip
    for width, column, offset, unit in cases:
        array = at_offset(np.arange(width * 6, dtype=np.uint8).reshape(6, width), offset)
        out = at_offset(np.zeros(4 * 16, np.uint8), 0)
        with through(engine):
            packed = pack(array, [((1, 5), (column, column + 16))], out)
        assert packed.tolist() == array[1:5, column : column + 16].reshape(-1).tolist()
        assert engine.launcher.launches[-1][0] == f"copy_{unit}"


@any_dtype
@pytest.mark.parametrize("column", [0, 32, 160])
@pytest.mark.parametrize(("row", "rows"), [(0, 300), (37, 220), (128, 5)])
def test_a_part_of_a_matrix_goes_to_its_tiles(
    dtype: str, row: int, rows: int, column: int, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    x = blocks(rng, dtype, rows * 10).reshape(rows, 320)[:, column:]
    space = rng.integers(0, 256, 300 * 320 + 3 * 3 * 512).astype(np.uint8)

    def call() -> Any:
        made = space.copy()
        quantize_into_tiles(
            x, made[: 300 * 320].reshape(300, 320), made[300 * 320 :], row, column, "e4m3", "rceil"
        )
        return made

    launches = len(any_engine.launcher.launches)
    assert_as_plain(any_engine, call)
    assert len(any_engine.launcher.launches) == launches + 1


# ----------------------------------------------------------------------------------------- scales' layouts
@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 4), (127, 3), (129, 5), (128, 64), (300, 33), (31, 130), (513, 8), (1, 257)]
)
def test_scales_are_swizzled_and_back(
    shape: tuple[int, int], any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    rows, columns = shape
    space = rng.integers(0, 256, (2 * rows, 2 * columns + 3), np.uint8)
    views = [
        space[:rows, :columns].copy(),
        space[:rows, 3 : columns + 3],
        space[::-2, :columns],
        space[:rows, ::2][:, :columns],
        np.ascontiguousarray(space[:rows, :columns].T).T,
        at_offset(space[:rows, :columns].copy(), 1),
    ]
    for view in views:
        tiles = assert_as_plain(any_engine, swizzle_scales, view)
        with through(any_engine):
            assert_same(swizzle_scales(view, at_offset(np.zeros_like(tiles), 3)), tiles)
        garbage = np.where(tiles == 0, np.uint8(7), tiles)
        for packed in (tiles, at_offset(garbage, 1), np.repeat(tiles, 2)[::2]):
            assert_as_plain(any_engine, unswizzle_scales, packed, rows, columns)

        def into_view(tiles: Any) -> Any:
            target = np.zeros_like(space)
            unswizzle_scales(tiles, rows, columns, target[::-2, :columns])
            return target

        assert_as_plain(any_engine, into_view, tiles)


MATRICES = [(1, 32), (128, 128), (127, 96), (129, 160), (300, 1056), (7, 8256)]


@any_dtype
@any_elem
@pytest.mark.parametrize("shape", mode.sample(MATRICES, 3, "matrices in tiles"))
def test_a_matrix_and_its_tiles_take_one_launch(
    shape: tuple[int, int], dtype: str, elem: Any, any_engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    rows, width = shape
    space = blocks(rng, dtype, 2 * rows * (width + 32) // 32).reshape(2 * rows, width + 32)
    views = {
        "linear": space[:rows, :width].copy(),
        "table": space[::-2, 32:],
        "any": at_offset(space[:rows, :width].copy(), 1),
    }

    def tiled(x: Any) -> Any:
        made = quantize_mxfp8(x, elem)
        scale = np.full(swizzle_scales(made.scale).size, 0xAA, np.uint8)
        out = SwizzledMXFP8(np.zeros(x.shape, np.uint8), at_offset(scale, 1), elem)
        before = len(any_engine.launcher.launches)
        quantize_mxfp8(x, elem, out=out, scale_layout="128x4")
        launches.append(any_engine.launcher.launches[before:])
        return out

    for form, x in views.items():
        launches: list[Any] = []
        assert_as_plain(any_engine, tiled, x)
        names = [name.rpartition("_")[2] for name, _ in launches[1]]
        assert names == ["linear" if form == "table" and rows == 1 else form]


def test_tiles_of_more_than_32_bits_of_blocks(rng: np.random.Generator) -> None:
    engine = host_cuda_engine(multiprocessors=10**9)
    rows, width = (1 << 31) + 256, 64  # 2 of 4 columns: as much padding as scales
    x = reserved(rows * width, DTYPES["bfloat16"]).reshape(rows, width)
    data = reserved(rows * width, np.uint8).reshape(rows, width)
    tail = 256  # rows of the last two tiles
    x[-tail:] = blocks(rng, "bfloat16", 2 * tail).reshape(tail, width)
    expected = quantize_mxfp8(x[-tail:], scale_layout="128x4")
    scale = reserved(rows * 4, np.uint8)
    scale[-tail * 4 :] = 0xAA
    ctas = rows * 2 // 256
    with through(engine):
        engine.launcher.only_ctas = (ctas - 4, ctas)
        quantize_mxfp8(x, out=SwizzledMXFP8(data, scale), scale_layout="128x4")
    assert engine.launcher.launches == [("quantize_bf16_e4m3_linear", ctas)]
    np.testing.assert_array_equal(data[-tail:], expected.data)
    np.testing.assert_array_equal(scale[-expected.scale.size :], expected.scale)


# ------------------------------------------------------------------------------------------ what is reused
def test_a_table_goes_to_the_device_once_for_each_stream() -> None:
    engine = host_cuda_engine()
    x = np.arange(4096, dtype=np.float32).reshape(32, 128)
    table = BoxTable(x.shape, (((0, 30), (0, 96)), ((3, 9), (32, 64))))
    out = np.zeros(table.total_elems, np.float32)
    with through(engine):
        for _ in range(3):
            pack(x, table, out)
            pack_quantize(x, table)
        assert engine.launcher.uploads == 2
        engine.launcher.current_stream = "another"
        for _ in range(3):
            pack(x, table, out)
        assert engine.launcher.uploads == 3
        engine.launcher.current_stream = 0
        pack(x, table, out)
        assert engine.launcher.uploads == 3
        for stream in range(1, 200):  # one that is made for each call keeps nothing for ever
            engine.launcher.current_stream = stream
            pack(x, table, out)
    kept = [
        found
        for runs in table._runs.values()
        for found in runs.derived.values()
        if isinstance(found, OrderedDict)
    ]
    assert 0 < max(map(len, kept)) == cuda_engine._KEPT_STREAMS


# ------------------------------------------------------------------------------------------ casts and sums
@pytest.mark.parametrize("source_dtype", ["bfloat16", "float16"])
@any_dtype
def test_every_16_bit_pattern_is_cast(source_dtype: str, dtype: str, any_engine: HostCudaEngine) -> None:
    x = floats(np.arange(1 << 16), source_dtype)
    assert_as_plain(any_engine, cast, x, dtype)
    assert_as_plain(any_engine, cast, x[1:], dtype)


@any_dtype
def test_fp32_of_every_exponent_and_all_ties_are_cast(
    dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator, full: bool
) -> None:
    # For every sign and exponent: ties of both 16-bit types and their neighbours, among random mantissas.
    ties = np.concatenate([np.arange(8)[:, None] << 12, np.arange(8)[:, None] << 15, [[0]]])
    mantissa = np.concatenate(
        [(ties + np.arange(-2, 3)).reshape(-1) % (1 << 23), rng.integers(0, 1 << 23, 64)]
    )
    bits = (np.arange(512)[:, None] << 23 | mantissa).reshape(-1)
    if full:
        bits = np.concatenate([bits, rng.integers(0, 1 << 32, 1 << 22)])
    assert_as_plain(any_engine, cast, floats(bits, "float32"), dtype)


@any_dtype
def test_strided_arrays_are_cast(dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator) -> None:
    for target in DTYPES:
        x = strided(rng, blocks(rng, dtype, 60).reshape(4, 3, 5, 32))
        assert_as_plain(any_engine, cast, x, target)
        assert_as_plain(any_engine, cast, x[..., ::2], target)
        assert_as_plain(any_engine, cast, x[..., :27], target)
        assert_as_plain(any_engine, cast, x.T, target)


@any_dtype
@pytest.mark.parametrize("accumulate", [True, False])
def test_sums_of_any_number_of_sources(
    dtype: str, accumulate: bool, engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    counts = (1, 2, 5, 7, 8, 9, 16, 20)
    for count, mixed in [*product(counts, (False, True))]:
        size = int(rng.integers(1, 4000))
        kinds = rng.choice(list(DTYPES), count if mixed else 1).tolist() * (1 if mixed else count)
        offsets = [0] * (count + 1) if rng.random() < 0.5 else rng.integers(0, 17, count + 1).tolist()
        sources = [
            at_offset(blocks(rng, kind, -(-size // 32)).reshape(-1)[:size], offset)
            for kind, offset in zip(kinds, offsets[1:], strict=True)
        ]
        out = blocks(rng, dtype, -(-size // 32)).reshape(-1)[:size]

        with through(PlainEngine()):
            expected = sum_into(at_offset(out, offsets[0]), sources, accumulate)
        with through(engine):
            result = sum_into(at_offset(out, offsets[0]), sources, accumulate)
        nan = np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), nan)
        assert_same(result[~nan], expected[~nan])
        unit = 8 if "float32" not in (dtype, *kinds) and len(set(kinds)) == 1 else 4
        unit = 1 if any(offset % 16 for offset in offsets) else unit
        assert engine.launcher.launches[-1][0].endswith(f"_{unit}")


@any_dtype
@pytest.mark.parametrize("kinds", [*DTYPES, "mixed"])
@pytest.mark.parametrize("offset", [0, 2])
def test_zeros_of_sign_minus_stay_and_absent_terms_add_nothing(
    dtype: str, kinds: str, offset: int, engine: HostCudaEngine
) -> None:
    for count in (1, 2, 8, 9):
        picked = (list(DTYPES) * 3)[:count] if kinds == "mixed" else [kinds] * count
        sources = [at_offset(np.full(21, -0.0, DTYPES[kind]), offset) for kind in picked]
        out = at_offset(np.full(21, -0.0, DTYPES[dtype]), offset)
        for accumulate in (True, False):
            with through(engine):
                assert np.signbit(sum_into(out, sources, accumulate)).all()
            assert not out.any()


def test_the_first_sources_need_no_table_and_later_ones_keep_theirs() -> None:
    engine = host_cuda_engine()
    sources = [np.full(100, i, np.float32) for i in range(9)]
    out = np.zeros(100, np.float32)
    with through(engine):
        sum_into(out, sources[:8])
        assert engine.launcher.uploads == 0
        for _ in range(3):
            sum_into(out, sources)
        assert engine.launcher.uploads == 1
        engine.launcher.current_stream = "another"
        sum_into(out, sources)
        assert engine.launcher.uploads == 2
        assert out.tolist() == [28.0 + 4 * 36.0] * 100
        for last in np.zeros((cuda_engine._KEPT_SOURCE_TABLES + 10, 100), np.float32):
            sum_into(out, [*sources[:8], last])
    assert len(engine._sources) == cuda_engine._KEPT_SOURCE_TABLES
