"""Ways and layouts that no plan of at most some price can have are left out of a space: the rest is exact as before.

A simpler problem gives a bound for each: every use of a tensor pays an equal share of its own move, whatever copies
other uses make. A way whose bound is above the price of a plan that is known is in no better plan (reduced cost
fixing: Nemhauser, Wolsey: Integer and Combinatorial Optimization, 1988, II.5.2).
"""

from __future__ import annotations

import numpy as np

from lowshard.solver.graph.elimination import BIG, Factor, eliminate, marginals
from lowshard.solver.graph.graph_schedule import Assignment
from lowshard.solver.graph.space import Space

_CELLS_MOST = 1 << 25
_ROUNDING = 1e-9


class Relaxation:
    """The simpler problem of a space: a variable for each leaf and each op, tables over two of them at most."""

    def __init__(self, space: Space) -> None:
        self.space = space
        leaves = list(space.leaf_layouts)
        self._leaf = {leaf: space.steps + i for i, leaf in enumerate(leaves)}
        self.sizes = [len(ways) for ways in space.choices] + [len(space.leaf_layouts[t]) for t in leaves]
        self.factors = [
            Factor((step,), np.array([c.price for c in ways])) for step, ways in enumerate(space.choices)
        ]
        for tensor in range(len(space.family)):
            self._add_moves(tensor)

    def _add_moves(self, tensor: int) -> None:
        space = self.space
        if tensor in self._leaf:
            source, comes = self._leaf[tensor], space.leaf_layouts[tensor]
        else:
            source, k = space.producer[tensor]
            comes = [c.outputs[k] for c in space.choices[source]]
        for step, k, fixed in space.uses[tensor]:
            needs = [c.inputs[k] for c in space.choices[step]] if fixed is None else [fixed]
            table = np.minimum(space.least_moves(tensor, comes, needs), BIG)
            if fixed is None:
                self.factors.append(Factor((source, step), table))
            else:
                self.factors.append(Factor((source,), table[:, 0]))

    def solve(self) -> tuple[float, Assignment]:
        """Return a price that no plan is below, and the assignment that has it here."""
        low, values = eliminate(self.sizes, self.factors, _CELLS_MOST)
        leaves = {leaf: self.space.leaf_layouts[leaf][values[v]] for leaf, v in self._leaf.items()}
        choices = (ways[values[step]] for step, ways in enumerate(self.space.choices))
        return low, Assignment(leaves, tuple(choices))

    def pruned(self, price: float) -> Space:
        """Return the space without what no plan of at most this price can have."""
        space = self.space
        stays = [low <= price * (1 + _ROUNDING) for low in marginals(self.sizes, self.factors, _CELLS_MOST)]
        choices = [
            [c for c, stay in zip(ways, stays[step], strict=True) if stay]
            for step, ways in enumerate(space.choices)
        ]
        leaves = {
            leaf: [x for x, stay in zip(space.leaf_layouts[leaf], stays[v], strict=True) if stay]
            for leaf, v in self._leaf.items()
        }
        return space.restricted(choices, leaves)


__all__ = ["Relaxation"]
