"""Graph: ops on named tensors, whole shapes, no layouts yet. Built by calls, bound to sizes, then solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from lowshard import dtypes
from lowshard.errors import LayoutError
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Placement, Replicated
from lowshard.solver.action_set import freeze_args
from lowshard.solver.table import ARITY, RULES, Call, offer

Extent = int | str
"""A number, or a symbol such as "tokens", or a product such as "batch*length"."""
Place = str | Mapping[str, Placement] | None
Kind = Literal["input", "weight", "result"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a graph: what the graph's calls take and give."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Info:
    """What a graph knows of a tensor before sizes are bound."""

    name: str
    kind: Kind
    shape: tuple[Extent, ...] | None = None
    """None for a result: its shape follows from the op."""
    dtype: str = "float32"
    place: Place = None


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
    outputs: tuple[tuple[int, Place], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def layout(self, mesh: DeviceMesh, tensor: int, place: Place) -> Layout:
        """Return the layout that `place` names; mesh axes that it does not name hold replicas.

        Axes that the mesh lacks are passed over: a graph is written once for many meshes.

        Raises:
            LayoutError: text that is no placement, or a dim that the tensor lacks.
        """
        head = f"{self.dtypes[tensor]}[{','.join(map(str, self.shapes[tensor]))}] "
        try:
            return Layout.parse(mesh, head + " ".join(_tokens(place, mesh)))
        except LayoutError as error:
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
        self.name = name
        self._tensors: list[Info] = []
        self._nodes: list[Node] = []
        self._outputs: list[tuple[int, Place]] = []
        self._names: set[str] = set()

    # ---- what there is

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The ops, in the order they were added, which is the order they run in."""
        return tuple(self._nodes)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in shapes, in order."""
        found: dict[str, None] = {}
        for info in self._tensors:
            for extent in info.shape or ():
                if isinstance(extent, str):
                    found.update(dict.fromkeys(p for p in _factors(extent) if not p.isdecimal()))
        return tuple(found)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name, or raise LayoutError."""
        for i, info in enumerate(self._tensors):
            if info.name == name:
                return Tensor(i, name)
        raise LayoutError(f"graph {self.name!r} has no tensor {name!r}; it has {', '.join(self._names)}")

    # ---- leaves and outputs

    def input(
        self, name: str, shape: Sequence[Extent], dtype: str = "float32", place: Place = None
    ) -> Tensor:
        """Add a tensor that comes from outside, held until its last use.

        Args:
            name: a name of its own.
            shape: global extents; symbols such as "tokens" stand for numbers that `bind` gives.
            dtype: any name of the dtype table.
            place: how it comes: "R", text such as "dp=S0 tp=P", a mapping of mesh axis to placement, or None where
                the solver may choose.
        """
        return self._leaf(name, "input", shape, dtype, place)

    def weight(
        self, name: str, shape: Sequence[Extent], dtype: str = "float32", place: Place = None
    ) -> Tensor:
        """Add a tensor that stays on the devices for good. Arguments: as `input`."""
        return self._leaf(name, "weight", shape, dtype, place)

    def output(self, tensor: Tensor, place: Place = None) -> Tensor:
        """Keep a tensor to the end; `place` says how it shall lie, None leaves that to the solver."""
        self._outputs.append((self._index(tensor), _checked(place)))
        return tensor

    # ---- ops

    def op(self, op: str, *operands: Tensor, name: str | None = None, **args: Any) -> Any:
        """Add any op that has a rule (`lowshard.solver.table.RULES`) and return its result, or a tuple of several.

        Raises:
            LayoutError: no such op, another number of operands, or a tensor of another graph. Shapes are checked when
                sizes are bound.
        """
        if op not in RULES:
            raise LayoutError(f"no rule for op {op!r}; there are rules for {', '.join(sorted(RULES))}")
        least, most = ARITY[op]
        if len(operands) < least or (most is not None and len(operands) > most):
            raise LayoutError(f"{op} takes {least} to {most or 'any number of'} tensors, got {len(operands)}")
        taken = tuple(self._index(t) for t in operands)
        count = _result_count(op, len(operands), args)
        base = name or f"{op}_{len(self._nodes)}"
        names = [base] if count == 1 else [f"{base}.{i}" for i in range(count)]
        results = tuple(self._add(Info(n, "result")) for n in names)
        self._nodes.append(Node(op, taken, tuple(r.index for r in results), freeze_args(args)))
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
        return self.op("reshape", x, name=name, shape=tuple(shape))  # type: ignore[no-any-return]

    def permute(self, x: Tensor, dims: Sequence[int], name: str | None = None) -> Tensor:
        """Add a transposition: result dim i is dim dims[i] of x."""
        return self.op("permute", x, name=name, dims=tuple(dims))  # type: ignore[no-any-return]

    # ---- binding

    def bind(self, sizes: Mapping[str, int] | None = None) -> BoundGraph:
        """Return the graph with every shape known.

        Args:
            sizes: a number for each symbol.

        Raises:
            LayoutError: a symbol without a number, or shapes and arguments that do not fit an op, which is named.
        """
        given = dict(sizes or {})
        shapes: list[tuple[int, ...]] = []
        kinds: list[str] = []
        for info in self._tensors:
            shapes.append(tuple(self._number(e, given) for e in info.shape or ()))
            kinds.append(dtypes.get(info.dtype).name)
        one = DeviceMesh((1,), ("one",))
        nodes = []
        for node in self._nodes:
            args = {
                n: _bound_arg(v, lambda e: self._number(e, given)) if n == "shape" else v
                for n, v in node.args
            }
            layouts = tuple(Layout(one, shapes[t], kinds[t], (Replicated(),)) for t in node.operands)
            try:
                results = offer(Call(node.op, layouts, args, True)).results
            except LayoutError as error:
                made = self._tensors[node.results[0]].name
                came = ", ".join(f"{self._tensors[t].name}{list(shapes[t])}" for t in node.operands)
                raise LayoutError(f"graph {self.name!r}, {made!r} = {node.op}({came}): {error}") from None
            for t, result in zip(node.results, results, strict=True):
                shapes[t], kinds[t] = result.shape, dtypes.get(result.dtype).name
            nodes.append(Node(node.op, node.operands, node.results, freeze_args(args)))
        outputs = tuple(self._outputs) or tuple((t, None) for t in self._ends())
        tensors = tuple(
            Info(i.name, i.kind, s, d, i.place) for i, s, d in zip(self._tensors, shapes, kinds, strict=True)
        )
        return BoundGraph(self.name, tensors, tuple(nodes), outputs, tuple(shapes), tuple(kinds))

    # ---- inside

    def _ends(self) -> list[int]:
        read = {t for node in self._nodes for t in node.operands}
        return [t for node in self._nodes for t in node.results if t not in read]

    def _leaf(self, name: str, kind: Kind, shape: Sequence[Extent], dtype: str, place: Place) -> Tensor:
        return self._add(Info(name, kind, tuple(shape), dtypes.get(dtype).name, _checked(place)))

    def _add(self, info: Info) -> Tensor:
        if info.name in self._names:
            raise LayoutError(f"graph {self.name!r} has a tensor {info.name!r} already: names differ")
        self._names.add(info.name)
        self._tensors.append(info)
        return Tensor(len(self._tensors) - 1, info.name)

    def _index(self, tensor: Tensor) -> int:
        known = isinstance(tensor, Tensor) and tensor.index < len(self._tensors)
        if not known or self._tensors[tensor.index].name != tensor.name:
            raise LayoutError(
                f"graph {self.name!r} takes tensors that its own calls returned, got {tensor!r}"
            )
        return tensor.index

    def _number(self, extent: Extent, sizes: Mapping[str, int]) -> int:
        if isinstance(extent, int):
            return extent
        found = []
        for part in _factors(extent):
            if not part.isdecimal() and part not in sizes:
                raise LayoutError(
                    f"graph {self.name!r}: extent {extent!r} needs a number for {part!r}: pass "
                    f"sizes={{{part!r}: N}} (lowshard solve: --size {part}=N); its symbols: {', '.join(self.symbols)}"
                )
            found.append(int(part) if part.isdecimal() else int(sizes[part]))
        return prod(found)


def _factors(extent: str) -> list[str]:
    return [part.strip() for part in extent.split("*")]


def _bound_arg(value: Any, number: Any) -> Any:
    return tuple(number(v) if isinstance(v, str) else v for v in value) if isinstance(value, tuple) else value


def _tokens(place: Place, mesh: DeviceMesh) -> list[str]:
    if place is None or place == "R":
        return []
    if isinstance(place, str):
        pairs = [token.partition("=") for token in place.split()]
        return [f"{a}={p}" for a, _, p in pairs if a in mesh.axis_names]
    return [f"{a}={p}" for a, p in place.items() if a in mesh.axis_names]


def _checked(place: Place) -> Place:
    if place is None or place == "R":
        return place
    if isinstance(place, str):
        if any(not (token.partition("=")[0] and token.partition("=")[2]) for token in place.split()):
            raise LayoutError(f"a place is 'R' or axis=placement pairs such as 'dp=S0 tp=R', got {place!r}")
        return " ".join(place.split())
    return " ".join(f"{axis}={placement}" for axis, placement in place.items())


def _result_count(op: str, operands: int, args: Mapping[str, Any]) -> int:
    if op in ("top_k", "bottom_k"):
        return 2
    if op == "rebind":
        return operands
    if op == "split":
        return len(args["sizes"]) if "sizes" in args else int(args.get("chunks", 1))
    if op == "chunk":
        return int(args.get("chunks", 1))
    return 1
