"""Whatever a rule file or a dump holds: a valid result or a RulesError, soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import pytest
import yaml
from support import mode

from lowshard.errors import LowshardError
from lowshard.rules import READY_MADE, RulesError, parse_rules
from lowshard.rules.golden import parse_dump
from lowshard.rules.loading import ready_made_text

ATOMS = (
    "x", "fsdp", "'y'", '"z"', "null", "~", "", "true", "no", "0", "-1", "1e9", "0x1F", "9" * 5000, "1:30", ".nan",
    "2026-01-01", "[]", "{}", "[[]]", "<<", "=", "&a x", "*a", "!!int x", "!!str 3", "!t v", "? x", "|\n   text",
    "é", "\u2028", "a b", "'it''s'", "\t", "#", "%", "@x", "`", "--- ", "...", ": ", "- ", "${oc.env:HOME}",
)  # fmt: skip
KEYS = (
    "mesh_axes", "data_sharding", "logical_axis_rules", "context_sharding", "lowshard", "override_logical_axis_rules",
    "layers", "parameters", "match", "memory_budget_bytes_per_device", "other", "<<",
)  # fmt: skip


def use(text: str, mode_: str) -> None:
    """Read a file and ask it everything; only RulesError may come."""
    rules = parse_rules(text, "fuzz.yml", mode=mode_)  # type: ignore[arg-type]
    names = tuple(dict.fromkeys(r.name for r in rules.logical_axis_rules))[:4]
    tensors = {"l.0.w": (names, tuple(8 for _ in names))}
    rules.check(tensors, devices=8).to_json()
    mesh = rules.mesh(8)
    rules.explain(names, tensors["l.0.w"][1], mesh)
    rules.layout(mesh, names, tensors["l.0.w"][1])


def try_all(texts: Callable[[np.random.Generator], str], count: int, rng: np.random.Generator) -> int:
    valid = 0
    for turn in range(count):
        text = texts(rng)
        start = time.perf_counter()
        try:
            use(text, ("strict", "maxtext")[turn % 2])
            valid += 1
        except RulesError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {text!r}") from error
        assert time.perf_counter() - start < 5.0, text
    return valid


def damaged(rng: np.random.Generator) -> str:
    """Return a ready-made file with a few bytes or lines changed."""
    text = ready_made_text(READY_MADE[int(rng.integers(1, len(READY_MADE)))])
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, len(text)))
        kind = int(rng.integers(0, 5))
        atom = str(rng.choice(ATOMS))
        if kind == 0:
            text = text[:at] + atom + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + int(rng.integers(1, 30)) :]
        elif kind == 2:
            text = text[:at] + chr(int(rng.integers(1, 0x3000))) + text[at + 1 :]
        else:
            lines = text.split("\n")
            line = int(rng.integers(0, len(lines)))
            other = int(rng.integers(0, len(lines)))
            lines[line] = lines[other] if kind == 3 else lines[line].replace("[", atom, 1)
            text = "\n".join(lines)
    return text


def grown(rng: np.random.Generator) -> str:
    """Return a map of the right keys with values of any kind."""

    def value(depth: int) -> str:
        kind = int(rng.integers(0, 6)) if depth < 5 else 0
        if kind < 3:
            return str(rng.choice(ATOMS[:24]))
        inner = [value(depth + 1) for _ in range(int(rng.integers(0, 4)))]
        if kind < 5:
            return f"[{', '.join(inner)}]"
        return "{" + ", ".join(f"{rng.choice(KEYS)}: {v}" for v in inner) + "}"

    keys = rng.choice(KEYS, int(rng.integers(1, 5)), replace=rng.random() < 0.1)
    return "\n".join(f"{key}: {value(0)}" for key in keys)


def plausible(rng: np.random.Generator) -> str:
    """Return a file of the right form with odd names, targets and sizes of lists."""

    def target() -> str:
        axes = [
            str(a) for a in rng.choice(["x", "y", "fsdp", "data", "stage", "gone"], int(rng.integers(0, 4)))
        ]
        return f"[{', '.join(axes)}]" if rng.random() < 0.9 else str(rng.choice(ATOMS[:14]))

    rules = "".join(f"- [{rng.choice(['a', 'b', 'c', 'activation_length'])}, {target()}]\n" for _ in range(5))
    return f"mesh_axes: [fsdp, data, stage]\ndata_sharding: [{target()}]\nlogical_axis_rules:\n{rules}"


@pytest.fixture(params=["libyaml", "PyYAML alone"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read with PyYAML's C parser, and without it as where the wheel lacks it."""
    if request.param != "libyaml":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("this PyYAML was built without libyaml")
    return str(request.param)


@pytest.mark.parametrize("texts", [damaged, grown, plausible], ids=["damaged", "grown", "plausible"])
def test_ten_thousand_fuzzed_files_are_valid_or_a_rules_error(
    texts: Callable[[np.random.Generator], str], parser: str, rng: np.random.Generator
) -> None:
    few = parser != "libyaml"
    count = (400 if few else 3400) if mode.full() else (30 if few else 250)
    valid = try_all(texts, count, rng)
    assert valid > 0 or count < 100


BOMBS: dict[str, Callable[[], str]] = {
    "aliases that double": lambda: "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 60)
    ),
    "aliases that double, as rules": lambda: (
        f"t: &t [{', '.join(['x'] * 3000)}]\nr: &r [a, *t]\nlogical_axis_rules: [{', '.join(['*r'] * 3000)}]\n"
    ),
    "an alias of itself": lambda: "logical_axis_rules: &a [*a]\n",
    "merge keys that double": lambda: "m0: &m0 {k: v}\n" + "".join(
        f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}], k{i}: v}}\n" for i in range(1, 60)
    ),
    "lists a million deep": lambda: "logical_axis_rules: " + "[" * 1_000_000,
    "maps a hundred thousand deep": lambda: "{a: " * 100_000,
    "blocks a thousand deep": lambda: "".join(" " * i + "a:\n" for i in range(1000)),
    "dashes": lambda: "- " * 100_000,
    "a number of a million digits": lambda: f"lowshard: {{memory_budget_bytes_per_device: {'9' * 1_000_000}}}\n",
    "an exponent": lambda: "lowshard: {memory_budget_bytes_per_device: 1e999999999}\n",
    "eight thousand rules of one name": lambda: "logical_axis_rules:\n" + "".join(
        f"- [a, [x, y{i}]]\n" for i in range(8_000)
    ),
    "twelve thousand rules": lambda: "logical_axis_rules:\n" + "".join(f"- [a{i}, x{i}]\n" for i in range(12_000)),
    "a thousand axes": lambda: f"mesh_axes: [{', '.join(f'x{i}' for i in range(1000))}]\n",
    "batches over forty thousand axes": lambda: f"data_sharding: [[{', '.join(f'x{i}' for i in range(40_000))}]]\n",
    "a name of a million letters": lambda: f"mesh_axes: [{'x' * 1_000_000}]\n",
    "a million rules": lambda: "logical_axis_rules:\n" + "- [a, x]\n" * 400_000,
    "nine million characters": lambda: "#" * 9_000_000,
    "half a surrogate": lambda: "mesh_axes: ['\\ud800', \ud800]\n",
    "control characters": lambda: "mesh_axes: [\x00\x01]\n",
    "colons that look like a clock": lambda: "a: " + ":".join(["1"] * 100_000),
    "sixty thousand anchors": lambda: "".join(f"a{i}: &x{i} 1\n" for i in range(60_000)),
    "question marks": lambda: "? " * 50_000,
    "quotes without an end": lambda: "a: '" + "''" * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("bomb", mode.sample(list(BOMBS), 3, "bombs"))
@pytest.mark.time_limit(30)
def test_a_file_made_to_hang_or_to_fill_memory_ends_soon(bomb: str, parser: str) -> None:
    text = BOMBS[bomb]()
    start, said = time.perf_counter(), ""
    try:
        use(text, "maxtext")
    except RulesError as error:
        said = str(error)
    assert len(said) < 5000
    assert time.perf_counter() - start < 10


def test_dumps_of_any_kind_are_read_or_refused(rng: np.random.Generator) -> None:
    entry = {"mesh": {"axis_names": ["x"], "shape": {"x": 2}}, "partition_spec": ["x", None], "shape": [4, 2]}
    flowing = {"f/v: bf16[4,2]": {"logic_axes": "('a', None)", "PartitionSpec": "P('x', None)"}}
    good = [
        json.dumps({"w": entry, "v": entry}),
        json.dumps({"w": {"partition_spec": ["a", None], "shape": [4, 2]}}),
        json.dumps({"Activation Sharding Dump": [flowing]}),
    ]
    pieces = [
        "null",
        "[]",
        "{}",
        "1",
        "-1",
        "true",
        '"x"',
        "[[1]]",
        "9" * 5000,
        "NaN",
        "1e999",
        '"\\ud800"',
        "[" * 5000,
    ]
    for _ in range(3000 if mode.full() else 400):
        text = good[int(rng.integers(0, 3))]
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, len(text)))
            if rng.random() < 0.5:
                text = text[:at] + str(rng.choice(pieces)) + text[at + int(rng.integers(0, 8)) :]
            else:
                text = text[:at] + text[at + int(rng.integers(1, 8)) :]
        try:
            dump = parse_dump(text)
            if dump.kind == "logical":
                dump.tensors()
            elif dump.kind == "activations":
                dump.activations()
        except RulesError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {text!r}") from error


@pytest.mark.parametrize(
    "sizes",
    [
        {"devices": 0}, {"devices": -4}, {"devices": 2**60}, {"devices": True}, {"devices": "8"}, {"devices": 8.0},
        {"slices": 3}, {"slices": 0}, {"ici": {"fsdp": 0}}, {"ici": {"fsdp": -2}}, {"ici": {"fsdp": 2.0}},
        {"ici": {3: 2}}, {"ici": "fsdp=2"}, {"ici": {"fsdp": 10**30}}, {"ici": {"pipeline": 2, "stage": 2}},
    ],
)  # fmt: skip
def test_sizes_of_any_kind_are_refused_by_name(sizes: dict) -> None:
    rules = parse_rules(ready_made_text("default"))
    with pytest.raises(LowshardError) as found:
        rules.mesh(**({"devices": 8} | sizes))
    assert isinstance(found.value, RulesError)
