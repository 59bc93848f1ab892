"""Logical names to partition specs: the discriminating cases, a slow model, and the near misses that must fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support import mode, rule_cases
from support.rule_cases import ON_A_MESH, SIZES, SPECS
from support.rule_edits import EDITS

from lowshard import Layout
from lowshard.rules import RulesError, load_rules, make_rules, parse_rules, resolution, rule_table


@pytest.mark.parametrize(("text", "names", "rules", "spec"), SPECS, ids=[c[0] for c in SPECS])
def test_a_spec_is_what_flax_gives(text: str, names: list, rules: list, spec: list) -> None:
    entries = make_rules(["x"], rules).resolve(names)
    assert [list(e) if isinstance(e, tuple) else e for e in entries] == spec


@pytest.mark.parametrize("case", ON_A_MESH, ids=[c[0] for c in ON_A_MESH])
def test_on_a_mesh_weights_and_activations_part_ways(case: tuple) -> None:
    assert case[0] not in rule_cases.failing_cases()


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
        (
            ("a", "b"),
            r"s\.yml:5:3: rule \[a, \[x, y\]\]: every rule of 'a' is blocked .* x already serves 'b'",
            5,
            "x",
        ),
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


@pytest.mark.parametrize("names", ["embed", 5, None, ("a", 3), (("a",),)])
def test_names_of_another_form_are_refused(names: object) -> None:
    with pytest.raises(RulesError, match=r"logical names? (are|is)"):
        make_rules(["x"], [("a", "x")]).resolve(names)  # type: ignore[arg-type]


@pytest.mark.full_only
def test_ten_thousand_random_rule_sets_agree_with_the_slow_model(rng: np.random.Generator) -> None:
    for turn in range(10_000 if mode.full() else 1500):
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


def test_a_trace_tells_the_same_story_as_the_spec(rng: np.random.Generator) -> None:
    for _ in range(2000 if mode.full() else 300):
        names, rules = rule_cases.random_rules(rng)
        if rule_cases.slow_spec(names, rules) is None:
            continue
        found = make_rules(list("xyzwuv"), rules).resolver().trace(names)
        holders: dict[str, int] = {}
        for attempt in found.attempts:
            held = [a for a in attempt.rule.axes if a in holders]
            if attempt.outcome == "won":
                assert not held
                assert found.winners[attempt.dim] is attempt.rule
                holders.update(dict.fromkeys(attempt.rule.axes, attempt.dim))
            elif attempt.outcome == "blocked":
                assert [b.axis for b in attempt.blocks] == held
                assert [b.dim for b in attempt.blocks] == [holders[a] for a in held]
            assert found.names[attempt.dim] == attempt.rule.name
        assert len(found.attempts) == sum(name in names for name, _ in rules)


@pytest.mark.parametrize(("target", "held"), [(["x", "y"], range(8)), (["y", "x"], (0, 2, 4, 6, 1, 3, 5, 7))])
def test_the_order_of_a_target_says_who_holds_what(target: list[str], held: object) -> None:
    rules = make_rules(["x", "y"], [("a", target)])
    layout = rules.layout(rules.mesh(8, ici={"x": 2, "y": 4}), ("a",), (8,))
    assert [layout.box(rank)[0][0] for rank in range(8)] == list(held)  # type: ignore[call-overload]


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


def test_the_documented_calls() -> None:
    rules = load_rules("pipeline-large-moe")
    assert rules.resolve(("embed", None, "mlp")) == (("fsdp", "expert"), None, "tensor")
    mesh = rules.mesh(devices=16, ici={"fsdp": -1, "expert": 4}, slices=1, dcn={})
    layout = rules.layout(mesh, ("embed", None, "mlp"), (64, 3, 7), "bfloat16")
    assert layout == Layout.from_spec(mesh, (64, 3, 7), "bfloat16", (("fsdp", "expert"), None, "tensor"))
    assert layout.spec == (("fsdp", "expert"), None, "tensor")


# ---- near misses: each is an edit of the source that at least one case above must notice


@pytest.fixture
def edited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the edited sources in place of the library's own."""
    sources: dict[ModuleType, str] = {}
    for module, old, new in EDITS[request.param]:
        path = module.__file__
        assert path is not None
        text = sources.get(module) or Path(path).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"the edit no longer fits {module.__name__}: {old!r}"
        sources[module] = text.replace(old, new)
    for module, text in sources.items():
        spec = importlib.util.spec_from_loader("edited", loader=None)
        assert spec is not None
        copy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "edited", copy)  # dataclasses look their module up
        copy.__dict__["Rule"] = resolution.Rule
        exec(compile(text, str(module.__file__), "exec"), copy.__dict__)
        if module is resolution:
            monkeypatch.setattr(rule_table, "Resolver", copy.Resolver)
        elif module is rule_table:
            monkeypatch.setattr(rule_table.RuleTable, "resolve_activation", copy.RuleTable.resolve_activation)
            monkeypatch.setattr(rule_table.RuleTable, "bound_spec", copy.RuleTable.bound_spec)
        else:
            monkeypatch.setattr(rule_cases, "named_shardings", copy.named_shardings)


@pytest.mark.parametrize("edited", list(EDITS), indirect=True)
def test_the_cases_notice_every_near_miss(edited: None) -> None:
    assert rule_cases.failing_cases()


def test_the_cases_find_nothing_wrong_with_the_library_itself() -> None:
    assert rule_cases.failing_cases() == []
    assert set(SIZES) >= {"x", "y", "z", "w"}
