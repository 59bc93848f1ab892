"""The CUDA sources on the host, where no GPU is large enough or tells what it was asked for: offsets beyond 32 bits,
grids of any size, and which sectors of memory a warp touches.

That they have the bytes of the plain engine is tested with the other engines (`support.engines`), and on GPU arrays in
tests/gpu.
"""

from __future__ import annotations

import mmap
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import mode
from support.cuda_host import Access, HostCudaEngine, host_cuda_engine, host_library

from lowshard import dtypes
from lowshard.comm.reduction import fold
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    SwizzledMXFP8,
    cast,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    unpack,
)
from lowshard.kernels import engine as engine_module
from lowshard.kernels.cuda import cuda_engine as cuda_engine
from lowshard.kernels.cuda import cuda_table as cuda_table
from lowshard.kernels.cuda.cuda_module import SOURCES, source
from lowshard.kernels.mxfp8 import quantize_into_tiles
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.runs import RunTable
from lowshard.selftest.arrays import hard_blocks, put
from lowshard.selftest.comparisons import Tally, difference
from lowshard.selftest.kernel_cases import FAMILIES, KernelCase, through

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32),
}  # fmt: skip
BF16 = DTYPES["bfloat16"]


@pytest.fixture(autouse=True)
def plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test expects, and what it prepares, comes from the plain engine."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which builds the kernels, is not on PATH")
    plain = PlainEngine()
    monkeypatch.setattr(engine_module, "host_engine", lambda: plain)
    with np.errstate(all="ignore"):  # overflow and invalid operations are what is asked for
        yield


@pytest.fixture(scope="module")
def engine() -> HostCudaEngine:
    return host_cuda_engine()


def blocks(rng: np.random.Generator, dtype: str, count: int) -> Any:
    """Return hard blocks [count, 32], others each time."""
    return hard_blocks((count, 32), dtype, int(rng.integers(1 << 60)))


def parts(result: Any) -> tuple[Any, ...]:
    if isinstance(result, (MXFP8Tensor, SwizzledMXFP8)):
        return result.data, result.scale
    return result if isinstance(result, tuple) else (result,)


def assert_as_plain(engine: HostCudaEngine, call: Callable[..., Any], *args: Any) -> None:
    """Make a call through both engines; it makes its own output arrays."""
    with through(engine):
        found = parts(call(*args))
    for a, b in zip(found, parts(call(*args)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (a, b)))


def at_offset(array: Any, offset: int, boundary: int = 64) -> Any:
    """Return a copy of an array that begins `offset` bytes after a boundary."""
    space = np.zeros(array.nbytes + offset + boundary, np.uint8)
    skip = -space.ctypes.data % boundary + offset
    copy = space[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# ---- the build


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


# ---- any grid, any numbers


@pytest.mark.parametrize("way", mode.sample(["one CTA", "large grid", "flushing"], 1, "ways of the host"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_kernels_has_its_bytes_whichever_way_it_runs(
    family: Callable[[], Iterator[KernelCase]], way: str
) -> None:
    """One CTA; a grid as large as the work; subnormals flushed, as in kernels that CuPy compiles."""
    if way == "flushing" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{platform.machine()}: the host build flushes subnormals on x86 alone")
    made = {
        "one CTA": {"most_ctas": 1},
        "large grid": {"multiprocessors": 10**6},
        "flushing": {"flush": True},
    }[way]
    tally = Tally()
    for case in mode.sample([*family()], 30, f"{family.__name__} {way}"):
        with through(host_cuda_engine(**made)):  # type: ignore[arg-type]
            case.check(partial(put, np), tally)
    assert not tally.findings


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 32, 160])
@pytest.mark.parametrize(("row", "rows"), [(0, 300), (37, 220), (128, 5)])
def test_a_part_of_a_matrix_goes_to_its_tiles(
    dtype: str, row: int, rows: int, column: int, engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    x = blocks(rng, dtype, rows * 10).reshape(rows, 320)[:, column:]
    space = rng.integers(0, 256, 300 * 320 + 3 * 3 * 512).astype(np.uint8)

    def call() -> Any:
        made = space.copy()
        codes, scales = made[: 300 * 320].reshape(300, 320), made[300 * 320 :]
        quantize_into_tiles(x, codes, scales, row, column, "e4m3", "rceil")
        return made

    launches = len(engine.launcher.launches)
    assert_as_plain(engine, call)
    assert len(engine.launcher.launches) == launches + 1


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
    np.testing.assert_array_equal(data[tail], expected.data)
    np.testing.assert_array_equal(scale[-259:], expected.scale)
    np.testing.assert_array_equal(
        *(part.view(np.uint16) for part in (back[tail], dequantize_mxfp8(expected)))
    )

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


@pytest.mark.parametrize("op", ["sum", "prod", "min"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_of_fp8_numbers_are_folded_as_on_the_cpu(
    engine: HostCudaEngine, dtype: str, op: str
) -> None:
    row, codes = dtypes.get(dtype), np.arange(256, dtype=np.uint8)  # CuPy has no arrays of them
    terms = [part.reshape(-1).view(row.numpy) for part in (np.repeat(codes, 256), np.tile(codes, 256))]
    expected, found = np.empty(1 << 16, row.numpy), np.empty(1 << 16, row.numpy)
    fold(terms, expected, op)
    engine.fold(found, terms, row.short, op, True, 1)
    assert not difference(found, expected, any_nan=True)


# ---- sectors: DRAM moves 32 bytes or none

# The n-th access of each lane of a warp to an array is one instruction, where all lanes take the same way.

SECTOR_BYTES, LANES, LONG = 32, 32, 4096


@pytest.fixture
def everywhere(engine: HostCudaEngine, monkeypatch: pytest.MonkeyPatch) -> HostCudaEngine:
    """All public calls on NumPy arrays run through the sources."""
    monkeypatch.setattr(engine_module, "host_engine", lambda: engine)
    return engine


def on_sector(shape: int | tuple[int, ...], dtype: Any, offset_bytes: int = 0) -> Any:
    """Return zeros that begin `offset_bytes` after a boundary of 128 bytes."""
    count, dtype = int(np.prod(shape)), np.dtype(dtype)
    space = np.zeros(count * dtype.itemsize + 256, np.uint8)
    start = -space.ctypes.data % 128 + offset_bytes
    return space[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


def instructions(accesses: list[Access], array: Any, stores: bool) -> list[list[Access]]:
    """Return what each warp's instruction did to an array, the accesses of all its lanes."""
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    so_far: dict[tuple[int, int], int] = defaultdict(int)
    found: dict[tuple[int, int], list[Access]] = defaultdict(list)
    for access in accesses:
        if access.is_store == stores and begin <= access.address < end:
            nth = so_far[access.warp, access.lane]
            so_far[access.warp, access.lane] += 1
            found[access.warp, nth].append(access)
    return list(found.values())


def assert_whole_sectors(accesses: list[Access], array: Any, stores: bool, lane_bytes: int) -> None:
    """Assert that every byte moves once, `lane_bytes` a lane, and no instruction touches a part of a sector."""
    found = instructions(accesses, array, stores)
    assert sum(access.size_bytes for group in found for access in group) == array.nbytes
    for group in found:
        sectors: dict[int, int] = defaultdict(int)
        for access in group:
            sectors[access.address // SECTOR_BYTES] += access.size_bytes
        assert set(sectors.values()) == {SECTOR_BYTES}, sorted(access.address % 1024 for access in group)
        assert [access.size_bytes for access in group] == [lane_bytes] * LANES


def traced(engine: HostCudaEngine, call: Callable[[], object]) -> tuple[str, list[Access]]:
    """Make a call; return its kernel and accesses."""
    with engine.launcher.traced() as accesses:
        call()
    return engine.launcher.launches[-1][0], accesses


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_loads_codes_and_stores_values_in_whole_sectors(
    dtype: str, special: bool, everywhere: HostCudaEngine, rng: np.random.Generator
) -> None:
    data = on_sector((LONG // 32, 32), np.uint8)
    data[...] = rng.integers(0, 0x7F, data.shape)
    if special:  # a warp goes another way where a code is a NaN
        data[::32, 5] = 0x7F
    q = MXFP8Tensor(data, np.full((LONG // 32, 1), 127, np.uint8))
    out = on_sector(data.shape, DTYPES[dtype])
    kernel, accesses = traced(everywhere, lambda: dequantize_mxfp8(q, dtype, out))
    assert kernel.endswith("_linear")
    assert_whole_sectors(accesses, data, False, 4 if dtype == "float32" else 8)
    assert_whole_sectors(accesses, out, True, 16)


@pytest.mark.parametrize(("src", "dst"), [*product(DTYPES, DTYPES)])
def test_cast_moves_whole_sectors_on_both_sides(src: str, dst: str, everywhere: HostCudaEngine) -> None:
    x, out = on_sector(LONG, DTYPES[src]), on_sector(LONG, DTYPES[dst])
    _, accesses = traced(everywhere, lambda: cast(x, dst, out))
    elems = 16 // max(x.itemsize, out.itemsize)
    assert_whole_sectors(accesses, x, False, elems * x.itemsize)
    assert_whole_sectors(accesses, out, True, elems * out.itemsize)
