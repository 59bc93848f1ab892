"""Random tables of layouts for resharding, and what each rank then holds, by slicing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import run_loopback
from lowshard.errors import LowshardError
from lowshard.kernels import MXFP8Tensor
from lowshard.kernels.mxfp8_tensor import swizzled_bytes
from lowshard.reshard import (
    DimSharding,
    ParameterMetadata,
    ReshardPlan,
    SwizzledMXFP8,
    TensorLayout,
    build_reshard_plan,
)

DTYPES = ("float32", "uint8", "bfloat16", "float64", "int16")


@dataclass(frozen=True)
class Case:
    """A plan, the whole tensors, and how to run it."""

    src: dict[str, TensorLayout]
    dst: dict[str, TensorLayout]
    whole: dict[str, np.ndarray]
    plan: ReshardPlan
    ranks: int
    way: str
    checksums: bool
    staging_bytes: int


def random_layout(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, first: int, ranks: int
) -> TensorLayout:
    """Return a layout over `ranks` ranks from `first` on: up to three axes, each on a dim or replicated."""
    sizes, left = [], ranks
    while left > 1 and len(sizes) < 2:
        size = int(rng.choice([n for n in range(1, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes.append(left)
    axes, stride = {}, 1
    for i in reversed(range(len(sizes))):
        axes[f"a{i}"] = (sizes[i], stride)
        stride *= sizes[i]
    by: dict[int, tuple[str, ...]] = {}
    for name in rng.permutation(list(axes)).tolist():
        dim = int(rng.integers(-1, len(shape)))
        if dim >= 0:
            by[dim] = (*by.get(dim, ()), name)
    dims = {dim: random_cut(rng, shape[dim], prod(axes[n][0] for n in names)) for dim, names in by.items()}
    return TensorLayout.sharded(shape, dtype, axes, dims, by=by, offset=first)


def random_cut(rng: np.random.Generator, length: int, parts: int) -> DimSharding:
    """Return a cut of any kind."""
    kind = rng.choice(["even", "ceil", "chunks", "blocks", "points"])
    if kind == "chunks":
        return DimSharding(length, parts, chunks=int(rng.choice([n for n in (1, 2, 3) if length % n == 0])))
    if kind == "blocks":
        at = int(rng.integers(0, length + 1))
        return DimSharding(length, parts, blocks=(at, length - at))
    if kind == "points":
        inner = sorted(rng.integers(0, length + 1, parts - 1).tolist())
        return DimSharding(length, parts, points=(0, *inner, length))
    return DimSharding(length, parts, split="ceil" if kind == "ceil" else "balanced")


GtpSide = tuple[list[ParameterMetadata], dict[int, np.ndarray]]


def gtp_pair(rng: np.random.Generator) -> tuple[GtpSide, GtpSide]:
    """Return two sides of one int64 tensor over ranks of their own, at least one under GTP: records and arrays.

    Made by slicing: whole -> what tensor parallelism gives a rank -> padded with rows of -1 -> pieces of equal length.
    """
    rows, plain, first, sides = int(rng.choice([6, 12, 24])), int(rng.integers(3)), 0, []
    whole = np.arange(1, rows * 6 + 1).reshape(rows, 6)
    for side in range(2):
        dim, pieces = int(rng.integers(2)), 1 if side == plain else int(rng.integers(1, 5))
        width = whole.shape[dim]
        halves, thirds = [width // 2] * 2, [width // 3, width * 2 // 3]
        kinds = (([width], 1, 1), ([width], 2, 1), ([width], 3, 1), (halves, 3, 2), (thirds, 2, 1))
        blocks, tp, stride = kinds[int(rng.integers(len(kinds)))]  # blocks are dealt one by one
        dealt = [np.split(block, tp, dim) for block in np.split(whole, np.cumsum(blocks)[:-1], dim)]
        locals_ = [np.concatenate(own, dim) for own in zip(*dealt, strict=True)]
        pads = [n for n in range(8) if (len(locals_[0]) + n) % pieces == 0]
        pad = 0 if side == plain else int(rng.choice(pads))
        records, arrays = [], {}
        for t, g in product(range(tp), range(pieces)):
            rank = first + g * tp + t
            arrays[rank] = np.split(np.pad(locals_[t], ((0, pad), (0, 0)), constant_values=-1), pieces)[g]
            records.append(ParameterMetadata(
                "w", arrays[rank].shape, "int64", is_tp=True, partition_dim=dim, partition_stride=stride,
                partition_sizes=tuple(n // tp for n in blocks) if stride < len(blocks) else None, owner_rank=rank,
                tensor_parallel_group_ranks=tuple(first + g * tp + i for i in range(tp)), is_gtp=side != plain,
                gtp_remat_group_ranks=tuple(first + i * tp + t for i in range(pieces)), gtp_pad_length=pad,
            ))  # fmt: skip
        sides.append((records, arrays))
        first += tp * pieces
    return sides[0], sides[1]


def random_case(rng: np.random.Generator, world: int | None = None) -> Case:
    """Return a case; with `world` one that fits so many ranks."""
    most = 8 if world is None else world
    have = int(rng.integers(1, most + 1))
    first = int(rng.choice([0, have // 2, have])) if world is None else int(rng.integers(0, world))
    want = int(rng.integers(1, (9 if world is None else world - first + 1)))
    src, dst, whole = {}, {}, {}
    for i in range(int(rng.integers(1, 5))):
        shape = tuple(rng.integers(0, 14, int(rng.integers(0, 4))).tolist())
        dtype = str(rng.choice(DTYPES))
        name = f"layers.{i}.weight"
        src[name] = random_layout(rng, shape, dtype, 0, have)
        dst[name] = random_layout(rng, shape, dtype, first, want)
        values = rng.integers(0, 120, shape)
        whole[name] = np.asarray(values).reshape(shape).astype(dtypes.get(dtype).numpy)
    node_size = None if rng.random() < 0.7 else int(rng.integers(1, 5))
    plan = build_reshard_plan(src, dst, node_size=node_size, multicast=bool(rng.random() < 0.4))
    ranks = max(have, first + want) if world is None else world
    way = str(rng.choice(["auto", "direct", "slots", "messages"]))
    staging = int(rng.choice([1 << 10, 1 << 14, 1 << 20]))
    return Case(src, dst, whole, plan, ranks, way, bool(rng.random() < 0.5), staging)


def local_part(layout: TensorLayout, rank: int, whole: np.ndarray) -> np.ndarray:
    """Return what a rank holds of a tensor, sliced out of the whole."""
    shape = layout.local_shape(rank)
    assert shape is not None
    out = np.zeros(shape, whole.dtype)
    for tile in layout.tiles(rank):
        out[tuple(slice(*s) for s in tile.local)] = whole[tuple(slice(*s) for s in tile.box)]
    return out


def arrays_of(
    layouts: dict[str, TensorLayout], rank: int, whole: dict[str, np.ndarray], comm: Any = None
) -> dict[str, np.ndarray]:
    """Return a rank's arrays; in memory that neighbours see where a communicator is given."""
    found = {}
    for name, layout in layouts.items():
        if rank in layout:
            part = local_part(layout, rank, whole[name])
            if comm is not None:
                seen = comm.empty(part.shape, part.dtype)
                seen[...] = part
                part = seen
            found[name] = part
    return found


def run_case(comm: Any, case: Case, shown: bool) -> tuple[int, int]:
    """Run a case on a rank, compare with slicing, and return bytes sent and received."""
    from lowshard.reshard import execute_reshard_plan

    src = arrays_of(case.src, comm.rank, case.whole, comm if shown else None)
    dst = {
        name: np.full(layout.local_shape(comm.rank) or (), 77).astype(case.whole[name].dtype)
        for name, layout in case.dst.items()
        if comm.rank in layout
    }
    dst = {n: a.reshape(case.dst[n].local_shape(comm.rank)) for n, a in dst.items()}
    before = {name: array.copy() for name, array in src.items()}
    report = execute_reshard_plan(
        case.plan, src, dst, comm, way=case.way, checksums=case.checksums, staging_bytes=case.staging_bytes
    )
    for name, array in dst.items():
        expected = local_part(case.dst[name], comm.rank, case.whole[name])
        assert np.array_equal(array, expected), (name, comm.rank, case)
    for name, array in src.items():
        assert np.array_equal(array, before[name]), f"{name}: the source has changed"
    return report.sent_bytes, report.received_bytes


# ---- on threads


WAYS = ("direct", "slots", "messages")
BF16 = dtypes.get("bfloat16").numpy
LIMIT_S = 30.0


def on_all(ranks: int, call: Callable[[Any], Any]) -> list[Exception | None]:
    """Run a call on threads and return what each raised."""

    def work(comm: Any) -> Exception | None:
        try:
            call(comm)
        except LowshardError as error:
            return error
        return None

    return run_loopback(ranks, work, LIMIT_S)


def weights(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Return bf16 values as weights have."""
    return (rng.standard_normal((rows, cols)) * 0.02).astype(BF16)


def held(rows: int, cols: int, swizzled: bool, elem: str) -> Any:
    """Return buffers of zeros for a quantised matrix."""
    data = np.zeros((rows, cols), np.uint8)
    if swizzled:
        return SwizzledMXFP8(data, np.zeros(swizzled_bytes(rows, cols // 32), np.uint8), elem)  # type: ignore[arg-type]
    return MXFP8Tensor(data, np.zeros((rows, cols // 32), np.uint8), elem)  # type: ignore[arg-type]
