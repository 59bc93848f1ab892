"""What the lanes of a warp load or store together is whole sectors: DRAM moves 32 bytes or none.

The sources are built for the host, which writes down every access. The n-th access of each lane of a warp to an array
is one instruction, where all lanes take the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cuda_host import Access, HostCudaEngine, host_cuda_engine
from support.host_kernels import needs_compiler

from lowshard.kernels import (
    MXFP8Tensor,
    adamw_step,
    cast,
    dequantize_mxfp8,
    sgd_step,
    sum_into,
    unpack_dequantize,
)
from lowshard.kernels import engine as engine_module

pytestmark = needs_compiler

SECTOR_BYTES = 32
LANES = 32
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
ELEMS = 4096


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> HostCudaEngine:
    """All public calls on NumPy arrays run through the sources."""
    found = host_cuda_engine()
    monkeypatch.setattr(engine_module, "host_engine", lambda: found)
    return found


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
    dtype: str, special: bool, engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    data = on_sector((ELEMS // 32, 32), np.uint8)
    data[...] = rng.integers(0, 0x7F, data.shape)
    if special:  # a warp goes another way where a code is a NaN
        data[::32, 5] = 0x7F
    q = MXFP8Tensor(data, np.full((ELEMS // 32, 1), 127, np.uint8))
    out = on_sector(data.shape, DTYPES[dtype])
    kernel, accesses = traced(engine, lambda: dequantize_mxfp8(q, dtype, out))
    assert kernel.endswith("_linear")
    assert_whole_sectors(accesses, data, False, 4 if dtype == "float32" else 8)
    assert_whole_sectors(accesses, out, True, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_into_boxes_stores_whole_sectors(
    dtype: str, engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    target = on_sector((64, 128), DTYPES[dtype])
    count = 64 * 64
    q = MXFP8Tensor(rng.integers(0, 0x7F, count, np.uint8), np.full(count // 32, 127, np.uint8))
    kernel, accesses = traced(engine, lambda: unpack_dequantize(q, [((0, 64), (32, 96))], target))
    assert kernel.endswith("_table")
    for row in target:
        assert {
            (access.size_bytes, access.address % 16)
            for group in instructions(accesses, row, True)
            for access in group
        } == {(16, 0)}
    for group in instructions(accesses, target, True):
        sectors = [access.address // SECTOR_BYTES for access in group]
        assert all(sectors.count(sector) == 2 for sector in sectors)


@pytest.mark.parametrize(("src", "dst"), [*product(DTYPES, DTYPES)])
def test_cast_moves_whole_sectors_on_both_sides(src: str, dst: str, engine: HostCudaEngine) -> None:
    x, out = on_sector(ELEMS, DTYPES[src]), on_sector(ELEMS, DTYPES[dst])
    _, accesses = traced(engine, lambda: cast(x, dst, out))
    elems = 16 // max(x.itemsize, out.itemsize)
    assert_whole_sectors(accesses, x, False, elems * x.itemsize)
    assert_whole_sectors(accesses, out, True, elems * out.itemsize)


@pytest.mark.parametrize(
    "kinds",
    [
        *product(DTYPES, DTYPES),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "bfloat16", "float16"),
        ("float16",) * 20,
    ],
)
def test_sum_moves_whole_sectors_on_all_sides(kinds: tuple[str, ...], engine: HostCudaEngine) -> None:
    out, *sources = (on_sector(ELEMS, DTYPES[kind]) for kind in kinds)
    _, accesses = traced(engine, lambda: sum_into(out, sources))
    elems = 4 if "float32" in kinds or len(set(kinds[1:])) > 1 else 8
    for array in (out, *sources):
        assert_whole_sectors(accesses, array, False, elems * array.itemsize)
    assert_whole_sectors(accesses, out, True, elems * out.itemsize)


@pytest.mark.parametrize("offset_bytes", [0, 4])
def test_steps_read_every_array_before_they_write(offset_bytes: int, engine: HostCudaEngine) -> None:
    arrays = [on_sector(ELEMS, np.float32) for _ in range(3)]
    param = on_sector(ELEMS, np.float32, offset_bytes)
    lane_bytes = 4 if offset_bytes else 16
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "adamw": (
            lambda: adamw_step(
                param, *arrays, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2
            ),
            4,
        ),
        "sgd": (lambda: sgd_step(param, *arrays[:2], lr=0.1, momentum=0.9, weight_decay=0.1, first=False), 3),
    }
    for name, (call, reads) in calls.items():
        kernel, accesses = traced(engine, call)
        assert kernel == f"{name}_{lane_bytes // 4}"
        lane = [access for access in accesses if (access.warp, access.lane) == (1, 7)]
        turn = [access.is_store for access in lane[: 2 * reads - 1]]
        assert turn == [False] * reads + [True] * (reads - 1)
        assert param.ctypes.data <= lane[0].address < param.ctypes.data + param.nbytes
        for array in arrays[: reads - 1] if offset_bytes else (param, *arrays[: reads - 1]):
            assert_whole_sectors(accesses, array, False, lane_bytes)
