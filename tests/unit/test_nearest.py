"""The nearest of the names that there are."""

from __future__ import annotations

import pytest

from lowshard import DeviceMesh
from lowshard.errors import LowshardError
from lowshard.nearest import nearest
from lowshard.rules import load_rules
from lowshard.weights import NamePatterns


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("fdsp", ["data", "fsdp"], "; did you mean fsdp?"), ("zzz", ["data", "fsdp"], ""), ("", ["a"], ""),
        ("FSDP", ["data", "fsdp"], "; did you mean fsdp?"), (None, ["a"], ""), (3, ["a"], ""), ("a", [], ""),
        ("ab", ["ab\n", "abc"], "; did you mean abc?"), ("w10", ["w11", "w11", "w2"], "; did you mean w11?"),
        ("GPU", ["auto", "cpu", "cuda"], "; did you mean cuda?"),
        ("mean", ["sum", "avg", "min"], "; did you mean avg?"), ("mean", ["sum", "min"], ""),
    ],
)  # fmt: skip
def test_near_names_are_told_and_others_are_not(name: object, known: list[str], said: str) -> None:
    assert nearest(name, known) == said


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: DeviceMesh((2, 4), ("data", "tensor")).axis_size("tenser"), "did you mean tensor"),
        (lambda: load_rules("shard-exp-fsdp"), "did you mean shard-exp-on-fsdp"),
        (lambda: NamePatterns.load("qwem"), "did you mean qwen"),
    ],
)
def test_errors_about_names_tell_the_nearest(call: object, said: str) -> None:
    with pytest.raises(LowshardError, match=said):
        call()  # type: ignore[operator]
