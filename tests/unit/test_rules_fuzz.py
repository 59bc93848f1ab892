"""Whatever a rule file holds: a valid result or a RulesError, soon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import yaml
from support import mode
from support.mutation import spoilt

from lowshard.rules import READY_MADE, RulesError, parse_rules
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
    return spoilt(text.encode(), random.Random(int(rng.integers(1 << 32)))).decode("latin-1")


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
    "an alias of itself": lambda: "logical_axis_rules: &a [*a]\n",
    "lists a million deep": lambda: "logical_axis_rules: " + "[" * 1_000_000,
    "blocks a thousand deep": lambda: "".join(" " * i + "a:\n" for i in range(1000)),
    "a number of a million digits": lambda: f"lowshard: {{memory_budget_bytes_per_device: {'9' * 1_000_000}}}\n",
    "eight thousand rules of one name": lambda: "logical_axis_rules:\n" + "".join(
        f"- [a, [x, y{i}]]\n" for i in range(8_000)
    ),
    "nine million characters": lambda: "#" * 9_000_000,
    "half a surrogate": lambda: "mesh_axes: ['\\ud800', \ud800]\n",
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
