"""Graphs from YAML files: tensors, ops, repeated blocks, outputs. And the examples that come with the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowshard.errors import LayoutError
from lowshard.solver.graph.graph import Graph, Tensor

EXAMPLES = Path(__file__).parent / "examples"
_KEYS = {"name", "sizes", "dtype", "inputs", "weights", "ops", "outputs"}
_BLOCK_KEYS = {"repeat", "name", "carry", "inputs", "weights", "ops"}


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
    data = source if isinstance(source, Mapping) else _read(source)
    unknown = set(data) - _KEYS
    if unknown or not data.get("ops"):
        raise LayoutError(
            f"a graph file has the keys {', '.join(sorted(_KEYS))}, and ops: got {', '.join(map(str, data)) or 'none'}"
        )
    graph = Graph(str(data.get("name", "graph")))
    names: dict[str, Tensor] = {}
    dtype = str(data.get("dtype", "float32"))
    _block(graph, data, names, "", dtype)
    outputs = data.get("outputs") or ()
    places = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    for name, place in places.items():
        graph.output(_named(names, str(name), "outputs"), place)
    return graph, {str(k): int(v) for k, v in (data.get("sizes") or {}).items()}


def examples() -> list[str]:
    """Return the names of the examples."""
    return sorted(p.stem for p in EXAMPLES.glob("*.yaml"))


def _read(source: str | Path) -> Mapping[str, Any]:
    import yaml

    path = Path(source)
    if not path.exists() and str(source) in examples():
        path = EXAMPLES / f"{source}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayoutError(
            f"no graph file {str(source)!r} ({error.strerror}); give a path, or an example: {', '.join(examples())}"
        ) from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LayoutError(f"{path} is no YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise LayoutError(f"{path} holds no graph: its top level is a mapping with the key ops")
    return data


def _block(graph: Graph, data: Mapping[str, Any], names: dict[str, Tensor], prefix: str, dtype: str) -> None:
    for kind, add in (("inputs", graph.input), ("weights", graph.weight)):
        for name, given in (data.get(kind) or {}).items():
            entry = given if isinstance(given, Mapping) else {"shape": given}
            shape = entry.get("shape")
            if not isinstance(shape, (list, tuple)) or set(entry) - {"shape", "dtype", "place"}:
                raise LayoutError(
                    f"{kind[:-1]} {name!r} is a shape such as [tokens, 512], or {{shape:, dtype:, place:}}; got {given}"
                )
            names[str(name)] = add(
                prefix + str(name), shape, str(entry.get("dtype", dtype)), entry.get("place")
            )
    for entry in data["ops"]:
        if not isinstance(entry, Mapping):
            raise LayoutError(f"an op is {{op:, in:, out:, arguments}}, got {entry!r}")
        if "repeat" in entry:
            _repeat(graph, entry, names, prefix, dtype)
        else:
            _op(graph, entry, names, prefix)


def _op(graph: Graph, entry: Mapping[str, Any], names: dict[str, Tensor], prefix: str) -> None:
    missing = {"op", "in", "out"} - set(entry)
    if missing:
        raise LayoutError(
            f"an op is {{op:, in:, out:, arguments}}: {dict(entry)!r} lacks {', '.join(sorted(missing))}"
        )
    op, out = str(entry["op"]), entry["out"]
    operands = [_named(names, n, f"op {op} -> {out}") for n in _many(entry["in"])]
    args = {k: v for k, v in entry.items() if k not in ("op", "in", "out")}
    outs = _many(out)
    made = graph.op(
        op, *operands, name=prefix + outs[0] if len(outs) == 1 else prefix + "+".join(outs), **args
    )
    results: Sequence[Tensor] = made if isinstance(made, tuple) else (made,)
    if len(results) != len(outs):
        raise LayoutError(f"op {op} has {len(results)} results, out names {len(outs)}: {out!r}")
    names.update(zip(outs, results, strict=True))


def _repeat(
    graph: Graph, entry: Mapping[str, Any], names: dict[str, Tensor], prefix: str, dtype: str
) -> None:
    count, name = entry["repeat"], str(entry.get("name", "layer"))
    unknown = set(entry) - _BLOCK_KEYS
    if not isinstance(count, int) or count < 1 or unknown or not entry.get("ops"):
        raise LayoutError(
            f"a block is {{repeat: N, name:, carry:, inputs:, weights:, ops:}} with N >= 1; got repeat {count!r}"
            f"{' and ' + ', '.join(sorted(unknown)) if unknown else ''}"
        )
    carry = {str(a): str(b) for a, b in (entry.get("carry") or {}).items()}
    for i in range(count):
        inside = dict(names)
        _block(graph, entry, inside, f"{prefix}{name}{i}.", dtype)
        for into, made in carry.items():
            names[into] = _named(inside, made, f"carry of block {name}")


def _named(names: Mapping[str, Tensor], name: object, where: str) -> Tensor:
    if name not in names:
        raise LayoutError(f"{where}: no tensor {name!r} by then; there are {', '.join(names)}")
    return names[str(name)]


def _many(value: object) -> list[str]:
    return [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
