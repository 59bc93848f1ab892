"""Graphs with short and uneven extents, and a search over every layout, made without the solver's space."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import numpy as np

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded, ShardingError
from lowshard.solver import Graph, action_set
from lowshard.solver.graph.bound_graph import BoundGraph
from lowshard.solver.graph.space import Choice, Space

Rng = np.random.Generator
UNARY = ("relu", "sigmoid", "negate", "abs", "mul_scalar", "passthrough", "cast")
ALONG = ("softmax", "cumsum", "sort", "argsort", "sum", "mean", "max", "min", "prod", "argmax")
UNARY_OF_INTEGERS = ("relu", "negate", "abs", "mul_scalar", "passthrough", "cast")
ALONG_OF_INTEGERS = tuple(op for op in ALONG if op not in ("softmax", "mean"))
BINARY = ("add", "sub", "mul", "maximum", "equal")
PLACES = ("R", "S0", "S1", "S0:ceil", "P", "P:avg", "P:max", "P:min")
MESHES = ((2,), (3,), (4,), (2, 2))


def any_mesh(rng: Rng, shapes: tuple[tuple[int, ...], ...] = MESHES) -> DeviceMesh:
    """A mesh of two to four ranks."""
    shape = shapes[int(rng.integers(len(shapes)))]
    return DeviceMesh(shape, ("a", "b")[: len(shape)])


def any_place(rng: Rng, ndim: int, mesh: DeviceMesh, kinds: tuple[str, ...]) -> str | None:
    """A place on every mesh axis, terms of one kind at most; None now and then."""
    if rng.random() < 0.35:
        return None
    found, terms = [], str(rng.choice([k for k in kinds if k.startswith("P")] or ["R"]))
    for axis in rng.permutation(list(mesh.axis_names)):
        kind = str(rng.choice(kinds))
        if kind.startswith("P"):
            kind = terms
        if kind.startswith("S") and int(kind[1]) >= ndim:
            kind = "R"
        found.append(f"{axis}={kind}")
    return " ".join(found)


def short_graph(rng: Rng, ops: int, mesh: DeviceMesh) -> Graph:
    """A graph of many kinds of ops on arrays of one to three dims of 1 to 9, of floats or of integers."""
    graph = Graph("short")
    kind = str(rng.choice(["float32", "float32", "float32", "int32"]))
    is_float = kind == "float32"
    made: list[tuple[object, tuple[int, ...]]] = []

    def extent() -> int:
        return int(rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9]))

    def leaf(shape: tuple[int, ...], dtype: str = kind) -> object:
        kinds = PLACES if dtype == kind else PLACES[:2]
        place = any_place(rng, len(shape), mesh, kinds)
        add = graph.weight if rng.random() < 0.4 else graph.input
        return add(f"in{len(graph.bind().tensors)}", shape, dtype, place)

    def taken(ndim: int = 1) -> tuple[object, tuple[int, ...]]:
        some = [m for m in made if len(m[1]) >= ndim]
        if not some or rng.random() < 0.2:
            shape = tuple(extent() for _ in range(int(rng.integers(ndim, 4))))
            made.append((leaf(shape), shape))
            return made[-1]
        return some[int(rng.integers(max(0, len(some) - 3), len(some)))]

    for number in range(ops):
        draw, name = rng.random(), f"t{number}"
        x, shape = taken()
        if draw < 0.25:
            op = str(rng.choice(UNARY if is_float else UNARY_OF_INTEGERS))
            args: dict[str, object] = {"value": 2} if op == "mul_scalar" else {}
            y = graph.op(op, x, name=name, **(args if op != "cast" else {"dtype": kind}))
        elif draw < 0.45:
            op, axis = (
                str(rng.choice(ALONG if is_float else ALONG_OF_INTEGERS)),
                int(rng.integers(len(shape))),
            )
            if op.endswith("sort"):
                axis = len(shape) - 1
            y = graph.op(op, x, name=name, axis=axis)
            if op.startswith("arg"):
                graph.output(y, any_place(rng, len(shape), mesh, ("R", "S0")))
                continue
            if op in ("sum", "mean", "max", "min", "prod"):
                shape = tuple(1 if d == axis else n for d, n in enumerate(shape))
        elif draw < 0.65:
            op = str(rng.choice(BINARY))
            other = [m for m in made if m[1] == shape]
            z = other[int(rng.integers(len(other)))][0] if other and rng.random() < 0.6 else leaf(shape)
            y = graph.op(op, x, z, name=name)
            if op == "equal":
                graph.output(y, any_place(rng, len(shape), mesh, ("R", "S0")))
                continue
        elif draw < 0.75:
            n = extent()
            x, shape = taken(2)
            w = (shape[-1], n)
            y, shape = graph.matmul(x, leaf(w), name=name), (*shape[:-1], n)
        elif draw < 0.82:
            axis, n = int(rng.integers(len(shape))), extent()
            ids = leaf((n,), "int64")
            y, shape = graph.gather(x, ids, axis=axis, name=name), (*shape[:axis], n, *shape[axis + 1 :])
        elif draw < 0.9:
            dims = [int(d) for d in rng.permutation(len(shape))]
            y, shape = graph.permute(x, dims, name=name), tuple(shape[d] for d in dims)
        elif draw < 0.96:
            to = (int(np.prod(shape)),) if len(shape) > 1 else (1, *shape)
            y, shape = graph.reshape(x, to, name=name), to
        else:
            y = (
                graph.op("rms_norm", x, leaf(shape[-1:]), name=name)
                if is_float
                else graph.pointwise("abs", x)
            )
        made.append((y, shape))
    read = {t for node in graph.nodes for t in node.operands}
    outputs = {t for t, _ in graph.bind().outputs} - {t.index for t, _ in made if t.index not in read}
    for t, shape in made:
        if t.name.startswith("t") and (t.index not in read | outputs or rng.random() < 0.1):
            graph.output(t, any_place(rng, len(shape), mesh, ("R", "S0", "P")))
    return graph


def every_layout(mesh: DeviceMesh, shape: tuple[int, ...], dtype: str, terms: bool) -> list[Layout]:
    """Every layout by balanced cuts in mesh order, empty shards or not; with `terms`, those of every kind too."""
    ways = [Replicated(), *map(Sharded, range(len(shape)))]
    if terms:
        ways += map(Partial, ("sum", "avg", "max", "min"))
    found = []
    for placements in product(ways, repeat=mesh.ndim):
        with suppress(ShardingError):  # terms of two kinds
            found.append(Layout(mesh, shape, dtype, placements))
    return found


def every_way(space: Space, graph: BoundGraph, rules: str) -> Space:
    """Return a space in which each op runs in every layout of its operands that any row takes just so."""
    mesh = space.mesh
    known: dict[object, list[Choice]] = {}
    choices = []
    for node in graph.nodes:
        shapes = [(graph.shapes[t], graph.dtypes[t]) for t in node.operands]
        key = (node.op, repr(node.args), tuple(shapes))
        if key not in known:
            ways: dict[object, Choice] = {}
            for inputs in product(*(every_layout(mesh, s, d, d not in ("int64", "bool")) for s, d in shapes)):
                offered = action_set(node.op, inputs, rules, **dict(node.args))  # type: ignore[arg-type]
                rows = []
                for axis, name in enumerate(mesh.axis_names):
                    held = tuple(x.placements[axis] for x in inputs)
                    rows.append(
                        [
                            r
                            for r in offered.axis_assignments
                            if r.needed_inputs == held and (not r.only or name in r.only)
                        ]
                    )
                for chosen in product(*rows):
                    try:
                        way = space.priced(node, inputs, tuple(chosen))
                    except ShardingError:
                        continue
                    if way is not None:
                        at = (way.inputs, way.outputs)
                        ways[at] = min(way, ways.get(at, way), key=lambda c: c.price)
            known[key] = list(ways.values())
        choices.append(known[key])
    leaves = {}
    for leaf, layouts in space.leaf_layouts.items():
        every = every_layout(mesh, graph.shapes[leaf], graph.dtypes[leaf], False)
        leaves[leaf] = layouts if leaf in space.given else [space.family[leaf].number(x) for x in every]
    return space.restricted(choices, leaves)
