"""Layouts of DTensors hold what torch's own shards hold, and go back to the same placements or say why not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, ShardingError
from lowshard.errors import BufferMismatchError, DTypeError, LowshardError, MeshError
from lowshard.interop import torch as lt
from lowshard.placement import Placement

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.tensor as dt  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh as TorchMesh  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta  # noqa: E402
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

WORLD, RANK, BATCHES = 64, 5, 10
NAMES = ("dp", "cp", "tp")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of 64 ranks that sends nothing: shards of every rank are asked of torch's own placements."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


MESHES: dict[tuple[Any, ...], Any] = {}


def torch_mesh(sizes: tuple[int, ...], ranks: tuple[int, ...] | None = None) -> Any:
    key = sizes, ranks
    if key not in MESHES:
        grid = torch.tensor(ranks or range(prod(sizes))).reshape(sizes)
        MESHES[key] = TorchMesh("cpu", grid, mesh_dim_names=NAMES[: len(sizes)], _init_backend=False)
    return MESHES[key]


def shards_of(whole: Any, placed: Any, sizes: tuple[int, ...]) -> dict[tuple[int, ...], np.ndarray]:
    """Return what torch gives each coordinate of a mesh: one mesh dim at a time, as distribute_tensor does."""
    found = {(): whole}
    for placement, size in zip(placed, sizes, strict=True):
        split = {}
        for coord, part in found.items():
            if isinstance(placement, dt.Shard | _StridedShard):
                pieces, _ = placement._split_tensor(part, size, with_padding=False)
            else:
                pieces = [part] * size
            split |= {(*coord, i): piece for i, piece in enumerate(pieces)}
        found = split
    return {coord: part.numpy() for coord, part in found.items()}


def random_case(rng: np.random.Generator) -> tuple[tuple[int, ...], Any, list[Any]]:
    sizes = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
    shape = tuple(int(n) for n in rng.integers(0, 14, rng.integers(1, 4)))
    if rng.random() < 0.4:  # even, so that strided shards are boxes
        shape = tuple(n // 2 * prod(sizes) for n in shape)
    placed: list[Any] = []
    op = str(
        rng.choice(["sum", "avg", "min", "max", "product", "band"], p=[0.4, 0.14, 0.14, 0.14, 0.14, 0.04])
    )
    one = int(rng.integers(len(shape))) if rng.random() < 0.5 else None  # several mesh dims cut it
    for _ in sizes:
        kind = rng.choice(["shard", "replicate", "partial"], p=[0.7, 0.2, 0.1])
        dim = int(rng.integers(len(shape))) if one is None else one
        placed.append(
            dt.Shard(dim) if kind == "shard" else dt.Replicate() if kind == "replicate" else dt.Partial(op)
        )
    for axis in range(len(sizes) - 1):
        if isinstance(placed[axis], dt.Shard) and rng.random() < 0.6:
            later = [
                n for p, n in zip(placed[axis + 1 :], sizes[axis + 1 :], strict=True) if p == placed[axis]
            ]
            factors = [prod(later[i:j]) for i, j in itertools.combinations(range(len(later) + 1), 2)]
            wild = rng.random() < 0.1 or not factors
            factor = int(rng.integers(1, 5)) if wild else int(rng.choice(factors))
            if factor > 1 or wild:
                placed[axis] = _StridedShard(placed[axis].dim, split_factor=factor)
    return shape, sizes, placed


def made(shape: tuple[int, ...], mesh: Any, placed: list[Any], dtype: Any = torch.float32) -> Any:
    """Return a DTensor with the part that torch says this rank has."""
    local, _ = compute_local_shape_and_global_offset(shape, mesh, placed)
    return dt.DTensor.from_local(
        torch.zeros(local, dtype=dtype), mesh, placed, shape=torch.Size(shape),
        stride=tuple(prod(shape[d + 1 :]) for d in range(len(shape))),
    )  # fmt: skip


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_dtensors_have_the_boxes_that_torch_gives(batch: int) -> None:
    rng = mode.rng(f"dtensors {batch}")
    count, kept, strided = (1000 if mode.full() else 40), 0, 0
    for _ in range(count):
        shape, sizes, placed = random_case(rng)
        ranks = tuple(int(r) for r in rng.permutation(WORLD)[: prod(sizes)]) if rng.random() < 0.02 else None
        mesh = torch_mesh(sizes, ranks)
        given = made(shape, mesh, placed)
        whole = torch.arange(prod(shape)).reshape(shape)
        theirs = shards_of(whole, placed, sizes)
        case = f"{shape} {sizes} {placed}"
        try:
            layout = lt.layout(given)
        except ShardingError as error:
            check_refusal(str(error), case, whole.numpy(), placed, theirs)
            continue
        kept += 1
        strided += any(isinstance(p, _StridedShard) for p in placed)
        for coord, part in theirs.items():
            box = layout.box_at(coord)
            np.testing.assert_array_equal(
                whole.numpy()[tuple(slice(*i) for i in box)], part, err_msg=f"{case} {coord}"
            )
        assert tuple(layout.mesh.ranks) == (ranks or tuple(range(prod(sizes))))
        dims, back = lt.placements(layout)
        assert back == given.placements, case
        assert dims == (NAMES[: len(sizes)], sizes)
        assert lt.layout(made(shape, mesh, list(back))) == layout
        if RANK in layout.mesh:
            local, offset = compute_local_shape_and_global_offset(shape, mesh, placed)
            assert layout.local_shape(RANK) == local == tuple(given.to_local().shape)
            assert all(lo == at for (lo, hi), at in zip(layout.box(RANK), offset, strict=True) if lo < hi)
            again = lt.dtensor(given.to_local(), layout, mesh)
            assert again._spec == given._spec
            assert again.to_local().data_ptr() == given.to_local().data_ptr()
    assert kept > count * 0.6  # what is refused are a few
    assert strided > count * 0.05


def check_refusal(
    text: str, case: str, whole: np.ndarray, placed: list[Any], theirs: dict[tuple[int, ...], np.ndarray]
) -> None:
    """Check that an error names a placement that no layout has, or a rank, what it holds and what it would hold."""
    if "band" in text:
        assert dt.Partial("band") in placed, case
        return
    if "nests mesh dims" in text:
        assert any(isinstance(p, _StridedShard) and repr(p) in text for p in placed), case
        return
    found = re.search(
        r"dim (\d) of .*: at (.*) a DTensor holds (.*), the layout .* (\d+):(\d+)\. torch wr", text
    )
    assert found, f"{case}: {text}"
    dim, where, held, lo, hi = found.groups()
    place = {name: int(at) for name, at in (word.split() for word in where.split(", "))}
    coord = tuple(place.get(name, 0) for name in NAMES[: len(placed)])
    rows = np.unique(np.argwhere(np.isin(whole, theirs[coord]))[:, int(dim)]).tolist()
    runs = [] if held == "nothing" else held.split(" and ")
    said = sorted(i for run in runs for i in range(*map(int, run.split(":"))))
    assert not rows or rows == said, f"{case}: {text}"
    assert said != list(range(int(lo), int(hi))), f"{case}: {text}"


def check_refusal_of_layout(text: str, partial: dict[str, str]) -> None:
    rule = r"a DTensor holds .*, the layout .*\. torch (cuts by the ceiling rule|writes an order other)"
    assert len(set(partial.values())) > 1 if "one op" in text else re.search(rule, text), text


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_layouts_go_to_dtensors_and_back(batch: int) -> None:
    rng = mode.rng(f"layouts to dtensors {batch}")
    count, kept = (1000 if mode.full() else 40), 0
    for _ in range(count):
        shape, sizes, _ = random_case(rng)
        axes = [name for name in NAMES[: len(sizes)] if rng.random() < 0.8]
        rng.shuffle(axes)
        spec: list[tuple[str, ...]] = [() for _ in shape]
        for name in axes:
            dim = int(rng.integers(len(shape)))
            spec[dim] = (*spec[dim], name)
        rest = [name for name in NAMES[: len(sizes)] if name not in axes]
        ops = ["sum", "avg"] if rng.random() < 0.5 else ["max"]
        partial: Any = {name: str(rng.choice(ops)) for name in rest if rng.random() < 0.5}
        split: Any = rng.choice(["ceil", "balanced"])
        layout = Layout.from_spec(
            DeviceMesh(sizes, NAMES[: len(sizes)]), shape, "bf16", spec, split, partial=partial
        )
        try:
            back = lt.placements(layout)[1]
        except ShardingError as error:
            check_refusal_of_layout(str(error), partial)
            continue
        kept += 1
        theirs = shards_of(torch.arange(prod(shape)).reshape(shape), back, sizes)
        whole = np.arange(prod(shape)).reshape(shape)
        for coord, part in theirs.items():
            np.testing.assert_array_equal(whole[tuple(slice(*i) for i in layout.box_at(coord))], part)
        again = lt.layout(made(shape, torch_mesh(sizes), list(back), torch.bfloat16))
        assert [again.box(r) for r in range(again.mesh.size)] == [
            layout.box(r) for r in range(again.mesh.size)
        ]
        assert again.partials == layout.partials
        if split == "ceil" and 1 not in sizes:
            assert again == layout
    assert kept > count * 0.4


def test_an_order_that_torch_keeps_beside_the_placements_is_read() -> None:
    mesh = torch_mesh((2, 3))
    whole = torch.arange(7)
    meta, order = TensorMeta(torch.Size((7,)), (1,), torch.int64), (ShardOrderEntry(0, (1, 0)),)
    spec = DTensorSpec(mesh, (dt.Shard(0), dt.Shard(0)), meta, shard_order=order)
    layout = lt.layout(dt.DTensor(torch.zeros(0, dtype=torch.int64), spec, requires_grad=False))
    assert layout.spec == (("cp", "dp"),)
    parts = {
        (d, c): half
        for c, third in enumerate(dt.Shard(0)._split_tensor(whole, 3, with_padding=False)[0])
        for d, half in enumerate(dt.Shard(0)._split_tensor(third, 2, with_padding=False)[0])
    }
    for coord, part in parts.items():
        assert list(range(*layout.box_at(coord)[0])) == part.tolist()


DTYPES = """float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu bool
    int8 int16 int32 int64 uint8 uint16 uint32 uint64"""


@pytest.mark.parametrize("name", DTYPES.split())
def test_every_dtype_goes_both_ways(name: str) -> None:
    mesh = torch_mesh((8,))
    given = made((19, 2), mesh, [dt.Shard(0)], getattr(torch, name))
    layout = lt.layout(given)
    assert layout.dtype == name
    local = np.zeros(layout.local_shape(RANK), layout.numpy_dtype)
    again = lt.dtensor(local, layout, mesh)
    assert again.dtype == given.dtype
    assert again.to_local().data_ptr() == local.ctypes.data


def test_what_cannot_be_said_is_named() -> None:
    mesh, ours = torch_mesh((2, 4)), DeviceMesh((2, 4), NAMES[:2])

    def f32(shape: tuple[int, ...], *placed: Placement) -> Layout:
        return Layout(ours, shape, "float32", placed)

    def to_dtensor(local: Any, layout: Layout, on: Any = mesh) -> Callable[[], Any]:
        return lambda: lt.dtensor(local, layout, on)

    local, rows = torch.zeros(3, 4), f32((6, 4), Sharded(0), Replicated())
    strided = made((8,), mesh, [dt.Replicate(), _StridedShard(0, split_factor=2)])
    beyond = dt.DTensor(
        local, DTensorSpec(mesh, (dt.Shard(1), dt.Replicate()), meta_of(8)), requires_grad=False
    )
    cases: list[tuple[Callable[[], Any], type[LowshardError], str]] = [
        (lambda: lt.layout(local), ShardingError, "takes a DTensor"),
        (lambda: lt.layout(beyond), ShardingError, "its dims are 0 to 0"),
        (lambda: lt.layout(strided), ShardingError, "several boxes"),
        (lambda: lt.layout(made((8, 4), mesh, [dt.Partial("bxor"), dt.Shard(0)])), ShardingError, "bxor"),
        (lambda: lt.layout(made((8,), mesh, [dt.Replicate()] * 2, torch.complex64)), DTypeError, "complex64"),
        (lambda: lt.placements("S0"), ShardingError, "takes a Layout"),  # type: ignore[arg-type]
        (lambda: lt.placements(f32((10,), Replicated(), Sharded(0))), ShardingError, "split='ceil'"),
        (lambda: lt.placements(f32((8,), Partial("sum"), Partial("avg"))), ShardingError, "one op"),
        (to_dtensor(local, rows, torch_mesh((4, 2))), MeshError, "same names"),
        (to_dtensor(local, rows, None), MeshError, "DeviceMesh"),
        (to_dtensor(local, f32((8, 4), Sharded(0), Replicated())), BufferMismatchError, r"float32\[4, 4\]"),
        (to_dtensor(local.double(), rows), BufferMismatchError, "float64"),
        (to_dtensor([[0.0]], rows), BufferMismatchError, "plain torch"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()


def meta_of(extent: int) -> Any:
    return TensorMeta(torch.Size((extent,)), (1,), torch.float32)
