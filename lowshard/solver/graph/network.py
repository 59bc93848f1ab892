"""The choices of a graph as variables and tables that can be eliminated.

A variable for each way a tensor comes (source) and for each way an op needs an operand (use). A table for each op over
its uses and results, and for each tensor over its source and uses: the moves, each from the cheapest copy that is
there by then. Memory enters as a price a byte at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from lowshard.solver.graph.elimination import BIG, CELLS_MOST, Factor, TooWideError, eliminate
from lowshard.solver.graph.graph_schedule import Assignment
from lowshard.solver.graph.space import Space

_USES_CELLS = 1 << 21
_USES_MOST = 24
_OP_CELLS = 1 << 18


@dataclass
class Network:
    """Variables and tables of a space."""

    space: Space
    memory_price: Sequence[float] | None = None  # a byte held at each step; None: memory is free
    use_price: float = 1.0  # factor of everything else; 0 leaves memory alone to decide
    # Tensors with more uses than a table can hold are priced use by use, without what copies save: "over" by whole
    # moves (never too little), "under" by `Space.least_moves` (never too much); None raises TooWideError.
    split: str | None = None
    was_split: bool = False
    sizes: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values: list[list[int]] = []
        self._source: dict[int, int] = {}
        self._use: dict[tuple[int, int], int] = {}
        self._op: dict[int, int] = {}
        self._known: dict[Any, np.ndarray[Any, Any]] = {}
        self._op_tables: dict[Any, np.ndarray[Any, Any]] = {}
        self._span = np.zeros(self.space.steps + 2)
        if self.memory_price is not None:
            self._span[1:] = np.cumsum(np.asarray(self.memory_price, np.float64))
        for tensor in range(len(self.space.family)):
            self._source[tensor] = self._variable(self.space.source_layouts(tensor))
        for step, node in enumerate(self.space.graph.nodes):
            for k in range(len(node.operands)):
                needs = list(dict.fromkeys(c.inputs[k] for c in self.space.choices[step]))
                self._use[step, k] = self._variable(needs)
        for step in range(self.space.steps):
            self._add_op(step)
        for tensor in range(len(self.space.family)):
            self._add_tensor(tensor)

    def solve(self, cells_most: int = CELLS_MOST) -> tuple[float, Assignment]:
        """Return the least price, and what reaches it."""
        price, values = eliminate(self.sizes, self.factors, cells_most)
        leaves = {leaf: self._values[v][values[v]] for leaf, v in self._source.items() if self._is_leaf(leaf)}
        choices = []
        for step, node in enumerate(self.space.graph.nodes):
            offered = self.space.choices[step]
            if step in self._op:
                choices.append(offered[values[self._op[step]]])
                continue
            needs = tuple(self._chosen(self._use[step, k], values) for k in range(len(node.operands)))
            comes = tuple(self._chosen(self._source[t], values) for t in node.results)
            # Where nothing can be made at all, the elimination ends with what is no way of the op.
            fits = (c for c in offered if c.inputs == needs and c.outputs == comes)
            choices.append(next(fits, offered[0]))
        return price, Assignment(leaves, tuple(choices))

    def _chosen(self, variable: int, values: Sequence[int]) -> int:
        return self._values[variable][values[variable]]

    def _is_leaf(self, tensor: int) -> bool:
        return tensor in self.space.leaf_layouts

    def _variable(self, values: list[int]) -> int:
        self._values.append(values)
        self.sizes.append(len(values))
        return len(self.sizes) - 1

    def _held(self, first: int, last: int) -> float:
        """Return the price of holding a byte from a step through another."""
        return float(self._span[last + 1] - self._span[first])

    def _add_op(self, step: int) -> None:
        node, offered = self.space.graph.nodes[step], self.space.choices[step]
        ends = [self._use[step, k] for k in range(len(node.operands))]
        ends += [self._source[t] for t in node.results]
        held = self._held(step, step)
        prices = np.array([self.use_price * c.price + held * c.temporary_bytes for c in offered])
        shape = [self.sizes[v] for v in ends]
        key = (id(offered), held)
        if key in self._op_tables:
            self.factors.append(Factor(tuple(ends), self._op_tables[key]))
            return
        places = [
            [{x: i for i, x in enumerate(self._values[v])}[layout] for layout in column]
            for v, column in zip(
                ends, zip(*[(*c.inputs, *c.outputs) for c in offered], strict=True), strict=True
            )
        ]
        if prod(shape) <= _OP_CELLS:
            table = np.full(shape, BIG)
            table[tuple(places)] = prices
            self._op_tables[key] = table
            self.factors.append(Factor(tuple(ends), table))
            return
        way = self._op[step] = self._variable(list(range(len(offered))))
        self.factors.append(Factor((way,), prices))
        for v, column in zip(ends, places, strict=True):
            table = np.full((len(offered), self.sizes[v]), BIG)
            table[np.arange(len(offered)), column] = 0.0
            self.factors.append(Factor((way, v), table))

    def _add_tensor(self, tensor: int) -> None:
        space = self.space
        family, last = space.family[tensor], space.last_use[tensor]
        source = self._source[tensor]
        mine = self._values[source]
        if self.memory_price is not None:
            held = self._held(space.born(tensor), last)
            self.factors.append(
                Factor((source,), held * np.array([family.bytes[x] for x in mine], np.float64))
            )
        uses = space.uses[tensor]
        if not uses:
            return
        ends: list[tuple[int | None, list[int], float]] = []
        for step, k, fixed in uses:
            held = self._held(step, space.copies_until[tensor] if space.timing.reuses else step)
            if fixed is None:
                ends.append((self._use[step, k], self._values[self._use[step, k]], held))
            else:
                ends.append((None, [fixed], held))
        cells = len(mine) * prod(len(needs) for _, needs, _ in ends)
        if space.timing.reuses and cells <= _USES_CELLS and len(ends) <= _USES_MOST:
            self._add_uses(tensor, ends)
            return
        if space.timing.reuses and len(ends) > 1:
            self.was_split = True
            if self.split is None:
                raise TooWideError(f"{space.graph.tensors[tensor].name}: {len(ends)} uses, {cells:,} cells")
        share = 1 / len(ends) if self.split == "under" and space.timing.reuses else 1.0
        for variable, needs, held in ends:
            is_under = self.split == "under"
            moves = space.least_moves(tensor, mine, needs) if is_under else family.table(mine, needs)
            table = self.use_price * np.minimum(moves, BIG)
            if self.memory_price is not None:
                new = np.array([[a != b for b in needs] for a in mine])
                table = table + new * share * held * np.array([family.bytes[b] for b in needs], np.float64)
            self._append((source, variable), table)

    def _add_uses(self, tensor: int, ends: list[tuple[int | None, list[int], float]]) -> None:
        family = self.space.family[tensor]
        source = self._source[tensor]
        lists = [self._values[source], *[needs for _, needs, _ in ends]]
        # What the table depends on: a layout that is fixed has no dim in it, a use that has one choice has.
        key = (id(family), *map(tuple, lists), *[(v is None, held) for v, _, held in ends])
        known = self._known.get(key)
        if known is not None:
            self.factors.append(
                Factor(tuple(v for v in (source, *[v for v, _, _ in ends]) if v is not None), known)
            )
            return
        every = sorted({x for values in lists for x in values})
        place = {x: i for i, x in enumerate(every)}
        moves = np.full((len(every), len(every)), np.inf)
        for i, earlier in enumerate(lists):
            for later in lists[i + 1 :]:
                rows, columns = [place[x] for x in earlier], [place[x] for x in later]
                moves[np.ix_(rows, columns)] = family.table(earlier, later)
        moves = np.minimum(moves, BIG)
        index: list[Any] = []
        for d, values in enumerate(lists):
            shape = [1] * len(lists)
            shape[d] = -1
            index.append(np.array([place[x] for x in values]).reshape(shape))
        bytes_ = np.array([family.bytes[x] for x in every], np.float64)
        whole = np.zeros([len(values) for values in lists])
        for j, (_, _, held) in enumerate(ends, 1):
            price = moves[index[0], index[j]]
            new = index[0] != index[j]
            for i in range(1, j):
                price = np.minimum(price, moves[index[i], index[j]])
                new = new & (index[i] != index[j])
            # What is there already costs nothing; of two needs alike the later one finds the earlier one's copy.
            price = np.where(new, price, 0.0)
            whole = whole + self.use_price * price
            if self.memory_price is not None and held:
                whole = whole + held * new * bytes_[index[j]]
        self._append((source, *[v for v, _, _ in ends]), whole)
        self._known[key] = self.factors[-1].table

    def _append(self, variables: tuple[int | None, ...], table: np.ndarray[Any, Any]) -> None:
        """Add a table, without the dims of what is fixed."""
        keep = [d for d, v in enumerate(variables) if v is not None]
        table = np.minimum(table.reshape([table.shape[d] for d in keep]), BIG * 1e3)
        self.factors.append(Factor(tuple(variables[d] for d in keep), table))  # type: ignore[misc]
