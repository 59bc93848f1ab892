"""Which solver `pick` uses when none is given: bound for a block, nested, restored whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lowshard.argument import brief
from lowshard.errors import SolverError
from lowshard.solver.action import Solver

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


@contextmanager
def isolated_solver() -> Iterator[None]:
    """Forget, within the block, every solver bound around it."""
    before = _BOUND.set(())
    try:
        yield
    finally:
        _BOUND.reset(before)


def bound_solver() -> Solver | None:
    """Return the innermost bound solver, or None."""
    bound = _BOUND.get()
    return bound[-1] if bound else None
