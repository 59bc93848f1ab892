"""Checkpoints for tests: random states over tilings, and what each rank should hold of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.box import full_box, relative_slices
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, save

S = ShardingStrategy
T = TypeVar("T")
Values = dict[str, np.ndarray]


def local_of(value: np.ndarray, tiling: Tiling, rank: int) -> np.ndarray | None:
    """Return what a rank holds of a value."""
    if rank >= tiling.num_ranks or rank not in tiling:
        return None
    out = np.empty(tiling.local_shape(rank), value.dtype)
    for tile in tiling.tiles(rank):
        out[relative_slices(tile.local, full_box(out.shape))] = value[
            relative_slices(tile.box, full_box(value.shape))
        ]
    return out


def random_value(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return random bytes as an array."""
    row = dtypes.get(dtype)
    size = int(np.prod(shape)) * row.itemsize_bytes
    raw = np.random.default_rng(seed).integers(0, 2 if row.kind == "bool" else 256, size, dtype=np.uint8)
    return raw.view(row.numpy).reshape(shape)


def attention_and_more(k: int) -> dict[str, Tiling]:
    """Return tilings of every kind over k ranks: rows, columns, stacked, grouped, whole, empty, 0-d, experts."""
    made = {
        "rows": (S.rowwise(k), (13, 6), "float32"), "columns": (S.columnwise(k), (9, 35), "bfloat16"),
        "qkv": (S.stacked_qkv(k, 5, 4), (60, 7), "float16"), "gqa": (S.grouped_qkv(k, 6, 2, 4), (40, 6), "float32"),
        "gate_up": (S.gate_up(k, 1), (3, 22, 4), "float32"), "norm": (S.replicate(k), (600,), "float32"),
        "large": (S.replicate(k), (700, 512), "float32"), "few": (S.rowwise(k), (2, 4), "int64"),
        "wide": (S.columnwise(k), (11, 40000), "uint8"), "nothing": (S.rowwise(k), (0, 3), "float32"),
        "step": (S.replicate(k), (), "int32"), "codes": (S.rowwise(k), (64, 32), "float8_e4m3fn"),
    }  # fmt: skip
    return {name: strategy.layout(shape, dtype) for name, (strategy, shape, dtype) in made.items()}


def values_of(tilings: Mapping[str, Tiling], seed: int = 0) -> Values:
    """Return a random value for each tiling."""
    return {n: random_value(t.shape, t.dtype, seed * 1000 + i) for i, (n, t) in enumerate(tilings.items())}


def state_of(
    values: Values, tilings: Mapping[str, Tiling], rank: int
) -> dict[str, tuple[Tiling, np.ndarray | None]]:
    """Return a rank's state to save."""
    return {name: (tiling, local_of(values[name], tiling, rank)) for name, tiling in tilings.items()}


def on_ranks(size: int, job: Callable[[lc.Communicator], T], timeout_s: float = 60) -> list[T]:
    """Run a job on threads as ranks."""
    return lc.run_loopback(size, job, timeout_s)


def save_over(path: Path, values: Values, tilings: Mapping[str, Tiling], size: int, **options: Any) -> None:
    """Save values from as many ranks."""
    on_ranks(size, lambda c: save(path, state_of(values, tilings, c.rank), c, **options))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal to the bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
