"""Every layout to every layout on threads: the bytes of slicing the global array, and no byte too many."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import mode
from support.layouts import layouts, meshes, shapes
from support.moves import WAYS, check_move, placements_of, random_pair, take_way

from lowshard import (
    DeviceMesh,
    Layout,
    Partial,
    Replicated,
    Sharded,
    execute,
    execute_all,
    plan_redistribute,
    redistribute,
)
from lowshard import comm as lc
from lowshard import dtypes as dt
from lowshard.box import Split
from lowshard.cost import ClusterProfile
from lowshard.errors import BufferMismatchError, DTypeError, MeshError, MismatchError, PlanError
from lowshard.placement import mean_weight, parse_placement
from lowshard.redistribute_plan import RedistributePlan

PROFILE = ClusterProfile.default()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test by each way that bytes can take; arrays are small here, so the limits of size are moved."""
    take_way(request.param, monkeypatch.setattr)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_pair_of_layouts_gives_the_bytes_of_slicing(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    src = data.draw(layouts(mesh))
    dst = data.draw(layouts(mesh, src.shape, src.dtype))
    seed = data.draw(st.integers(0, 2**31))
    lc.run_loopback(mesh.size, lambda c: check_move(c, src, dst, seed), 30)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_plan_by_seconds_gives_the_same_bits(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32", "int8"]))
    src = data.draw(layouts(mesh, dtype=dtype))
    dst = data.draw(layouts(mesh, src.shape, dtype))
    seed, node_size = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([None, 1, 2, 4]))
    kind = "float" if dtype in ("float32", "bfloat16") else "int"
    # The bits that check_move expects are those of one fold over all terms.
    lc.run_loopback(mesh.size, lambda c: check_move(c, src, dst, seed, kind, PROFILE, node_size), 30)


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_floats_fold_in_tree_order_bit_for_bit(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    dtype = data.draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"]))
    shape = data.draw(shapes)
    src = data.draw(layouts(mesh, shape, dtype))
    dst = data.draw(layouts(mesh, shape, dtype))
    seed = data.draw(st.integers(0, 2**31))
    lc.run_loopback(mesh.size, lambda c: check_move(c, src, dst, seed, "float"), 30)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_other_meshes_and_parts_of_the_world(size: int, full: bool) -> None:
    rng = random.Random(f"{mode.seed()} {size}")
    for seed in range(600 if full else 6):
        src, dst = random_pair(rng, size)
        world = plan_redistribute(src, dst).world_size
        lc.run_loopback(world, lambda c, s=src, d=dst, n=seed: check_move(c, s, d, n), 30)


# Grid, shape, dtype, ops of partial terms, how many pairs of a default run.
GRIDS = [
    *(((size,), (6, 5), "float32", ("sum", "avg", "min", "max", "prod"), 10) for size in (1, 2, 3, 4, 8)),
    *((grid, (5, 7), "int32", ("sum",), 25) for grid in ((2, 2), (2, 3), (3, 2))),
    ((2, 2, 2), (5, 9), "int16", ("max",), 20),
]  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("grid", "shape", "dtype", "ops", "few"), GRIDS, ids=lambda value: str(value))
def test_every_pair_of_placements(
    grid: tuple[int, ...], shape: tuple[int, ...], dtype: str, ops: tuple[str, ...], few: int
) -> None:
    mesh = DeviceMesh(grid, ("dp", "tp", "pp")[: len(grid)])
    every = [*placements_of(2, ops), *((Sharded(0, "ceil"), Sharded(1, "ceil")) if mesh.ndim == 1 else ())]
    found = [Layout(mesh, shape, dtype, placed) for placed in product(every, repeat=mesh.ndim)]
    if mesh.ndim == 2:  # nested in either order
        specs = [(("dp", "tp"),), (("tp", "dp"),), (None, ("tp", "dp"))]
        found += [Layout.from_spec(mesh, shape, dtype, spec) for spec in specs]
    pairs = mode.sample(list(product(found, repeat=2)), few, f"pairs on {grid}")

    def run(comm: lc.Communicator) -> None:
        for number, (src, dst) in enumerate(pairs):
            check_move(comm, src, dst, number)

    lc.run_loopback(mesh.size, run, 600)


# ---- means of integers


def value_of(layout: Layout, parts: list[np.ndarray]) -> np.ndarray:
    """Return the array that all ranks' parts stand for: terms summed without a limit, divided once, the floor taken."""
    mesh = layout.mesh
    terms = [a for a, op in enumerate(layout.partials) if op]
    total = np.zeros(layout.shape, object)
    for rank in range(mesh.size):
        coord = mesh.coord(rank)
        used = {*terms, *(a for axes in layout.sharding_axes for a in axes)}
        if all(coord[a] == 0 for a in range(mesh.ndim) if a not in used):
            total[tuple(slice(*i) for i in layout.box(rank))] += parts[rank].astype(object)
    divisor = int(np.prod([mesh.shape[a] for a in terms if layout.partials[a] == "avg"]))
    value: np.ndarray = total // divisor
    return value


def check_value(src: Layout, dst: Layout, seed: int, cost: ClusterProfile | None = None) -> None:
    info = np.iinfo(src.numpy_dtype)
    bits = 8 * src.itemsize_bytes
    means = "avg" in src.partials

    def run(comm: lc.Communicator) -> tuple[np.ndarray, np.ndarray]:
        at = [c for c, op in zip(src.mesh.coord(comm.rank), src.partials, strict=True) if op]
        rng = np.random.default_rng([seed, *at])
        # Where terms are divided they are so large that no sum of theirs fits their dtype.
        low, high = (info.min, info.max) if means else (0, 3)
        whole = rng.integers(low, high, src.shape, src.numpy_dtype, endpoint=True)
        local = np.ascontiguousarray(whole[tuple(slice(*i) for i in src.box(comm.rank))])
        got = redistribute(local, src, dst, comm, cost=cost)
        assert isinstance(got, np.ndarray)
        return local, got

    given, got = zip(*lc.run_loopback(src.mesh.size, run, 60), strict=True)
    before, after = value_of(src, list(given)), value_of(dst, list(got))
    assert ((before - after) % (1 << bits) == 0).all(), f"{src} -> {dst}: {before} became {after}"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 3, 2)])
def test_means_of_integers_are_rounded_once(grid: tuple[int, ...]) -> None:
    mesh = DeviceMesh(grid, ("dp", "tp", "pp")[: len(grid)])
    dtypes = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    before = [
        p for p in product((Partial("avg"), Partial(), Sharded(0)), repeat=len(grid)) if Partial("avg") in p
    ]
    after = list(product((Replicated(), Sharded(0), Sharded(1), Partial(), Partial("avg")), repeat=len(grid)))
    cases = mode.sample(list(enumerate(product(before, after))), 8, f"means on {grid}")
    for number, (start, end) in cases:
        src = Layout(mesh, (5, 3), dtypes[number % len(dtypes)], start)
        check_value(src, src.with_placements(end), number, (None, PROFILE)[number // len(dtypes) % 2])


def test_an_avg_axis_is_not_folded_beside_one_that_stays() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (1,), "int32", (Partial("avg"), Partial("avg")))
    half = src.with_placements((Replicated(), Partial("avg")))
    whole = src.with_placements((Replicated(), Replicated()))

    def run(comm: lc.Communicator) -> list[int]:
        term = np.array([[1, 0], [0, 3]][comm.rank // 2][comm.rank % 2 : comm.rank % 2 + 1], np.int32)
        once = redistribute(term, src, whole, comm)
        between = redistribute(term, src, half, comm)
        twice = redistribute(between, half, whole, comm)
        assert once is not None
        assert twice is not None
        return [int(once[0]), int(twice[0])]

    assert lc.run_loopback(4, run) == [[1, 1]] * 4


# ---- plans are values


@given(st.data())
def test_a_plan_survives_json_and_is_equal_everywhere(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    src = data.draw(layouts(mesh))
    dst = data.draw(layouts(mesh, src.shape, src.dtype))
    plan = plan_redistribute(src, dst)
    again = RedistributePlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.digest() == plan.digest()
    assert plan_redistribute(src, dst) is plan
    assert str(src) in plan.explain()
    total = sum(plan.sent_bytes(r) for r in mesh.ranks)
    assert total == sum(plan.received_bytes(r) for r in mesh.ranks)
    assert f"moves {total:,} bytes in all" in plan.explain()


def test_a_reduction_to_replicas_moves_what_reduce_scatter_and_all_gather_move() -> None:
    mesh = DeviceMesh((4,), ("tp",))
    src = Layout(mesh, (64,), "float32", (Partial(),))
    plan = plan_redistribute(src, src.with_placements((Replicated(),)))
    assert [plan.received_bytes(r) for r in range(4)] == [2 * 3 * 64 * 4 // 4] * 4


def test_a_slice_of_replicas_and_a_kept_copy_move_nothing() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    whole = Layout(mesh, (6, 6), "float32", (Replicated(), Replicated()))
    for placements in [(Sharded(0), Sharded(1)), (Partial(), Replicated()), (Partial("max"), Sharded(0))]:
        plan = plan_redistribute(whole, whole.with_placements(placements))
        assert sum(plan.sent_bytes(r) for r in range(4)) == 0


def sources_of(src: Layout, dst: Layout, rank: int, node_size: int | None = None) -> set[int]:
    (step,) = plan_redistribute(src, dst, node_size=node_size).steps[0].exchanges
    return {p.src_rank for p in step.incoming(rank)}


def test_what_is_partial_stays_so_on_the_same_grid_by_other_names() -> None:
    src = Layout(DeviceMesh((2, 2), ("dp", "tp")), (4, 6), "int32", (Partial("sum"), Sharded(1)))
    dst = Layout(DeviceMesh((2, 2), ("x", "y")), (4, 6), "int32", (Partial("sum"), Sharded(1)))
    assert plan_redistribute(src, dst).steps == ()
    lc.run_loopback(4, lambda comm: check_move(comm, src, dst, 1), 30)


def test_every_pair_of_ranks_shares_one_box_at_most() -> None:
    rng = random.Random(3)
    for _ in range(200):
        src, dst = random_pair(rng, 8)
        for step in (e for s in plan_redistribute(src, dst).steps for e in s.exchanges):
            for rank in range(8):
                pairs = [p.src_rank for p in step.incoming(rank)]
                assert len(pairs) == len(set(pairs))


def test_copies_are_read_evenly() -> None:
    src = Layout(DeviceMesh((4, 2), ("dp", "tp")), (8, 8), "float32", (Replicated(), Sharded(0)))
    dst = src.with_placements((Replicated(), Sharded(1)))
    assert len({plan_redistribute(src, dst).sent_bytes(r) for r in range(8)}) == 1
    # Also by readers that hold nothing themselves: two copies serve four readers.
    copies = Layout(DeviceMesh((2,), ("dp",), ranks=(0, 1)), (8,), "float32", (Replicated(),))
    readers = Layout(DeviceMesh((4,), ("tp",), ranks=(2, 3, 4, 5)), (8,), "float32", (Sharded(0),))
    assert [plan_redistribute(copies, readers).sent_bytes(r) for r in (0, 1)] == [16, 16]


def test_a_copy_on_the_own_node_is_read_first() -> None:
    # Nodes of four ranks: 0 to 3 and 4 to 7. Either has a copy of the array on its lower two ranks.
    src = Layout(
        DeviceMesh((2, 2), ("dp", "tp"), ranks=(0, 1, 4, 5)), (8,), "float32", (Replicated(), Sharded(0))
    )
    dst = Layout(DeviceMesh((4,), ("x",), ranks=(2, 3, 6, 7)), (8,), "float32", (Replicated(),))
    assert [sources_of(src, dst, r, node_size=4) for r in (2, 3, 6, 7)] == [{0, 1}, {0, 1}, {4, 5}, {4, 5}]
    assert sources_of(src, dst, 3) == {4, 5}, "without node sizes this reader is sent elsewhere"


def test_a_rank_reads_its_own_copy_before_any_of_its_node() -> None:
    # An order of ranks in which no other rule ends at the reader itself.
    src = Layout(DeviceMesh((8,), ("x",), ranks=(1, 0, 3, 2, 5, 4, 7, 6)), (16,), "float32", (Replicated(),))
    dst = src.with_placements((Sharded(0),))
    for node_size in (None, 2, 4, 8):
        assert [sources_of(src, dst, r, node_size) for r in range(8)] == [{r} for r in range(8)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8] if mode.full() else [3, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_any_number_of_terms_have_the_bits_of_the_documented_tree(size: int, dtype: str) -> None:
    src = Layout(DeviceMesh((size,), ("x",)), (size, 61), dtype, (Partial(),))
    for target in (Sharded(1), Replicated()):
        dst = src.with_placements((target,))
        lc.run_loopback(size, lambda c, d=dst: check_move(c, src, d, 5, "float"))


# ---- results and refusals


def test_where_nothing_moves_the_result_may_be_a_read_only_view() -> None:
    mesh = DeviceMesh((2,), ("tp",))
    src = Layout(mesh, (6,), "float32", (Replicated(),))

    def run(comm: lc.Communicator) -> None:
        local = np.arange(6, dtype=np.float32)
        view = redistribute(local, src, src.with_placements((Sharded(0),)), comm)
        assert view is not None
        assert np.shares_memory(view, local)
        assert not view.flags.writeable
        same = redistribute(local, src, src, comm)
        assert same is not None
        assert np.shares_memory(same, local)
        assert local.flags.writeable
        out = np.empty(3, np.float32)
        got = redistribute(local, src, src.with_placements((Sharded(0),)), comm, out=out)
        assert got is out
        assert not np.shares_memory(out, local)
        assert out.tolist() == local[view[0].astype(int) :][:3].tolist()

    lc.run_loopback(2, run)


@pytest.mark.parametrize("rows", [7, 3, 2])
@pytest.mark.parametrize("split", ["balanced", "ceil"])
def test_a_mean_over_uneven_parts_counts_each_by_its_length(rows: int, split: Split) -> None:
    mesh, parts = DeviceMesh((4,), ("x",)), 4
    value = np.random.default_rng(rows).standard_normal((rows, 6))
    given = Layout(mesh, value.shape, "float64", (Sharded(0, split),))
    means = Layout(mesh, (6,), "float64", (Partial("avg"),))

    def run(comm: lc.Communicator) -> None:
        (start, stop), _ = given.box(comm.rank)
        weight = mean_weight(rows, parts, comm.rank, split)
        term = value[start:stop].mean(0) * weight if stop > start else np.zeros(6)
        for target in (Replicated(), Sharded(0)):
            dst = means.with_placements((target,))
            got = redistribute(term, means, dst, comm)
            np.testing.assert_allclose(got, value.mean(0)[slice(*dst.box(comm.rank)[0])], rtol=1e-12)

    lc.run_loopback(4, run)


def test_steps_are_timed_beside_the_prediction() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (64, 64), "float32", (Partial(), Sharded(0)))
    made = plan_redistribute(src, src.with_placements((Replicated(), Sharded(1))), PROFILE, 2)
    plan = RedistributePlan.from_json(made.to_json())  # nobody else's
    assert "measured" not in plan.explain()

    def run(comm: lc.Communicator) -> None:
        execute(plan, np.ones(src.local_shape(comm.rank), np.float32), comm, profile=True)

    lc.run_loopback(4, run)
    assert len(plan.measured_s) == len(plan.steps) > 1
    assert all(seconds > 0 for seconds in plan.measured_s)
    assert plan.explain().count("measured") == len(plan.steps) + 1


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("words", ["S0->S1", "P->S1", "P->R", "S1->R"])
def test_nothing_is_held_beside_source_and_result_but_a_slab(
    words: str, monkeypatch: pytest.MonkeyPatch, laid_out: bool
) -> None:
    mesh = DeviceMesh((2,), ("x",))
    before, after = ([parse_placement(word)] for word in words.split("->"))
    src = Layout(mesh, (1024, 2048), "float32", before)
    dst = src.with_placements(after)
    slab = 256 << 10
    take_way("laid out" if laid_out else "in rounds", monkeypatch.setattr)
    for name in ("SEND_FROM_BYTES", "STAGE_BYTES"):
        monkeypatch.setattr(sys.modules["lowshard.execute"], name, slab)
    plan = plan_redistribute(src, dst)
    locals_ = [np.ones(src.local_shape(r), np.float32) for r in range(2)]
    outs = [np.zeros(dst.local_shape(r), np.float32) for r in range(2)]
    lc.run_loopback(2, lambda c: execute(plan, locals_[c.rank], c, outs[c.rank]))
    tracemalloc.start()
    try:
        lc.run_loopback(2, lambda c: execute(plan, locals_[c.rank], c, outs[c.rank]))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A rank's slabs (sent, received, laid out twice), and between two steps a share of the result.
    between = dst.local_bytes(0) if len(plan.steps[0].exchanges) > 1 else 0
    assert peak_bytes <= 2 * (5 * slab + between)


MESH = DeviceMesh((2,), ("tp",))
SRC = Layout(MESH, (6,), "float32", (Sharded(0),))
DST = Layout(MESH, (6,), "float32", (Replicated(),))


def test_results_and_means_that_cannot_be_are_refused() -> None:
    flags = Layout(MESH, (3,), "bool", (Partial("avg"),))
    means = plan_redistribute(flags, flags.with_placements((Replicated(),)))

    def run(comm: lc.Communicator) -> None:
        memory, moves = np.zeros(12, np.float32), plan_redistribute(SRC, DST)
        with pytest.raises(BufferMismatchError, match="overlaps"):
            execute(moves, memory[2:5], comm, memory[:6])
        with pytest.raises(BufferMismatchError, match="rank 1: out is C-contiguous"):
            execute(moves, memory[:3].copy(), comm, memory[::2] if comm.rank else memory[:6])
        with pytest.raises(DTypeError, match="no mean"):
            execute(means, np.ones(3, bool), comm)

    lc.run_loopback(2, run)


def test_a_world_too_small_for_the_mesh_is_named() -> None:
    def run(comm: lc.Communicator) -> None:
        with pytest.raises(MeshError, match="name ranks up to 1, but the communicator has 1"):
            redistribute(np.zeros(3, np.float32), SRC, DST, comm)

    lc.run_loopback(1, run)


def test_a_rank_outside_the_meshes_must_know_it() -> None:
    def run(comm: lc.Communicator) -> None:
        local = np.zeros(3, np.float32)
        with pytest.raises(BufferMismatchError, match="rank 2 is not in mesh"):
            redistribute(local, SRC, DST, comm)
        got = redistribute(local if comm.rank < 2 else None, SRC, DST, comm)
        assert (got is None) == (comm.rank == 2)

    lc.run_loopback(3, run)


def test_a_layout_of_another_array_is_refused() -> None:
    for other in (Layout(MESH, (7,), "float32", (Sharded(0),)), Layout(MESH, (6,), "int32", (Sharded(0),))):
        with pytest.raises(PlanError, match="layouts of one array"):
            plan_redistribute(SRC, other)


def test_plans_of_different_ranks_raise_mismatch_everywhere() -> None:
    def run(comm: lc.Communicator) -> None:
        other = Layout(MESH, (6,), "float32", (Sharded(0, "ceil"),))
        with pytest.raises(MismatchError, match="ranks"):
            redistribute(np.zeros(3, np.float32), SRC if comm.rank else other, DST, comm)

    lc.run_loopback(2, run)


@pytest.mark.usefixtures("way")
def test_every_dtype_moves_and_sums() -> None:
    mesh = DeviceMesh((3,), ("x",))
    for row in dt.all_dtypes():
        src = Layout(mesh, (7, 2), row.name, (Partial() if row.kind != "scale" else Sharded(1),))
        dst = src.with_placements((Sharded(0),))
        lc.run_loopback(3, lambda c, s=src, d=dst: check_move(c, s, d, 1))


def test_many_arrays_move_after_one_agreement() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layouts = {
        f"w{i}": Layout(mesh, (5 + i, 7), "int64", pair)
        for i, pair in enumerate(product(placements_of(2, ("sum",)), repeat=2))
    }
    plans = {
        n: plan_redistribute(lay, lay.with_placements((Sharded(1), Sharded(0)))) for n, lay in layouts.items()
    }

    def run(comm: lc.Communicator) -> None:
        local = {n: np.full(lay.local_shape(comm.rank), 3) for n, lay in layouts.items()}
        apart = {n: execute(plan, local[n], comm) for n, plan in plans.items()}
        place = {"w3": np.empty(plans["w3"].dst.local_shape(comm.rank), np.int64)}
        together = execute_all(plans, local, comm, place)
        assert together["w3"] is place["w3"]
        for name in plans:
            assert np.array_equal(together[name], apart[name])  # type: ignore[arg-type]
        for change, text in (({"w5": np.zeros(3)}, "rank 2: 'w5': local"), ({"x": np.zeros(3)}, r"no plan")):
            asked = {**local, **change} if comm.rank == 2 else local
            with pytest.raises(BufferMismatchError, match=text):
                execute_all(plans, asked, comm)
        other = {**plans, "w0": plan_redistribute(layouts["w0"], layouts["w0"])} if comm.rank == 1 else plans
        with pytest.raises(MismatchError, match=r"ranks \[0, 2, 3\] have 'w0': .*; ranks \[1\] have 'w0': "):
            execute_all(other, local, comm)

    lc.run_loopback(4, run)


def test_a_plan_that_cannot_be_made_on_one_rank_raises_on_all() -> None:
    def run(comm: lc.Communicator) -> None:
        dst = Layout(MESH, (7,), "float32", (Sharded(0),)) if comm.rank == 1 else DST
        with pytest.raises(
            PlanError, match="redistribute: rank 1: source and destination are layouts of one array"
        ):
            redistribute(np.zeros(3, np.float32), SRC, dst, comm)

    lc.run_loopback(2, run)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_of_arrays_move_as_plain_ones() -> None:
    mesh = DeviceMesh((2,), ("x",))
    src, dst = (Layout(mesh, (4, 2), "float64", (placed,)) for placed in (Sharded(0), Replicated()))
    whole = np.arange(8.0).reshape(4, 2)

    def job(comm: lc.Communicator) -> None:
        part = np.asmatrix(whole[src.box(comm.rank)[0][0] :][:2])
        for out in (np.asmatrix(np.zeros((4, 2))), None):
            found = redistribute(part, src, dst, comm, out)
            assert found is not None
            assert (np.asarray(found) == whole).all()
            assert out is None or found is out

    lc.run_loopback(2, job, timeout_s=30.0)
