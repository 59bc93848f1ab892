"""The per-op solver that MAX documents, written down once more: rows, feasibility, prices and choice, on plain tuples.

A placement is "R", "P" (a sum to do), "A" (an average to do) or the number of the dim that is cut. Nothing of
`lowshard.solver` is used. Every row is one of the published table; those that change values carry the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any

Code = str | int
Shape = tuple[int, ...]

EXCEPTIONS = {
    "grouped channels": "with groups, a rank's output channels need some of the input channels only",
    "scan": "each rank's scan would start at 0",
    "uneven mean": "an average of shard means weighs short shards too much",
    "joined dim": "joining shards permutes the elements",
    "split dim": "a rank's pieces are not its shares of the pieces",
    "minor dim": "a rank's elements are no run of the merged dim",
    "other elements": "shards of the two shapes hold other elements",
    "repeated dim": "each rank would repeat its shard",
    "both cut": "the result keeps the cut of the indices and drops the table's",
    "short updates": "shards of shorter updates are not those of the leading elements",
    "short result": "a reshaped dim that keeps its extent keeps its shards, however short; -1 is filled in",
}
"""Where lowshard departs from the published table and rules, by name, and why."""


@dataclass(frozen=True)
class Operand:
    """One operand: what a pick is about."""

    shape: Shape
    itemsize_bytes: int
    placements: tuple[Code, ...]


@dataclass(frozen=True)
class Row:
    """What the operands need, how the result lies, and why the row is left out, if it is."""

    needs: tuple[Code, ...]
    out: Code
    unsound: str = ""
    only: frozenset[int] | None = None


UNARY = (
    "relu", "abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu", "gelu", "tanh", "sin", "cos", "erf", "floor",
    "round", "trunc", "is_nan", "is_inf", "logical_not", "log1p", "atanh", "acos",
)  # fmt: skip
BINARY = (
    "mul", "div", "pow", "mod", "equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and",
    "logical_or", "logical_xor", "maximum", "minimum", "complex_mul",
)  # fmt: skip
SUMS_STAY = (
    "slice",
    "pad",
    "repeat_interleave",
    "band_part",
    "fold",
    "irfft",
    "interleaved_complex",
    "resize",
)


def rows_of(op: str, operands: Sequence[Operand], sizes: Sequence[int], args: dict[str, Any]) -> list[Row]:
    """Return the rows of the published table for an op, the all-replicated one first."""
    shapes = [x.shape for x in operands]
    return [Row(("R",) * len(operands), "R"), *_rows(op, shapes, operands, sizes, args)]


def _rows(op: str, shapes: list[Shape], operands: Any, sizes: Any, args: Any) -> list[Row]:
    x = shapes[0]
    n = len(x)
    every = [Row((d,), d) for d in range(n)]
    if op in UNARY:
        return every
    if op in ("negate", "cast", "dequantize", "passthrough"):
        return [*every, Row(("P",), "P")]
    if op in (*BINARY, "add", "sub", "where"):
        return [*_aligned(shapes), *([Row(("P", "P"), "P")] if op in ("add", "sub") else [])]
    if op == "matmul":
        return _matmul(*shapes)
    if op == "outer":
        return [Row((0, "R"), 0), Row(("R", 0), 1), Row(("P", "R"), "P"), Row(("R", "P"), "P")]
    if op in ("qmatmul", "argsort"):
        return []
    if op in ("prod", "max", "min", "argmax", "argmin", "softmax", "logsoftmax", "cumsum", "sum", "mean"):
        return _reduced(op, x, operands[0], sizes, args)
    if op in ("layer_norm", "rms_norm"):
        return [Row((d, *["R"] * (len(shapes) - 1)), d) for d in range(n - len(shapes[1]))]
    if op.startswith("conv"):
        return _conv(op, shapes, args)
    if op in ("max_pool", "avg_pool"):
        return [Row((0,), 0), Row((3,), 3), *([Row(("P",), "P")] if op == "avg_pool" else [])]
    if op in ("transpose", "permute"):
        order = [d % n for d in args["dims"]] if op == "permute" else list(range(n))
        if op == "transpose":
            a, b = args["axis_1"], args["axis_2"]
            order[a], order[b] = order[b], order[a]
        return [*(Row((d,), order.index(d)) for d in range(n)), Row(("P",), "P")]
    if op == "unsqueeze":
        at = args["axis"] % (n + 1)
        return [*(Row((d,), d + (d >= at)) for d in range(n)), Row(("P",), "P")]
    if op == "squeeze":
        at = args["axis"] % n
        return [*(Row((d,), d - (d > at)) for d in range(n) if d != at), Row(("P",), "P")]
    if op == "flatten":
        a, b = args["start"], args["end"]
        kept = [d for d in range(n) if d < a or d > b or a == b]
        return [*(Row((d,), d if d <= a else d - (b - a)) for d in kept), Row(("P",), "P")]
    if op == "reshape":
        return [*_reshape(x, operands[0], sizes, args["shape"]), Row(("P",), "P")]
    if op == "broadcast_to":
        back = len(args["shape"]) - n
        return [*(Row((d,), d + back) for d in range(n) if x[d] != 1), Row(("P",), "P")]
    if op in ("concat", "stack"):
        at = args["axis"] % (n + (op == "stack"))
        many = len(shapes)
        rows = [
            Row(
                (d,) * many,
                d if op == "concat" else d + (d >= at),
                "joined dim" if op == "concat" and d == at else "",
            )
            for d in range(n)
        ]
        return [*rows, Row(("P",) * many, "P")]
    if op in ("split", "chunk"):
        at = args["axis"] % n
        whole = op == "split" and all(s % max(sizes) == 0 for s in args["sizes"])
        return [
            *(Row((d,), d, "split dim" if d == at else "") for d in range(n) if d != at or whole),
            Row(("P",), "P"),
        ]
    if op in SUMS_STAY:
        return _untouched(op, x, args)
    if op == "tile":
        return [
            *(Row((d,), d, "repeated dim" if k != 1 else "") for d, k in enumerate(args["repeats"])), Row(("P",), "P")
        ]  # fmt: skip
    if op in ("gather", "embedding"):
        at = args["axis"] % n if op == "gather" else 0
        q = len(shapes[1])
        table = [Row((k, "R"), k if k < at else k + q - 1) for k in range(n) if k != at]
        both = [Row((k, i), at + i, "both cut") for k in range(n) if k != at for i in range(q)]
        return [*table, *(Row(("R", i), at + i) for i in range(q)), *both, Row(("P", "R"), "P")]
    if op == "gather_nd":
        return [*(Row((b, b), b) for b in range(args["batch_dims"])), Row(("P", "R"), "P")]
    if op.startswith("scatter"):
        at = args["axis"] % n
        short = [d for d in range(n) if not x[d] == shapes[1][d] == shapes[2][d]]
        return [Row((d, d, d), d, "short updates" if d in short else "") for d in range(n) if d != at]
    if op in ("top_k", "bottom_k", "top_k_values"):
        return [Row((d,), d) for d in range(n) if d != args["axis"] % n]
    if op == "buffer_store":
        return [*(Row((d, d), d) for d in range(n)), Row(("P", "P"), "P")]
    if op == "grouped_matmul":
        rest = ("R",) * (len(shapes) - 2)
        return [Row(("R", 1, *rest), 1), Row((1, 2, *rest), "P")]
    if op == "moe_finalize":
        return [Row((1, "R", "R"), 1), Row(("P", "R", "R"), "P")]
    if op == "fused_silu":
        return [Row((d,), d) for d in range(n - 1)]
    raise KeyError(op)


def _aligned(shapes: list[Shape]) -> list[Row]:
    """A row for each dim of the result, trailing dims aligned: full extents are cut, broadcast ones whole."""
    n = max(map(len, shapes))
    padded = [(1,) * (n - len(s)) + s for s in shapes]
    rows = []
    for d in range(n):
        extents = [p[d] for p in padded]
        full = next((e for e in extents if e != 1), 1)
        rows.append(
            Row(
                tuple(
                    d - (n - len(s)) if e == full and d >= n - len(s) else "R"
                    for s, e in zip(shapes, extents, strict=True)
                ),
                d,
            )
        )
    return rows


def _matmul(a: Shape, b: Shape) -> list[Row]:
    sums = [Row(("P", "R"), "P"), Row(("R", "P"), "P")]
    if len(a) == len(b) == 1:
        return [Row((0, 0), "P"), *sums]
    if len(a) == 1:
        batch = [Row(("R", d), d) for d in range(len(b) - 2)]
        return [*batch, Row(("R", len(b) - 1), len(b) - 2), Row((0, len(b) - 2), "P"), *sums]
    if len(b) == 1:
        return [*(Row((d, "R"), d) for d in range(len(a) - 1)), Row((len(a) - 1, 0), "P"), *sums]
    n = max(len(a), len(b))
    rows = []
    for d in range(n - 2):
        left, right = d - (n - len(a)), d - (n - len(b))
        has_left, has_right = left >= 0 and a[left] > 1, right >= 0 and b[right] > 1
        # An extent of 0 counts as cut by nobody.
        if has_left or has_right:
            rows.append(Row((left if has_left else "R", right if has_right else "R"), d))
    rows += [Row((len(a) - 2, "R"), n - 2), Row(("R", len(b) - 1), n - 1), Row((len(a) - 1, len(b) - 2), "P")]
    return rows + sums


def _reduced(op: str, x: Shape, operand: Operand, sizes: Sequence[int], args: Any) -> list[Row]:
    n = len(x)
    axis = args.get("axis", -1)
    dims = (
        list(range(n))
        if axis is None
        else [a % n for a in (axis if isinstance(axis, (list, tuple)) else [axis])]
    )
    rows = [Row((d,), d) for d in range(n) if d not in dims]
    if op == "cumsum":
        return [*rows, *(Row((d,), "P", "scan") for d in dims)]
    if op == "sum":
        return [*rows, *(Row((d,), "P") for d in dims), Row(("P",), "P")]
    if op == "mean":
        for d in dims:
            cutting = [a for a, code in enumerate(operand.placements) if code == d]
            if x[d] % prod(sizes) == 0:
                rows.append(Row((d,), "A"))
            elif cutting and x[d] % prod(sizes[a] for a in cutting) == 0:
                # Even as it comes; were more axes to cut it, it would not be.
                rows.append(Row((d,), "A", only=frozenset(cutting)))
            else:
                rows.append(Row((d,), "A", "uneven mean"))
        return [*rows, Row(("P",), "P")]
    return rows


def _conv(op: str, shapes: list[Shape], args: Any) -> list[Row]:
    n = len(shapes[0])
    channel = 1 if args["layout"] == "NCHW" else n - 1
    cin, cout = (n - 1, n - 2) if op.endswith("transpose") else (n - 2, n - 1)
    grouped = "grouped channels" if args["groups"] > 1 else ""
    if len(shapes) == 3:
        return [Row((0, "R", "R"), 0), Row(("R", cout, 0), channel, grouped)]
    rows = [Row((0, "R"), 0), Row(("R", cout), channel, grouped)]
    if not grouped:
        rows.append(Row((channel, cin), "P"))
    return [*rows, Row(("P", "R"), "P"), Row(("R", "P"), "P")]


def _reshape(x: Shape, operand: Operand, sizes: Sequence[int], asked: Sequence[int]) -> list[Row]:
    """Held cuts only: a dim goes where its run of elements begins or is contained, or contains."""
    target = filled(x, asked)
    if prod(x) == 0:
        return [Row((k,), k) for k in range(len(x)) if k in operand.placements and target == x]

    def spans(shape: Sequence[int]) -> list[tuple[int, int]]:
        """The run of products before and with each dim, counted from the front."""
        return [(prod(shape[:d]), prod(shape[: d + 1])) for d in range(len(shape))]

    rows = []
    for k, (low, high) in enumerate(spans(x)):
        if k not in operand.placements:
            continue
        if high == low:  # an extent of 1 has no run of its own: by its place
            continue
        cutting = [a for a, code in enumerate(operand.placements) if code == k]
        parts = prod(sizes[a] for a in cutting)
        for j, (start, stop) in enumerate(spans(target)):
            if stop == start or not ((start <= low and high <= stop) or (low <= start and stop <= high)):
                continue
            if (low, high) == (start, stop):
                rows.append(Row((k,), j))
            elif low != start:
                rows.append(Row((k,), j, "minor dim"))
            else:
                even = x[k] % parts == 0 and target[j] % parts == 0
                rows.append(Row((k,), j, "" if even else "other elements", frozenset(cutting)))
            break
    return rows


def filled(source: Shape, asked: Sequence[int]) -> Shape:
    """Return the shape asked for with its -1 filled in."""
    rest = prod(e for e in asked if e != -1)
    return tuple(prod(source) // rest if e == -1 else e for e in asked)


def _untouched(op: str, x: Shape, args: Any) -> list[Row]:
    n = len(x)
    touched: set[int] = set()
    keeps = True
    if op == "slice":
        entries = [*args["slices"], *[None] * (n - len(args["slices"]))]
        touched = {d for d, e in enumerate(entries) if slice(*(e or (None,))).indices(x[d]) != (0, x[d], 1)}
    elif op == "pad":
        touched = {d for d, pair in enumerate(args["pads"]) if tuple(pair) != (0, 0)}
        keeps = args.get("mode", "constant") != "constant" or args.get("value", 0) == 0
    elif op == "repeat_interleave":
        if "axis" not in args:
            return []
        touched = {args["axis"] % n}
    elif op == "resize":
        touched = {1, 2}
    else:
        touched = set(range(n - (1 if op in ("irfft", "interleaved_complex") else 2), n))
    return [*(Row((d,), d) for d in range(n) if d not in touched), *([Row(("P",), "P")] if keeps else [])]


def least_cell(operand: Operand, dim: int, sizes: Sequence[int]) -> int | None:
    """Return the fewest indices of a dim that a device holds, or None where no axis cuts it."""
    cells = [operand.shape[dim]]
    cut = [size for size, code in zip(sizes, operand.placements, strict=True) if code == dim]
    for size in cut:
        cells = [cell // size + (i < cell % size) for cell in cells for i in range(size)]
    return min(cells) if cut else None


def feasible(row: Row, axis: int, operands: Sequence[Operand], sizes: Sequence[int]) -> bool:
    """Whether every operand can be cut as a row needs it on a mesh axis."""
    if row.only is not None and axis not in row.only:
        return False
    g = sizes[axis]
    used = {x.placements[axis] for x in operands if isinstance(x.placements[axis], int)}
    for operand, need in zip(operands, row.needs, strict=True):
        if not isinstance(need, int) or operand.placements[axis] == need:
            continue
        if need >= len(operand.shape):
            return False
        cell = least_cell(operand, need, sizes)
        if cell is not None:  # the extent is one per shard already
            if cell == 0 or (cell == 1 and g > 1) or (need not in used and cell < g):
                return False
        elif operand.shape[need] == 1 or (need not in used and operand.shape[need] < g):
            return False
    return True


def long_enough(row: Row, g: int, source: Shape, asked: Sequence[int], exceptions: bool) -> bool:
    """Whether the dim of a reshaped array that a row cuts is as long as the mesh axis; one given as -1 is."""
    if not isinstance(row.out, int):
        return True
    target = filled(source, asked)
    if not exceptions:
        return asked[row.out] == -1 or target[row.out] >= g
    return target[row.out] >= g or source[row.needs[0]] == target[row.out]  # type: ignore[index]


def price(operand: Operand, have: Code, need: Code, size: int) -> float:
    """Bytes of the whole tensor; an all-to-all costs what an all-gather does."""
    if have == need:
        return 0.0
    if need in ("P", "A"):
        return inf
    if have == "R" or size == 1:
        return 0.0
    whole = operand.itemsize_bytes * prod(operand.shape) * (size - 1) / size
    return 2 * whole if have in ("P", "A") and need == "R" else whole


def choose(
    op: str,
    operands: Sequence[Operand],
    sizes: Sequence[int],
    args: dict[str, Any],
    allow_partial_to_sharded: bool,
    exceptions: bool,
) -> tuple[tuple[Row, ...], float] | None:
    """Return the first of the cheapest combinations of rows, one a mesh axis, and its price; None if policy bars all.

    `exceptions` says whether to depart from what is published as `EXCEPTIONS` say.
    """
    rows = [r for r in rows_of(op, operands, sizes, args) if not (exceptions and r.unsound)]
    by_axis = []
    for axis, size in enumerate(sizes):
        here = []
        for row in rows:
            if not feasible(row, axis, operands, sizes):
                continue
            if op == "reshape" and not long_enough(row, size, operands[0].shape, args["shape"], exceptions):
                continue
            moves = [(x, x.placements[axis], need) for x, need in zip(operands, row.needs, strict=True)]
            cost = sum(price(x, have, need, size) for x, have, need in moves)
            reduces = any(have in ("P", "A") and isinstance(need, int) for _, have, need in moves)
            if cost < inf and (allow_partial_to_sharded or not reduces):
                here.append((row, cost))
        by_axis.append(here)
    best: tuple[tuple[Row, ...], float] | None = None
    for combination in product(*by_axis):
        cost = sum(c for _, c in combination)
        if best is None or cost < best[1]:
            best = tuple(r for r, _ in combination), cost
    return best
