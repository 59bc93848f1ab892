"""Logical names to partition specs: the discriminating cases, a slow model, and the near misses that must fail."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import mode, rule_cases
from support.rule_cases import SIZES

from lowshard.rules import RulesError, make_rules, parse_rules


def test_a_name_on_two_dims_is_an_error_with_the_rule_and_its_place() -> None:
    rules = parse_rules("mesh_axes: [x]\nlogical_axis_rules:\n  - [b, x]\n  - [a, x]\n", "r.yml")
    with pytest.raises(
        RulesError, match=r"r\.yml:4:5: rule \[a, \[x\]\]: the logical name 'a' stands on two dims"
    ) as e:
        rules.resolve(("a", None, "a"))
    assert (e.value.path, e.value.line, e.value.column) == ("r.yml", 4, 5)
    rules.resolve((None, "a", None))  # None may repeat


def test_strict_mode_is_not_silent_where_maxtext_is() -> None:
    head = "mesh_axes: [x, y]\ndata_sharding: [[x]]\nlogical_axis_rules:\n"
    text = f"{head}- [b, x]\n- [a, [x, y]]\n- [c, []]\n- [d, [y]]"
    quiet, loud = (parse_rules(text, "s.yml", mode=m) for m in ("maxtext", "strict"))  # type: ignore[arg-type]
    mesh = quiet.mesh(4, ici={"x": 2, "y": 2})
    for names, message, line, axis in (
        (
            ("b", "gone"),
            r"s\.yml:3:1: no rule is for the logical name 'gone' .*write \[gone, \[\]\]",
            3,
            None,
        ),
        (("a", "b"), r"s\.yml:5:3: .* every rule of 'a' is blocked .* x already serves 'b'", 5, "x"),
    ):
        assert None in quiet.resolve(names)
        assert None in quiet.layout(mesh, names, (8, 8)).spec
        for ask in (lambda n=names: loud.resolve(n), lambda n=names: loud.layout(mesh, n, (8, 8))):
            with pytest.raises(RulesError, match=message) as found:
                ask()
            assert (found.value.path, found.value.line, found.value.axis) == ("s.yml", line, axis)
        assert None in loud.resolve_activation(names, mesh)
    assert (
        loud.resolve(("b", "c", "d", None)) == quiet.resolve(("b", "c", "d", None)) == ("x", None, "y", None)
    )


def test_ten_thousand_random_rule_sets_agree_with_the_slow_model(rng: np.random.Generator) -> None:
    for turn in range(10_000 if mode.full() else 300):
        names, rules = rule_cases.random_rules(rng)
        if turn % 10 == 0:  # through a file, too
            text = "mesh_axes: [x, y, z, w, u, v]\nlogical_axis_rules: " + json.dumps(rules)
            made = parse_rules(text)
        else:
            made = make_rules(list("xyzwuv"), rules)
        expected = rule_cases.slow_spec(names, rules)
        if expected is None:
            with pytest.raises(RulesError):
                made.resolve(names)
            continue
        got = [list(e) if isinstance(e, tuple) else e for e in made.resolve(names)]
        assert got == expected, (names, rules)
        sizes = {a: int(n) for a, n in zip("xyzwuv", rng.choice([1, 1, 2, 3], 6), strict=True)}
        rank = int(rng.integers(0, len(names) + 1))
        mesh = make_rules([a for a in "xyzwu"], []).mesh(
            int(np.prod([sizes[a] for a in "xyzwu"])), ici={a: sizes[a] for a in "xyzwu"}
        )
        flowing = [list(e) if isinstance(e, tuple) else e for e in made.resolve_activation(names, mesh, rank)]
        known = {a: sizes[a] for a in "xyzwu"}  # the mesh lacks v
        assert flowing == rule_cases.slow_activation(expected, known, rank), (names, rules, sizes)


def test_layouts_agree_with_reshaped_device_numbers(rng: np.random.Generator) -> None:
    for _ in range(200 if mode.full() else 40):
        names, rules = rule_cases.random_rules(rng)
        if rule_cases.slow_spec(names, rules) is None:
            continue
        axes = list("xyzwuv")
        shape = [int(n) for n in rng.choice([1, 2, 3], len(axes))]
        made = make_rules(axes, rules)
        mesh = made.mesh(int(np.prod(shape)), ici=dict(zip(axes, shape, strict=True)))
        spec = made.resolve(names)
        parts = [mesh.axis_size(() if e is None else e) for e in spec]
        extents = [k * int(rng.integers(1, 3)) for k in parts]
        layout = made.layout(mesh, names, extents)
        devices = np.arange(mesh.size).reshape(shape)
        for rank in map(int, rng.choice(mesh.size, min(mesh.size, 5), replace=False)):
            coord = dict(zip(axes, np.argwhere(devices == rank)[0], strict=True))
            for dim, entry in enumerate(spec):
                index = 0
                for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                    index = index * mesh.axis_size(axis) + int(coord[axis])
                width = extents[dim] // parts[dim]
                assert layout.box(rank)[dim] == (index * width, (index + 1) * width)


def test_the_cases_find_nothing_wrong_with_the_library_itself() -> None:
    assert rule_cases.failing_cases() == []
    assert set(SIZES) >= {"x", "y", "z", "w"}
