"""The CUDA sources on the host, where no GPU is large enough or tells what it was asked for: offsets beyond 32 bits,
grids of any size, which sectors of memory a warp touches. That they have the bytes of the plain engine is tested with
the other engines (`support.engines`), and on GPU arrays in tests/gpu."""

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
from support.cuda_host import HostCudaEngine, HostFault, host_cuda_engine, host_library

from lowshard import dtypes
from lowshard.comm.reduction import fold
from lowshard.kernels import MXFP8Tensor, cast, dequantize_mxfp8, pack, pack_quantize, quantize_mxfp8
from lowshard.kernels import engine as engine_module
from lowshard.kernels.cuda import cuda_table
from lowshard.kernels.cuda.cuda_module import SOURCES, source
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.runs import whole_array_runs
from lowshard.selftest.arrays import hard_blocks, put
from lowshard.selftest.comparisons import Tally, difference
from lowshard.selftest.kernel_cases import FAMILIES, through

FLOATS = [np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32)]
WAYS: dict[str, dict[str, Any]] = {
    "one CTA": {"most_ctas": 1}, "large grid": {"multiprocessors": 10**6}, "flushing": {"flush": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test expects, and what it prepares, comes from the plain engine."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which builds the kernels, is not on PATH")
    plain = PlainEngine()
    monkeypatch.setattr(engine_module, "host_engine", lambda: plain)
    with np.errstate(all="ignore"):  # overflow and invalid operations are what is asked for
        yield


def test_the_sources_compile_without_a_warning_and_include_no_file() -> None:
    assert host_library()[1] == ""
    for name in SOURCES:
        assert not re.search(r"^\s*#\s*(include|pragma once)", source(name), re.MULTILINE)


def test_what_needs_a_gpu_can_be_imported_without_cupy_numba_and_mpi4py() -> None:
    code = (
        "import sys; sys.modules['cupy'] = sys.modules['numba'] = sys.modules['mpi4py'] = None\n"
        "import lowshard.kernels.cuda.cuda_engine, lowshard.kernels.cuda.cuda_module, lowshard.comm.nccl_over_mpi"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("way", mode.sample([*WAYS], 1, "ways of the host"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_kernels_has_its_bytes_whichever_way_it_runs(family: Callable[[], Any], way: str) -> None:
    """One CTA; a grid as large as the work; subnormals flushed, as in kernels that CuPy compiles."""
    if way == "flushing" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{platform.machine()}: the host build flushes subnormals on x86 alone")
    tally = Tally()
    for case in mode.sample([*family()], 30, f"{family.__name__} {way}"):
        with through(host_cuda_engine(**WAYS[way])):
            case.check(partial(put, np), tally)
    assert not tally.findings


def test_misaligned_and_outside_accesses_are_faults() -> None:
    launcher, words = host_cuda_engine().launcher, np.zeros(64, np.uint8)
    launcher.ranges = [(words.ctypes.data, words.ctypes.data + 32)]
    engine, runs = HostCudaEngine(launcher), whole_array_runs((64,), (1,), (1,), 1, 1)
    for at, fault in ((1, "no multiple of it"), (0, "outside all arrays")):
        table = engine._placed(runs, 8, bytes_as_items=True)
        with pytest.raises(HostFault, match=fault):
            launcher.launch("copy_8", 1, 256, (words.ctypes.data + at, words.ctypes.data, *table.args))


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
    if sys.platform != "linux":
        pytest.skip(f"{sys.platform}: address space without memory is asked for as Linux does")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), np.uint8).view(dtype)


def test_offsets_and_totals_beyond_32_bits(rng: np.random.Generator) -> None:
    rows, width, bf16 = 5, 1 << 30, FLOATS[0]
    x = reserved(rows * width, bf16).reshape(rows, width)  # 10 GiB of addresses
    boxes = [((0, 5), (width - 64, width)), ((4, 5), (width - 96, width)), ((1, 4), (0, 32))]
    for (r0, r1), (c0, c1) in boxes:
        x[r0:r1, c0:c1] = hard_blocks((r1 - r0, c1 - c0), "bfloat16", 3)
    for call in (partial(pack, x, boxes), lambda: pack_quantize(x, boxes).data):
        with through(host_cuda_engine()):
            found: Any = call()
        assert found.tobytes() == call().tobytes()  # type: ignore[attr-defined]

    engine, elems = host_cuda_engine(multiprocessors=10**9), (1 << 32) + 8192 + 96
    flat, back = reserved(elems, bf16), reserved(elems, bf16)
    data, scale = reserved(elems, np.uint8), reserved(elems // 32, np.uint8)
    tail, ctas = slice(elems - 8192 - 96, None), -(-elems // 8192)
    flat[tail] = hard_blocks((259, 32), "bfloat16", 5).reshape(-1)
    expected = quantize_mxfp8(flat[tail])
    with through(engine):
        engine.launcher.only_ctas = (ctas - 2, ctas)
        quantize_mxfp8(flat, out=MXFP8Tensor(data, scale))
        assert engine.launcher.launches[-1] == ("quantize_bf16_e4m3_linear", ctas)
        dequantize_mxfp8(MXFP8Tensor(data, scale), out=back)
    assert data[tail].tobytes() == expected.data.tobytes()
    assert scale[-259:].tobytes() == expected.scale.tobytes()
    assert back[tail].tobytes() == dequantize_mxfp8(expected).tobytes()


@pytest.mark.parametrize("op", ["sum", "prod", "min"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_of_fp8_numbers_are_folded_as_on_the_cpu(dtype: str, op: str) -> None:
    row, codes = dtypes.get(dtype), np.arange(256, dtype=np.uint8)  # CuPy has no arrays of them
    terms = [part.reshape(-1).view(row.numpy) for part in (np.repeat(codes, 256), np.tile(codes, 256))]
    expected, found = np.empty(1 << 16, row.numpy), np.empty(1 << 16, row.numpy)
    fold(terms, expected, op)
    host_cuda_engine().fold(found, terms, row.short, op, True, 1)
    assert not difference(found, expected, any_nan=True)


# ---- sectors: DRAM moves 32 bytes or none


def on_sector(dtype: Any, elems: int = 4096) -> Any:
    """Return zeros that begin on a boundary of 128 bytes."""
    space = np.zeros(elems * np.dtype(dtype).itemsize + 128, np.uint8)
    return space[-space.ctypes.data % 128 :][: elems * np.dtype(dtype).itemsize].view(dtype)


def assert_whole_sectors(accesses: Any, array: Any, kind: int, lane_bytes: int) -> None:
    """Assert that every byte moves once, `lane_bytes` a lane, and no instruction of a warp, which is the n-th access of
    each of its lanes to the array, touches a part of a sector. The kind is 0 for loads, 1 for stores."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    sectors: dict[tuple[int, int, int], int] = defaultdict(int)
    for at, size, warp, lane, is_store in accesses.tolist():
        if is_store == kind and 0 <= at - array.ctypes.data < array.nbytes:
            assert size == lane_bytes
            sectors[warp, counts[warp, lane], at // 32] += size
            counts[warp, lane] += 1
    assert set(sectors.values()) == {32}
    assert sum(sectors.values()) == array.nbytes


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantise_moves_whole_sectors_on_both_sides(
    dtype: Any, special: bool, rng: np.random.Generator
) -> None:
    engine, data, out = host_cuda_engine(), on_sector(np.uint8), on_sector(dtype)
    data[...] = rng.integers(0, 0x7F, data.shape)
    if special:  # a warp goes another way where a code is a NaN
        data[5::1024] = 0x7F
    q = MXFP8Tensor(data, np.full(128, 127, np.uint8))
    with through(engine):
        accesses = engine.launcher.traced(lambda: dequantize_mxfp8(q, dtype.name, out))
    assert_whole_sectors(accesses, data, 0, 4 if dtype.itemsize == 4 else 8)
    assert_whole_sectors(accesses, out, 1, 16)


@pytest.mark.parametrize(("src", "dst"), [*product(FLOATS, FLOATS)], ids=str)
def test_cast_moves_whole_sectors_on_both_sides(src: Any, dst: Any) -> None:
    engine, x, out = host_cuda_engine(), on_sector(src), on_sector(dst)
    with through(engine):
        accesses = engine.launcher.traced(lambda: cast(x, dst.name, out))
    elems = 16 // max(src.itemsize, dst.itemsize)
    assert_whole_sectors(accesses, x, 0, elems * src.itemsize)
    assert_whole_sectors(accesses, out, 1, elems * dst.itemsize)
