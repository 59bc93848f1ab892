"""The step `bandwidths`: kernels and collectives as shares of a copy of as many bytes, taken in the same process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard import dtypes, kernels
from lowshard.bench.bench_device import open_device
from lowshard.bench.turn_timing import Work
from lowshard.comm import Communicator
from lowshard.kernels import BoxTable, MXFP8Tensor
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.device_arrays import settle
from lowshard.selftest.over_mpi import run_over_mpi
from lowshard.selftest.step_setting import Setting

_TICK_S = 1e-9
_ROUNDS = 5
_SIZES_BYTES = {"cpu": (64 << 20,), "cuda": (64 << 20, 1 << 30)}
_BOX_ROWS_BYTES = 4096
_REDUCED_BYTES = 16 << 20


def run(setting: Setting, tally: Tally) -> None:
    """Measure the kernels here, and the collectives on ranks."""
    rows: list[dict[str, Any]] = []
    for size_bytes in _SIZES_BYTES[setting.device]:
        rows += _kernels(setting, size_bytes)
    run_over_mpi("bandwidths", setting, tally)
    rows += tally.data.pop("rows", [])
    tally.data["bandwidths"] = rows
    for row in rows:
        numbers = (row["seconds"], row["copy_s"], row["share"], row["gb_per_s"])
        said = f"expected finite positive figures, got {row['seconds']} s and a copy in {row['copy_s']} s"
        tally.true(f"bandwidth of {row['name']}", all(math.isfinite(x) and x > 0 for x in numbers), said)
    tally.summary = f"copy {rows[0]['gb_per_s']:.1f} GB/s; " + ", ".join(
        f"{row['name']} {row['share']:.2f}" for row in rows[1:]
    )


def _kernels(setting: Setting, size_bytes: int) -> list[dict[str, Any]]:
    """Time a copy of so many bytes and the kernels over a bf16 array of that size."""
    device = open_device(setting.device)
    bf16 = dtypes.get("bfloat16").numpy
    cols = _BOX_ROWS_BYTES // 2
    shape = (size_bytes // bf16.itemsize // cols, cols)
    x = device.empty(shape, bf16)
    x.view(np.uint16)[...] = 0x3F81  # near 1: no special case of any kernel
    q = MXFP8Tensor(
        device.empty(shape, np.dtype(np.uint8)), device.empty((shape[0], cols // 32), np.dtype(np.uint8))
    )
    back = device.empty(shape, bf16)
    half = shape[0] // 2
    table = BoxTable(shape, tuple(((row, row + 1), (0, cols)) for row in range(0, shape[0], 2)))
    packed = device.empty((table.total_elems,), bf16)
    fused = MXFP8Tensor(
        device.empty((table.total_elems,), np.dtype(np.uint8)),
        device.empty((table.total_elems // 32,), np.dtype(np.uint8)),
    )
    quantised_bytes = x.nbytes + q.wire_bytes
    works: list[tuple[str, int, Callable[[], Any]]] = [
        ("copy", 2 * x.nbytes, lambda: None),
        ("quantize_mxfp8 bf16", quantised_bytes, lambda: kernels.quantize_mxfp8(x, out=q)),
        ("dequantize_mxfp8 bf16", quantised_bytes, lambda: kernels.dequantize_mxfp8(q, "bfloat16", out=back)),
        ("pack rows of 4 KB", 2 * packed.nbytes, lambda: kernels.pack(x, table, out=packed)),
        ("pack_quantize rows of 4 KB", half * cols * 2 + fused.wire_bytes,
         lambda: kernels.pack_quantize(x, table, out=fused)),
    ]  # fmt: skip
    src, dst = (
        device.empty((size_bytes,), np.dtype(np.uint8)),
        device.empty((size_bytes,), np.dtype(np.uint8)),
    )
    src.fill(1)
    dst.fill(2)
    rows = []
    for name, moved_bytes, work in works:
        each = moved_bytes // 2
        copy = device.copy_work(dst[:each], src[:each])
        work = copy if name == "copy" else work
        work()
        seconds, copies_s = [], []
        for _ in range(_ROUNDS):
            seconds.append(device.clock.work_s(work))
            copies_s.append(device.clock.work_s(copy))
        rows.append(_row(f"{name} {size_bytes >> 20} MB", moved_bytes, seconds, copies_s))
        print(f"{rows[-1]['name']}: {rows[-1]['share']:.2f} of a copy", flush=True)
    return rows


def measure_collectives(comm: Communicator, tally: Tally) -> None:
    """Time all_reduce and all_gather of 16 MB, and on each rank a copy of the bytes that it gets. Collective."""
    xp = comm.xp
    elems = _REDUCED_BYTES // 4
    send, recv = comm.empty(elems, "float32"), comm.empty(elems, "float32")
    part = elems // comm.size
    whole = comm.empty(part * comm.size, "float32")
    send[...] = 1
    recv[...] = 2
    whole[...] = 3
    rows = []
    calls: tuple[tuple[str, Work], ...] = (
        ("all_reduce sum fp32", lambda: comm.all_reduce(send, recv)),
        ("all_gather fp32", lambda: comm.all_gather(send[:part], whole)),
    )
    for name, call in calls:
        seconds: list[float] = []
        copies_s: list[float] = []
        for turn in range(_ROUNDS + 1):
            for times, work in ((seconds, call), (copies_s, lambda: xp.copyto(recv, send))):
                settle(xp)
                comm.barrier()
                start_s = time.perf_counter()
                work()
                settle(xp)
                if turn:  # the first one warms
                    times.append(time.perf_counter() - start_s)
        rows.append(
            _row(f"{name} 16 MB, {comm.size} ranks, {comm.transport}", 2 * _REDUCED_BYTES, seconds, copies_s)
        )
    if comm.rank == 0:
        tally.data["rows"] = rows


def _row(name: str, moved_bytes: int, seconds: list[float], copies_s: list[float]) -> dict[str, Any]:
    """Return one figure: medians, GB/s of bytes read and written, and the share of the copy's speed."""
    seconds = [max(s, _TICK_S) for s in seconds]  # else JSON would get an infinity
    middle_s, copy_s = statistics.median(seconds), statistics.median(copies_s)
    share = statistics.median(c / s for s, c in zip(seconds, copies_s, strict=True))
    return {
        "name": name,
        "moved_bytes": moved_bytes,
        "seconds": middle_s,
        "copy_s": copy_s,
        "gb_per_s": moved_bytes / middle_s / 1e9,
        "share": share,
    }
