"""pick: the layouts an op shall run in, for operands that come as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowshard.argument import instance, items
from lowshard.bounded import BoundedCache
from lowshard.errors import LayoutError, SolverError
from lowshard.layout import Layout
from lowshard.solver.action import OPERANDS, Action, Solver, action_set
from lowshard.solver.greedy import GreedyReshard, current_solver, require_solver
from lowshard.solver.table import Rules
from lowshard.solver.table.op_argument import freeze_args, told_apart


def pick(
    op: str,
    layouts: Sequence[Layout],
    *,
    solver: Solver | None = None,
    rules: Rules = "extended",
    **op_args: Any,
) -> Action:
    """Return the action a solver picks for an op on operands that come in these layouts.

    Rows that do not hold for the dtypes of the operands are not offered, under either rules. Beyond that itemsizes and
    extents decide; whether the op takes the dtype at all is checked when it runs. Pure: every rank gets the same action
    from the same layouts. The picks of a silent GreedyReshard are kept.

    Args:
        op: name of the op, such as "matmul".
        layouts: one a tensor operand, in order, all on one mesh.
        solver: any `(ActionSet, layouts) -> Action`; by default the one bound by `with solver(...)`, else a plain
            GreedyReshard.
        rules: as for `action_set`.
        **op_args: arguments that are no tensors (axis, shape, dims, ...).

    Raises:
        LayoutError: as `action_set`.
        SolverError: the solver finds no action (BudgetError, PolicyError: see GreedyReshard), or returns something else
            than an action of this op on these layouts.
    """
    chosen = current_solver() if solver is None else solver
    if solver is not None:
        require_solver(solver)
    operands = items(layouts, OPERANDS, LayoutError)
    # The one solver known to pick the same from the same layouts, always.
    if type(chosen) is not GreedyReshard or chosen.on_reshard != "silent":
        return _checked(chosen(action_set(op, operands, rules, **op_args), operands), op, operands)
    key = (op, operands, rules, chosen.allow_partial_to_sharded, told_apart(freeze_args(op_args)))
    try:
        found = _PICKED.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _checked(chosen(action_set(op, operands, rules, **op_args), operands), op, operands)
    if found is None:
        found = chosen(action_set(op, operands, rules, **op_args), operands)
        _PICKED.put(key, found)
    return found


_PICKED = BoundedCache[Any, Action]("picks", 8 << 20, lambda key, action: 1024 + 1536 * len(key[1]))


def _checked(found: object, op: str, operands: tuple[Layout, ...]) -> Action:
    """Return what a solver found, or raise SolverError where it is no action of the op on these operands."""
    action = instance(found, Action, f"{op}: a solver returns an Action", SolverError)
    if action.op != op or action.sources != operands:
        raise SolverError(
            f"{op}: a solver returns an Action of the ActionSet that it was given, from its action(rows), got one of "
            f"{action.op} on {', '.join(map(str, action.sources))}"
        )
    return action


def clear_picks() -> None:
    """Forget what was picked."""
    _PICKED.clear()
