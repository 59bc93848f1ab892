"""A plan as text: every tensor with its layout, how it is made, what moves for it, seconds, bytes a device; and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowshard.solver.action import HOW
from lowshard.solver.graph.plan import GraphMove, GraphPlan, show, show_bytes
from lowshard.solver.graph.timing import largest_bytes

_LAYER = re.compile(r"\b([A-Za-z_]+)\d+\.(?=[A-Za-z_])")
_HEADS = ("tensor", "shape", "layout", "made by", "moved before", "price", "bytes a device")


def rows(plan: GraphPlan) -> list[tuple[str, ...]]:
    """Return one row a tensor, in order: the cells under `heads`."""
    graph = plan.graph
    found: list[tuple[str, ...]] = []
    for t in graph.leaves():
        info = graph.tensors[t]
        origin = info.kind if info.place is not None else f"{info.kind} (free)"
        found.append(
            (info.name, _shape(plan, t), _axes(plan, t), origin, "", "", show_bytes(_bytes(plan, t)))
        )
    for step, (node, action) in enumerate(zip(graph.nodes, plan.actions, strict=True)):
        moves = plan.needed_moves(step)
        price = sum(m.price for m in moves)
        names = ", ".join(graph.tensors[t].name for t in node.operands)
        inner = sorted(
            {row.how for row, n in zip(action.rows, plan.mesh.shape, strict=True) if n > 1} - {"local"}
        )
        made = f"{node.op}({names})" + (f" [{', '.join(inner)}]" if inner else "")
        for place, t in enumerate(node.results):
            said = "; ".join(_move(plan, m) for m in moves) if place == 0 else ""
            cost = show(price, plan.unit) if moves and place == 0 else ""
            found.append(
                (
                    graph.tensors[t].name,
                    _shape(plan, t),
                    _axes(plan, t),
                    made,
                    said,
                    cost,
                    show_bytes(_bytes(plan, t)),
                )
            )
    for move in plan.needed_moves(len(graph.nodes)):
        layout = " ".join(f"{a}={p}" for a, p in zip(plan.mesh.axis_names, move.dst.placements, strict=True))
        found.append(
            (graph.tensors[move.tensor].name, _shape(plan, move.tensor), layout, "output", _move(plan, move),
             show(move.price, plan.unit), show_bytes(largest_bytes(move.dst)))
        )  # fmt: skip
    return found


def folded(every: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows, those that like layers share as one: layer0.q, layer1.q, ... become layer*.q (x32)."""
    like: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in every:
        like.setdefault(tuple(_LAYER.sub(r"\1*.", cell) for cell in row), []).append(row)
    return [
        rows_of[0] if len(rows_of) == 1 else (f"{shared[0]} (x{len(rows_of)})", *shared[1:])
        for shared, rows_of in like.items()
    ]


def heads() -> tuple[str, ...]:
    """Return the heads of `rows`."""
    return _HEADS


def summary(plan: GraphPlan) -> list[tuple[str, str]]:
    """Return what a plan comes to: label and value."""
    moved = [m for m in plan.moves if not m.is_local]
    calls = ", ".join(f"{n} {name}" for name, n in sorted(plan.collectives.items())) or "none"
    over = plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes
    return [
        ("price", show(plan.price, plan.unit)),
        ("compute", show(plan.compute, plan.unit)),
        ("moves", f"{show(plan.moved, plan.unit)} in {len(moved)}"),
        ("inside ops", show(plan.inner, plan.unit)),
        ("collectives", calls),
        ("bytes moved", show_bytes(moved_bytes(plan))),
        ("peak a device", show_bytes(plan.peak_bytes) + (" (over budget)" if over else "")),
        ("found by", plan.method),
    ]


def moved_bytes(plan: GraphPlan) -> float:
    """Return the bytes that the moves bring to the rank that receives most of each, added up."""
    from lowshard.redistribute import plan_redistribute

    known: dict[tuple[object, object], int] = {}
    total = 0
    for move in plan.moves:
        key = (move.src, move.dst)
        if key not in known:
            route = plan_redistribute(move.src, move.dst, plan.profile, plan.node_size)
            known[key] = max(route.received_bytes(rank) for rank in plan.mesh.ranks)
        total += known[key]
    return total


def explain(plan: GraphPlan) -> str:
    """Return a plan as text of several lines."""
    lines = [str(plan), *("  " + line for line in plan.why())]
    table = [heads(), *rows(plan)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADS))]
    lines += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
    ways = {row.how for a in plan.actions for row, n in zip(a.rows, plan.mesh.shape, strict=True) if n > 1}
    lines += [f"[{how}]: {HOW[how]}" for how in sorted(ways - {"local"})]
    lines.append(f"fullest: {_fullest(plan)}")
    return "\n".join(lines)


def _fullest(plan: GraphPlan) -> str:
    step = max(range(len(plan.memory_bytes)), key=plan.memory_bytes.__getitem__)
    nodes = plan.graph.nodes
    where = plan.graph.tensors[nodes[step].results[0]].name if step < len(nodes) else "the end"
    held = ", ".join(f"{h.name} {show_bytes(h.bytes)}" for h in plan.fullest[:4])
    return f"{show_bytes(plan.peak_bytes)} a device at {where}: {held}"


def _move(plan: GraphPlan, move: GraphMove) -> str:
    axes: Sequence[str] = [
        f"{a}:{p}->{q}"
        for a, p, q in zip(plan.mesh.axis_names, move.src.placements, move.dst.placements, strict=True)
        if p != q
    ]
    return f"{plan.graph.tensors[move.tensor].name} {move.collective} {' '.join(axes)}"


def _shape(plan: GraphPlan, tensor: int) -> str:
    return f"{plan.graph.dtypes[tensor]}[{','.join(map(str, plan.graph.shapes[tensor]))}]"


def _axes(plan: GraphPlan, tensor: int) -> str:
    placements = plan.layouts[tensor].placements
    return " ".join(f"{a}={p}" for a, p in zip(plan.mesh.axis_names, placements, strict=True))


def _bytes(plan: GraphPlan, tensor: int) -> int:
    return largest_bytes(plan.layouts[tensor])
