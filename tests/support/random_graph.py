"""Random small graphs, and the best assignment of one found by trying all: what a solver's answer must equal."""

from __future__ import annotations

from math import inf

import numpy as np

from lowshard.cost import OPS, ClusterProfile, Curve, Piece
from lowshard.solver import Graph, Rates
from lowshard.solver.graph.space import Assignment, Choice, Space, schedule

Rng = np.random.Generator
UNARY = (
    "relu",
    "negate",
    "gelu",
    "passthrough",
    "softmax",
    "cumsum",
    "permute",
    "sum",
    "mean",
    "max",
    "reshape",
)
PLACES = ("R", "tp=S0", "tp=S1", "tp=P", None)


def random_profile(rng: Rng) -> ClusterProfile:
    """A cluster on which now messages, now bytes decide."""
    alpha, beta = 10 ** rng.uniform(-7, -5), 10 ** rng.uniform(-10, -7)
    piece = Piece(float(alpha), float(beta), float(beta) / 10)
    plain = Piece(float(alpha), float(beta))
    sums = ("all_reduce", "reduce_scatter", "reduce")
    return ClusterProfile(
        tuple(
            Curve(op, level, 2, (piece if op in sums else plain,))  # type: ignore[arg-type]
            for level in ("node", "network")
            for op in OPS
        )
    )


def random_rates(rng: Rng) -> Rates:
    return Rates(float(10 ** rng.uniform(7, 10)), float(10 ** rng.uniform(7, 10)))


def random_graph(rng: Rng, ops: int) -> Graph:
    """A graph of `ops` ops on [rows, width] tensors; operands are any tensors made so far: some are used often."""
    rows, width = int(rng.choice([4, 8, 12])), int(rng.choice([4, 8, 12]))
    graph = Graph("random")
    made: dict[tuple[int, ...], list] = {}

    def leaf(shape: tuple[int, ...]) -> object:
        place = PLACES[int(rng.integers(len(PLACES)))]
        if place == "tp=S1" and len(shape) < 2:
            place = "R"
        add = graph.weight if rng.random() < 0.5 else graph.input
        t = add(f"in{sum(map(len, made.values()))}", shape, place=place)
        made.setdefault(shape, []).append(t)
        return t

    def any_of(shape: tuple[int, ...], fresh: float = 0.3) -> object:
        if not made.get(shape) or rng.random() < fresh:
            return leaf(shape)
        few = made[shape]
        return few[int(rng.integers(max(0, len(few) - 3), len(few)))]

    shape = (rows, width)
    any_of(shape)
    for number in range(ops):
        kind, name = rng.random(), f"t{number}"
        if kind < 0.3:
            to = (width, int(rng.choice([4, 8, 12])))
            result = graph.op("matmul", any_of(shape, 0.1), any_of(to, 0.7), name=name)
            shape = (shape[0], to[1])
        elif kind < 0.6:
            op = str(rng.choice(["add", "mul", "sub", "maximum"]))
            result = graph.op(op, any_of(shape, 0.05), any_of(shape, 0.2), name=name)
        elif kind < 0.7:
            result = graph.op("rms_norm", any_of(shape, 0.05), any_of(shape[-1:], 0.8), name=name)
        else:
            op = str(rng.choice(UNARY))
            x = any_of(shape, 0.05)
            args: dict = (
                {"axis": int(rng.integers(2))} if op in ("softmax", "cumsum", "sum", "mean", "max") else {}
            )
            if op == "permute":
                args, shape = {"dims": (1, 0)}, shape[::-1]
            if op == "reshape":
                fewer = max(1, shape[0] // 2)
                shape = (fewer, shape[0] * shape[1] // fewer)
                args = {"shape": shape}
            result = graph.op(op, x, name=name, **args)
            if op in ("sum", "mean", "max"):
                result = graph.op("add", result, any_of(shape, 0.0), name=f"{name}b")
        width = shape[1]
        made.setdefault(shape, []).append(result)
    return graph


def exhaustive(
    space: Space, budget: float | None = None, nodes_most: int = 200_000
) -> tuple[float, int] | None:
    """Return the least price of every assignment that fits, and how many partial ones were looked at; None: too many.

    Depth first over ops in order; a partial assignment that already costs as much as the best whole one is left.
    """
    graph = space.graph
    best = inf
    looked = 0
    leaves = graph.leaves()
    first_use = {t: space.consumers[t][0][0] if space.consumers[t] else 0 for t in leaves}
    place: dict[int, int] = {}
    chosen: list[Choice] = []
    copies: dict[int, list[int]] = {}

    def wanted() -> float:
        price = 0.0
        for tensor, layout in space.wanted:
            have = copies[tensor]
            if layout not in have:
                price += min(space.family[tensor].move(h, layout) for h in have)
        return price

    def held(step: int, choice: Choice) -> int:
        live = (t for t in copies if space.born(t) <= step <= space.last_use[t])
        return choice.temporary_bytes + sum(
            space.family[t].bytes[x]
            for t in live
            for x in (copies[t] if step <= space.copies_until[t] else copies[t][:1])
        )

    def ops(step: int, price: float) -> None:
        nonlocal best, looked
        looked += 1
        if price >= best or looked > nodes_most:
            return
        if step == len(graph.nodes):
            whole = price + wanted()
            if whole < best:
                found = schedule(space, Assignment(dict(place), tuple(chosen)))
                np.testing.assert_allclose(found.price, whole, rtol=1e-9)
                if budget is None or found.peak_bytes <= budget:
                    best = whole
            return
        waiting = [t for t in leaves if first_use[t] == step]
        for_leaves(step, waiting, price)

    def for_leaves(step: int, waiting: list[int], price: float) -> None:
        if not waiting:
            for_choices(step, price)
            return
        tensor = waiting[0]
        for layout in space.leaf_layouts[tensor]:
            place[tensor], copies[tensor] = layout, [layout]
            for_leaves(step, waiting[1:], price)
        del place[tensor], copies[tensor]

    def for_choices(step: int, price: float) -> None:
        node = graph.nodes[step]
        for choice in space.choices[step]:
            now, new = price + choice.price, []
            for t, need in zip(node.operands, choice.inputs, strict=True):
                if need not in copies[t]:
                    now += min(space.family[t].move(have, need) for have in copies[t])
                    copies[t].append(need)
                    new.append(t)
            for t, layout in zip(node.results, choice.outputs, strict=True):
                copies[t] = [layout]
            # What later steps decide only adds to what is held now.
            if budget is None or held(step, choice) <= budget:
                chosen.append(choice)
                ops(step + 1, now)
                chosen.pop()
            for t in node.results:
                del copies[t]
            for t in new:
                copies[t].pop()

    ops(0, 0.0)
    return None if looked > nodes_most else (best, looked)
