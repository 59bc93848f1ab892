"""The default tier stays small: it draws from the large matrices, and says what it skipped."""

from __future__ import annotations

from itertools import product

import pytest
from support import mode, skips


def test_of_a_matrix_each_value_is_tried_and_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": range(2), "b": range(9), "c": range(3)}
    cases = {case: dict(zip(values, case, strict=True)) for case in product(*values.values())}
    monkeypatch.setattr(mode, "full", lambda: False)
    chosen = mode.thinned(cases, 6, "x")
    assert chosen == mode.thinned(cases, 6, "x") != mode.thinned(cases, 6, "y")
    assert 9 <= len(chosen) <= 14  # of 54; b has nine values
    for number, name in enumerate(values):
        assert {case[number] for case in chosen} == {*values[name]}
    few = dict(list(cases.items())[:3])
    assert mode.thinned(few, 6, "x") == few.keys()
    assert len(mode.thinned({k: {"a": k[0]} for k in cases}, 6, "x")) == 6
    monkeypatch.setattr(mode, "full", lambda: True)
    assert mode.thinned(cases, 6, "x") == cases.keys()


def test_reasons_of_skips_are_told_by_what_was_missing() -> None:
    reasons = ["Skipped: CuPy is not installed", "no GPU", "Skipped: torch is not installed", "on Tuesdays"]
    a_gpu, a_library = "skipped 2: needs a GPU with CuPy", "skipped 1: needs a library that is not installed"
    assert skips.summary(reasons) == [a_gpu, a_library, "skipped 1: on Tuesdays"]
