"""Graph: ops on named tensors, whole shapes, no layouts yet. Built by calls, bound to sizes, then solved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from lowshard import dtypes
from lowshard.argument import MOST_ELEMS, brief, instance, items, whole, wholes
from lowshard.errors import DTypeError, LayoutError, ShardingError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Placement, Replicated, Sharded, parse_placement
from lowshard.solver.assignment import Result
from lowshard.solver.table import Call, check_names, find_rule, offer
from lowshard.solver.table.op_argument import MOST_ENTRIES, few, freeze_args, plain_argument

Place = str | Mapping[str, Placement] | None
"""\"R\" (replicated), text such as "dp=S0 tp=P", a mapping of mesh axis to placement, or None: the solver chooses."""

Extent = int | str
"""A number, or a symbol such as "tokens", or a product such as "batch*length"."""
Kind = Literal["input", "weight", "result"]

DIMS_MOST = 32
_FACTOR = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*|[0-9]{1,19}", re.ASCII)
_PLACE = "a place is 'R' or axis=placement pairs such as 'dp=S0 tp=R', as text or as a mapping, or None"
_SHAPE = 'a shape is a sequence of extents >= 0 and symbols such as ("tokens", 512)'


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a graph: what the graph's calls take and give."""

    index: int
    name: str
    graph: Graph | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Info:
    """What a graph knows of a tensor before sizes are bound."""

    name: str
    kind: Kind
    shape: tuple[Extent, ...] | None = None
    """None for a result: its shape follows from the op."""
    dtype: str = "float32"
    place: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One op: its operands and results by their index."""

    op: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    args: tuple[tuple[str, Any], ...]

    @property
    def label(self) -> str:
        """The op with its arguments."""
        return self.op + ("(" + ", ".join(f"{n}={v}" for n, v in self.args) + ")" if self.args else "")


@dataclass(frozen=True)
class BoundGraph:
    """A graph with all shapes known. A value."""

    name: str
    tensors: tuple[Info, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[int, str | None], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def layout(self, mesh: DeviceMesh, tensor: int, place: Place) -> Layout:
        """Return the layout that `place` names; mesh axes that it does not name hold replicas."""
        head = f"{self.dtypes[tensor]}[{','.join(map(str, self.shapes[tensor]))}] "
        try:
            return Layout.parse(mesh, head + place_on(place, mesh))
        except ShardingError as error:
            raise LayoutError(
                f"tensor {self.tensors[tensor].name!r} of graph {self.name!r}: {error}"
            ) from None

    def leaves(self) -> list[int]:
        """Return the inputs and weights."""
        return [i for i, info in enumerate(self.tensors) if info.kind != "result"]

    def consumers(self) -> list[list[tuple[int, int]]]:
        """Return for each tensor the places that read it, in order: (step, operand)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.tensors]
        for step, node in enumerate(self.nodes):
            for k, tensor in enumerate(node.operands):
                found[tensor].append((step, k))
        return found


class Graph:
    """Ops on named tensors. Every call adds one op and returns its result (or results).

    Shapes may hold symbols ("tokens"), which `bind` gives numbers. Where inputs and weights lie is given (`place`), or
    left to the solver (None).

        g = Graph("mlp")
        x = g.input("x", ("tokens", 512), place="R")
        h = g.pointwise("relu", g.matmul(x, g.weight("up", (512, 2048))))
        g.output(g.matmul(h, g.weight("down", (2048, 512)), name="y"), place="R")

    Args:
        name: for messages and tables.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = instance(name, str, "the name of a graph is text", LayoutError)
        self._tensors: list[Info] = []
        self._nodes: list[Node] = []
        self._outputs: dict[int, str | None] = {}
        self._numbers: dict[str, int] = {}
        self._symbols: dict[str, None] = {}

    # ---- what there is

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The ops, in the order they were added, which is the order they run in."""
        return tuple(self._nodes)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in shapes, in order."""
        return tuple(self._symbols)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name, or raise LayoutError."""
        number = self._numbers.get(name) if isinstance(name, str) else None
        if number is None:
            raise LayoutError(
                f"graph {self.name!r} has no tensor {brief(name)}; it has {brief(list(self._numbers))}"
            )
        return Tensor(number, name, self)

    # ---- leaves and outputs

    def input(
        self, name: str, shape: Sequence[Extent], dtype: object = "float32", place: Place = None
    ) -> Tensor:
        """Add a tensor that comes from outside, held until its last use.

        Args:
            name: a name of its own.
            shape: global extents; symbols such as "tokens" stand for numbers that `bind` gives.
            dtype: any name of the dtype table.
            place: how it comes: "R", text such as "dp=S0 tp=P", a mapping of mesh axis to placement, or None where
                the solver may choose; it does not choose terms of a sum.

        Raises:
            LayoutError: a name that is taken, a shape or a place that cannot be.
            DTypeError: an unknown dtype.
        """
        return self._leaf(name, "input", shape, dtype, place)

    def weight(
        self, name: str, shape: Sequence[Extent], dtype: object = "float32", place: Place = None
    ) -> Tensor:
        """Add a tensor that stays on the devices for good. Arguments: as `input`."""
        return self._leaf(name, "weight", shape, dtype, place)

    def output(self, tensor: Tensor, place: Place = None) -> Tensor:
        """Keep a tensor to the end; `place` says how it shall lie, None leaves that to the solver.

        Raises:
            LayoutError: a place that cannot be, or a tensor that is an output already.
        """
        number = self._index(tensor)
        if number in self._outputs:
            raise LayoutError(
                f"graph {self.name!r}: {tensor.name!r} is an output already, and an output has one place; to have it "
                f"in two, make another tensor of it: g.output(g.pointwise('passthrough', t), place=...)"
            )
        self._outputs[number] = written_place(place)
        return tensor

    # ---- ops

    def op(self, op: str, *operands: Tensor, name: str | None = None, **args: Any) -> Any:
        """Add any op that has a rule (`lowshard.solver.table.RULES`) and return its result, or a tuple of several.

        Raises:
            LayoutError: no such op, another number of operands, an argument that the op does not have, or a tensor of
                another graph. Shapes are checked when sizes are bound.
        """
        least, most = find_rule(op).operands
        if len(operands) < least or (most is not None and len(operands) > most):
            raise LayoutError(f"{op} takes {least} to {most or 'any number of'} tensors, got {len(operands)}")
        taken = tuple(self._index(t) for t in operands)
        check_names(op, args)
        kept = {n: self._argument(op, n, value) for n, value in args.items()}
        count = _result_count(op, len(operands), kept)
        base = f"{op}_{len(self._nodes)}" if name is None else self._name(name)
        names = [base] if count == 1 else [f"{base}.{i}" for i in range(count)]
        results = tuple(self._add(Info(n, "result")) for n in names)
        self._nodes.append(Node(op, taken, tuple(r.index for r in results), freeze_args(kept)))
        return results[0] if count == 1 else results

    def matmul(self, x: Tensor, y: Tensor, name: str | None = None) -> Tensor:
        """Add x [..., M, K] @ y [..., K, N]."""
        return self.op("matmul", x, y, name=name)  # type: ignore[no-any-return]

    def einsum(self, subscripts: str, *operands: Tensor, name: str | None = None) -> Tensor:
        """Add an einsum, such as "bik,kj->bij"."""
        return self.op("einsum", *operands, name=name, subscripts=subscripts)  # type: ignore[no-any-return]

    def pointwise(self, op: str, *operands: Tensor, name: str | None = None, **args: Any) -> Tensor:
        """Add an op that works element by element: relu, add, mul, where, cast, ..."""
        return self.op(op, *operands, name=name, **args)  # type: ignore[no-any-return]

    def reduce(self, op: str, x: Tensor, axis: int = -1, name: str | None = None) -> Tensor:
        """Add a reduction along a dim, which stays with extent 1: sum, mean, max, min, prod, argmax, argmin."""
        return self.op(op, x, name=name, axis=axis)  # type: ignore[no-any-return]

    def norm(
        self, op: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str | None = None
    ) -> Tensor:
        """Add layer_norm or rms_norm over the trailing dims that the weight has."""
        rest = () if bias is None else (bias,)
        return self.op(op, x, weight, *rest, name=name)  # type: ignore[no-any-return]

    def gather(self, table: Tensor, ids: Tensor, axis: int = 0, name: str | None = None) -> Tensor:
        """Add a lookup of integer ids along a dim of a table."""
        return self.op("gather", table, ids, name=name, axis=axis)  # type: ignore[no-any-return]

    def softmax(self, x: Tensor, axis: int = -1, name: str | None = None) -> Tensor:
        """Add a softmax along a dim."""
        return self.op("softmax", x, name=name, axis=axis)  # type: ignore[no-any-return]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, name: str | None = None
    ) -> Tensor:
        """Add attention: q [B, H, L, D], k [B, G, T, D], v [B, G, T, E], H a multiple of G."""
        return self.op("attention", q, k, v, name=name, causal=causal)  # type: ignore[no-any-return]

    def reshape(self, x: Tensor, shape: Sequence[Extent], name: str | None = None) -> Tensor:
        """Add a reshape; one extent may be -1, extents may be symbols."""
        return self.op("reshape", x, name=name, shape=shape)  # type: ignore[no-any-return]

    def permute(self, x: Tensor, dims: Sequence[int], name: str | None = None) -> Tensor:
        """Add a transposition: result dim i is dim dims[i] of x."""
        return self.op("permute", x, name=name, dims=dims)  # type: ignore[no-any-return]

    # ---- binding

    def bind(self, sizes: Mapping[str, int] | None = None) -> BoundGraph:
        """Return the graph with every shape known.

        Args:
            sizes: a number for each symbol.

        Raises:
            LayoutError: a symbol without a number, or shapes and arguments that do not fit an op, which is named.
            DTypeError: an op does not take the dtype of an operand.
        """
        numbers = self._sizes({} if sizes is None else sizes)
        shapes: list[tuple[int, ...]] = []
        kinds: list[str] = []
        for info in self._tensors:
            shapes.append(tuple(self._number(e, numbers) for e in info.shape or ()))
            kinds.append(info.dtype)
            if info.kind != "result":
                self._check_size(info.name, shapes[-1], info.dtype)
        nodes = []
        for node in self._nodes:
            bound = self._bound(node, numbers)
            nodes.append(bound)
            for t, result in zip(node.results, self._results(bound, shapes, kinds), strict=True):
                shapes[t], kinds[t] = result.shape, dtypes.get(result.dtype).name
                self._check_size(self._tensors[t].name, shapes[t], kinds[t])
        outputs = tuple(
            (t, settled_place(place, len(shapes[t]), f"output {self._tensors[t].name!r}"))
            for t, place in (self._outputs or self._ends()).items()
        )
        tensors = tuple(
            replace(info, shape=s, dtype=d) for info, s, d in zip(self._tensors, shapes, kinds, strict=True)
        )
        return BoundGraph(self.name, tensors, tuple(nodes), outputs, tuple(shapes), tuple(kinds))

    # ---- inside

    def _bound(self, node: Node, sizes: Mapping[str, int]) -> Node:
        """Return an op with the symbols of its shape argument as numbers."""
        args = {
            n: tuple(self._number(e, sizes) for e in v) if n == "shape" and isinstance(v, tuple) else v
            for n, v in node.args
        }
        return replace(node, args=freeze_args(args))

    def _results(
        self, node: Node, shapes: Sequence[tuple[int, ...]], kinds: Sequence[str]
    ) -> tuple[Result, ...]:
        """Return shape and dtype of each result of an op whose symbols are bound."""
        one = DeviceMesh((1,), ("one",))
        layouts = tuple(Layout(one, shapes[t], kinds[t], (Replicated(),)) for t in node.operands)
        came = ", ".join(f"{self._tensors[t].name}{list(shapes[t])}" for t in node.operands)
        made = f"graph {self.name!r}, {self._tensors[node.results[0]].name!r} = {node.op}({came})"
        try:
            results = offer(Call(node.op, layouts, dict(node.args), True)).results
        except (LayoutError, DTypeError) as error:
            raise type(error)(f"{made}: {error}") from None
        if len(results) != len(node.results):
            raise LayoutError(f"{made} gives {len(results)} results, not {len(node.results)}")
        return results

    def _check_size(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if len(shape) > DIMS_MOST or prod(filter(None, shape)) > MOST_ELEMS:
            raise LayoutError(
                f"graph {self.name!r}: a tensor has at most {DIMS_MOST} dims and 2^63 - 1 bytes, got {name!r} of "
                f"{dtype} and shape {brief(list(shape))}"
            )

    def _ends(self) -> dict[int, str | None]:
        """Return the results that nothing reads: the outputs where none are named."""
        read = {t for node in self._nodes for t in node.operands}
        return {t: None for node in self._nodes for t in node.results if t not in read}

    def _leaf(self, name: str, kind: Kind, shape: Sequence[Extent], dtype: object, place: Place) -> Tensor:
        rule = f"{kind} {brief(name)} of graph {self.name!r}: {_SHAPE}"
        extents = tuple(self._extent(e, rule) for e in items(shape, rule, LayoutError))
        if len(extents) > DIMS_MOST:
            raise LayoutError(f"{rule}, of at most {DIMS_MOST} dims, got {len(extents)}")
        settled = settled_place(written_place(place), len(extents), f"{kind} {brief(name)}")
        return self._add(Info(self._name(name), kind, extents, dtypes.get(dtype).name, settled))

    def _name(self, name: object) -> str:
        found = instance(name, str, f"a tensor of graph {self.name!r} is named by a text", LayoutError)
        if not found or found in self._numbers:
            raise LayoutError(
                f"graph {self.name!r} has a tensor {brief(name)} already: names differ"
                if found
                else f"a tensor of graph {self.name!r} is named by a text that is not empty"
            )
        return found

    def _add(self, info: Info) -> Tensor:
        number = self._numbers[self._name(info.name)] = len(self._tensors)
        self._tensors.append(info)
        return Tensor(number, info.name, self)

    def _index(self, tensor: Tensor) -> int:
        if not isinstance(tensor, Tensor) or tensor.graph is not self:
            raise LayoutError(
                f"graph {self.name!r} takes tensors that its own calls returned, got {brief(tensor)}"
            )
        return tensor.index

    def _extent(self, extent: object, rule: str, least: int = 0) -> Extent:
        """Return an extent: a number, or a text whose symbols are now those of the graph as well."""
        if not isinstance(extent, str):
            return whole(extent, rule, LayoutError, least, MOST_ELEMS)
        factors = _factors(extent)
        if len(extent) > 200 or not all(_FACTOR.fullmatch(part) for part in factors):
            raise LayoutError(f'{rule}; a symbol is "tokens", a product "batch*length": got {brief(extent)}')
        self._symbols.update(dict.fromkeys(part for part in factors if not part.isdecimal()))
        return extent

    def _argument(self, op: str, name: str, value: object) -> Any:
        """Return an argument of an op as Python's own numbers, texts and tuples."""
        what = f"graph {self.name!r}, {op}: argument {name!r}"
        if name == "shape":
            rule = f"{what} is a sequence of extents, one of them -1 perhaps, and symbols"
            return tuple(self._extent(e, rule, -1) for e in few(items(value, rule, LayoutError), what))
        return plain_argument(what, name, value)

    def _sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        rule = f"graph {self.name!r}: sizes is a mapping of symbol to number, such as {{'tokens': 128}}"
        given = instance(sizes, Mapping, rule, LayoutError)  # type: ignore[type-abstract]
        return {
            name: whole(n, f"{rule}, each an integer >= 0; {brief(name)}", LayoutError, 0, MOST_ELEMS)
            for name, n in given.items()
        }

    def _number(self, extent: Extent, sizes: Mapping[str, int]) -> int:
        if isinstance(extent, int):
            return extent
        found = []
        for part in _factors(extent):
            if not part.isdecimal() and part not in sizes:
                raise LayoutError(
                    f"graph {self.name!r}: extent {extent!r} needs a number for {part!r}: pass "
                    f"sizes={{{part!r}: N}} (lowshard solve: --size {part}=N); its symbols: "
                    f"{brief(list(self._symbols))}"
                )
            found.append(int(part) if part.isdecimal() else sizes[part])
        rule = f"graph {self.name!r}: extent {extent!r} is at most 2^63 - 1"
        return whole(prod(found), rule, LayoutError, most=MOST_ELEMS)


def _factors(extent: str) -> list[str]:
    return [part.strip() for part in extent.split("*")]


def _result_count(op: str, operands: int, args: Mapping[str, Any]) -> int:
    if op in ("top_k", "bottom_k"):
        return 2
    if op == "rebind":
        return operands
    if op == "split" and "sizes" in args:
        return len(wholes(args["sizes"], "split: sizes are integers", LayoutError))
    if op in ("split", "chunk"):
        rule = f"{op}: chunks is an integer from 1 to {MOST_ENTRIES:,}"
        return whole(args.get("chunks", 1), rule, LayoutError, 1, MOST_ENTRIES)
    return 1


# ---- places


def written_place(place: object) -> str | None:
    """Return a place as text, axis=placement pairs in order; "R" stays."""
    if place is None:
        return None
    if isinstance(place, str):
        if place.strip() == "R":
            return "R"
        pairs = [(axis, text) for axis, _, text in (token.partition("=") for token in place.split())]
    else:
        given = instance(place, Mapping, _PLACE, LayoutError)  # type: ignore[type-abstract]
        pairs = [(axis, str(p) if isinstance(p, Placement) else p) for axis, p in given.items()]
    is_said = bool(pairs) or not isinstance(place, str)
    if not is_said or not all(isinstance(part, str) and part for pair in pairs for part in pair):
        raise LayoutError(f"{_PLACE}; got {brief(place)}")
    if len({axis for axis, _ in pairs}) < len(pairs):
        raise LayoutError(f"a place names each mesh axis once, got {brief(place)}")
    return " ".join(f"{axis}={_placement(text)}" for axis, text in pairs) or "R"


def settled_place(place: str | None, ndim: int, what: str) -> str | None:
    """Return a place with its dims counted from 0."""
    if place is None or place == "R":
        return place
    found = []
    for axis, _, text in (token.partition("=") for token in place.split()):
        placement = _placement(text)
        if isinstance(placement, Sharded):
            if not -ndim <= placement.dim < ndim:
                raise LayoutError(
                    f"{what} has {ndim} dims, and its place {place!r} cuts dim {placement.dim} over mesh axis {axis!r}"
                )
            placement = Sharded(placement.dim % ndim, placement.split)
        found.append(f"{axis}={placement}")
    return " ".join(found)


def place_on(place: Place, mesh: DeviceMesh) -> str:
    """Return the axis=placement pairs of a place that are about axes of a mesh: the others are passed over."""
    text = written_place(place)
    if text is None or text == "R":
        return ""
    return " ".join(token for token in text.split() if token.partition("=")[0] in mesh.axis_names)


def _placement(text: str) -> Placement:
    try:
        return parse_placement(text)
    except ShardingError as error:
        raise LayoutError(f"{_PLACE}; {error}") from None
