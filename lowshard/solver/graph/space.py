"""Space: every way each op of a graph can run on a mesh, every way each tensor can lie, and all prices between them.

Schedule: what an assignment of them makes happen, step by step: moves, copies that serve again, memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from lowshard import dtypes
from lowshard.errors import ShardingError, SolverError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Placement, ReduceOp, Replicated, Sharded
from lowshard.solver.action import Action, action_set
from lowshard.solver.assignment import AxisAssignment, Prices, Result, Style
from lowshard.solver.graph.bound_graph import BoundGraph, Node
from lowshard.solver.graph.graph_rates import Timing, largest_bytes, temporary_bytes
from lowshard.solver.table import Rules, check_rules

COMBINATIONS_MOST = 1 << 14
"""Of rows over mesh axes that one op may have; beyond, it is offered the rows of one axis beside replicas on others. Of
ways in which operands may come, and in which a leaf may lie."""


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

    def chains(self, layouts: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return the least price from each of some layouts to each by one move or several; not to be written to."""
        key = ("chains", layouts)
        found = self._tables.get(key)
        if found is None:
            found = self.table(layouts, layouts).copy()
            for via in range(len(layouts)):
                np.minimum(found, found[:, via, None] + found[via], out=found)
            self._tables[key] = found
        return found


class Space:
    """What a solver of whole graphs chooses among."""

    def __init__(
        self,
        graph: BoundGraph,
        mesh: DeviceMesh,
        timing: Timing,
        rules: Rules,
        keeps: bool = False,  # inputs and results stay to the end, as a backward pass needs them; copies do not
        given_only: bool = False,  # the ways of ops come from elsewhere
        spreads: bool = False,  # free leaves may be cut in any way, to hold less than an op needs
    ) -> None:
        check_rules(rules)
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
        self.is_whole = True
        """Whether the space holds every way that the rules allow; else an op has too many of them."""
        self._known: dict[Any, list[Choice]] = {}
        self._known_rows: dict[Any, list[AxisAssignment]] = {}
        self._styles = self._all_styles()
        self._spreads = spreads
        self._terms = [] if given_only else self._all_terms()
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
        whole = self.graph.layout(self.mesh, leaf, "R")
        found = {family.number(whole): None}
        for step, k in self.consumers[leaf]:
            for choice in self.choices[step] if self.choices else ():
                if not any(family.layouts[choice.inputs[k]].partials):
                    found[choice.inputs[k]] = None
        if self._spreads and not self._is_many((1 + whole.ndim) ** self.mesh.ndim):
            cuts = [Replicated(), *map(Sharded, range(whole.ndim))]
            for placements in product(cuts, repeat=self.mesh.ndim):
                found[family.number(whole.with_placements(placements))] = None
        return list(found)

    def _is_many(self, count: int) -> bool:
        """Whether so many are not listed one by one; then the space is not whole."""
        if count > COMBINATIONS_MOST:
            self.is_whole = False
        return count > COMBINATIONS_MOST

    def least_moves(
        self, tensor: int, sources: Sequence[int], targets: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        """Return what a use of a tensor pays at the least, as [sources, targets]; over all uses no plan pays less."""
        family, uses = self.family[tensor], self.uses[tensor]
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        if len(uses) == 1 or not self.timing.reuses:
            table = family.table(rows, columns)
        else:
            every = self._reached[tensor]
            place = {x: i for i, x in enumerate(every)}
            table = family.chains(every)[np.ix_([place[x] for x in rows], [place[x] for x in columns])]
            table = table / len(uses)
        row, column = ({x: i for i, x in enumerate(known)} for known in (rows, columns))
        return table[np.ix_([row[x] for x in sources], [column[x] for x in targets])]

    @cached_property
    def _reached(self) -> list[tuple[int, ...]]:
        """For each tensor every layout that it may come in or be brought to."""
        found = []
        for tensor, uses in enumerate(self.uses):
            every = set(self.source_layouts(tensor))
            for step, k, fixed in uses:
                every |= {c.inputs[k] for c in self.choices[step]} if fixed is None else {fixed}
            found.append(tuple(sorted(every)))
        return found

    def _all_styles(self) -> list[Style]:
        """Return how mesh axes may nest and which split rules they may follow: as leaves come, and the usual way."""
        given = [Style.of([self.family[leaf].layouts[layout]]) for leaf, layout in self.given.items()]
        orders = dict.fromkeys([None, *(style.order for style in given)])
        ceil = [any(style.ceil[axis] for style in given) for axis in range(self.mesh.ndim)]
        return [Style(order, c) for order in orders for c in product(*[(False, True)[: 1 + c] for c in ceil])]

    def action(self, node: Node, inputs: tuple[Layout, ...], rows: tuple[AxisAssignment, ...]) -> Action:
        """Return the action of rows, for operands that come just as they need them."""
        results = tuple(Result(self.graph.shapes[t], self.graph.dtypes[t]) for t in node.results)
        prices: Prices = "volume" if self.rules == "extended" else "published"
        return Action(node.op, node.args, inputs, rows, results, prices)

    def including(self, leaves: Mapping[int, int], choices: Sequence[Choice]) -> Space:
        """Return the same space with some leaf layouts and one way of each op, where it lacks them."""
        leaf_layouts = {t: list(dict.fromkeys((*known, leaves[t]))) for t, known in self.leaf_layouts.items()}
        ways = []
        for known, way in zip(self.choices, choices, strict=True):
            is_there = any((c.inputs, c.outputs) == (way.inputs, way.outputs) for c in known)
            ways.append(known if is_there else [*known, way])
        return self.restricted(ways, leaf_layouts)

    def restricted(self, choices: Sequence[list[Choice]], leaf_layouts: dict[int, list[int]]) -> Space:
        """Return the same space with fewer ways."""
        made = copy(self)
        made.__dict__.pop("_reached", None)
        made.choices, made.leaf_layouts = list(choices), leaf_layouts
        return made

    # ---- the ways of one op

    def _all_terms(self) -> list[frozenset[ReduceOp]]:
        """Return of which kinds each tensor may come as terms, or be wanted as."""
        # What an op gives spreads to its readers; what it needs spreads back, since terms are cheaper to make of small
        # arrays, perhaps several ops earlier.
        terms = self._useful_terms()
        for tensor, layout in (*self.given.items(), *self.wanted):
            terms[tensor] |= _terms_of(self.family[tensor].layouts[layout].placements)
        before: list[frozenset[ReduceOp]] = []
        while terms != before:
            before = list(terms)
            for node in (*self.graph.nodes, *reversed(self.graph.nodes)):
                rows = self._rows(node, self._held(node, terms))
                for k, t in enumerate(node.operands):
                    terms[t] |= _terms_of(row.needed_inputs[k] for row in rows)
                for k, t in enumerate(node.results):
                    terms[t] |= _terms_of(row.outputs(len(node.results))[k] for row in rows)
        return terms

    def _useful_terms(self) -> list[frozenset[ReduceOp]]:
        """Return in which kinds of terms each tensor may be worth having, though nothing gives or needs them so."""
        # Where all ranks of an axis hold the same, all but one may drop it: less moves along the other axes then.
        terms: list[frozenset[ReduceOp]] = [frozenset()] * len(self.graph.tensors)
        if self.rules == "documented" or sum(n > 1 for n in self.mesh.shape) < 2:
            return terms
        kinds: tuple[ReduceOp, ...] = ("max", "min", "prod")
        for node in self.graph.nodes:
            if any(dtypes.get(self.graph.dtypes[t]).kind == "scale" for t in node.operands):
                continue
            for op in kinds:
                needs = {
                    row.needed_inputs for row in self._rows(node, (frozenset((op,)),) * len(node.operands))
                }
                for need in needs:
                    if tuple(Partial() if p == Partial(op) else p for p in need) not in needs:
                        for t, p in zip(node.operands, need, strict=True):
                            terms[t] |= _terms_of((p,))
        return terms

    def _held(self, node: Node, terms: Sequence[frozenset[ReduceOp]]) -> tuple[frozenset[ReduceOp], ...]:
        """Return the kinds of terms to ask the rule of an op for, by operand."""
        wanted = frozenset[ReduceOp]().union(*(terms[t] for t in node.results))
        return tuple(terms[t] | wanted for t in node.operands)

    def _key(self, node: Node, held: tuple[frozenset[ReduceOp], ...]) -> Any:
        shapes = tuple((self.graph.shapes[t], self.graph.dtypes[t]) for t in node.operands)
        return (node.op, repr(node.args), held, shapes)  # repr: 1, 1.0 and True are equal as keys

    def _choices(self, node: Node) -> list[Choice]:
        held = self._held(node, self._terms)
        key = self._key(node, held)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._enumerate(node, held)
        return found

    def _enumerate(self, node: Node, held: tuple[frozenset[ReduceOp], ...]) -> list[Choice]:
        rows = self._rows(node, held)
        by_axis = []
        for axis, name in enumerate(self.mesh.axis_names):
            here = [r for r in rows if not r.only or name in r.only]
            by_axis.append(here if self.mesh.shape[axis] > 1 else here[:1])
        if self._is_many(prod(map(len, by_axis))):
            combinations = [
                tuple(rows[0] if b != a else r for b in range(self.mesh.ndim))
                for a, here in enumerate(by_axis)
                for r in here
            ]
        else:
            combinations = list(product(*by_axis))
        best: dict[tuple[tuple[int, ...], tuple[int, ...]], Choice] = {}
        for style in self._styles:
            for combination in combinations:
                inputs = self._inputs(node, combination, style)
                choice = None if inputs is None else self.choice(node, inputs, combination)
                if choice is None:
                    continue
                key = (choice.inputs, choice.outputs)
                if key not in best or choice.price < best[key].price:
                    best[key] = choice
        if not best:
            raise SolverError(f"{node.label}: no row of its rule can be used on mesh {self.mesh}")
        return list(best.values())

    def _rows(self, node: Node, held: tuple[frozenset[ReduceOp], ...]) -> list[AxisAssignment]:
        """Return the rows that the rule offers for any way the operands may come."""
        key = self._key(node, held)
        found = self._known_rows.get(key)
        if found is None:
            args = dict(node.args)
            sets = (action_set(node.op, probe, self.rules, **args) for probe in self._probes(node, held))
            found = list(dict.fromkeys(row for offered in sets for row in offered.axis_assignments))
            self._known_rows[key] = found
        return found

    def _probes(self, node: Node, held: Sequence[frozenset[ReduceOp]]) -> Iterator[list[Layout]]:
        """Yield layouts of the operands that together make the rule offer every row it has."""
        mesh = self.mesh
        whole = [
            Layout(mesh, self.graph.shapes[t], self.graph.dtypes[t], (Replicated(),) * mesh.ndim)
            for t in node.operands
        ]
        yield whole
        terms: list[list[Placement]] = [[Partial(op) for op in sorted(ops)] for ops in held]
        cuts: list[list[Placement]] = [[Sharded(d) for d in range(x.ndim)] for x in whole]
        if node.op == "rebind":  # a row for each way in which all operands come
            ways = [[Replicated(), *cut, *term] for cut, term in zip(cuts, terms, strict=True)]
            if self._is_many(prod(map(len, ways))):
                return
            for each in product(*ways):
                yield [x.with_placements((p,) * mesh.ndim) for x, p in zip(whole, each, strict=True)]
            return
        # Published rows may be bound to the mesh axes that cut an operand as it comes.
        sets = subsets(mesh.ndim) if self.rules == "documented" else [(True,) * mesh.ndim]
        for k, x in enumerate(whole):
            for placement in (*terms[k], *cuts[k]):
                for axes in sets if isinstance(placement, Sharded) else [(True,) * mesh.ndim]:
                    made = x.with_placements([placement if here else Replicated() for here in axes])
                    yield [made if i == k else x for i, x in enumerate(whole)]

    def _inputs(self, node: Node, rows: Sequence[AxisAssignment], style: Style) -> tuple[Layout, ...] | None:
        """Return the layouts in which rows need the operands; None where terms of two kinds would meet in one."""
        try:
            return tuple(
                style.layout(
                    self.mesh, self.graph.shapes[t], self.graph.dtypes[t], [r.needed_inputs[k] for r in rows]
                )
                for k, t in enumerate(node.operands)
            )
        except ShardingError:
            return None

    def choice(self, node: Node, inputs: tuple[Layout, ...], rows: Sequence[AxisAssignment]) -> Choice | None:
        """Return the way of an op by these rows, which the operands fit; None where it is not offered."""
        found = action_set(node.op, inputs, self.rules, **dict(node.args))
        count = len(node.results)
        exact = []
        for name, row in zip(self.mesh.axis_names, rows, strict=True):
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
            return self.priced(node, inputs, tuple(exact))
        except ShardingError:  # terms of two kinds would meet in a result
            return None

    def priced(
        self, node: Node, inputs: tuple[Layout, ...], rows: tuple[AxisAssignment, ...]
    ) -> Choice | None:
        """Return the way of an op by these rows, priced; None where the rows do not take the inputs as they come."""
        action = self.action(node, inputs, rows)
        if action.inputs != inputs:
            return None
        inner = self.timing.inner(rows, inputs[0])
        if inner == inf:
            return None
        return Choice(
            rows,
            tuple(self.family[t].number(x) for t, x in zip(node.operands, inputs, strict=True)),
            tuple(self.family[t].number(x) for t, x in zip(node.results, action.outputs, strict=True)),
            self.timing.compute(node.op, dict(node.args), inputs, action.outputs),
            inner,
            temporary_bytes(node.op, inputs),
        )


def _terms_of(placements: Iterable[Placement]) -> frozenset[ReduceOp]:
    """Return the kinds of terms among placements."""
    return frozenset(p.op for p in placements if isinstance(p, Partial))


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Return every choice among so many but the empty one, as flags."""
    return [flags for flags in product((False, True), repeat=count) if any(flags)]


class Move(NamedTuple):
    """A tensor is brought into another layout before a step. Layouts are numbered in the tensor's family."""

    tensor: int
    step: int
    src: int
    dst: int
    price: float


@dataclass(frozen=True)
class Assignment:
    """Where each leaf lies and how each op runs."""

    leaves: Mapping[int, int]
    choices: tuple[Choice, ...]

    def layout(self, space: Space, tensor: int) -> int:
        """Return the layout that a tensor comes in."""
        if tensor in self.leaves:
            return self.leaves[tensor]
        step, k = space.producer[tensor]
        return self.choices[step].outputs[k]


@dataclass(frozen=True)
class Schedule:
    """An assignment, priced."""

    assignment: Assignment
    moves: tuple[Move, ...]
    compute: float
    inner: float  # of the collectives inside ops
    memory_bytes: tuple[int, ...]  # on the fullest device at each step; the last entry is after the last op

    @property
    def moved(self) -> float:
        """Price of the moves."""
        return sum(m.price for m in self.moves)

    @property
    def price(self) -> float:
        """Price of everything."""
        return self.compute + self.inner + self.moved

    @property
    def peak_bytes(self) -> int:
        """The most that the fullest device holds at any step."""
        return max(self.memory_bytes, default=0)


def schedule(space: Space, assignment: Assignment) -> Schedule:
    """Price an assignment."""
    # A tensor is held from its making to its last use, a weight all the time. A copy in another layout is made before
    # the first op that needs it, from the cheapest of the source and earlier copies, and held to the last use of the
    # tensor. Where the timing reuses nothing, each use pays for its own move, and holds its own copy for that step.
    moves: list[Move] = []
    steps = space.steps
    change = [0] * (steps + 2)
    for tensor, uses in enumerate(space.uses):
        family, last = space.family[tensor], space.last_use[tensor]
        source = assignment.layout(space, tensor)
        change[space.born(tensor)] += family.bytes[source]
        change[last + 1] -= family.bytes[source]
        held = [source]
        for step, k, fixed in uses:
            need = assignment.choices[step].inputs[k] if fixed is None else fixed
            if need in held:
                continue
            if not space.timing.reuses:
                moves.append(Move(tensor, step, source, need, family.move(source, need)))
                change[step] += family.bytes[need]
                change[step + 1] -= family.bytes[need]
                continue
            price, place = min((family.move(have, need), i) for i, have in enumerate(held))
            moves.append(Move(tensor, step, held[place], need, price))
            held.append(need)
            change[step] += family.bytes[need]
            change[space.copies_until[tensor] + 1] -= family.bytes[need]
    memory, now = [], 0
    for step in range(steps + 1):
        now += change[step]
        memory.append(now + (assignment.choices[step].temporary_bytes if step < steps else 0))
    moves.sort(key=lambda m: m.step)
    return Schedule(
        assignment,
        tuple(moves),
        sum(c.compute for c in assignment.choices),
        sum(c.inner for c in assignment.choices),
        tuple(memory),
    )


def holders(space: Space, assignment: Assignment, step: int) -> list[tuple[int, int, int]]:
    """Return what a device holds at a step: (bytes, tensor, layout), the largest first."""
    found = []
    for tensor, uses in enumerate(space.uses):
        if not space.born(tensor) <= step <= space.last_use[tensor]:
            continue
        family = space.family[tensor]
        held = [assignment.layout(space, tensor)]
        for at, k, fixed in uses:
            need = assignment.choices[at].inputs[k] if fixed is None else fixed
            until = space.copies_until[tensor] if space.timing.reuses else at
            if at <= step <= until and need not in held:
                held.append(need)
        found += [(family.bytes[layout], tensor, layout) for layout in held]
    return sorted(found, key=lambda f: (-f[0], f[1], f[2]))


def is_feasible(found: Schedule, budget_bytes: float | None) -> bool:
    """Whether every move can be made, and the budget holds at every step."""
    return found.price != inf and (budget_bytes is None or found.peak_bytes <= budget_bytes)
