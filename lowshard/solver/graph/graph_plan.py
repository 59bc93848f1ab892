"""GraphPlan: where every tensor of a graph lies and what moves when. Frozen data, equal on every rank; explained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowshard.argument import instance
from lowshard.content_hash import text_digest
from lowshard.cost import ClusterProfile
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.redistribute_plan import plan_redistribute
from lowshard.solver.action import Action, aligned
from lowshard.solver.assignment import HOW
from lowshard.solver.graph.bound_graph import BoundGraph
from lowshard.solver.graph.graph_rates import largest_bytes
from lowshard.step_search import classify, state_of

PROVED = 1e-6
"""A plan is called the best where no other can be cheaper by more than this share."""


_WRITTEN = (
    "method", "unit", "price", "bound", "gap", "compute", "moved", "inner", "collectives", "memory_bytes",
    "peak_bytes", "budget_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphMove:
    """A tensor is brought into another layout before a step; the copy serves every later use of that layout, or that
    step alone where bytes are the price.
    """

    tensor: int
    step: int
    """The op that needs it first; the number of ops for an output that must end so."""
    src: Layout
    dst: Layout
    price: float = field(compare=False, default=0.0)

    @property
    def collective(self) -> str:
        """What moves it, where one collective can: all_gather, reduce_scatter, ...; else "exchange"."""
        return classify(state_of(self.src), state_of(self.dst))[0]

    @property
    def is_local(self) -> bool:
        """Whether nothing leaves a device: a slice, or one replica that is kept as the only term."""
        return self.collective in ("slice", "keep_one")


@dataclass(frozen=True)
class GraphPlan:
    """A solved graph. `lowshard.op.run_graph` runs it.

    Attributes:
        graph: the graph, shapes bound.
        mesh: where it runs.
        layouts: where each tensor of the graph lies as it comes.
        actions: how each op runs; an action's sources are what it needs, so that it moves nothing itself.
        moves: what moves between, in order.
        compute: price of the ops: seconds, or 0 where bytes are minimised.
        inner: price of the collectives inside ops.
        memory_bytes: what the fullest device holds at each op, and after the last.
        bound: no plan that fits has a smaller price; equal to the price where the plan is proved best, 0 where nothing
            is known.
        unit: "s", or "bytes": then each use of a tensor in another layout makes its own move.
        method: how it was found.
        budget_bytes: the limit that it was solved for.
        profile: the cluster profile its prices come from; None for the built-in default.
        node_size: ranks a node.
    """

    graph: BoundGraph
    mesh: DeviceMesh
    layouts: tuple[Layout, ...]
    actions: tuple[Action, ...]
    moves: tuple[GraphMove, ...]
    compute: float = field(compare=False)
    inner: float = field(compare=False)
    memory_bytes: tuple[int, ...] = field(compare=False)
    bound: float = field(compare=False)
    unit: str
    method: str = field(compare=False)
    budget_bytes: float | None = field(default=None, compare=False)
    profile: ClusterProfile | None = field(default=None, compare=False, repr=False)
    node_size: int | None = None

    @property
    def moved(self) -> float:
        """Price of the moves between ops."""
        return sum(m.price for m in self.moves)

    @property
    def price(self) -> float:
        """Price of the whole graph."""
        return self.compute + self.inner + self.moved

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest device holds."""
        return max(self.memory_bytes)

    @property
    def gap(self) -> float:
        """How much better a plan could be, as a share of the price: 0 where that is proved to be under a millionth."""
        slack = self.price - self.bound
        return slack / self.price if slack > PROVED * self.price else 0.0

    def layout(self, name: str) -> Layout:
        """Return where a tensor lies as it comes: an input or weight, or the result of an op."""
        return self.layouts[self._number(name)]

    def action(self, name: str) -> Action:
        """Return how the op that makes a tensor runs."""
        step = self._makers.get(self._number(name))
        if step is None:
            raise LayoutError(f"{name!r} is an input or weight of graph {self.graph.name!r}: no op makes it")
        return self.actions[step]

    def _number(self, name: str) -> int:
        number = self._numbers.get(instance(name, str, "a tensor is known by its name", LayoutError))
        if number is None:
            raise LayoutError(
                f"graph {self.graph.name!r} has no tensor {name!r}; it has {', '.join(self._numbers)}"
            )
        return number

    @cached_property
    def output_layouts(self) -> dict[str, Layout]:
        """Where each output of the graph lies at the end."""
        return {
            self.graph.tensors[t].name: self.layouts[t] if p is None else self.graph.layout(self.mesh, t, p)
            for t, p in self.graph.outputs
        }

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {info.name: i for i, info in enumerate(self.graph.tensors)}

    @cached_property
    def _makers(self) -> dict[int, int]:
        return {t: step for step, node in enumerate(self.graph.nodes) for t in node.results}

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each collective run between ops and, by the rows' own statement, inside them."""
        found: dict[str, int] = {}
        for move in self.moves:
            if not move.is_local:
                found[move.collective] = found.get(move.collective, 0) + 1
        for action in self.actions:
            for row, size in zip(action.rows, self.mesh.shape, strict=True):
                for name, _ in row.inner if size > 1 else ():
                    found[name] = found.get(name, 0) + 1
        return found

    def needed_moves(self, step: int) -> list[GraphMove]:
        """Return the moves that are made before a step."""
        return self._moves_by_step.get(step, [])

    @cached_property
    def _moves_by_step(self) -> dict[int, list[GraphMove]]:
        found: dict[int, list[GraphMove]] = {}
        for move in self.moves:
            found.setdefault(move.step, []).append(move)
        return found

    def why(self) -> list[str]:
        """Return in a few lines what decided: what the time goes to, what is proved, whether memory set a limit."""
        parts = {"compute": self.compute, "moves": self.moved, "collectives inside ops": self.inner}
        shares = ", ".join(f"{n} {100 * v / (self.price or 1):.0f}%" for n, v in parts.items() if v > 0)
        calls = ", ".join(f"{n} {name}" for name, n in sorted(self.collectives.items())) or "none"
        proof = f"bound {show(self.bound, self.unit)}, gap {100 * self.gap:.2g}%"
        if not self.bound and self.price:
            proof = "how much better a plan could be is not known"
        elif not self.gap:
            proof += ": no plan in the solver's space is cheaper by a millionth"
        held = f"the fullest device holds {show_bytes(self.peak_bytes)}"
        if self.budget_bytes is not None:
            over = " (over budget)" if self.peak_bytes > self.budget_bytes else ""
            held += f" of {show_bytes(self.budget_bytes)}{over}"
        return [
            f"found by {self.method}; {show(self.price, self.unit)}: {shares or 'nothing moves'}",
            proof,
            f"collectives: {calls}; bytes moved: {show_bytes(moved_bytes(self))}",
            held,
        ]

    def explain(self, most: int | None = None) -> str:
        """Return the plan as text: every tensor (or so many rows), how it is made, what moves before, what decided."""
        every = folded(rows(self))
        lines = [str(self), *("  " + line for line in self.why()), *aligned([HEADS, *every[:most]])]
        if most is not None and len(every) > most:
            lines.append(f"... {len(every) - most} more tensors; --json has all of them")
        ways = {
            row.how for a in self.actions for row, n in zip(a.rows, self.mesh.shape, strict=True) if n > 1
        }
        return "\n".join([*lines, *(f"[{how}]: {HOW[how]}" for how in sorted(ways - {"local"}))])

    def __str__(self) -> str:
        return (
            f"{self.graph.name} on {self.mesh}: {show(self.price, self.unit)}, "
            f"{len(self.moves)} moves, {show_bytes(self.peak_bytes)} a device, {self.method}"
        )

    # ---- data

    def to_json(self) -> dict[str, Any]:
        """Return plain data for other programs. To ranks that did not solve the graph a plan goes as a pickle."""
        tensors = self.graph.tensors
        return {
            "graph": self.graph.name,
            "mesh": self.mesh.to_json(),
            **{name: getattr(self, name) for name in _WRITTEN},
            "received_bytes": moved_bytes(self),
            "why": self.why(),
            "layouts": {info.name: str(x) for info, x in zip(tensors, self.layouts, strict=True)},
            "outputs": {name: str(x) for name, x in self.output_layouts.items()},
            "ops": [
                {"op": a.op, "results": [tensors[t].name for t in n.results], "rows": list(map(str, a.rows))}
                for n, a in zip(self.graph.nodes, self.actions, strict=True)
            ],
            "moves": [
                {"tensor": tensors[m.tensor].name, "step": m.step, "from": str(m.src), "to": str(m.dst),
                 "collective": m.collective, "price": m.price}
                for m in self.moves
            ],
        }  # fmt: skip

    @cached_property
    def _digest(self) -> str:
        moves = [(m.tensor, m.step, m.src.digest(), m.dst.digest()) for m in self.moves]
        layouts, actions = [x.digest() for x in self.layouts], [a.digest() for a in self.actions]
        return text_digest(repr((self.graph, layouts, actions, moves, self.node_size, self.unit))).hex()

    def digest(self) -> str:
        """Return 32 hex digits that two plans share exactly when they do the same."""
        return self._digest


def show(value: float, unit: str) -> str:
    """Return a price as text."""
    if unit == "bytes":
        return f"{value:,.0f} bytes"
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value / 1e-6:.4g} us"


def show_bytes(value: float) -> str:
    """Return bytes as text, in decimal units."""
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:.0f} bytes"


# ---- as text

_LAYER = re.compile(r"\b([A-Za-z_]+)\d+\.(?=[A-Za-z_])")
HEADS = ("tensor", "shape", "layout", "made by", "moved before", "price", "bytes a device")
"""Of `rows`."""


def rows(plan: GraphPlan) -> list[tuple[str, ...]]:
    """Return one row a tensor, in order: the cells under `HEADS`."""
    graph = plan.graph
    found: list[tuple[str, ...]] = []
    for t in graph.leaves():
        info = graph.tensors[t]
        origin = info.kind if info.place is not None else f"{info.kind} (free)"
        found.append((info.name, *_lies(plan.layouts[t], origin, "", "")))
    for step, (node, action) in enumerate(zip(graph.nodes, plan.actions, strict=True)):
        moves = plan.needed_moves(step)
        price = sum(m.price for m in moves)
        names = ", ".join(graph.tensors[t].name for t in node.operands)
        inner = sorted(
            {row.how for row, n in zip(action.rows, plan.mesh.shape, strict=True) if n > 1} - {"local"}
        )
        made = f"{node.op}({names})" + (f" [{', '.join(inner)}]" if inner else "")
        for place, t in enumerate(node.results):
            said = "; ".join(_move_text(plan, m) for m in moves) if place == 0 else ""
            cost = show(price, plan.unit) if moves and place == 0 else ""
            found.append((graph.tensors[t].name, *_lies(plan.layouts[t], made, said, cost)))
    for move in plan.needed_moves(len(graph.nodes)):
        said, cost = _move_text(plan, move), show(move.price, plan.unit)
        found.append((graph.tensors[move.tensor].name, *_lies(move.dst, "output", said, cost)))
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


def moved_bytes(plan: GraphPlan) -> float:
    """Return the bytes that the moves bring to the rank that receives most of each, added up."""
    known: dict[tuple[object, object], int] = {}
    total = 0
    for move in plan.moves:
        key = (move.src, move.dst)
        if key not in known:
            route = plan_redistribute(move.src, move.dst, plan.profile, plan.node_size)
            known[key] = max(route.received_bytes(rank) for rank in plan.mesh.ranks)
        total += known[key]
    return total


def _move_text(plan: GraphPlan, move: GraphMove) -> str:
    axes: Sequence[str] = [
        f"{a}:{p}->{q}"
        for a, p, q in zip(plan.mesh.axis_names, move.src.placements, move.dst.placements, strict=True)
        if p != q
    ]
    return f"{plan.graph.tensors[move.tensor].name} {move.collective} {' '.join(axes)}"


def _lies(layout: Layout, made: str, moved: str, price: str) -> tuple[str, ...]:
    """Return the cells of a row behind the tensor's name."""
    shape = f"{layout.dtype}[{','.join(map(str, layout.shape))}]"
    axes = " ".join(f"{a}={p}" for a, p in zip(layout.mesh.axis_names, layout.placements, strict=True))
    return shape, axes, made, moved, price, show_bytes(largest_bytes(layout))
