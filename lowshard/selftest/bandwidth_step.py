"""The step `bandwidths`: kernels and collectives as shares of a copy of as many bytes, taken in the same process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowshard import dtypes, kernels
from lowshard.bench.bench_device import Yardstick, open_device
from lowshard.bench.turn_timing import Case, Copy, Row, Work, measure
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
    cases = [Case(f"{name} {size}", work, moved, copies.copy(moved)) for name, moved, work in works]
    return [_figure(row) for row in measure(cases, _ROUNDS, device.clock)]


@dataclass(frozen=True)
class _Together:
    """Times what all ranks begin together."""

    comm: Communicator

    def work_s(self, run: Work) -> float:
        """Return the seconds until this rank has done its part."""
        settle(self.comm.xp)
        self.comm.barrier()
        start_s = time.perf_counter()
        run()
        settle(self.comm.xp)
        return time.perf_counter() - start_s

    call_s = work_s


def run_rank(comm: Communicator, tally: Tally) -> None:
    """Time all_reduce and all_gather of 16 MB, and on each rank a copy of the bytes that it gets. Collective."""
    elems = _REDUCED_BYTES // 4
    part = elems // comm.size
    send, recv, whole = (comm.empty(n, "float32") for n in (elems, elems, part * comm.size))
    for value, array in enumerate((send, recv, whole), 1):
        array[...] = value
    copy = Copy(lambda: comm.xp.copyto(recv, send), _REDUCED_BYTES)
    works: tuple[tuple[str, Work], ...] = (
        ("all_reduce sum fp32", lambda: comm.all_reduce(send, recv)),
        ("all_gather fp32", lambda: comm.all_gather(send[:part], whole)),
    )
    where = f"16 MB, {comm.size} ranks, {comm.transport}"
    cases = [Case(f"{name} {where}", work, 2 * _REDUCED_BYTES, copy) for name, work in works]
    rows = [_figure(row) for row in measure(cases, _ROUNDS, _Together(comm))]
    if comm.rank == 0:
        tally.data["rows"] = rows


def _figure(row: Row) -> dict[str, Any]:
    """Return medians, GB/s of bytes read and written, and the share of the copy's speed."""
    seconds, copy_s = (max(float(np.median(s)), _TICK_S) for s in (row.work_s, row.copy_s))
    share, gb_per_s = copy_s / seconds, row.moved_bytes / seconds / 1e9
    print(f"{row.name}: {share:.2f} of a copy", flush=True)
    figures = {"seconds": seconds, "copy_s": copy_s, "gb_per_s": gb_per_s, "share": share}
    return {"name": row.name, "moved_bytes": row.moved_bytes, **figures}
