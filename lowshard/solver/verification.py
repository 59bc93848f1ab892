"""Reading actions and graph plans, and proving that what was read is what rules and a solver make.

Rows, results, shapes and layouts follow from the op and the layouts of its operands. They are worked out anew, and
compared: a plan that was read runs to the right result, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowshard import dtypes
from lowshard.errors import PlanError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import parse_placement
from lowshard.reading import reader
from lowshard.solver.action import Action, AxisAssignment, How, Result, one_row_an_axis
from lowshard.solver.action_set import freeze_args
from lowshard.solver.graph.graph import BoundGraph, Graph, Info, Kind, Node, Tensor
from lowshard.solver.graph.plan import GraphMove, GraphPlan, Holding
from lowshard.solver.pick import action_set
from lowshard.solver.table import RULES
from lowshard.solver.transition import Collective, Prices

# ---- one op


@dataclass(frozen=True)
class _Row:
    needs: tuple[str, ...]
    output: str | tuple[str, ...]
    how: How
    inner: tuple[tuple[Collective, float], ...]
    only: tuple[str, ...]
    kinds: tuple[dtypes.Kind, ...]
    finite_only: bool

    def assignment(self) -> AxisAssignment:
        needs = tuple(map(parse_placement, self.needs))
        given = self.output
        out = parse_placement(given) if isinstance(given, str) else tuple(map(parse_placement, given))
        kinds = frozenset(self.kinds)
        return AxisAssignment(needs, out, self.how, self.inner, self.only, kinds, self.finite_only)


@reader("action", PlanError)
def read_action(
    op: str,
    args: tuple[tuple[str, Any], ...],
    sources: tuple[Layout, ...],
    rows: tuple[_Row, ...],
    results: tuple[tuple[tuple[int, ...], str], ...],
    prices: Prices,
) -> Action:
    """Return an action, checked: its rows are those of the op's rule, and its results what the rule gives."""
    if not sources or any(source.mesh != sources[0].mesh for source in sources):
        raise PlanError(f"{op}: an action has operands, all on one mesh")
    made = tuple(Result(shape, dtype) for shape, dtype in results)
    action = Action(op, args, sources, tuple(row.assignment() for row in rows), made, prices)
    one_row_an_axis(action.rows, action.mesh)
    if op in RULES:
        _verify_rows(action)
    _ = action.inputs, action.outputs  # every placement fits the array it is for
    return action


def _verify_rows(action: Action) -> None:
    """Raise PlanError unless the op's rule offers each row, on its mesh axis, and gives these results."""
    rules: Literal["extended", "documented"] = "extended" if action.prices == "volume" else "documented"
    offered = action_set(action.op, action.sources, rules, **dict(action.args))
    for axis, row in zip(action.mesh.axis_names, action.rows, strict=True):
        if row not in offered.axis_assignments or (row.only and axis not in row.only):
            raise PlanError(
                f"{action.op}: on mesh axis {axis!r} the rule has no row {row} for these operands"
            )
    if action.results != offered.results or not offered.commute(action.rows):
        raise PlanError(
            f"{action.op}: its rows go together and its results are {offered.results}, got {action.results}"
        )


# ---- a graph


@dataclass(frozen=True)
class _Tensor:
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    place: str | None


@dataclass(frozen=True)
class _Node:
    op: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    args: Mapping[str, Any]


@reader("graph", PlanError)
def _read_graph(
    name: str,
    tensors: tuple[_Tensor, ...],
    nodes: tuple[_Node, ...],
    outputs: tuple[tuple[int, str | None], ...],
) -> BoundGraph:
    graph = BoundGraph(
        name,
        tuple(Info(t.name, t.kind, t.shape, t.dtype, t.place) for t in tensors),
        tuple(Node(n.op, n.operands, n.results, freeze_args(n.args)) for n in nodes),
        outputs,
        tuple(t.shape for t in tensors),
        tuple(t.dtype for t in tensors),
    )
    if _rebuilt(graph) != graph:
        raise PlanError(f"graph {name!r}: shapes, dtypes and results do not follow from its ops")
    return graph


def _rebuilt(graph: BoundGraph) -> BoundGraph:
    """Return the graph that the same calls make."""
    made, left = Graph(graph.name), list(graph.nodes)
    known: list[Tensor] = []
    for info in graph.tensors:
        if info.kind != "result":
            add = made.input if info.kind == "input" else made.weight
            known.append(add(info.name, info.shape or (), info.dtype, info.place))
        elif left and left[0].results and left[0].results[0] == len(known):
            node = left.pop(0)
            if not all(0 <= t < len(known) for t in node.operands):
                raise PlanError(f"graph {graph.name!r}: {node.op} reads tensors that are not there by then")
            base = info.name if len(node.results) == 1 else info.name.removesuffix(".0")
            results = made.op(node.op, *(known[t] for t in node.operands), name=base, **dict(node.args))
            known.extend(results if isinstance(results, tuple) else (results,))
    for tensor, place in graph.outputs:
        if not 0 <= tensor < len(known):
            raise PlanError(f"graph {graph.name!r}: there is no tensor {tensor} to be an output")
        made.output(known[tensor], place)
    return made.bind()


@dataclass(frozen=True)
class _Move:
    tensor: int
    step: int
    src: str
    dst: str
    price: float


@reader("move of a graph plan", PlanError)
def _read_move(tensor: int, step: int, from_: str, to: str, price: float) -> _Move:
    return _Move(tensor, step, from_, to, price)


@dataclass(frozen=True)
class _Holding:
    name: str
    layout: str
    bytes: int


@reader("graph plan", PlanError)
def read_graph_plan(
    graph: BoundGraph,
    mesh: DeviceMesh,
    layouts: tuple[str, ...],
    actions: tuple[Action, ...],
    moves: tuple[_Move, ...],
    compute: float,
    inner: float,
    memory_bytes: tuple[int, ...],
    fullest: tuple[_Holding, ...],
    bound: float,
    unit: Literal["s", "bytes"],
    method: str,
    budget_bytes: float | None,
    node_size: int | None,
) -> GraphPlan:
    """Return a plan, checked: every step gets what it needs, from where the tensor is."""
    plan = GraphPlan(
        graph,
        mesh,
        tuple(Layout.parse(mesh, text) for text in layouts),
        actions,
        tuple(
            GraphMove(m.tensor, m.step, Layout.parse(mesh, m.src), Layout.parse(mesh, m.dst), m.price)
            for m in moves
        ),
        compute,
        inner,
        memory_bytes,
        tuple(Holding(h.name, Layout.parse(mesh, h.layout), h.bytes) for h in fullest),
        bound,
        unit,
        method,
        budget_bytes,
        None,
        node_size,
    )
    _verify_plan(plan)
    return plan


def _verify_plan(plan: GraphPlan) -> None:
    graph, steps = plan.graph, len(plan.graph.nodes)
    if (len(plan.layouts), len(plan.actions), len(plan.memory_bytes)) != (
        len(graph.tensors),
        steps,
        steps + 1,
    ):
        raise PlanError("a graph plan has a layout a tensor, an action an op, and the memory of each step")
    prices = (plan.compute, plan.inner, plan.bound, *(m.price for m in plan.moves), *plan.memory_bytes)
    if min(prices) < 0 or (plan.node_size is not None and plan.node_size < 1):
        raise PlanError("prices, bytes and node_size of a graph plan are not negative")
    for t, layout in enumerate(plan.layouts):
        _is_of(plan, t, layout)
    for step, (node, action) in enumerate(zip(graph.nodes, plan.actions, strict=True)):
        if (action.op, action.args, len(action.sources)) != (node.op, node.args, len(node.operands)):
            raise PlanError(f"step {step} is {node.label}, its action is of {action.op}")
        for t, source in zip(node.operands, action.sources, strict=True):
            _is_of(plan, t, source)
        if not action.moves_nothing or action.outputs != tuple(plan.layouts[t] for t in node.results):
            raise PlanError(
                f"step {step}, {node.label}: its action takes its operands as they come and leaves its results in "
                f"{[str(plan.layouts[t]) for t in node.results]}; got {action}"
            )
    held = [{layout} for layout in plan.layouts]
    made = {t: step for step, node in enumerate(graph.nodes) for t in node.results}
    for move in sorted(plan.moves, key=lambda m: m.step):
        if not 0 <= move.tensor < len(held) or not made.get(move.tensor, -1) < move.step <= steps:
            raise PlanError(f"a move is of a tensor that is there, before a step; got {move}")
        _is_of(plan, move.tensor, move.dst)
        if move.src not in held[move.tensor]:
            raise PlanError(f"tensor {graph.tensors[move.tensor].name!r} does not lie in {move.src} by then")
        held[move.tensor].add(move.dst)
    _ = plan.output_layouts  # the places of outputs fit


def _is_of(plan: GraphPlan, tensor: int, layout: Layout) -> None:
    """Raise PlanError unless a layout is one of a tensor of the graph on the plan's mesh."""
    wanted = (plan.mesh, plan.graph.shapes[tensor], plan.graph.dtypes[tensor])
    if (layout.mesh, layout.shape, layout.dtype) != wanted:
        raise PlanError(
            f"tensor {plan.graph.tensors[tensor].name!r} is {wanted[2]}{list(wanted[1])} on mesh {plan.mesh}, got "
            f"{layout} on mesh {layout.mesh}"
        )
