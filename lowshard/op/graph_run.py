"""Runs a solved graph on sharded arrays: what the wanted outputs need, and no more; and on whole arrays, to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, instance, items, mapping, number
from lowshard.argument import whole as whole_number
from lowshard.box import slices_of
from lowshard.comm.agreement import collective_step, control_of
from lowshard.comm.communicator import Communicator
from lowshard.comm.loopback import run_loopback
from lowshard.comm.work import Stream
from lowshard.content_hash import text_digest
from lowshard.errors import (
    BufferMismatchError,
    LayoutError,
    LowshardError,
    MeshError,
    PlanError,
    VerificationError,
)
from lowshard.execute import execute
from lowshard.foreign_array import is_foreign, like, view_of
from lowshard.layout import Layout
from lowshard.op.action_run import check_part, compute, kept_apart, unsharded
from lowshard.op.op_part import find_kernel
from lowshard.redistribute_plan import plan_redistribute
from lowshard.solver.graph.bound_graph import BoundGraph
from lowshard.solver.graph.graph_plan import GraphPlan
from lowshard.solver.table import RULES, dtype_error

Array = Any
_PLACES = {"argmax": 0, "argmin": 0, "argsort": 0, "top_k": 1, "bottom_k": 1}
"""Ops that tell where elements are, and which of their results that is."""
_LOOKED_UP = {
    "gather": 0, "embedding": 0, "moe_finalize": 0,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_max", "scatter_min", "scatter_mul"), -1),
}  # fmt: skip
"""Ops that look elements up along one dim of their first operand, and that dim where no `axis` is given."""
_FOLDS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def run_graph(
    plan: GraphPlan,
    inputs: Mapping[str, Array | None],
    comm: Communicator,
    outputs: Sequence[str] | None = None,
    *,
    stream: Stream = None,
) -> dict[str, Array | None]:
    """Run a graph as its plan says and return this rank's part of each output, laid out as `plan.output_layouts`.

    Collective: all ranks of the communicator call this, with equal plans and outputs. Ops that no wanted output needs
    are left out; tensors and copies are let go of after their last use. Outputs that share memory with an input, or
    with one another, are read-only views; torch and CuPy, which have none, get copies.

    Args:
        plan: from `GraphSolver.solve` or `solve_graph`.
        inputs: by name, this rank's part of each input and weight that is needed, of the shape and dtype that
            `plan.layout(name)` gives this rank; None on a rank outside the mesh.
        comm: a communicator whose ranks are those of the mesh; it may have more.
        outputs: names of tensors; by default the graph's outputs. Others come as `plan.layout(name)`.
        stream: as for `lowshard.execute`.

    Every rank raises the same error.

    Raises:
        BufferMismatchError: an input that is missing, or of another shape or dtype.
        DTypeError: an op does not take the dtype of an operand.
        LayoutError: no such tensor.
        MeshError: the communicator has fewer ranks than the mesh names.
        MismatchError: the ranks hold different plans, or want other outputs or the same in another order.
        PlanError: what was passed is not a plan.
    """
    control_of(comm)
    with comm.meeting("run_graph", stream) as wrong:
        return _run_graph(plan, inputs, comm, outputs, wrong)


def _run_graph(
    plan: GraphPlan, inputs: Mapping[str, Array | None], comm: Communicator, outputs: Sequence[str] | None,
    error: LowshardError | None,
) -> dict[str, Array | None]:  # fmt: skip
    sample: object = None
    with collective_step(comm, "run_graph") as agreed:
        agreed.error = error
        instance(plan, GraphPlan, "run_graph takes a GraphPlan", PlanError)
        names = list(dict.fromkeys(_wanted(plan.graph, outputs)))
        steps = needed_steps(plan.graph, names)
        if isinstance(inputs, Mapping):
            sample = next(filter(is_foreign, inputs.values()), None)
            inputs = {name: view_of(part, str(name)) for name, part in inputs.items()}
        _check_inputs(plan, inputs, steps, names, comm)
        agreed.digest = text_digest(json.dumps([plan.digest(), names]))
        agreed.said = lambda: f"{plan}, for the outputs {', '.join(map(brief, names[:8]))}"
    graph, end = plan.graph, len(plan.graph.nodes)
    number = {info.name: t for t, info in enumerate(graph.tensors)}
    ends = {number[n]: plan.output_layouts.get(n, plan.layouts[number[n]]) for n in names}
    read = {t: step for step in steps for t in graph.nodes[step].operands}
    last = {**read, **dict.fromkeys(ends, end)}
    held: dict[int, dict[Layout, Array | None]] = {
        t: {plan.layouts[t]: inputs[graph.tensors[t].name]} for t in graph.leaves() if t in last
    }
    given = [part for parts in held.values() for part in parts.values()]

    def bring(tensor: int, step: int, layout: Layout) -> Array | None:
        if layout not in held[tensor]:
            for move in plan.needed_moves(step):
                if move.tensor == tensor and move.dst == layout:
                    src = move.src if move.src in held[tensor] else plan.layouts[tensor]
                    route = plan_redistribute(src, layout, plan.profile, plan.node_size)
                    held[tensor][layout] = execute(route, held[tensor][src], comm)
                    break
            else:  # its first use was left out, or each use moves for itself
                route = plan_redistribute(plan.layouts[tensor], layout, plan.profile, plan.node_size)
                held[tensor][layout] = execute(route, held[tensor][plan.layouts[tensor]], comm)
        return held[tensor][layout]

    for step in steps:
        node, action = graph.nodes[step], plan.actions[step]
        operands = [bring(t, step, need) for t, need in zip(node.operands, action.inputs, strict=True)]
        made = compute(action, operands, comm)
        for t, layout, part in zip(node.results, action.outputs, made, strict=True):
            if last.get(t, -1) > step:
                held[t] = {layout: part}
        del operands, made
        for t in {*node.operands}:
            if last[t] <= step:
                held.pop(t, None)
            elif plan.unit == "bytes" or (read[t] <= step and ends[t] == plan.layouts[t]):
                held[t] = {plan.layouts[t]: held[t][plan.layouts[t]]}  # it stays, copies of it do not
    results = kept_apart([bring(t, end, layout) for t, layout in ends.items()], given)
    return {n: like(result, sample, apart=True) for n, result in zip(names, results, strict=True)}


def _wanted(graph: BoundGraph, outputs: Sequence[str] | None) -> list[str]:
    if outputs is None:
        return [graph.tensors[t].name for t, _ in graph.outputs]
    rule = "outputs is a sequence of names of tensors, or None"
    return [instance(n, str, rule, LayoutError) for n in items(outputs, rule, LayoutError)]


def needed_steps(graph: BoundGraph, outputs: Sequence[str]) -> list[int]:
    """Return the ops that some tensors rest on, in order."""
    number = {info.name: t for t, info in enumerate(graph.tensors)}
    unknown = [n for n in outputs if n not in number]
    if unknown:
        raise LayoutError(f"graph {graph.name!r} has no tensor {unknown[0]!r}; it has {', '.join(number)}")
    wanted = {number[n] for n in outputs}
    found = []
    for step in range(len(graph.nodes) - 1, -1, -1):
        if wanted & set(graph.nodes[step].results):
            found.append(step)
            wanted |= set(graph.nodes[step].operands)
    return found[::-1]


def run_unsharded(graph: BoundGraph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return every tensor of a graph, computed on whole arrays: what a sharded run must equal.

    Raises:
        LayoutError: no bound graph.
        BufferMismatchError: an input is missing, or no array.
    """
    instance(graph, BoundGraph, "what runs unsharded is a bound graph, as Graph.bind returns it", LayoutError)
    given = mapping(inputs, "inputs is a mapping of name to whole array", BufferMismatchError)
    names = {t: graph.tensors[t].name for t in graph.leaves()}
    missing = [name for name in names.values() if name not in given]
    if missing:
        raise BufferMismatchError(f"graph {graph.name!r} reads {missing[0]!r}: pass its whole array")
    held = {t: given[name] for t, name in names.items()}
    for node in graph.nodes:
        results = unsharded(node.op, *(held[t] for t in node.operands), **dict(node.args))
        held.update(zip(node.results, results, strict=True))
    return {graph.tensors[t].name: x for t, x in held.items()}


def random_inputs(graph: BoundGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """Return whole arrays for every input and weight: small normal numbers; indices where all that read them can."""
    rng = np.random.default_rng(seed)
    limits: dict[int, int] = {}
    for node in graph.nodes:
        if node.op not in _LOOKED_UP:
            continue
        source, indices = node.operands[0], node.operands[RULES[node.op].indices[0]]
        extent = graph.shapes[source][int(dict(node.args).get("axis", _LOOKED_UP[node.op]))]
        limits[indices] = max(1, min(extent, limits.get(indices, extent)))
    found = {}
    for t in graph.leaves():
        shape, row = graph.shapes[t], dtypes.get(graph.dtypes[t])
        if row.kind in ("int", "uint", "bool"):
            value: Any = rng.integers(0, limits.get(t, 2), shape)
        else:
            fan = shape[-2] if graph.tensors[t].kind == "weight" and len(shape) > 1 else 1
            value = rng.standard_normal(shape, np.float32) / np.sqrt(fan)
        found[graph.tensors[t].name] = np.asarray(value).astype(row.numpy)  # of no dims they are scalars
    return found


def shard(layout: Layout, value: np.ndarray, rank: int) -> np.ndarray:
    """Return a rank's part of a whole array; of the ranks along a partial axis of sums the first holds it."""
    box = slices_of(layout.box(rank))
    part = np.ascontiguousarray(value[box]).reshape(layout.local_shape(rank))
    coord = layout.mesh.coord(rank)
    for axis, op in enumerate(layout.partials):
        if op in ("sum", "prod") and coord[axis]:
            part = np.full_like(part, 0 if op == "sum" else 1)
    return part


def whole(layout: Layout, parts: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the array that ranks hold the parts of; partial axes are folded."""
    mesh = layout.mesh
    axes = [a for a, op in enumerate(layout.partials) if op is not None]
    terms: dict[tuple[int, ...], np.ndarray] = {}
    for rank in mesh.ranks:
        key = tuple(mesh.coord(rank)[a] for a in axes)
        box = slices_of(layout.box(rank))
        terms.setdefault(key, np.zeros(layout.shape, parts[rank].dtype))[box] = parts[rank]
    for axis in reversed(axes):
        op = str(layout.partials[axis])
        folded: dict[tuple[int, ...], np.ndarray] = {}
        for key, value in sorted(terms.items()):
            short = key[:-1]
            folded[short] = _FOLDS[op](folded[short], value) if short in folded else value
        if op == "avg":
            folded = {key: (v / mesh.shape[axis]).astype(v.dtype) for key, v in folded.items()}
        terms = folded
    return terms[()]


def prove(plan: GraphPlan, seed: int = 0, tolerance: float = 2e-3, timeout_s: float = 60.0) -> float:
    """Run a plan on random arrays, a thread a rank, compare with the unsharded result, and return the largest error.

    Errors are relative to the largest element of each output. Outputs of argmax, argsort and the like are compared by
    the elements at the places they tell: of two that are equal but for rounding either may come first.

    Raises:
        VerificationError: an output differs by more than `tolerance`.
    """
    instance(plan, GraphPlan, "prove takes a GraphPlan", PlanError)
    seed = whole_number(seed, "seed is an integer of 0 or more", PlanError, 0)
    tolerance = number(tolerance, "tolerance is a finite number", PlanError)
    arrays = random_inputs(plan.graph, seed)
    expected = run_unsharded(plan.graph, arrays)
    size = max(plan.mesh.ranks) + 1

    def work(comm: Communicator) -> dict[str, Array | None]:
        mine = {
            name: shard(plan.layout(name), value, comm.rank) if comm.rank in plan.mesh else None
            for name, value in arrays.items()
        }
        return run_graph(plan, mine, comm)

    came = run_loopback(size, work, timeout_s)
    worst = 0.0
    for name, layout in plan.output_layouts.items():
        value = whole(layout, {r: np.asarray(came[r][name]) for r in plan.mesh.ranks})
        error = _largest_error(*_elements_told(plan.graph, name, expected, value))
        if value.dtype != expected[name].dtype or not error <= tolerance:
            raise VerificationError(
                f"graph {plan.graph.name!r}: output {name!r} in {layout} differs from the unsharded result by "
                f"{error:.3g} of its largest element, allowed is {tolerance:g}"
            )
        worst = max(worst, error)
    return worst


def _largest_error(value: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference, relative to the largest finite element of what is right; NaN equals NaN."""
    ours, wide = value.astype(np.float64), right.astype(np.float64)
    scale = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0)) or 1.0
    same = (ours == wide) | (np.isnan(ours) & np.isnan(wide))
    return float(np.abs(ours[~same] - wide[~same]).max(initial=0.0)) / scale


def _elements_told(
    graph: BoundGraph, name: str, expected: Mapping[str, np.ndarray], value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return an output and what is right; the elements at the places it tells, if it tells other places."""
    right = expected[name]
    if value.dtype != right.dtype or np.array_equal(value, right):
        return value, right
    for node in graph.nodes:
        at = _PLACES.get(node.op, len(node.results))
        if at < len(node.results) and graph.tensors[node.results[at]].name == name:
            x = expected[graph.tensors[node.operands[0]].name]
            dim = int(dict(node.args).get("axis", -1))
            if ((value >= 0) & (value < x.shape[dim])).all():
                return np.take_along_axis(x, value, dim), np.take_along_axis(x, right, dim)
    return value, right


def _check_inputs(
    plan: GraphPlan,
    inputs: Mapping[str, Array | None],
    steps: Sequence[int],
    names: Sequence[str],
    comm: Communicator,
) -> None:
    """Raise what is wrong with this rank's arguments."""
    graph, mesh = plan.graph, plan.mesh
    rule = "inputs is a mapping of name to this rank's part"
    instance(inputs, Mapping, rule, BufferMismatchError)  # type: ignore[type-abstract]
    for step in steps:
        action = plan.actions[step]
        find_kernel(action.op)
        refused = dtype_error(action.op, action.sources, action.rows)
        if refused is not None:
            raise refused
    if comm.size <= max(mesh.ranks):
        raise MeshError(
            f"graph {graph.name!r} is planned for mesh {mesh} with ranks up to {max(mesh.ranks)}, the communicator has "
            f"{comm.size}; start {max(mesh.ranks) + 1} ranks or solve for a smaller mesh"
        )
    read = {t for step in steps for t in graph.nodes[step].operands}
    for t in graph.leaves():
        name, layout = graph.tensors[t].name, plan.layouts[t]
        if t not in read and name not in names:
            continue
        if name not in inputs:
            raise BufferMismatchError(
                f"graph {graph.name!r} reads {name!r}: pass this rank's part of {layout}"
            )
        check_part(f"graph {graph.name!r}: {name!r}", inputs[name], layout, comm)
