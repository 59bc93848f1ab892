"""An op run by rows of its rule on real shards, against the op on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, dtypes
from lowshard import comm as lc
from lowshard.op import run_action, unsharded
from lowshard.solver import Action, AxisAssignment, action_set
from lowshard.solver.table import RULES

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
    ops = [op for op in ops if op != "avg" or array.dtype != bool]
    family = str(rng.choice(ops)) if ops else None
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


def reducible(op: str, arrays: Sequence[np.ndarray], ops: Sequence[str]) -> list[Sequence[str]]:
    """Return the reductions that each operand may come with: of values all, of indices none."""
    return [() if k in RULES[op].indices or x.dtype == np.int64 else ops for k, x in enumerate(arrays)]


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
    """Return terms that fold to about a value: rounding, and averages of integers, may leave them beside it."""
    dtype = value.dtype
    row = dtypes.get(dtype)
    draw = rng.integers(-8, 9, (count, *value.shape)) / (4 if row.bits > 16 else 8)
    if row.kind != "float":
        draw = rng.integers(0, 256, draw.shape)  # sums of them wrap around
    if op in ("sum", "avg"):
        parts = [x.astype(dtype) for x in draw[1:]]
        if row.kind == "bool":
            return [value & x for x in (*parts, np.ones(value.shape, bool))]
        total = value.astype(np.float64 if row.kind == "float" else np.int64) * (count if op == "avg" else 1)
        return [*parts, (total - sum(x.astype(total.dtype) for x in parts)).astype(dtype)]
    if op == "prod":
        signs = rng.choice([1, -1] if row.kind in ("float", "int") else [1], (count - 1, *value.shape))
        return [*(x.astype(dtype) for x in signs), (value * signs.prod(axis=0).astype(dtype)).astype(dtype)]
    beside = np.maximum if op == "min" else np.minimum
    owner = rng.integers(0, count, value.shape)
    return [np.where(owner == i, value, beside(value, x.astype(dtype))) for i, x in enumerate(draw)]


def assembled(layout: Layout, parts: dict[int, np.ndarray]) -> np.ndarray:
    """Return the array that shards are parts of; replicas must be equal, every element must be there."""
    return np.asarray(folded(layout, whole_terms(layout, parts)).astype(layout.numpy_dtype))


def whole_terms(layout: Layout, parts: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Return the whole terms that are still to be folded, one where nothing is."""
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
        same = whole[box][old].tobytes() == part[old].tobytes()
        if not same:  # of NaN and 0 other bits are as good
            wide = np.float64 if dtypes.get(layout.dtype).kind == "float" else part.dtype
            pair = whole[box][old].astype(wide), part[old].astype(wide)
            np.testing.assert_array_equal(*pair, f"replicas differ in {layout}")
        whole[box] = part
        seen[box] = True
    assert all(seen.all() for seen in written.values())
    return list(terms.values())


def folded(layout: Layout, terms: Sequence[np.ndarray]) -> np.ndarray:
    """Return the fold of terms: of floats in float64, of integers in 64 bits, averages rounded down once."""
    kind = dtypes.get(layout.dtype).kind
    wide = {"float": np.float64, "bool": np.bool_, "uint": np.uint64}.get(kind, np.int64)
    ops = {op for op in layout.partials if op is not None}
    values = [x.astype(wide) for x in terms]
    made = np.asarray(reduce(FOLDS["sum" if ops <= {"sum", "avg"} else ops.pop()], values))
    count = int(np.prod([n for n, op in zip(layout.mesh.shape, layout.partials, strict=True) if op == "avg"]))
    if count == 1:
        return made
    return made / count if kind == "float" else made // wide(count)


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
    sources = [
        random_layout(rng, mesh, x, own) for x, own in zip(arrays, reducible(op, arrays, ops), strict=True)
    ]
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
        for x, own in zip(arrays, reducible(op, arrays, ops), strict=True):
            fits = getattr(way, "dim", -1) < x.ndim
            if isinstance(way, Partial):
                fits = way.op in own and not (way.op == "avg" and x.dtype == bool)
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


Run = tuple[list[np.ndarray], list[list[np.ndarray]]]


def run(action: Action, rng: Rng, arrays: Sequence[np.ndarray]) -> Run:
    """Return the operands that the shards fold to, and the whole terms of each result of the action run on them."""
    mesh = action.mesh
    size = max(mesh.ranks) + 1 + int(rng.random() < 0.1)
    parts = [shards(rng, layout, x) for layout, x in zip(action.sources, arrays, strict=True)]

    def work(comm: lc.Communicator) -> tuple[Any, ...]:
        return run_action(action, [p.get(comm.rank) for p in parts], comm)

    made = lc.run_loopback(size, work, 20)
    wholes = [assembled(layout, part) for layout, part in zip(action.sources, parts, strict=True)]
    return wholes, [
        whole_terms(layout, {rank: made[rank][k] for rank in mesh.ranks})
        for k, layout in enumerate(action.outputs)
    ]


def check(action: Action, rng: Rng, arrays: Sequence[np.ndarray], args: dict[str, Any]) -> None:
    """Compare an op run as an action says with the op on whole arrays: equal, floats but for what is rounded.

    Every float term of a sum was rounded once, by half of the dtype's epsilon at most. So were the result, and the
    operand that terms fold to, which the unsharded op amplifies to no more than its result of absolute values (for a
    difference: their sum).
    """
    wholes, came = run(action, rng, arrays)
    expected = unsharded(action.op, *wholes, **args)
    assert len(came) == len(expected)
    for terms, theirs, layout in zip(came, expected, action.outputs, strict=True):
        ours = folded(layout, terms)
        assert ours.shape == theirs.shape
        row = dtypes.get(theirs.dtype)
        if row.kind != "float":
            np.testing.assert_array_equal(ours.astype(theirs.dtype), theirs, str(action))
            continue
        wide = theirs.astype(np.float64)
        least = float(ml_dtypes.finfo(row.numpy).smallest_subnormal)
        partial = [x for x in action.sources if any(x.partials) and dtypes.get(x.dtype).kind == "float"]
        half = max(float(ml_dtypes.finfo(x).eps) / 2 for x in (row.numpy, *(p.numpy_dtype for p in partial)))
        # A few hundred roundings of what is summed inside.
        compute = 64 * float(np.finfo(row.accumulator.numpy).eps)
        rounded = sum(np.abs(x.astype(np.float64)) for x in terms) + np.abs(wide)
        if "prod" in layout.partials:  # each factor's rounding is one of the product
            rounded = rounded + len(terms) * np.abs(wide)
        if partial:
            indices = RULES[action.op].indices
            values = [
                x if k in indices or x.dtype == bool else np.asarray(np.abs(x)) for k, x in enumerate(wholes)
            ]
            amplified = unsharded("add" if action.op == "sub" else action.op, *values, **args)
            rounded = rounded + np.nanmax(np.abs(amplified[0].astype(np.float64)), initial=0.0)
        scale = np.nanmax(np.where(np.isfinite(wide), np.abs(wide), 0), initial=1.0)
        allowed = half * 1.001 * rounded + compute * scale + least
        with np.errstate(invalid="ignore"):
            near = (np.abs(ours - wide) <= allowed) | (ours == wide) | (np.isnan(ours) & np.isnan(wide))
        assert near.all(), (
            f"{action}\n{action.sources}\n{ours[~near]}\n{wide[~near]}\nallowed {allowed[~near]}"
        )
