"""The step `bandwidths`: kernels and collectives as shares of a copy of as many bytes, taken in the same process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lowshard import dtypes, kernels
from lowshard.bench.bench_device import Yardstick, open_device
from lowshard.bench.turn_timing import ProcessClock, Runner, Work, take_turns
from lowshard.comm import Communicator
from lowshard.kernels import BoxTable, MXFP8Tensor
from lowshard.selftest.arrays import settle
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.ranks import run_over_mpi
from lowshard.selftest.steps import Device, Setting

_ROUNDS = 5
_SIZES_BYTES = {"cpu": (64 << 20,), "cuda": (64 << 20, 1 << 30)}
_COLS = 2048
"""Of bf16: rows of 4 KB."""
_REDUCED_BYTES = 16 << 20
_TICK_S = 1e-9  # nothing is faster: what is was not measured


def run(setting: Setting, tally: Tally) -> None:
    """Measure the kernels here, and the collectives on ranks."""
    rows = [row for size in _SIZES_BYTES[setting.device] for row in _kernels(setting.device, size)]
    run_over_mpi("bandwidth_step", setting, tally)
    rows += tally.data.pop("rows", [])
    tally.data["bandwidths"] = rows
    for row in rows:
        said = f"expected seconds, got {row['seconds']} s and a copy in {row['copy_s']} s"
        tally.true(f"bandwidth of {row['name']}", min(row["seconds"], row["copy_s"]) > _TICK_S, said)
    shares = ", ".join(f"{row['name']} {row['share']:.2f}" for row in rows[1:])
    tally.summary = f"copy {rows[0]['gb_per_s']:.1f} GB/s; {shares}"


def _kernels(where: Device, size_bytes: int) -> list[dict[str, Any]]:
    """Time a copy of so many bytes and the kernels over a bf16 array of that size."""
    device, bf16, byte = open_device(where), dtypes.get("bfloat16").numpy, np.dtype(np.uint8)
    shape = (size_bytes // 2 // _COLS, _COLS)
    x, back = device.empty(shape, bf16), device.empty(shape, bf16)
    x.view(np.uint16)[...] = 0x3F81  # near 1: no special case of any kernel
    q = MXFP8Tensor(device.empty(shape, byte), device.empty((shape[0], _COLS // 32), byte))
    table = BoxTable(shape, tuple(((row, row + 1), (0, _COLS)) for row in range(0, shape[0], 2)))
    elems = table.total_elems
    packed = device.empty((elems,), bf16)
    fused = MXFP8Tensor(device.empty((elems,), byte), device.empty((elems // 32,), byte))
    quantised_bytes, copies = x.nbytes + q.wire_bytes, Yardstick(device, size_bytes)
    works: tuple[tuple[str, int, Work], ...] = (
        ("copy", 2 * x.nbytes, copies.copy(2 * x.nbytes).run),
        ("quantize_mxfp8 bf16", quantised_bytes, lambda: kernels.quantize_mxfp8(x, out=q)),
        ("dequantize_mxfp8 bf16", quantised_bytes, lambda: kernels.dequantize_mxfp8(q, "bfloat16", out=back)),
        ("pack rows of 4 KB", 2 * packed.nbytes, lambda: kernels.pack(x, table, out=packed)),
        ("pack_quantize rows of 4 KB", 2 * elems + fused.wire_bytes,
         lambda: kernels.pack_quantize(x, table, out=fused)),
    )  # fmt: skip
    size = f"{size_bytes >> 20} MB"
    return _figures(
        [(f"{name} {size}", moved, work, copies.copy(moved).run) for name, moved, work in works], device.clock
    )


class _Together(ProcessClock):
    """Times what all ranks begin together."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def work_s(self, run: Work) -> float:
        """Return the seconds until this rank has done its part."""
        settle(self.comm.xp)
        self.comm.barrier()
        start_s = time.perf_counter()
        run()
        settle(self.comm.xp)
        return time.perf_counter() - start_s


def run_rank(comm: Communicator, tally: Tally) -> None:
    """Time all_reduce and all_gather of 16 MB, and on each rank a copy of the bytes that it gets. Collective."""
    elems = _REDUCED_BYTES // 4
    part = elems // comm.size
    send, recv, whole = (comm.empty(n, "float32") for n in (elems, elems, part * comm.size))
    for value, array in enumerate((send, recv, whole), 1):
        array[...] = value
    works: tuple[tuple[str, Work], ...] = (
        ("all_reduce sum fp32", lambda: comm.all_reduce(send, recv)),
        ("all_gather fp32", lambda: comm.all_gather(send[:part], whole)),
    )
    where = f"16 MB, {comm.size} ranks, {comm.transport}"
    rows = _figures(
        [(f"{name} {where}", 2 * _REDUCED_BYTES, work, lambda: comm.xp.copyto(recv, send)) for name, work in works],
        _Together(comm),
    )  # fmt: skip
    if comm.rank == 0:
        tally.data["rows"] = rows


def _figures(works: list[tuple[str, int, Work, Work]], clock: ProcessClock) -> list[dict[str, Any]]:
    """Return, of name, moved bytes, work and copy: medians, GB/s read and written, the share of the copy's speed."""
    timings = take_turns(
        [Runner(run) for *_, work, copy in works for run in (work, copy)], _ROUNDS, clock, warm=1
    )
    rows = []
    for (name, moved, *_), work, copy in zip(works, timings[::2], timings[1::2], strict=True):
        seconds, copy_s = max(work.median_s, _TICK_S), max(copy.median_s, _TICK_S)
        figures = {
            "seconds": seconds,
            "copy_s": copy_s,
            "gb_per_s": moved / seconds / 1e9,
            "share": copy_s / seconds,
        }
        print(f"{name}: {figures['share']:.2f} of a copy", flush=True)
        rows.append({"name": name, "moved_bytes": moved, **figures})
    return rows
