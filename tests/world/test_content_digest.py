"""`digest`: the same for every layout, another for every other content, and replicas that differ are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import local_part, random_layout

import lowshard as ls
from lowshard import comm as lc
from lowshard import dtypes
from lowshard.errors import BufferMismatchError, LayoutError, LowshardError, MismatchError, VerificationError
from lowshard.kernels.unit_weights import table
from lowshard.reshard import TensorLayout, digest
from lowshard.tiling import Tile, Tiling

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "float16")


def _run(size: int, job: Any) -> list[Any]:
    return lc.run_loopback(size, job, 30.0)


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    row = dtypes.get(dtype).numpy
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape, dtype=int)) * row.itemsize
    return rng.integers(0, 256, size, dtype=np.uint8).view(row).reshape(shape)


def _tiling(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, ranks: int) -> Tiling:
    """Return a tiling with tiles that overlap each other across ranks and cover the array."""
    tiles: list[tuple[Tile, ...]] = []
    shapes: list[tuple[int, ...]] = []
    edges = sorted(rng.integers(0, shape[0] + 1, ranks - 1).tolist())
    for low, high in zip([0, *edges], [*edges, shape[0]], strict=True):
        wide = (max(0, low - int(rng.integers(0, 4))), min(shape[0], high + int(rng.integers(0, 4))))
        rest = tuple((0, n) for n in shape[1:])
        extent = (wide[1] - wide[0], *shape[1:])
        tiles.append((Tile((wide, *rest), tuple((0, n) for n in extent)),))
        shapes.append(extent)
    return Tiling(shape, dtype, tuple(tiles), tuple(shapes))


def _local(layout: Any, rank: int, whole: np.ndarray) -> np.ndarray | None:
    made = layout if isinstance(layout, TensorLayout) else TensorLayout.from_tiling(layout)
    return local_part(made, rank, whole) if rank in made else None


def test_the_layout_does_not_matter(rng: np.random.Generator) -> None:
    for _ in range(1000 if mode.full() else 60):
        shape = tuple(rng.integers(1, 14, int(rng.integers(0, 4))).tolist())
        dtype, size = str(rng.choice(DTYPES)), int(rng.integers(1, 7))
        whole = {"a": _values(rng, shape, dtype), "b": _values(rng, (7, 5), "float32")}
        layouts: dict[str, Any] = {
            "a": random_layout(rng, shape, dtype, int(rng.integers(0, 2)), size),
            "b": random_layout(rng, (7, 5), "float32", 0, size),
        }
        if shape and rng.random() < 0.4:
            layouts["a"] = _tiling(rng, shape, dtype, size)
        alone = digest(
            {
                n: (ls.Layout(ls.DeviceMesh((1,), ("x",)), w.shape, w.dtype, (ls.Replicated(),)), w)
                for n, w in whole.items()
            }
        )

        def job(comm: Any, layouts: Any = layouts, whole: Any = whole) -> dict[str, str]:
            return digest({n: (x, _local(x, comm.rank, whole[n])) for n, x in layouts.items()}, comm)

        assert _run(size + 1, job) == [alone] * (size + 1)


def test_dtype_and_shape_count() -> None:
    def one(shape: tuple[int, ...], dtype: str) -> str:
        layout = ls.Layout(ls.DeviceMesh((1,), ("x",)), shape, dtype, (ls.Replicated(),))
        return digest({"w": (layout, np.zeros(shape, dtypes.get(dtype).numpy))})["w"]

    made = [one((4, 6), "float32"), one((6, 4), "float32"), one((24,), "float32"), one((4, 6), "int32")]
    assert len(set(made)) == 4
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in made)


def test_one_changed_element_of_up_to_four_bytes_shows_and_of_eight_not_always() -> None:
    """Weights are below 2^15, so that sums of two changed units of 16 bits are 0 only if both ratios are one."""
    weights = table().astype(np.int64)
    assert 2 * 65535 * int(np.abs(weights).max()) < 1 << 32
    assert (weights[0, ::2] * weights[1, 1::2] != weights[0, 1::2] * weights[1, ::2]).all()
    layout = ls.Layout(ls.DeviceMesh((1,), ("x",)), (2,), "int64", (ls.Replicated(),))
    zeros, other = np.zeros(2, np.int64), np.array([365950007978753648, 0])  # as the docs say
    assert digest({"w": (layout, zeros)}) == digest({"w": (layout, other)})


def test_a_changed_replica_is_named(rng: np.random.Generator) -> None:
    mesh = ls.DeviceMesh((2, 2), ("dp", "tp"))
    layout = ls.Layout(mesh, (6, 10), "bfloat16", (ls.Replicated(), ls.Sharded(1)))
    tensor = TensorLayout.from_layout(layout)
    whole = {f"w{i}": _values(rng, (6, 10), "bfloat16") for i in range(3)}

    def job(comm: Any) -> str:
        mine = {n: (layout, local_part(tensor, comm.rank, w)) for n, w in whole.items()}
        if comm.rank == 3:
            mine["w1"][1].view(np.uint16)[5, 2] ^= 0x8000
        with pytest.raises(VerificationError) as found:
            digest(mine, comm)
        return str(found.value)

    texts = _run(4, job)
    assert len(set(texts)) == 1
    assert "w1[0:6, 5:10] differs on ranks 1 than 3" in texts[0]
    assert "w0" not in texts[0]


def test_three_replicas_whose_errors_cancel_are_found(rng: np.random.Generator) -> None:
    """The worst case for a sum over replicas: one holds more by what another holds less."""
    layout = ls.Layout(ls.DeviceMesh((3,), ("dp",)), (8,), "int32", (ls.Replicated(),))
    whole = rng.integers(0, 100, 8).astype(np.int32)

    def job(comm: Any) -> None:
        mine = whole.copy()
        mine[4] += (0, 1, -1)[comm.rank]
        with pytest.raises(VerificationError, match="0 than 1 than 2"):
            digest({"w": (layout, mine)}, comm)

    _run(3, job)


def test_a_moved_tile_shows(rng: np.random.Generator) -> None:
    layout = ls.Layout(ls.DeviceMesh((2,), ("tp",)), (64, 96), "bfloat16", (ls.Sharded(0),))
    whole = _values(rng, (64, 96), "bfloat16")
    before = digest(
        {"w": (ls.Layout(ls.DeviceMesh((1,), ("x",)), (64, 96), "bfloat16", (ls.Replicated(),)), whole)}
    )
    for _ in range(500 if mode.full() else 25):
        moved = whole.copy()
        (r, c), (s, d) = (8 * rng.permutation(8)[:2]).tolist(), (16 * rng.permutation(6)[:2]).tolist()
        moved[r : r + 8, s : s + 16], moved[c : c + 8, d : d + 16] = (
            whole[c : c + 8, d : d + 16],
            whole[r : r + 8, s : s + 16],
        )
        rows = (moved[:32], moved[32:])
        assert _run(2, lambda comm, rows=rows: digest({"w": (layout, rows[comm.rank])}, comm)) != [before] * 2


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t, r: {"w": (t, np.zeros((3, 4), np.float32))}, BufferMismatchError, "holds float32"),
        (lambda t, r: {"w": (t, np.zeros((2, 4), np.int32))}, BufferMismatchError, "got int32"),
        (lambda t, r: {"w": (t, np.zeros((2, 4), ">f4"))}, BufferMismatchError, "got >f4"),
        (lambda t, r: {"w": (t, None)}, LowshardError, "w"),
        (lambda t, r: {"w": t}, LayoutError, "w has"),
        (lambda t, r: [("w", t)], LayoutError, "mapping"),
        (lambda t, r: {3: (t, np.zeros((2, 4), np.float32))}, LayoutError, "text"),
        (lambda t, r: {f"w{r}": (t, np.zeros((2, 4), np.float32))}, MismatchError, "digest"),
    ],
)
def test_wrong_calls_are_one_error_on_all_ranks(change: Any, error: type[Exception], text: str) -> None:
    layout = ls.Layout(ls.DeviceMesh((2,), ("tp",)), (4, 4), "float32", (ls.Sharded(0),))

    def job(comm: Any) -> str:
        right = {"w": (layout, np.zeros((2, 4), np.float32))}
        with pytest.raises(error, match=text) as found:
            digest(change(layout, comm.rank) if comm.rank == 1 or error is MismatchError else right, comm)
        return type(found.value).__name__

    assert len(set(_run(2, job))) == 1
