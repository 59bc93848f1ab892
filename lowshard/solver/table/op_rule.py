"""What a rule is: from operand layouts and arguments to rows and results. One registry over all ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from lowshard import dtypes
from lowshard.argument import brief, choice
from lowshard.bounded import bounded_cache
from lowshard.box import Interval, split_interval
from lowshard.dtypes import Kind
from lowshard.errors import DTypeError, LayoutError, LowshardError
from lowshard.layout import Layout
from lowshard.nearest import nearest
from lowshard.placement import Partial, Placement, ReduceOp, Replicated, Sharded
from lowshard.solver.assignment import EVERY_KIND, AxisAssignment, Collective, How, Result

Rules = Literal["documented", "extended"]
Rows = list[AxisAssignment]

R = Replicated()
P = Partial("sum")
AVG, MAX, MIN, PROD = Partial("avg"), Partial("max"), Partial("min"), Partial("prod")
FLOAT: frozenset[Kind] = frozenset(("float",))
INTEGER: frozenset[Kind] = frozenset(("int", "uint"))
NUMBER = INTEGER | FLOAT
ACCUMULATOR_BYTES = 4


@bounded_cache(1 << 18)
def S(dim: int) -> Sharded:
    """Return Sharded(dim)."""
    return Sharded(dim)


def row(
    *needs: Placement,
    out: Placement | tuple[Placement, ...],
    how: How = "local",
    inner: tuple[tuple[Collective, float], ...] = (),
    kinds: frozenset[Kind] = EVERY_KIND,
    finite_only: bool = False,
) -> AxisAssignment:
    """Return a row: what each operand needs, how the result lies, and which values it holds for."""
    return AxisAssignment(needs, out, how, inner, (), kinds, finite_only)


def passing(p: Partial) -> frozenset[Kind]:
    """Return the kinds of dtype whose arithmetic a partial passes through."""
    # Integers that wrap around keep every law of a ring; an average of them is rounded down.
    return FLOAT if p is AVG else EVERY_KIND


def product_row(*needs: Placement, out: Partial) -> AxisAssignment:
    """Return a row in which one factor is partial and the others are whole: the whole ones must be finite."""
    return row(*needs, out=out, kinds=passing(out), finite_only=True)


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
        """Return an argument that is a dim, counted from 0."""
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
    refused: tuple[object, ...] = ()
    """Published rows, and rows that do not hold for the dtypes of the operands, that are left out; and why."""


Offering = Callable[[Call], Offer]


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of an op: what it offers, and which operands the op takes."""

    offering: Offering
    operands: tuple[int, int | None]
    """The least and the largest number of tensor operands; None: any number."""
    kinds: frozenset[Kind]
    """The kinds of dtype that the op computes on."""
    indices: tuple[int, ...]
    """The operands that are indices or conditions. The others are values, which the op computes on."""
    args: tuple[str, ...] | None
    """The names of the arguments that are no tensors; None: any, of an op that runs in the caller's own code."""
    index_kinds: frozenset[Kind]
    """The kinds of dtype that those may have."""

    @property
    def reads_indices(self) -> bool:
        """Whether it looks elements up: then it may find that there is none."""
        return bool(self.indices) and self.index_kinds == INTEGER

    def values(self, layouts: Sequence[Layout]) -> list[dtypes.DType]:
        """Return the dtypes of the operands that are values."""
        return [dtypes.get(x.dtype) for k, x in enumerate(layouts) if k not in self.indices]


RULES: dict[str, Rule] = {}


def rule(
    *names: str,
    operands: int | tuple[int, int | None] = 1,
    kinds: frozenset[Kind] = EVERY_KIND,
    indices: tuple[int, ...] = (),
    args: tuple[str, ...] | None = (),
    index_kinds: frozenset[Kind] = INTEGER,
) -> Callable[[Offering], Offering]:
    """Register a rule for ops; the arguments are the fields of `Rule`, one number of operands for (n, n)."""

    def register(function: Offering) -> Offering:
        arity = (operands, operands) if isinstance(operands, int) else operands
        for name in names:
            RULES[name] = Rule(function, arity, kinds, indices, args, index_kinds)
        return function

    return register


NOT_TAKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a rule, or a kernel, raises on arguments that it cannot read."""


def find_rule(op: object) -> Rule:
    """Return the rule of an op, or raise LayoutError with the nearest ops, or all."""
    found = RULES.get(op) if isinstance(op, str) else None
    if found is None:
        hint = nearest(op, RULES) or f"; there are rules for {', '.join(sorted(RULES))}"
        raise LayoutError(f"no rule for op {brief(op)}{hint}")
    return found


def check_names(op: str, names: Iterable[object]) -> None:
    """Raise LayoutError unless an op has arguments of these names: one that nobody reads would change nothing."""
    known = find_rule(op).args
    if known is None:
        return
    for name in names:
        if name not in known:
            has = f"its arguments are {', '.join(known)}" if known else "it has none"
            raise LayoutError(f"{op} has no argument {brief(name)}; {has}{nearest(name, known)}")


def offer(call: Call) -> Offer:
    """Return what the op's rule offers: the rows that hold for the dtypes of the operands."""
    found = find_rule(call.op)
    check_names(call.op, call.args)
    least, most = found.operands
    count = len(call.layouts)
    if count < least or (most is not None and count > most):
        wanted = f"{least}" if most == least else f"{least} to {most or 'any number of'}"
        raise LayoutError(f"{call.op} takes {wanted} tensor operands, got {count}")
    try:
        offered = found.offering(call)
    except LowshardError:
        raise
    except NOT_TAKEN as error:
        said = ", ".join(f"{name}={brief(value)}" for name, value in call.args.items())
        raise LayoutError(f"{call.op}: its rule does not take {said or 'these operands'}: {error}") from None
    kind = common_kind(found.values(call.layouts))
    if kind == "float":  # there is no row that does not hold for floats
        return offered
    held = [r for r in offered.rows if r.holds_for(kind)]
    if len(held) == len(offered.rows):
        return offered
    names = " and ".join(dict.fromkeys(x.dtype for x in call.layouts))
    refused = [f"{r}: does not hold for {names}" for r in offered.rows if not r.holds_for(kind)]
    return Offer(held, offered.results, (*offered.refused, *refused))


def common_kind(values: Sequence[dtypes.DType]) -> Kind | None:
    """Return the kind of dtype that an op computes in, of the dtypes of its operands."""
    # None: a cast to the first operand's dtype that drops fractions or high bits, and scales, which have no sum.
    if len(values) > 1 and any(dtype != values[0] for dtype in values):
        return "float" if all(dtype.kind == "float" for dtype in values) else None
    kind: Kind | None = values[0].kind if values else "float"
    return None if kind == "scale" else kind


def dtype_error(op: str, layouts: Sequence[Layout], rows: Sequence[AxisAssignment]) -> DTypeError | None:
    """Return what keeps an op from running by these rows on operands of these dtypes, or None."""
    found = RULES.get(op)
    if found is None:
        return None
    values = found.values(layouts)
    for k, layout in enumerate(layouts):
        is_index = k in found.indices
        kinds, dtype = found.index_kinds if is_index else found.kinds, dtypes.get(layout.dtype)
        if dtype.kind not in kinds:
            what = f"indices as operand {k}" if is_index else "operands"
            return DTypeError(
                f"{op} takes {what} of kind {' or '.join(sorted(kinds))}, got {dtype}; cast first"
            )
    kind = common_kind(values)
    bad = next((r for r in rows if not r.holds_for(kind)), None)
    if bad is None:
        return None
    names = " and ".join(dict.fromkeys(map(str, values)))
    return DTypeError(
        f"{op}: the row {bad} does not hold for {names}: it would give other values than the unsharded op; take a row "
        "that pick() offers for these layouts"
    )


def check_rules(rules: object) -> None:
    """Raise LayoutError unless this names a set of rules."""
    choice(rules, get_args(Rules), "rules is 'documented' or 'extended'", LayoutError)


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
    """Return the shape that the operands broadcast to, trailing dims aligned."""
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


Run = tuple[int, int, int, int]
"""Operand, first index there, first index in the result, length."""
Inner = tuple[tuple[Collective, float], ...]


def cutting_sizes(call: Call, dim: int) -> list[int]:
    """Return the sizes of the mesh axes that cut a dim of the first operand; where none does, of the longest axis."""
    layout = call.layouts[0]
    held = [layout.mesh.shape[a] for a in layout.sharding_axes[dim]]
    return held or [max(layout.mesh.shape)]


def shares(extent: int, sizes: Sequence[int], scale: int = 1) -> list[Interval]:
    """Return what each rank has of an extent that mesh axes of these sizes cut, nested, times `scale`."""
    found = [(0, extent)]
    for size in sizes:
        found = [split_interval(part, size, i) for part in found for i in range(size)]
    return [(start * scale, stop * scale) for start, stop in found]


def most_received(have: Sequence[Sequence[Interval]], want: Sequence[Interval], runs: Sequence[Run]) -> int:
    """Return the most indices that one rank wants and does not have."""
    most = 0
    for rank, (low, high) in enumerate(want):
        missing = 0
        for operand, source, target, length in runs:
            shift = target - source
            start, stop = max(target, low), min(target + length, high)
            if start >= stop:
                continue
            held = have[operand][rank]
            kept = min(stop, held[1] + shift) - max(start, held[0] + shift)
            missing += stop - start - max(kept, 0)
        most = max(most, missing)
    return most


def index_bytes(layout: Layout, dims: Sequence[int]) -> float:
    """Return the bytes of one index along merged dims, were no other mesh axis to cut the rest."""
    return float(layout.itemsize_bytes * prod(n for d, n in enumerate(layout.shape) if d not in dims))


def exchange(received: float, sizes: Sequence[int]) -> Inner:
    """Return the collective of a row in which the busiest rank receives so many bytes; none where nothing moves."""
    return (("exchange", received * max(sizes)),) if received else ()


def groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the smallest runs of dims of both shapes that hold the same elements, in order."""
    if prod(source) == 0:
        return [((0, len(source)), (0, len(target)))] if tuple(source) == tuple(target) else []
    found = []
    i = j = 0
    while i < len(source) and j < len(target):
        i0, j0 = i, j
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= source[i]
                i += 1
            else:
                b *= target[j]
                j += 1
        found.append(((i0, i), (j0, j)))
    return found


def major(shape: Sequence[int], start: int, stop: int) -> int | None:
    """Return the first dim of a run that is longer than 1."""
    return next((d for d in range(start, stop) if shape[d] != 1), None)
