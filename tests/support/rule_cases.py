"""Cases that tell the resolution of logical names from its near misses, and a slow model of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.errors import RulesError
from lowshard.rules import make_rules
from lowshard.rules.golden import named_shardings

# What flax does (flax 0.12.8, `logical_to_mesh_axes`): what the case shows, names, rules, spec.
SPECS: list[tuple[str, list[str | None], list[tuple[str, Any]], list[Any]]] = [
    ("the earlier rule goes first, not the earlier dim", ["a", "b"], [("b", "x"), ("a", "x")], [None, "x"]),
    ("the same with the dims swapped", ["b", "a"], [("b", "x"), ("a", "x")], ["x", None]),
    ("a later rule of the name is the fallback", ["a", "b"],
     [("b", "x"), ("a", ["x", "y"]), ("a", "y")], ["y", "x"]),
    ("a rule is taken whole or not at all", ["a", "b"], [("b", "x"), ("a", ["x", "y"])], [None, "x"]),
    ("the third rule of a name fits", ["a", "b", "c"],
     [("b", "x"), ("c", "y"), ("a", ["x", "z"]), ("a", ["y", "z"]), ("a", ["z"])], ["z", "x", "y"]),
    ("a name that has its axes gets no more", ["a", "b"],
     [("b", "x"), ("a", ["x", "y"]), ("b", "y"), ("c", "y")], [None, "x"]),
    ("a blocked rule holds none of its axes", ["a", "b", "c"],
     [("b", "x"), ("a", ["x", "y"]), ("c", "y")], [None, "x", "y"]),
    ("an empty target ends the search", ["a"], [("a", []), ("a", "x")], [None]),
    ("a null target ends the search", ["a"], [("a", None), ("a", "x")], [None]),
    ("an empty target conflicts with nothing", ["a", "b"], [("b", "x"), ("a", [])], [None, "x"]),
    ("a name without a rule stays whole", ["q"], [("a", "x")], [None]),
    ("a mesh axis is no logical name", ["x"], [("a", "x")], [None]),
    ("dims without a name stay whole", [None, "a", None], [("a", "x")], [None, "x", None]),
    ("a list of one is the axis itself", ["a"], [("a", ["x"])], ["x"]),
    ("axes keep the order of the target", ["a"], [("a", ["y", "x"])], [["y", "x"]]),
    ("a scalar", [], [("a", "x")], []),
    ("no rules at all", ["a", "b"], [], [None, None]),
    ("overlap blocks, whatever the sizes", ["embed", "mlp"],
     [("mlp", ["ft", "t"]), ("embed", ["f", "ft"]), ("embed", ["f"])], ["f", ["ft", "t"]]),
    ("two rules swapped give another spec", ["embed", "mlp"],
     [("embed", ["f", "ft"]), ("mlp", ["ft", "t"])], [["f", "ft"], None]),
    ("a rule for a name that is not there holds nothing", ["a"], [("z", "x"), ("a", "x")], ["x"]),
    ("a rule that comes too late holds nothing", ["a", "b"], [("a", "x"), ("a", "y"), ("b", "y")], ["x", "y"]),
    ("fallbacks of two names in turn", ["a", "b"],
     [("a", ["x", "y"]), ("b", ["y"]), ("b", ["z"]), ("a", ["w"])], [["x", "y"], "z"]),
    ("an axis of a taken rule blocks from any place in it", ["a", "b"],
     [("b", ["x", "y", "z"]), ("a", ["z"]), ("a", ["w"])], ["w", ["x", "y", "z"]]),
]  # fmt: skip

SIZES = {"x": 2, "y": 4, "z": 1, "w": 1, "f": 2, "ft": 1, "t": 2}

# On a mesh of SIZES: what the case shows, names, rules, shape, the named spec (None: an error), the activation's.
ON_A_MESH: list[tuple[str, list[str | None], list[tuple[str, Any]], list[int], Any, Any]] = [
    ("axes of size 1 stay in a named file and go from an activation", ["a"], [("a", ["z", "x", "w"])], [8],
     [["z", "x", "w"]], ["x"]),
    ("an axis of size 1 blocks as any other", ["a", "b"], [("b", "z"), ("a", ["z", "x"]), ("a", ["y"])], [8, 8],
     ["y", "z"], ["y", None]),
    ("conflicts are judged before axes go from an activation", ["a", "b"],
     [("b", ["z", "y"]), ("a", ["z", "x"])], [8, 8], [None, ["z", "y"]], [None, "y"]),
    ("an axis the mesh lacks is an error for a weight and goes from an activation", ["a"],
     [("a", ["nowhere", "x"])], [8], None, ["x"]),
    ("an axis the mesh lacks blocks as any other", ["a", "b"],
     [("b", ["nowhere"]), ("a", ["nowhere", "x"])], [8, 8], None, [None, None]),
    ("no later rule is tried where a dim is not divided", ["a"], [("a", ["x", "y"]), ("a", ["x"])], [12], None,
     [["x", "y"]]),
    ("dividing is asked for, not being larger", ["a"], [("a", ["x", "y"])], [12], None, [["x", "y"]]),
    ("an empty dim is divided by anything", ["a"], [("a", ["x", "y"])], [0], [["x", "y"]], [["x", "y"]]),
    ("fewer names than dims", ["a"], [("a", "x")], [8, 3], ["x"], ["x"]),
    ("an activation's names are cut to the rank", ["a", "b"], [("b", "x"), ("a", "y")], [8], None, ["y"]),
    ("a name on two dims", ["a", "a"], [("a", "x")], [8, 8], None, None),
]  # fmt: skip


def failing_cases() -> list[str]:
    """Return the cases that the library answers otherwise."""
    wrong = []
    for text, names, rules, spec in SPECS:
        if _plain(lambda n=names, r=rules: make_rules(["x"], r).resolve(n)) != spec:  # type: ignore[misc]
            wrong.append(text)
    for text, names, rules, shape, named, activation in ON_A_MESH:
        made = make_rules(list(SIZES), rules)
        mesh = made.mesh(32, ici=SIZES)
        tensors = {"t": (names, shape)}
        got = _plain(lambda m=made, d=mesh, t=tensors: named_shardings(m, d, t)["t"]["partition_spec"])  # type: ignore[misc]
        flowing = _plain(
            lambda m=made, d=mesh, n=names, s=shape: m.resolve_activation(n, d, len(s))  # type: ignore[misc]
        )
        if got != named or flowing != activation:
            wrong.append(text)
    return wrong


def _plain(ask: Any) -> Any:
    try:
        return [list(e) if isinstance(e, tuple) else e for e in ask()]
    except RulesError:
        return None


def slow_spec(names: Sequence[str | None], rules: Sequence[tuple[str, Any]]) -> list[Any] | None:
    """Return the spec by its definition, with no state; None for a name on two dims.

    A rule is taken when its name is on the tensor, no earlier rule of the name is taken, and no earlier
    rule that is taken has an axis of its own.
    """
    present = [n for n in names if n is not None]
    if len(set(present)) != len(present):
        return None

    def axes(place: int) -> set[str]:
        target = rules[place][1]
        return set() if target is None else {target} if isinstance(target, str) else set(target)

    def taken(place: int) -> bool:
        name = rules[place][0]
        if name not in present:
            return False
        before = [p for p in range(place) if (rules[p][0] == name or axes(p) & axes(place)) and taken(p)]
        return not any(rules[p][0] == name or axes(p) & axes(place) for p in before)

    spec: list[Any] = []
    for name in names:
        targets = [
            rules[p][1] for p in range(len(rules)) if rules[p][0] == name and name is not None and taken(p)
        ]
        target = targets[0] if targets else None
        listed = [] if target is None else [target] if isinstance(target, str) else list(target)
        spec.append(None if not listed else listed[0] if len(listed) == 1 else listed)
    return spec


def slow_activation(spec: list[Any] | None, sizes: dict[str, int], rank: int) -> list[Any] | None:
    """Return an activation's spec from a weight's: entry by entry, axis by axis."""
    if spec is None:
        return None
    out: list[Any] = []
    for entry in spec[:rank]:
        listed = [] if entry is None else [entry] if isinstance(entry, str) else entry
        left = [a for a in listed if sizes.get(a, 1) != 1]
        out.append(None if not left else left[0] if len(left) == 1 else left)
    return out


def random_rules(rng: np.random.Generator) -> tuple[list[str | None], list[tuple[str, Any]]]:
    """Return names of a tensor and rules, with repeated names, empty and null targets."""
    logical = list("abcdef")[: int(rng.integers(1, 7))]
    axes = list("xyzwuv")[: int(rng.integers(1, 7))]
    rules: list[tuple[str, Any]] = []
    for _ in range(int(rng.integers(0, 11))):
        count = min(int(rng.integers(0, 4)), len(axes))
        target: Any = [str(a) for a in rng.choice(axes, count, replace=False)]
        if count == 1 and rng.random() < 0.5:
            target = target[0]
        elif count == 0 and rng.random() < 0.3:
            target = None
        rules.append((str(rng.choice(logical)), target))
    rank = int(rng.integers(0, 5))
    names: list[str | None] = [str(n) for n in rng.choice(logical, rank, replace=rank > len(logical))]
    if rank and rng.random() < 0.05:  # a name on two dims
        names = [str(n) for n in rng.choice(logical, rank)]
    return [None if rng.random() < 0.15 else n for n in names], rules
