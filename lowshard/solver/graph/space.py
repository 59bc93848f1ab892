"""Space: every way each op of a graph can run on a mesh, every way each tensor can lie, and all prices between them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from lowshard.errors import ShardingError, SolverError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Replicated
from lowshard.solver.action import Action, AxisAssignment, Result
from lowshard.solver.graph.graph import BoundGraph, Node
from lowshard.solver.graph.timing import Timing, largest_bytes, temporary_bytes
from lowshard.solver.pick import action_set
from lowshard.solver.table import Rules
from lowshard.solver.transition import Prices

COMBINATIONS_MOST = 4096
"""Of rows over mesh axes that one op may have; beyond, it is offered the rows of one axis beside replicas on others."""


class Choice(NamedTuple):
    """One way to run an op: a row a mesh axis. Layouts are numbered in the family of each tensor."""

    rows: tuple[AxisAssignment, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    compute: float
    inner: float
    temporary_bytes: int

    @property
    def price(self) -> float:
        """What it costs beside moves."""
        return self.compute + self.inner


class Family:
    """The layouts in which tensors of one shape and dtype may lie, numbered; what moves between them cost."""

    def __init__(self, timing: Timing) -> None:
        self.layouts: list[Layout] = []
        self._timing = timing
        self._number: dict[Layout, int] = {}
        self._moves: dict[tuple[int, int], float] = {}
        self._tables: dict[Any, np.ndarray[Any, Any]] = {}
        self.bytes: list[int] = []
        """Of the largest shard, by number."""

    def number(self, layout: Layout) -> int:
        """Return a layout's number, a new one the first time."""
        found = self._number.get(layout)
        if found is None:
            found = self._number[layout] = len(self.layouts)
            self.layouts.append(layout)
            self.bytes.append(largest_bytes(layout))
        return found

    def move(self, src: int, dst: int) -> float:
        """Return the price of a move."""
        if src == dst:
            return 0.0
        found = self._moves.get((src, dst))
        if found is None:
            found = self._moves[src, dst] = self._timing.move(self.layouts[src], self.layouts[dst])
        return found

    def table(self, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the prices of all moves from some layouts to others, as [sources, targets]; not to be written to."""
        key = (tuple(sources), tuple(targets))
        found = self._tables.get(key)
        if found is None:
            prices = [[self.move(a, b) for b in targets] for a in sources]
            found = self._tables[key] = np.array(prices, np.float64).reshape(len(sources), len(targets))
        return found


class Space:
    """What a solver of whole graphs chooses among.

    Args:
        graph: with its shapes bound.
        mesh: where it runs.
        timing: the prices.
        rules: "extended" or "documented".
        keeps: whether inputs and results stay to the end, as a backward pass needs them; copies of them do not.
        given_only: leave the ways of ops out: they come from elsewhere.
    """

    def __init__(
        self,
        graph: BoundGraph,
        mesh: DeviceMesh,
        timing: Timing,
        rules: Rules,
        keeps: bool = False,
        given_only: bool = False,
    ) -> None:
        self.graph, self.mesh, self.timing, self.rules, self.keeps = graph, mesh, timing, rules, keeps
        self.consumers = graph.consumers()
        self._families: dict[tuple[tuple[int, ...], str], Family] = {}
        self.family = [
            self._families.setdefault((s, d), Family(timing))
            for s, d in zip(graph.shapes, graph.dtypes, strict=True)
        ]
        self.given: dict[int, int] = {}
        """The leaves whose place is given, and their layout."""
        for leaf in graph.leaves():
            place = graph.tensors[leaf].place
            if place is not None:
                self.given[leaf] = self.family[leaf].number(graph.layout(mesh, leaf, place))
        self.wanted: list[tuple[int, int]] = [
            (t, self.family[t].number(graph.layout(mesh, t, place)))
            for t, place in graph.outputs
            if place is not None
        ]
        """Outputs that must end in a layout."""
        self.last_use = self._last_uses()
        self._known: dict[Any, list[Choice]] = {}
        self._actions: dict[Any, Action] = {}
        self._terms: list[frozenset[str]] = [frozenset()] * len(graph.tensors)
        for leaf, layout in self.given.items():
            ops = self.family[leaf].layouts[layout].partials
            self._terms[leaf] = frozenset(op for op in ops if op is not None)
        self.choices = [] if given_only else [self._choices(node) for node in graph.nodes]
        self.leaf_layouts: dict[int, list[int]] = {
            leaf: [self.given[leaf]] if leaf in self.given else self._leaf(leaf) for leaf in graph.leaves()
        }

    @cached_property
    def copies_until(self) -> list[int]:
        """For each tensor the step through which copies of it are held: its last use, though it may stay itself."""
        return [places[-1][0] if places else -1 for places in self.uses]

    @property
    def steps(self) -> int:
        """How many ops there are."""
        return len(self.graph.nodes)

    @cached_property
    def uses(self) -> list[list[tuple[int, int, int | None]]]:
        """For each tensor what reads it, in order: (step, operand, None), or (steps, 0, layout) for a wanted output."""
        found: list[list[tuple[int, int, int | None]]] = [
            [(step, k, None) for step, k in places] for places in self.consumers
        ]
        for tensor, layout in self.wanted:
            found[tensor].append((self.steps, 0, layout))
        return found

    def source_layouts(self, tensor: int) -> list[int]:
        """Return the layouts that a tensor can come in, in order."""
        if tensor in self.leaf_layouts:
            return self.leaf_layouts[tensor]
        step, k = self.producer[tensor]
        return list(dict.fromkeys(c.outputs[k] for c in self.choices[step]))

    @cached_property
    def producer(self) -> dict[int, tuple[int, int]]:
        """For each result the step and the place among its results."""
        return {
            t: (step, k) for step, node in enumerate(self.graph.nodes) for k, t in enumerate(node.results)
        }

    def born(self, tensor: int) -> int:
        """Return the step at which a tensor is there: a leaf from the first on."""
        return self.producer[tensor][0] if tensor in self.producer else 0

    def _last_uses(self) -> list[int]:
        found = [places[-1][0] if places else -1 for places in self.consumers]
        for tensor, _ in self.graph.outputs:
            found[tensor] = self.steps
        for tensor, info in enumerate(self.graph.tensors):
            if info.kind == "weight" or self.keeps:
                found[tensor] = self.steps
            elif found[tensor] < 0:
                found[tensor] = self.producer[tensor][0] if tensor in self.producer else 0
        return found

    def _leaf(self, leaf: int) -> list[int]:
        family = self.family[leaf]
        found = {family.number(self.graph.layout(self.mesh, leaf, "R")): None}
        for step, k in self.consumers[leaf]:
            for choice in self.choices[step] if self.choices else ():
                if not any(family.layouts[choice.inputs[k]].partials):
                    found[choice.inputs[k]] = None
        return list(found)

    def action(self, node: Node, inputs: tuple[Layout, ...], rows: tuple[AxisAssignment, ...]) -> Action:
        """Return the action of a choice, for operands that come just as it needs them."""
        key = (node.op, node.args, inputs, rows)
        found = self._actions.get(key)
        if found is None:
            results = tuple(Result(self.graph.shapes[t], self.graph.dtypes[t]) for t in node.results)
            prices: Prices = "volume" if self.rules == "extended" else "published"
            found = self._actions[key] = Action.quick(node.op, node.args, inputs, rows, results, prices)
        return found

    def restricted(self, choices: Sequence[list[Choice]], leaf_layouts: dict[int, list[int]]) -> Space:
        """Return the same space with fewer ways."""
        made = copy(self)
        made.choices, made.leaf_layouts = list(choices), leaf_layouts
        return made

    # ---- the ways of one op

    def _choices(self, node: Node) -> list[Choice]:
        held = tuple(self._terms[t] for t in node.operands)
        shapes = tuple((self.graph.shapes[t], self.graph.dtypes[t]) for t in node.operands)
        given = tuple(self.given.get(t) for t in node.operands)
        key = (node.op, node.args, held, shapes, given)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._enumerate(node, held)
        for k, t in enumerate(node.results):
            ops = {op for c in found for op in self.family[t].layouts[c.outputs[k]].partials}
            self._terms[t] = frozenset(op for op in ops if op is not None)
        return found

    def _enumerate(self, node: Node, held: Sequence[frozenset[str]]) -> list[Choice]:
        args = dict(node.args)
        rows = self._rows(node, args, held)
        by_axis = []
        for axis, name in enumerate(self.mesh.axis_names):
            here = [r for r in rows if not r.only or name in r.only]
            by_axis.append(here if self.mesh.shape[axis] > 1 else here[:1])
        if prod(map(len, by_axis)) > COMBINATIONS_MOST:
            combinations = [
                tuple(rows[0] if b != a else r for b in range(self.mesh.ndim))
                for a, here in enumerate(by_axis)
                for r in here
            ]
        else:
            combinations = list(product(*by_axis))
        best: dict[tuple[tuple[int, ...], tuple[int, ...]], Choice] = {}
        for combination in combinations:
            choice = self._choice(node, args, combination)
            if choice is None:
                continue
            key = (choice.inputs, choice.outputs)
            if key not in best or choice.price < best[key].price:
                best[key] = choice
        if not best:
            raise SolverError(f"{node.label}: no row of its rule can be used on mesh {self.mesh}")
        return list(best.values())

    def _rows(self, node: Node, args: dict[str, Any], held: Sequence[frozenset[str]]) -> list[AxisAssignment]:
        """Return the rows that the rule offers for any way the operands may come."""
        whole = [
            Layout(self.mesh, self.graph.shapes[t], self.graph.dtypes[t], (Replicated(),) * self.mesh.ndim)
            for t in node.operands
        ]
        probes = [whole]
        for k, ops in enumerate(held):
            for op in sorted(ops - {"sum"}):
                terms = whole[k].with_placements((Partial(op),) * self.mesh.ndim)  # type: ignore[arg-type]
                probes.append([terms if i == k else x for i, x in enumerate(whole)])
        for k, t in enumerate(node.operands):  # rules that read how an operand comes
            if t in self.given and node.op in ("rebind", "reshape", "flatten"):
                given = self.family[t].layouts[self.given[t]]
                probes.append([given if i == k else x for i, x in enumerate(whole)])
        found: dict[AxisAssignment, None] = {}
        for probe in probes:
            for row in action_set(node.op, probe, self.rules, **args).axis_assignments:
                needs = [p.op if isinstance(p, Partial) else None for p in row.needed_inputs]
                terms_of = [op for op in needs if op is not None]
                # What never comes as terms is not made terms of, but to go along with an operand that does.
                if terms_of and not any(op in held[k] for k, op in enumerate(needs) if op is not None):
                    continue
                found[row] = None
        return list(found)

    def _choice(self, node: Node, args: dict[str, Any], rows: tuple[AxisAssignment, ...]) -> Choice | None:
        try:
            inputs = [
                Layout(
                    self.mesh, self.graph.shapes[t], self.graph.dtypes[t], [r.needed_inputs[k] for r in rows]
                )
                for k, t in enumerate(node.operands)
            ]
        except ShardingError:  # terms of two kinds
            return None
        if not all(map(_is_full, inputs)):
            return None
        found = action_set(node.op, inputs, self.rules, **args)
        # Offered again for just these layouts: how a row runs, and what it exchanges, may rest on them.
        count = len(node.results)
        exact = []
        for axis, row in enumerate(rows):
            name = self.mesh.axis_names[axis]
            same = [
                r
                for r in found.axis_assignments
                if r.needed_inputs == row.needed_inputs
                and r.outputs(count) == row.outputs(count)
                and (not r.only or name in r.only)
            ]
            if not same:
                return None
            exact.append(same[0])
        try:
            outputs = found.action(exact).outputs
        except ShardingError:
            return None
        if not all(map(_is_full, outputs)):
            return None
        compute = self.timing.compute(node.op, args, inputs, outputs)
        inner = self.timing.inner(exact, inputs[0])
        if inner == inf:
            return None
        return Choice(
            tuple(exact),
            tuple(self.family[t].number(x) for t, x in zip(node.operands, inputs, strict=True)),
            tuple(self.family[t].number(x) for t, x in zip(node.results, outputs, strict=True)),
            compute,
            inner,
            temporary_bytes(node.op, inputs),
        )


def _is_full(layout: Layout) -> bool:
    """Whether no rank's shard is empty, and none is cut along a dim of extent 1."""
    sizes = layout.mesh.shape
    return all(
        not axes or extent >= prod(sizes[a] for a in axes)
        for extent, axes in zip(layout.shape, layout.cutters, strict=True)
    )


__all__ = ["Choice", "Family", "Space"]
