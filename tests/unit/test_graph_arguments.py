"""What a graph and its solvers are given in a wrong way is a LowshardError; numbers of NumPy are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowshard import DeviceMesh, LowshardError, Sharded
from lowshard.solver import Graph, GraphSolver, solve_graph

TP = DeviceMesh((2,), ("tp",))
NO_SHAPES: tuple[Any, ...] = (None, 4, "ab", (4.0, 3), (True, 3), (-2, 3), ("a b",), (1 << 63,), (2,) * 33)
NO_PLACES: tuple[Any, ...] = ("", "tp=S9", "tp=X", "tp=S0 tp=R", "tp=P:mean", 1, {"tp": Sharded(7)})
NO_SIZES: tuple[Any, ...] = ({"n": 2.5}, {"n": "3"}, {"n": -1}, {"n": 1 << 64}, {}, None, {"m": 3})


def all_of(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def two() -> tuple[Graph, Any]:
    g = Graph("two")
    return g, g.input("taken", (4, 6))


@pytest.mark.parametrize("shape", NO_SHAPES, ids=repr)
def test_shapes(shape: Any) -> None:
    g, x = two()
    for call in (g.input, g.weight):
        with pytest.raises(LowshardError):
            call("x", shape)
    with pytest.raises(LowshardError):
        all_of(lambda: g.reshape(x, shape), g.bind)


@pytest.mark.parametrize("place", NO_PLACES, ids=repr)
def test_places(place: Any) -> None:
    g, x = two()
    with pytest.raises(LowshardError):
        g.input("x", (4, 6), place=place)
    y = g.pointwise("relu", x)
    with pytest.raises(LowshardError):
        all_of(lambda: g.output(y, place), g.bind)


@pytest.mark.parametrize("sizes", NO_SIZES, ids=repr)
def test_sizes(sizes: Any) -> None:
    g = Graph("sizes")
    g.output(g.pointwise("relu", g.input("x", ("n", 4))))
    for call in (g.bind, lambda s: GraphSolver().solve(g, TP, s), lambda s: solve_graph(g, TP, sizes=s)):
        with pytest.raises(LowshardError):
            call(sizes)  # type: ignore[operator]


CALLS: dict[str, Callable[[Graph, Any], object]] = {
    "no op": lambda g, x: g.op("nothing", x),
    "text for a tensor": lambda g, x: g.pointwise("relu", "taken"),  # type: ignore[arg-type]
    "an array for a tensor": lambda g, x: g.matmul(x, np.zeros((6, 2))),  # type: ignore[arg-type]
    "a tensor of another graph": lambda g, x: g.pointwise("relu", two()[1]),
    "a float axis": lambda g, x: g.softmax(x, axis=1.0),  # type: ignore[arg-type]
    "an axis that is not there": lambda g, x: g.softmax(x, axis=2),
    "dims twice": lambda g, x: g.permute(x, (1, 1)),
    "sizes that do not sum up": lambda g, x: g.op("split", x, sizes=(2, 3), axis=0),
    "a billion chunks": lambda g, x: g.op("chunk", x, chunks=1_000_000_000, axis=0),
    "an argument that is an object": lambda g, x: g.op("mul_scalar", x, value=object()),
    "a tile of 10^12": lambda g, x: g.op("tile", x, repeats=(10**12, 10**12)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    g, x = two()
    with pytest.raises(LowshardError):
        all_of(lambda: CALLS[name](g, x), g.bind)
