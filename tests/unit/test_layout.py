"""box(), local_shape() and the text and JSON forms of layouts, against a brute-force model."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layouts import layouts, meshes

from lowshard import DeviceMesh, Layout, LowshardError, Partial, Replicated, Sharded, ShardingError
from lowshard import dtypes as dt
from lowshard.box import contains, contiguous_runs, covers, intersect, single_run, subtract, volume
from lowshard.errors import DTypeError, LayoutError, MeshError
from lowshard.placement import Placement


def brute_box(layout: Layout, rank: int) -> tuple[tuple[int, int], ...]:
    """Cut an index list axis by axis, as written in the split rule, with no interval arithmetic."""
    coord = np.argwhere(np.array(layout.mesh.ranks).reshape(layout.mesh.shape) == rank)[0]
    box = []
    for extent, entry in zip(layout.shape, layout.spec, strict=True):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        held = list(range(extent))
        start = 0
        for name in names:
            axis = layout.mesh.axis_names.index(name)
            k, i = layout.mesh.shape[axis], int(coord[axis])
            if layout.splits[axis] == "balanced":
                parts = [list(p) for p in np.array_split(np.array(held, int), k)]
            else:
                step = -(-len(held) // k)
                parts = [held[j * step : (j + 1) * step] for j in range(k)]
            start = start + sum(len(p) for p in parts[:i])
            held = parts[i]
        box.append((start, start + len(held)))
    return tuple(box)


@given(layouts())
def test_box_and_local_shape_agree_with_a_brute_force_model(layout: Layout) -> None:
    for rank in layout.mesh.ranks:
        assert layout.box(rank) == brute_box(layout, rank)
        assert layout.local_shape(rank) == tuple(b - a for a, b in brute_box(layout, rank))
        assert layout.local_bytes(rank) == volume(layout.box(rank)) * dt.get(layout.dtype).itemsize_bytes


@given(layouts(partial=False))
def test_the_boxes_of_all_ranks_cover_the_array_once_replicas_apart(layout: Layout) -> None:
    counts = np.zeros(layout.shape, int)
    for rank in layout.mesh.ranks:
        counts[tuple(slice(a, b) for a, b in layout.box(rank))] += 1
    sharding_axes = {a for dim in layout.sharding_axes for a in dim}
    copies = int(np.prod([n for a, n in enumerate(layout.mesh.shape) if a not in sharding_axes]))
    assert (counts == copies).all()


@given(layouts())
def test_text_json_and_digest_round_trip(layout: Layout) -> None:
    assert Layout.parse(layout.mesh, str(layout)) == layout
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.digest() == layout.digest()


@given(layouts(), layouts())
def test_digests_differ_where_layouts_differ(a: Layout, b: Layout) -> None:
    assert (a.digest() == b.digest()) == (a == b)


@given(meshes())
def test_coord_and_rank_are_inverse_and_row_major(mesh: DeviceMesh) -> None:
    assert [mesh.rank(mesh.coord(r)) for r in mesh.ranks] == list(mesh.ranks)
    assert [mesh.coord(r) for r in mesh.ranks] == list(np.ndindex(*mesh.shape))
    for name in mesh.axis_names:
        groups = mesh.groups(name)
        assert sorted(r for g in groups for r in g) == list(mesh.ranks)
        assert all(len(g) == mesh.axis_size(name) for g in groups)
        axis = mesh.axis_names.index(name)
        for g in groups:
            assert [mesh.coord(r)[axis] for r in g] == list(range(mesh.axis_size(name)))
            assert len({mesh.coord(r)[:axis] + mesh.coord(r)[axis + 1 :] for r in g}) == 1


def test_groups_of_two_axes_follow_the_order_named() -> None:
    mesh = DeviceMesh((2, 3, 2), ("a", "b", "c"))
    assert mesh.groups(("c", "a")) == [(0, 6, 1, 7), (2, 8, 3, 9), (4, 10, 5, 11)]


def test_nesting_order_is_kept_and_told_apart() -> None:
    mesh = DeviceMesh((2, 4), ("dp", "tp"))
    a = Layout.from_spec(mesh, (10, 3), "bf16", (("tp", "dp"), None))
    b = Layout.from_spec(mesh, (10, 3), "bf16", (("dp", "tp"), None))
    assert a != b
    assert a.placements == b.placements == (Sharded(0), Sharded(0))
    assert str(a) == "bfloat16[10,3] tp=S0 dp=S0"
    assert a.spec == (("tp", "dp"), None)
    assert a.box(1) == ((3, 5), (0, 3))  # tp=1 holds 3..6 of 3,3,2,2; dp=0 takes the first 2 of 3
    assert b.box(1) == ((2, 3), (0, 3))


def test_spec_is_canonical() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    assert Layout.from_spec(mesh, (4, 4), "f32", (["dp"], ())).spec == ("dp", None)
    assert Layout.from_spec(mesh, (4, 4), "f32", ()).spec == (None, None)
    assert Layout(mesh, (4, 4), "f32", (Sharded(-1), Replicated())).spec == (None, "dp")


def test_a_mesh_over_other_ranks_answers_for_them_only() -> None:
    mesh = DeviceMesh((2,), ("tp",), ranks=(6, 3))
    lay = Layout(mesh, (5,), "f32", (Sharded(0),))
    assert lay.box(6) == ((0, 3),)
    assert lay.box(3) == ((3, 5),)
    with pytest.raises(MeshError, match="rank 0 is not in mesh"):
        lay.box(0)
    assert DeviceMesh((2,), ("tp",), ranks=(0, 1)) == DeviceMesh((2,), ("tp",))


MESH = DeviceMesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: DeviceMesh((), ()), MeshError, "at least one axis"),
        (lambda: DeviceMesh((2, 2), ("a", "a")), MeshError, "must differ"),
        (lambda: DeviceMesh((2,), ("a",), ranks=(1, 1)), MeshError, "distinct ranks"),
        # A set has another order in each process.
        (lambda: DeviceMesh((2, 2), {"a", "b"}), MeshError, "one name an axis"),  # type: ignore[arg-type]
        (lambda: MESH.groups({"dp", "tp"}), MeshError, "as names"),  # type: ignore[arg-type]
        (lambda: Layout.from_spec(MESH, (4,), "f32", ({"dp", "tp"},)), LayoutError, "one entry a dim"),  # type: ignore
        (lambda: Layout(MESH, (4,), "f32", {Sharded(0), Partial()}), LayoutError, "one placement"),  # type: ignore
        (lambda: MESH.axis_size("pp"), MeshError, "no axis 'pp'; its axes are dp, tp"),
        (lambda: Layout(MESH, (4,), "f32", (Sharded(1), Replicated())), LayoutError, "dim 1"),
        (lambda: Layout(MESH, (4,), "f33", (Replicated(), Replicated())), DTypeError, "float32"),
        (lambda: Layout(MESH, (4,), "f32", (Placement(), Replicated())), LayoutError, "write Replicated"),
        (lambda: Layout(MESH, (4,), "f32", (Partial("sum"), Partial("max"))), LayoutError, "share one op"),
        (lambda: Layout(MESH, (4,), "e8m0", (Partial(), Replicated())), DTypeError, "scale"),
        (lambda: Layout.from_spec(MESH, (4, 4), "f32", ("tp", "tp")), LayoutError, "used twice"),
        (lambda: Layout.parse(MESH, "float32[4"), LayoutError, "reads like"),
        (lambda: Layout.parse(MESH, "float32[4] dp=Q"), ShardingError, "cannot be read"),
        (lambda: Layout.from_json({"mesh": MESH.to_json()}), LayoutError, "not a valid layout"),
        (lambda: Partial("mean"), ShardingError, "sum, avg, min, max, prod"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(make: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        make()  # type: ignore[operator]
    assert isinstance(caught.value, LowshardError)


boxes3 = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: (min(p), max(p)))] * 3)


@given(boxes3, boxes3)
def test_box_arithmetic_agrees_with_masks(a: tuple, b: tuple) -> None:  # type: ignore[type-arg]
    def mask(box: tuple[tuple[int, int], ...]) -> np.ndarray:
        m = np.zeros((6, 6, 6), bool)
        m[tuple(slice(s, e) for s, e in box)] = True
        return m

    both = intersect(a, b)
    assert np.array_equal(mask(both) if both else np.zeros((6, 6, 6), bool), mask(a) & mask(b))
    rest = subtract(a, b)
    total = sum((mask(r).astype(int) for r in rest), np.zeros((6, 6, 6), int))
    assert np.array_equal(total, (mask(a) & ~mask(b)).astype(int))
    assert contains(a, b) == (not (mask(b) & ~mask(a)).any())
    assert covers([b, *rest], a)
    assert covers(rest, a) == (volume(a) == 0 or both is None)
    run, starts = contiguous_runs(a, (6, 6, 6))
    assert single_run(a, (6, 6, 6)) == (0 if not starts else starts[0] if len(starts) == 1 else None)
    flat = np.zeros(216, int)
    for s in starts:
        flat[s : s + run] += 1
    assert np.array_equal(flat.reshape(6, 6, 6), mask(a).astype(int))


def test_every_dtype_has_one_row_and_every_name_of_it_leads_there() -> None:
    rows = dt.all_dtypes()
    assert len({r.name for r in rows}) == len({r.safetensors for r in rows}) == len(rows) == 16
    for row in rows:
        assert dt.get(row.name) is dt.get(row.short) is dt.get(row.numpy) is dt.get(row.safetensors) is row
        assert row.numpy.itemsize == row.itemsize_bytes
        assert dt.from_safetensors(row.safetensors) is row
        assert np.zeros(2, row.numpy).dtype.name == row.name
    assert {r.name for r in rows if r.accumulator.name != r.name} == {
        "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    }  # fmt: skip
    # ml_dtypes' float8_e4m3 has infinities where float8_e4m3fn has 256 and more: the name alone is an alias.
    assert dt.get("float8_e4m3").name == "float8_e4m3fn"
    for bad in (
        "complex64",
        "F4",
        3,
        None,
        np.dtype("S4"),
        ml_dtypes.float8_e4m3,
        np.dtype(ml_dtypes.float8_e4m3),
    ):
        with pytest.raises(DTypeError, match=r"lowshard carries.*goes as its bytes"):
            dt.get(bad)
    for code, name in (("f4", "float32"), ("d", "float64"), ("i4", "int32"), ("<i2", "int16"), ("?", "bool")):
        with pytest.raises(DTypeError, match=f"; for NumPy's code '{re.escape(code)}' write '{name}'$"):
            dt.get(code)


def test_with_shape_is_the_layout_of_another_array_cut_the_same_way() -> None:
    mesh = DeviceMesh((2, 3), ("x", "y"))
    first = Layout.from_spec(mesh, (6, 4), "bfloat16", (("y", "x"), None), "ceil")
    assert first.with_shape((12, 5)) == Layout.from_spec(
        mesh, (12, 5), "bfloat16", (("y", "x"), None), "ceil"
    )
    assert first.digest() != first.with_shape((12, 5)).digest()
    assert first.with_shape((6, 4)).digest() == first.digest()
    with pytest.raises(LayoutError, match="has 2 dims"):
        first.with_shape((6,))
    with pytest.raises(LayoutError, match="extents >= 0"):
        first.with_shape((6, -1))
