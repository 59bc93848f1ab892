"""pick, and the solvers that look at one op: GreedyReshard, NoReshard, PartialsOnly, force_replicated.

GreedyReshard follows what MAX documents of its own (docs.modular.com, max.experimental.sharding, generation with the
memory budget on the mesh): every combination of rows over the mesh axes, those within the budget, those the policy
allows, the cheapest, the earliest of equals.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, Literal

from lowshard.argument import brief, choice, instance, items, truth
from lowshard.bounded import BoundedCache
from lowshard.errors import BudgetError, LayoutError, PolicyError, ShardingError, SolverError
from lowshard.layout import Layout
from lowshard.placement import Partial, Replicated, Sharded
from lowshard.solver.action import (
    OPERANDS,
    Action,
    ActionSet,
    Solver,
    Transition,
    action_set,
    arrows,
    candidate_table,
)
from lowshard.solver.assignment import AxisAssignment, replicated_row
from lowshard.solver.pricing import Candidate
from lowshard.solver.table import Rules
from lowshard.solver.table.op_argument import freeze_args, told_apart

_BOUND: ContextVar[tuple[Solver, ...]] = ContextVar("lowshard_solvers", default=())


def require_solver(solver: object) -> None:
    """Raise SolverError unless something can be called as a solver; a class of solvers is none."""
    if not callable(solver) or isinstance(solver, type):
        raise SolverError(
            f"solver is (ActionSet, layouts) -> Action, such as GreedyReshard(), got {brief(solver)}"
        )


def push(solver: Solver) -> None:
    """Make a solver the current one, or raise SolverError where it is none."""
    require_solver(solver)
    _BOUND.set((*_BOUND.get(), solver))


def pop() -> None:
    """Make the solver before the current one current again."""
    _BOUND.set(_BOUND.get()[:-1])


@contextmanager
def solver(chosen: Solver) -> Iterator[Solver]:
    """Use a solver for every pick in the block that names none; also a decorator.

    Any callable `(ActionSet, layouts) -> Action` will do. Bound in a context variable: other threads and tasks keep
    theirs.

    Raises:
        SolverError: what was chosen cannot be called.
    """
    push(chosen)
    try:
        yield chosen
    finally:
        pop()


def bound_solver() -> Solver | None:
    """Return the innermost bound solver, or None."""
    bound = _BOUND.get()
    return bound[-1] if bound else None


OnReshard = Literal["silent", "warn", "raise"]
_OFFER = "a solver is called with an ActionSet and the layouts of the operands"


class Bindable:
    """A solver that can be used as `with solver:`, for every pick in the block that names none."""

    __slots__ = ()

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the action to take for operands that come in `layouts`."""
        raise NotImplementedError

    def __enter__(self) -> Bindable:
        push(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop()


@dataclass(frozen=True, slots=True)
class GreedyReshard(Bindable):
    """Picks the cheapest action of one op; of equals the earliest row, the first mesh axis counting most.

    The mesh's memory budget a device bounds the tensor operands of the op as they are needed, each at the mean over its
    shards (MAX's count: no results, no temporaries); an action that takes exactly the budget fits.

    Args:
        on_reshard: "silent", "warn" (UserWarning) or "raise" (ShardingError) when an operand must move.
        allow_partial_to_sharded: whether a partial operand may be reduced to shards, on any mesh axis.
        allowed_transitions: how operands may change their placement on a mesh axis: a set of pairs of letters, from
            and to, of "P", "R" and "S", such as `{("P", "R"), ("S", "R")}`; None for all. Both arguments are asked: P
            to S takes `allow_partial_to_sharded=True`, and its pair where there is a set.

    Raises (when called):
        SolverError: no row can be reached.
        BudgetError: no action fits; it names the tightest tensor and the smallest budget that would do.
        PolicyError: what fits takes a transition that is not allowed; it names those.
        ShardingError: an operand must move and `on_reshard` is "raise".
    """

    on_reshard: OnReshard = "silent"
    allow_partial_to_sharded: bool = False
    allowed_transitions: Collection[Transition] | None = None

    def __post_init__(self) -> None:
        rule = "on_reshard is 'silent', 'warn' or 'raise'"
        choice(self.on_reshard, ("silent", "warn", "raise"), rule, ShardingError)
        rule = "allow_partial_to_sharded is True or False"
        object.__setattr__(
            self, "allow_partial_to_sharded", truth(self.allow_partial_to_sharded, rule, ShardingError)
        )
        if self.allowed_transitions is not None:
            rule = 'allowed_transitions is a set of pairs of "P", "R" and "S", such as {("P", "R")}, or None'
            given = items(self.allowed_transitions, rule, ShardingError, any_order=True)
            pairs = [items(pair, rule, ShardingError) for pair in given]
            if any(len(pair) != 2 or not all(x in ("P", "R", "S") for x in pair) for pair in pairs):
                raise ShardingError(f"{rule}, got {brief(self.allowed_transitions)}")
            object.__setattr__(self, "allowed_transitions", frozenset(pairs))

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the cheapest action that the budget and the policy leave."""
        instance(action_set, ActionSet, _OFFER, SolverError)
        action = action_set.action(self.choose(action_set))
        # Shards of one dim move by no row where another operand is nested or split in another way.
        moves = [m.collective for each in action.reshards for m in each] if self._barred({("S", "S")}) else []
        if "all_to_all" in moves:
            raise self._policy_error(action_set, "nesting and splitting all operands alike", {("S", "S")})
        if self.on_reshard != "silent" and not action.moves_nothing:
            self._report(action)
        return action

    def choose(self, action_set: ActionSet) -> tuple[AxisAssignment, ...]:
        """Return the row of each mesh axis."""
        action_set.need_candidates()
        budget = action_set.mesh.smallest_budget_bytes
        if action_set.may_not_commute:
            return self._jointly(action_set, budget)
        # Prices add up over the axes: without a budget the best combination is the best row of each axis.
        best: list[AxisAssignment | None] = []
        for axis, (costs, reduces) in enumerate(action_set.priced):
            if self.allowed_transitions is not None:
                barred = self._barred_rows(action_set, axis)
                costs = [inf if i in barred else cost for i, cost in enumerate(costs)]
            elif not self.allow_partial_to_sharded and True in reduces:
                costs = [inf if reducing else cost for cost, reducing in zip(costs, reduces, strict=True)]
            least = min(costs)
            best.append(None if least == inf else action_set.axis_assignments[costs.index(least)])
        rows = tuple(row for row in best if row is not None)
        if budget is None:
            if len(rows) < len(best):
                axis = best.index(None)
                where = f"every row on mesh axis {action_set.mesh.axis_names[axis]!r}"
                barred = self._barred_rows(action_set, axis)
                raise self._policy_error(action_set, where, set().union(*barred.values()))
            return rows
        if len(rows) == len(best) and needed_bytes(action_set, rows) <= budget:
            return rows
        return self._jointly(action_set, budget)

    def _barred(self, made: Collection[Transition]) -> set[Transition]:
        """Return those of some transitions that are not allowed."""
        found = set() if self.allowed_transitions is None else {*made} - {*self.allowed_transitions}
        return found if self.allow_partial_to_sharded else found | ({("P", "S")} & {*made})

    def _barred_rows(self, action_set: ActionSet, axis: int) -> dict[int, set[Transition]]:
        """Return for each row that is feasible on a mesh axis and not allowed, by its index, why not."""
        every = {c.row_index: action_set.transitions(axis, c.row) for c in action_set.candidates(axis)}
        return {index: barred for index, made in every.items() if (barred := self._barred(made))}

    def _jointly(self, action_set: ActionSet, budget: float | None) -> tuple[AxisAssignment, ...]:
        """Return the best combination where the rows of the mesh axes bear on each other."""
        barred = [self._barred_rows(action_set, a) for a in range(action_set.mesh.ndim)]
        every = [_strongest(action_set, action_set.candidates(a), rows) for a, rows in enumerate(barred)]
        fitting = [c for c in product(*every) if action_set.commute([x.row for x in c])]
        if budget is not None:
            fitting = [c for c in fitting if needed_bytes(action_set, [x.row for x in c]) <= budget]
            if not fitting:
                raise self._budget_error(action_set, budget, every)
        allowed = [c for c in fitting if not any(map(dict.__contains__, barred, (x.row_index for x in c)))]
        if not allowed:
            fits = "" if budget is None else f" that fits into {budget:,.0f} bytes a device"
            why = set().union(*(one for rows in barred for one in rows.values()))
            raise self._policy_error(action_set, f"every action{fits}", why)
        best = min(allowed, key=lambda c: (sum(x.cost_bytes for x in c), tuple(x.row_index for x in c)))
        return tuple(c.row for c in best)

    def _report(self, action: Action) -> None:
        text = (
            f"{action.op}: operands must move (on_reshard={self.on_reshard!r}). Redistribute them before the op, or "
            f"pass on_reshard='silent' to let the op do it.\n{action.explain()}"
        )
        if self.on_reshard == "raise":
            raise SolverError(text)
        warnings.warn(text, UserWarning, stacklevel=4)

    def _budget_error(
        self, action_set: ActionSet, budget: float, every: Sequence[Sequence[Candidate]]
    ) -> BudgetError:
        least = min(product(*every), key=lambda c: needed_bytes(action_set, [x.row for x in c]))
        return BudgetError(
            f"{action_set.op}: {budget_text(action_set, [c.row for c in least], budget)}\n"
            f"{candidate_table(action_set, self._barred)}"
        )

    def _policy_error(self, action_set: ActionSet, where: str, barred: Collection[Transition]) -> PolicyError:
        """Return the error that says which transitions are barred, and how to allow them."""
        ways = []
        if ("P", "S") in barred and not self.allow_partial_to_sharded:
            ways.append("pass allow_partial_to_sharded=True")
        if self.allowed_transitions is not None and (lacking := {*barred} - {*self.allowed_transitions}):
            ways.append(f"add {', '.join(map(str, sorted(lacking)))} to allowed_transitions")
        return PolicyError(
            f"{action_set.op}: {where} takes a transition that is not allowed ({arrows(barred)}): "
            f"{' and '.join(ways)}, or redistribute the operands first\n{candidate_table(action_set, self._barred)}"
        )


@dataclass(frozen=True, slots=True)
class NoReshard(Bindable):
    """Takes the first action that leaves every operand as it comes, else raises SolverError (a ShardingError)."""

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the first action under which nothing moves."""
        return _first(action_set, "NoReshard", partials=False)


@dataclass(frozen=True, slots=True)
class PartialsOnly(Bindable):
    """Takes the first action under which nothing moves, else the first that only reduces partial operands to replicas.

    Raises SolverError (a ShardingError) when there is neither.
    """

    def __call__(self, action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
        """Return the first action that moves nothing, or reduces partial operands and moves nothing else."""
        return _first(action_set, "PartialsOnly", partials=True)


def force_replicated(action_set: ActionSet, layouts: Sequence[Layout], /) -> Action:
    """Solver: bring every operand to all ranks, whatever it costs."""
    instance(action_set, ActionSet, _OFFER, SolverError)
    row = replicated_row(len(action_set.layouts))
    return action_set.action((row,) * action_set.mesh.ndim)


def current_solver() -> Solver:
    """Return the solver that `with solver(...)` bound, or a plain GreedyReshard."""
    return bound_solver() or _DEFAULT


_DEFAULT = GreedyReshard()


def _first(action_set: ActionSet, name: str, partials: bool) -> Action:
    instance(action_set, ActionSet, _OFFER, SolverError)
    action_set.need_candidates()
    placements = [layout.placements for layout in action_set.layouts]
    for reducing in (False, True) if partials else (False,):
        staying = [
            [
                c.row
                for c in action_set.candidates(axis)
                if _stays([p[axis] for p in placements], c.row, reducing)
            ]
            for axis in range(action_set.mesh.ndim)
        ]
        for rows in product(*staying):
            if not action_set.commute(rows):
                continue
            action = action_set.action(rows)
            if reducing or action.moves_nothing:
                return action
            break  # nested otherwise: so it is with every other combination
    what = "is as the operands come, or only reduces partial ones" if partials else "is as the operands come"
    raise SolverError(
        f"{action_set.op}: {name} takes a row that {what}, and there is none: redistribute the operands "
        f"first, or use GreedyReshard\n{candidate_table(action_set)}"
    )


def _stays(held: Sequence[object], row: AxisAssignment, reducing: bool) -> bool:
    for have, need in zip(held, row.needed_inputs, strict=True):
        if have == need or (isinstance(have, Sharded) and isinstance(need, Sharded) and have.dim == need.dim):
            continue
        if not (reducing and isinstance(have, Partial) and isinstance(need, Replicated)):
            return False
    return True


def _strongest(
    action_set: ActionSet, candidates: Sequence[Candidate], barred: Collection[int]
) -> list[Candidate]:
    """Return the candidates that can be in the best action: of those that cut the same operands, go together with the
    same others and that the policy treats alike, the cheapest, the earliest of equals.
    """
    best: dict[object, Candidate] = {}
    for candidate in candidates:
        cuts = [isinstance(need, Sharded) for need in candidate.row.needed_inputs]
        families = action_set.families(candidate.row) if action_set.may_not_commute else ()
        key = (candidate.row_index in barred, *cuts, *families)
        if key not in best or candidate.cost_bytes < best[key].cost_bytes:
            best[key] = candidate
    return sorted(best.values(), key=lambda c: c.row_index)


def needed_bytes(action_set: ActionSet, rows: Sequence[AxisAssignment]) -> float:
    """Return the bytes that the operands, as the rows need them, take on a device: the mean over the shards."""
    return sum(operand_bytes(action_set, rows))


def operand_bytes(action_set: ActionSet, rows: Sequence[AxisAssignment]) -> list[float]:
    """Return the bytes of each operand on a device, as the rows need it: the mean over its shards."""
    found = []
    for k, layout in enumerate(action_set.layouts):
        share = float(layout.size_bytes)
        for row, size in zip(rows, action_set.mesh.shape, strict=True):
            if isinstance(row.needed_inputs[k], Sharded):
                share /= size
        found.append(share)
    return found


def budget_text(action_set: ActionSet, least: Sequence[AxisAssignment], budget: float) -> str:
    """Return why nothing fits into a budget: the tightest tensor, and the smallest budget that would do."""
    shares = operand_bytes(action_set, least)
    tightest = max(range(len(shares)), key=shares.__getitem__)
    parts = ", ".join(f"operand {k} {share:,.0f}" for k, share in enumerate(shares))
    needs = ",".join(str(row.needed_inputs[tightest]) for row in least)
    return (
        f"no action fits into the memory budget of {budget:,.0f} bytes a device: the operands take "
        f"{sum(shares):,.0f} bytes at the least ({parts}). The tightest tensor is operand {tightest}, "
        f"{action_set.layouts[tightest]}: {shares[tightest]:,.0f} bytes a device even as {needs}. The smallest "
        f"budget that would do is {_up(sum(shares))} bytes: give the mesh "
        f"memory_budget_bytes_per_device={_up(sum(shares))}, or more ranks"
    )


def _up(value: float) -> int:
    return -int(-value // 1)


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
    policy = chosen.allow_partial_to_sharded, chosen.allowed_transitions
    key = (op, operands, rules, policy, told_apart(freeze_args(op_args)))
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
