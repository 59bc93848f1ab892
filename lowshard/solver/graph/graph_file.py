"""Graphs from YAML files: tensors, ops, repeated blocks, outputs. And the examples that come with the library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowshard.argument import brief
from lowshard.errors import LayoutError
from lowshard.nearest import nearest
from lowshard.reading import reader
from lowshard.solver.graph.bound_graph import Graph, Tensor

EXAMPLES = Path(__file__).parent / "examples"
MOST_TENSORS = 20_000
"""Ops, inputs and weights of a graph file with every block written out."""


@dataclass(frozen=True)
class _Leaf:
    """An input or a weight."""

    shape: tuple[int | str, ...]
    dtype: str | None = None
    place: str | None = None


_Leaves = Mapping[str, _Leaf | tuple[int | str, ...]]


def load_graph(source: str | Path | Mapping[str, Any]) -> tuple[Graph, dict[str, int]]:
    """Return the graph of a YAML file, and the sizes that it gives its symbols.

        name: mlp
        sizes: {tokens: 4096}                    # defaults of the symbols in shapes
        dtype: bfloat16                          # of tensors that name none
        inputs:  {x: {shape: [tokens, 512], place: "dp=S0"}}
        weights: {up: [512, 2048], down: [2048, 512]}
        ops:
          - {op: matmul, in: [x, up], out: h}
          - {op: gelu, in: h, out: a}
          - {op: matmul, in: [a, down], out: y}
        outputs: {y: "dp=S0"}                    # or [y]: the solver chooses how it ends

    Other keys of an op are its arguments. A block {repeat: N, name: layer, carry: {x: y}, weights: ..., ops: ...}
    stands for N copies: names made in it become layer0.NAME, layer1.NAME, ...; `carry` has x stand for what the copy
    before made as y (in the first copy for the x outside), and after the block x is the last y.

    Args:
        source: path of a file, name of an example, or what a file holds.

    Raises:
        LayoutError: the file is missing or no graph; the text says which entry is wrong.
    """
    if isinstance(source, Mapping):
        return _read(source)
    return _read.yaml(_path(source))


def examples() -> list[str]:
    """Return the names of the examples."""
    return sorted(p.stem for p in EXAMPLES.glob("*.yaml"))


def _path(source: str | Path) -> Path:
    path = Path(source)
    if not os.path.isfile(path) and str(source) in examples():
        path = EXAMPLES / f"{source}.yaml"
    if not os.path.exists(path):
        raise LayoutError(
            f"no graph file {brief(str(source))}; give a path, or an example: {', '.join(examples())}"
            f"{nearest(str(source), examples())}"
        )
    return path


@reader("graph file", LayoutError)
def _read(
    ops: tuple[Mapping[str, Any], ...],
    name: str = "graph",
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float32",
    inputs: _Leaves | None = None,
    weights: _Leaves | None = None,
    outputs: Mapping[str, str | None] | tuple[str, ...] | None = None,
) -> tuple[Graph, dict[str, int]]:
    if not ops or _count(ops) > MOST_TENSORS:
        raise LayoutError(
            f"a graph file has ops, and with its blocks written out up to {MOST_TENSORS} tensors, got {_count(ops)}"
        )
    graph = Graph(name)
    names: dict[str, Tensor] = {}
    _leaves(graph, inputs, weights, names, "", dtype)
    _ops(graph, ops, names, "", dtype)
    places = outputs.items() if isinstance(outputs, Mapping) else ((n, None) for n in outputs or ())
    for tensor, place in places:
        graph.output(_named(names, tensor, "outputs"), place)
    for symbol in sizes or ():
        if symbol not in graph.symbols:
            raise LayoutError(
                f"sizes are of symbols in the shapes of the graph ({', '.join(graph.symbols) or 'none'}), got "
                f"{brief(symbol)}{nearest(symbol, graph.symbols)}"
            )
    return graph, dict(sizes or {})


def _count(ops: Sequence[Any]) -> int:
    """Return how many tensors there are with every block written out; no more is looked at than there is to read."""
    total = 0
    for entry in ops:
        times = entry.get("repeat") if isinstance(entry, Mapping) else None
        if isinstance(times, int):
            parts = [entry.get(key) for key in ("inputs", "weights", "ops")]
            inside = sum(len(p) for p in parts[:2] if isinstance(p, Mapping))
            total += max(times, 1) * (inside + _count(parts[2] if isinstance(parts[2], tuple) else ()))
        else:
            total += 1
    return total


def _leaves(
    graph: Graph,
    inputs: _Leaves | None,
    weights: _Leaves | None,
    names: dict[str, Tensor],
    prefix: str,
    dtype: str,
) -> None:
    for given, add in ((inputs, graph.input), (weights, graph.weight)):
        for name, leaf in (given or {}).items():
            made = _Leaf(leaf) if isinstance(leaf, tuple) else leaf
            names[name] = add(prefix + name, made.shape, made.dtype or dtype, made.place)


def _ops(
    graph: Graph, ops: Sequence[Mapping[str, Any]], names: dict[str, Tensor], prefix: str, dtype: str
) -> None:
    for entry in ops:
        if "repeat" in entry:
            _read_block(entry).add_to(graph, names, prefix, dtype)
        else:
            args = {k: v for k, v in entry.items() if k not in ("op", "in", "out")}
            said = {k: v for k, v in entry.items() if k in ("op", "in", "out")}
            _read_op(said).add_to(graph, names, prefix, args)


@dataclass(frozen=True)
class _Op:
    op: str
    operands: tuple[str, ...]
    outs: tuple[str, ...]

    def add_to(self, graph: Graph, names: dict[str, Tensor], prefix: str, args: Mapping[str, Any]) -> None:
        where = f"op {self.op} -> {', '.join(self.outs)}"
        operands = [_named(names, n, where) for n in self.operands]
        made = graph.op(self.op, *operands, name=prefix + "+".join(self.outs), **args)
        results: Sequence[Tensor] = made if isinstance(made, tuple) else (made,)
        if len(results) != len(self.outs):
            raise LayoutError(f"{where}: the op has {len(results)} results, out names {len(self.outs)}")
        names.update(zip(self.outs, results, strict=True))


@reader("op of a graph", LayoutError)
def _read_op(op: str, in_: str | tuple[str, ...], out: str | tuple[str, ...]) -> _Op:
    return _Op(op, (in_,) if isinstance(in_, str) else in_, (out,) if isinstance(out, str) else out)


@dataclass(frozen=True)
class _Block:
    """Ops that stand for `repeat` copies of themselves."""

    repeat: int
    ops: tuple[Mapping[str, Any], ...]
    name: str = "layer"
    carry: Mapping[str, str] | None = None
    inputs: _Leaves | None = None
    weights: _Leaves | None = None

    def add_to(self, graph: Graph, names: dict[str, Tensor], prefix: str, dtype: str) -> None:
        if self.repeat < 1 or not self.ops:
            raise LayoutError(f"a block has ops, and repeat N >= 1; got {self.repeat} of {len(self.ops)} ops")
        for i in range(self.repeat):
            inside = dict(names)
            under = f"{prefix}{self.name}{i}."
            _leaves(graph, self.inputs, self.weights, inside, under, dtype)
            _ops(graph, self.ops, inside, under, dtype)
            for into, made in (self.carry or {}).items():
                names[into] = _named(inside, made, f"carry of block {self.name}")


_read_block = reader("block of a graph", LayoutError)(_Block)


def _named(names: Mapping[str, Tensor], name: str, where: str) -> Tensor:
    if name not in names:
        raise LayoutError(f"{where}: no tensor {name!r} by then; there are {', '.join(names)}")
    return names[name]
