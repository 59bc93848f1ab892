"""Running an action: wrong calls raise the same error on every rank; ranks beside the mesh; groups are kept."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard import comm as lc
from lowshard.errors import (
    BufferMismatchError,
    DTypeError,
    LayoutError,
    LowshardError,
    MeshError,
    MismatchError,
)
from lowshard.op import KERNELS, run_action
from lowshard.op.op_part import _GROUPS
from lowshard.solver import AxisAssignment, GreedyReshard, PerShard, build_action_set, pick

MESH = DeviceMesh((2,), ("tp",))
X = Layout(MESH, (4, 6), "float32", (Sharded(1),))


def everywhere(size: int, call: Any) -> list[LowshardError]:
    """Return what each rank raised."""

    def work(comm: lc.Communicator) -> LowshardError:
        try:
            call(comm)
        except LowshardError as error:
            return error
        raise AssertionError(f"rank {comm.rank} raised nothing")

    return lc.run_loopback(size, work, 10)


def part(comm: lc.Communicator, layout: Layout = X) -> np.ndarray:
    return np.ones(layout.local_shape(comm.rank), layout.numpy_dtype)


def test_one_ranks_wrong_operand_is_every_ranks_error() -> None:
    action = pick("softmax", [X], axis=0)

    def call(comm: lc.Communicator) -> None:
        given: Any = part(comm) if comm.rank == 0 else np.ones((9, 9), np.float32)
        run_action(action, [given], comm)

    errors = everywhere(2, call)
    assert {type(e) for e in errors} == {BufferMismatchError}
    assert all("rank 1" in str(e) and "shape (4, 3)" in str(e) for e in errors)
    errors = everywhere(2, lambda comm: run_action(action, [part(comm)] * (1 + comm.rank), comm))
    assert all("takes 1 operands" in str(e) for e in errors)


def test_an_argument_may_have_a_value_a_rank() -> None:
    x = Layout(DeviceMesh((2,), ("tp",), ranks=(1, 0)), (4, 6), "float32", (Sharded(1),))
    cut = AxisAssignment((Sharded(1),), Sharded(1))

    def times(*values: float) -> Any:
        extras = {"value": PerShard(values)}
        return build_action_set([cut], layouts=[x], op="mul_scalar", extras=extras).action([cut])

    made = lc.run_loopback(2, lambda comm: run_action(times(2, 3), [part(comm, x)], comm)[0], 10)
    assert [set(shard.flat) for shard in made] == [{3.0}, {2.0}]
    assert times(2, 3) == times(2, 3) != times(2, 3.0)
    assert len({times(*v).digest() for v in ((2, 3), (2, 3.0), (3, 2))}) == 3
    with pytest.raises(LayoutError, match="value has 3 for 2"):
        times(1, 2, 3)
    with pytest.raises(LayoutError, match="'value' is a number"):
        pick("mul_scalar", [x], value=PerShard((2, 3)))


def test_ranks_with_other_actions_are_told() -> None:
    def call(comm: lc.Communicator) -> None:
        run_action(pick("softmax", [X], axis=comm.rank), [part(comm)], comm)

    told = r"ranks \[0\] have softmax \(S1\) -> \(S1\), 0 bytes; ranks \[1\] have softmax \(S0\) -> \(S0\), 24 bytes"
    for error in everywhere(2, call):
        assert isinstance(error, MismatchError)
        assert re.search(told, str(error))


def test_dtypes_ops_and_worlds_that_do_not_fit() -> None:
    whole = Layout(MESH, (4, 6), "int32", (Replicated(),))
    action = pick("softmax", [whole])
    assert {type(e) for e in everywhere(2, lambda c: run_action(action, [part(c, whole)], c))} == {DTypeError}
    no_kernel = pick("nonzero", [X])
    errors = everywhere(2, lambda c: run_action(no_kernel, [part(c)], c))
    assert {type(e) for e in errors} == {LayoutError}
    assert "has no kernel here" in str(errors[0])
    small = pick("relu", [X])
    assert {type(e) for e in everywhere(1, lambda c: run_action(small, [part(c)], c))} == {MeshError}


def test_ranks_beside_the_mesh_pass_none_and_get_none() -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"), ranks=[4, 1, 3, 0])
    action = pick("softmax", [Layout(mesh, (4, 600), "float32", (Sharded(0), Sharded(1)))])
    assert action.rows[1].how == "statistics"
    wide = action.sources[0]

    def work(comm: lc.Communicator) -> Any:
        inside = comm.rank in mesh
        given = np.zeros(wide.local_shape(comm.rank), np.float32) if inside else None
        (made,) = run_action(action, [given], comm)
        (again,) = run_action(action, [given], comm)
        assert (made is None) == (again is None) == (not inside)
        groups = len(_GROUPS[comm])
        return groups, None if made is None else float(made[0, 0])

    found = lc.run_loopback(5, work, 10)
    assert [value for _, value in found] == [pytest.approx(1 / 600) if r in mesh else None for r in range(5)]
    assert {groups for groups, _ in found} == {1}


@pytest.mark.parametrize(
    ("op", "given", "args", "flag"),
    [
        ("argsort", [((8, 16), Sharded(1))], {}, False),
        ("relu", [((8, 16), Partial())], {}, False),
        ("relu", [((8, 16), Partial())], {}, True),
        ("matmul", [((8, 16), Sharded(0)), ((16, 8), Sharded(1))], {}, False),
        ("add", [((8, 16), Sharded(0)), ((8, 16), Sharded(1))], {}, False),
        ("slice", [((8, 16), Sharded(0))], {"slices": [[0, 4], None]}, False),
        ("reshape", [((2, 6, 8), Sharded(1))], {"shape": [2, 48]}, False),
        ("concat", [((8, 4), Sharded(0)), ((8, 4), Sharded(0))], {"axis": 0}, False),
    ],
)
def test_the_busiest_rank_moves_what_the_pick_is_priced_at(
    op: str, given: Any, args: Any, flag: bool
) -> None:
    mesh = DeviceMesh((4,), ("tp",))
    layouts = [Layout(mesh, shape, "float32", (placement,)) for shape, placement in given]
    action = pick(op, layouts, solver=GreedyReshard(allow_partial_to_sharded=flag), **args)
    assert action.cost_bytes > 0

    def work(comm: lc.Communicator) -> int:
        run_action(action, [part(comm, x) for x in layouts], comm)
        return comm.traffic.received_bytes

    assert max(lc.run_loopback(4, work, 10)) == action.cost_bytes, action.explain()


@pytest.mark.parametrize("op", ["gather", "gather_nd", "scatter"])
def test_an_index_out_of_range_on_one_rank_is_every_ranks_error(op: str) -> None:
    table = Layout(MESH, (4, 6), "float32", (Sharded(1) if op == "scatter" else Replicated(),))
    shape = {"gather": (6,), "gather_nd": (6, 1), "scatter": (4, 6)}[op]
    ids = Layout(MESH, shape, "uint64", (Sharded(1 if op == "scatter" else 0),))
    updates = [table] if op == "scatter" else []
    args = {"gather": {"axis": 0}, "gather_nd": {}, "scatter": {"axis": 0}}[op]
    action = pick(op, [table, *updates, ids], **args)
    if op == "gather_nd":  # no row keeps such indices cut
        action = pick(op, [table, ids := ids.with_placements((Replicated(),))], **args)

    def call(comm: lc.Communicator) -> None:
        places = np.zeros(ids.local_shape(comm.rank), np.uint64)
        places[-1] = comm.rank * (2**64 - 1)
        run_action(action, [*(part(comm, x) for x in (table, *updates)), places], comm)

    errors = everywhere(2, call)
    assert {type(e) for e in errors} == {LayoutError}
    assert all(
        "rank 1" in str(e) and "indices of 4 elements are from -4 to 3, got 0 to 184467" in str(e)
        for e in errors
    )


@pytest.mark.parametrize(
    ("dtype", "wrong"), [("int32", LayoutError), ("float32", DTypeError), ("bool", DTypeError)]
)
def test_a_lookup_in_a_cut_dim_refuses_what_no_rank_holds_and_what_is_no_index(
    dtype: str, wrong: Any
) -> None:
    table = Layout(MESH, (4, 6), "float32", (Sharded(0),))
    action = pick("gather", [table, Layout(MESH, (3,), dtype, (Replicated(),))], axis=0)
    assert action.rows[0].how == "mask"
    given = np.full(3, 4).astype(dtype)
    errors = everywhere(2, lambda c: run_action(action, [part(c, table), given], c))
    assert {type(e) for e in errors} == {wrong}


@pytest.mark.parametrize(
    ("op", "args"), [("rebind", {}), ("reshape", {"shape": [24]}), ("split", {"sizes": [2, 2]})]
)
def test_a_result_that_is_an_operand_seen_otherwise_cannot_be_written(op: str, args: Any) -> None:
    whole = Layout(MESH, (4, 6), "float32", (Replicated(),))
    action = pick(op, [whole], **args)

    def work(comm: lc.Communicator) -> None:
        x = part(comm, whole)
        for result in run_action(action, [x], comm):
            assert result is not None
            assert np.shares_memory(result, x)
            assert not result.flags.writeable

    lc.run_loopback(2, work, 10)


def test_an_op_of_ones_own_runs_by_ones_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "doubled", lambda part, x: 2 * x)
    row = AxisAssignment((Sharded(1),), Sharded(1))
    action = GreedyReshard()(build_action_set([row], layouts=[X], op="doubled"), [X])
    assert action.rows == (row,)
    for (made,) in lc.run_loopback(2, lambda c: run_action(action, [part(c)], c), 10):
        assert made is not None
        assert (made == 2).all()
