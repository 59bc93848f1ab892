"""An op run by rows of its rule on real shards, against the op on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard import comm as lc
from lowshard.op import run_action, unsharded
from lowshard.solver import Action, AxisAssignment, action_set

Rng = np.random.Generator
MESHES = ((2,), (3,), (4,), (2, 2), (1, 3), (2, 3), (2, 2, 2))
FOLDS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def random_mesh(rng: Rng) -> DeviceMesh:
    shape = MESHES[int(rng.integers(len(MESHES)))]
    names = ("dp", "tp", "pp")[: len(shape)]
    if rng.random() < 0.8:
        return DeviceMesh(shape, names)
    size = int(np.prod(shape))
    return DeviceMesh(shape, names, ranks=[int(r) for r in rng.permutation(size + 1)[:size]])


def random_layout(rng: Rng, mesh: DeviceMesh, array: np.ndarray, ops: Sequence[str]) -> Layout:
    """Any placement on each axis; partial ones of one family; nested in any order."""
    family = str(rng.choice(ops)) if ops and array.dtype.kind == "f" else None
    names: list[list[str]] = [[] for _ in array.shape]
    partial = {}
    for name in rng.permutation(list(mesh.axis_names)):
        kind = rng.random()
        if kind < 0.5 and array.ndim:
            names[int(rng.integers(array.ndim))].append(str(name))
        elif kind < 0.75 and family:
            partial[str(name)] = family
    return Layout.from_spec(
        mesh, array.shape, array.dtype, [tuple(n) or None for n in names], partial=partial
    )  # type: ignore[arg-type]


def shards(rng: Rng, layout: Layout, value: np.ndarray) -> dict[int, np.ndarray]:
    """Return each rank's part of an array; partial terms are random and fold to it."""
    mesh = layout.mesh
    axes = [a for a, op in enumerate(layout.partials) if op is not None]
    terms: dict[tuple[int, ...], np.ndarray] = {(): value}
    for axis in axes:
        split: dict[tuple[int, ...], np.ndarray] = {}
        for key, whole in terms.items():
            parts = _terms(rng, whole, str(layout.partials[axis]), mesh.shape[axis])
            split.update({(*key, i): part for i, part in enumerate(parts)})
        terms = split
    found = {}
    for rank in mesh.ranks:
        coord = mesh.coord(rank)
        box = tuple(slice(a, b) for a, b in layout.box(rank))
        found[rank] = np.ascontiguousarray(terms[tuple(coord[a] for a in axes)][box]).reshape(
            layout.local_shape(rank)
        )
    return found


def _terms(rng: Rng, value: np.ndarray, op: str, count: int) -> list[np.ndarray]:
    if op in ("sum", "avg"):
        parts = [(rng.integers(-8, 9, value.shape) / 4).astype(value.dtype) for _ in range(count - 1)]
        total = value * count if op == "avg" else value
        return [*parts, (total - sum(parts)).astype(value.dtype)]
    if op == "prod":
        parts = [rng.choice([1.0, 2.0, -1.0, 0.5], value.shape).astype(value.dtype) for _ in range(count - 1)]
        rest = value.copy()
        for part in parts:
            rest = rest / part
        return [*parts, rest.astype(value.dtype)]
    sign = -1 if op == "max" else 1
    parts = [value + sign * (rng.integers(0, 9, value.shape) / 4).astype(value.dtype) for _ in range(count)]
    owner = rng.integers(0, count, value.shape)
    return [np.where(owner == i, value, part).astype(value.dtype) for i, part in enumerate(parts)]


def assembled(layout: Layout, parts: dict[int, np.ndarray]) -> np.ndarray:
    """Return the array that shards are parts of; replicas must be equal, every element must be there."""
    mesh = layout.mesh
    axes = [a for a, op in enumerate(layout.partials) if op is not None]
    terms: dict[tuple[int, ...], np.ndarray] = {}
    written: dict[tuple[int, ...], np.ndarray] = {}
    for rank in mesh.ranks:
        coord = mesh.coord(rank)
        key = tuple(coord[a] for a in axes)
        whole = terms.setdefault(key, np.zeros(layout.shape, layout.numpy_dtype))
        seen = written.setdefault(key, np.zeros(layout.shape, bool))
        box = tuple(slice(a, b) for a, b in layout.box(rank))
        part = parts[rank]
        assert part.shape == layout.local_shape(rank), f"rank {rank}: {part.shape} for {layout}"
        assert part.dtype == layout.numpy_dtype, f"rank {rank}: {part.dtype} for {layout}"
        old = seen[box]
        np.testing.assert_array_equal(whole[box][old], part[old], f"replicas differ in {layout}")
        whole[box] = part
        seen[box] = True
    assert all(seen.all() for seen in written.values())
    for axis in reversed(axes):
        op = str(layout.partials[axis])
        folded: dict[tuple[int, ...], np.ndarray] = {}
        for key in product(*(range(mesh.shape[a]) for a in axes[: axes.index(axis)])):
            value = terms[(*key, 0)]
            for i in range(1, mesh.shape[axis]):
                value = FOLDS[op](value, terms[(*key, i)])
            folded[key] = value / mesh.shape[axis] if op == "avg" else value
        terms = folded
    return terms[()]


def needed(mesh: DeviceMesh, arrays: Sequence[np.ndarray], rows: Sequence[AxisAssignment]) -> list[Layout]:
    """Return layouts in which operands come just as rows need them."""
    return [
        Layout(mesh, x.shape, x.dtype, tuple(row.needed_inputs[k] for row in rows))
        for k, x in enumerate(arrays)
    ]


def random_action(
    rng: Rng, op: str, arrays: Sequence[np.ndarray], args: dict[str, Any], rules: str
) -> Action | None:
    """Return an action of random rows, for operands that come as needed or anyhow; None if the draw has none."""
    mesh = random_mesh(rng)
    ops = ("sum", "avg", "max", "min", "prod")[: 5 if rules == "extended" else 1]
    sources = [random_layout(rng, mesh, x, ops) for x in arrays]
    found = action_set(op, sources, rules=rules, **args)  # type: ignore[arg-type]
    rows = [draw(rng, found.axis_assignments, name) for name in mesh.axis_names]
    if rng.random() < 0.6:
        try:
            sources = needed(mesh, arrays, rows)
        except ValueError:  # partial ops that do not mix
            return None
        found = action_set(op, sources, rules=rules, **args)  # type: ignore[arg-type]
        if any(r not in found.axis_assignments for r in rows):
            return None
    if not found.commute(rows):
        return None
    action = found.action(rows)
    if any(m.collective == "infeasible" for operand in action.reshards for m in operand):
        return None
    return action


def elicited(
    op: str, arrays: Sequence[np.ndarray], args: dict[str, Any], rules: str, mesh: DeviceMesh
) -> list[AxisAssignment]:
    """Return every row that a rule offers for operands that come in some way or other on a mesh of one axis."""
    ops = ("sum", "avg", "max", "min", "prod") if rules == "extended" else ("sum",)
    ways: list[Any] = [Replicated(), *(Sharded(d) for d in range(4)), *map(Partial, ops)]
    rows: dict[AxisAssignment, None] = {}
    for way in ways:
        layouts = []
        for x in arrays:
            fits = x.dtype.kind == "f" if isinstance(way, Partial) else getattr(way, "dim", -1) < x.ndim
            layouts.append(Layout(mesh, x.shape, x.dtype, (way if fits else Replicated(),)))
        rows.update(dict.fromkeys(action_set(op, layouts, rules=rules, **args).axis_assignments))  # type: ignore[arg-type]
    return list(rows)


def action_of(
    op: str,
    arrays: Sequence[np.ndarray],
    args: dict[str, Any],
    rules: str,
    mesh: DeviceMesh,
    *rows: AxisAssignment,
) -> Action | None:
    """Return the action of one row a mesh axis, for operands that come as they need them; None if there is none."""
    try:
        layouts = needed(mesh, arrays, rows)
    except ValueError:  # a tensor that is a max along one axis and a sum along another
        return None
    found = action_set(op, layouts, rules=rules, **args)  # type: ignore[arg-type]
    chosen = []
    for row, name in zip(rows, mesh.axis_names, strict=True):
        # Perhaps priced otherwise, or bound to the axes that cut the operand so.
        same = [
            r
            for r in found.axis_assignments
            if (r.needed_inputs, r.output, r.how) == (row.needed_inputs, row.output, row.how)
            and (not r.only or name in r.only)
        ]
        chosen += same[:1]
    if len(chosen) < len(rows) or not found.commute(chosen):
        return None
    return found.action(chosen)


def draw(rng: Rng, rows: Sequence[AxisAssignment], name: str) -> AxisAssignment:
    here = [r for r in rows if not r.only or name in r.only]
    return here[int(rng.integers(len(here)))]


def run(action: Action, rng: Rng, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the whole results of an action run on shards of whole operands."""
    mesh = action.mesh
    size = max(mesh.ranks) + 1 + int(rng.random() < 0.1)
    parts = [shards(rng, layout, x) for layout, x in zip(action.sources, arrays, strict=True)]

    def work(comm: lc.Communicator) -> tuple[Any, ...]:
        return run_action(action, [p.get(comm.rank) for p in parts], comm)

    made = lc.run_loopback(size, work, 20)
    return [
        assembled(layout, {rank: made[rank][k] for rank in mesh.ranks})
        for k, layout in enumerate(action.outputs)
    ]


def check(action: Action, rng: Rng, arrays: Sequence[np.ndarray], args: dict[str, Any]) -> None:
    """Compare an op run as an action says with the op on whole arrays."""
    expected = unsharded(action.op, *arrays, **args)
    came = run(action, rng, arrays)
    assert len(came) == len(expected)
    for ours, theirs in zip(came, expected, strict=True):
        assert ours.shape == theirs.shape
        if theirs.dtype.kind == "f":
            np.testing.assert_allclose(ours, theirs, rtol=3e-4, atol=3e-4, err_msg=str(action))
        else:
            np.testing.assert_array_equal(ours, theirs, str(action))


__all__ = ["Partial", "Replicated", "Sharded", "assembled", "check", "random_action", "run", "shards"]
