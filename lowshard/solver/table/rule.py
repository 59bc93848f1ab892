"""What a rule is: from operand layouts and arguments to rows and results. One registry over all ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.placement import Partial, Placement, ReduceOp, Replicated, Sharded
from lowshard.solver.action import AxisAssignment, How, Result
from lowshard.solver.transition import Collective

Rules = Literal["documented", "extended"]
Rows = list[AxisAssignment]

R = Replicated()
P = Partial("sum")
AVG, MAX, MIN, PROD = Partial("avg"), Partial("max"), Partial("min"), Partial("prod")
ACCUMULATOR_BYTES = 4


@cache
def S(dim: int) -> Sharded:
    """Return Sharded(dim)."""
    return Sharded(dim)


def row(
    *needs: Placement,
    out: Placement | tuple[Placement, ...],
    how: How = "local",
    inner: tuple[tuple[Collective, float], ...] = (),
) -> AxisAssignment:
    """Return a row: what each operand needs, and how the result lies."""
    return AxisAssignment(needs, out, how, inner)


@dataclass(frozen=True, slots=True)
class Call:
    """An op on operands: what a rule reads."""

    op: str
    layouts: tuple[Layout, ...]
    args: Mapping[str, Any]
    extended: bool

    def shape(self, operand: int = 0) -> tuple[int, ...]:
        """Global shape of an operand."""
        return self.layouts[operand].shape

    def ndim(self, operand: int = 0) -> int:
        """Number of dims of an operand."""
        return len(self.layouts[operand].shape)

    @property
    def dtype(self) -> str:
        """Dtype of the first operand."""
        return self.layouts[0].dtype

    def dim(self, name: str = "axis", default: int = -1, ndim: int | None = None) -> int:
        """Return an argument that is a dim, counted from 0.

        Raises:
            LayoutError: the operand has no such dim.
        """
        n = self.ndim() if ndim is None else ndim
        return dim_of(self.args.get(name, default), n, f"{self.op}: {name}")

    def need(self, name: str) -> Any:
        """Return an argument that must be there, or raise LayoutError."""
        if name not in self.args:
            raise LayoutError(f"{self.op} takes the argument {name!r}, got {sorted(self.args) or 'none'}")
        return self.args[name]

    def same(self, *shape: int) -> Result:
        """Return a result of the first operand's dtype."""
        return Result(tuple(shape), self.dtype)

    def held(self, op: ReduceOp) -> bool:
        """Whether an operand comes as a partial of this op: rows for such are offered only then."""
        return self.extended and any(op in layout.partials for layout in self.layouts)

    def linear(self) -> Iterator[Partial]:
        """Yield the partials that a linear map keeps: sums, and averages where one comes."""
        yield P
        if self.held("avg"):
            yield AVG

    def ordered(self) -> Iterator[Partial]:
        """Yield the partials that an increasing map keeps, where one comes."""
        if self.held("max"):
            yield MAX
        if self.held("min"):
            yield MIN

    def statistic_elems(self, dims: Sequence[int]) -> float:
        """Return the elements of the first operand without `dims`: one number for each is what a rank puts into a
        collective over cut `dims`, were no other mesh axis to cut the rest.
        """
        shape = self.layouts[0].shape
        return float(prod(n for d, n in enumerate(shape) if d not in dims))

    def statistic_bytes(self, dims: Sequence[int]) -> float:
        """Return the bytes of `statistic_elems` in the accumulator's type."""
        return self.statistic_elems(dims) * max(ACCUMULATOR_BYTES, self.layouts[0].itemsize_bytes)


@dataclass(frozen=True, slots=True)
class Refused:
    """A published row that does not preserve values, and is therefore offered nowhere."""

    ops: tuple[str, ...]
    row: str
    reason: str

    def __str__(self) -> str:
        return f"{self.row} of {', '.join(self.ops)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rule gives: rows in order of preference (the all-replicated one is put first), and the results."""

    rows: Rows
    results: tuple[Result, ...]
    refused: tuple[Refused, ...] = ()


Rule = Callable[[Call], Offer]
RULES: dict[str, Rule] = {}
ARITY: dict[str, tuple[int, int | None]] = {}


def rule(*names: str, operands: int | tuple[int, int | None] = 1) -> Callable[[Rule], Rule]:
    """Register a rule for ops that take so many tensor operands (or a range; None: any number)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            ARITY[name] = (operands, operands) if isinstance(operands, int) else operands
        return function

    return register


def offer(call: Call) -> Offer:
    """Return what the op's rule offers.

    Raises:
        LayoutError: no such op, another number of operands, shapes or arguments that do not fit.
    """
    found = RULES.get(call.op)
    if found is None:
        raise LayoutError(f"no rule for op {call.op!r}; there are rules for {', '.join(sorted(RULES))}")
    least, most = ARITY[call.op]
    count = len(call.layouts)
    if count < least or (most is not None and count > most):
        wanted = f"{least}" if most == least else f"{least} to {most or 'any number of'}"
        raise LayoutError(f"{call.op} takes {wanted} tensor operands, got {count}")
    return found(call)


def dim_of(value: Any, ndim: int, what: str) -> int:
    """Return a dim counted from 0, or raise LayoutError with what it was given for."""
    try:
        dim = operator.index(value)
    except TypeError:
        dim = ndim
    if isinstance(value, bool) or not -ndim <= dim < ndim:
        rule = f"is a dim from {-ndim} to {ndim - 1}" if ndim else "names a dim, and a 0-d operand has none"
        raise LayoutError(f"{what} {rule}, got {value!r}")
    return dim % ndim


def broadcast(call: Call) -> tuple[int, ...]:
    """Return the shape that the operands broadcast to, trailing dims aligned.

    Raises:
        LayoutError: two extents differ and neither is 1.
    """
    ndim = max(len(layout.shape) for layout in call.layouts)
    shape = [1] * ndim
    for layout in call.layouts:
        for back, extent in enumerate(reversed(layout.shape), 1):
            if extent != 1:
                if shape[-back] not in (1, extent):
                    shapes = ", ".join(str(list(x.shape)) for x in call.layouts)
                    raise LayoutError(
                        f"{call.op}: shapes broadcast where extents are equal or 1, got {shapes}"
                    )
                shape[-back] = extent
    return tuple(shape)
