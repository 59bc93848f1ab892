"""The default tier stays small: what files take is on record, and one that outgrows its budget is told of."""

from __future__ import annotations

from itertools import product

import pytest
from support import durations, mode, skips


def test_the_recorded_files_fit_the_time_of_a_default_run() -> None:
    unit_s, files = durations.recorded()
    assert unit_s > 0
    assert sum(files.values()) <= durations.TOTAL_S


def test_a_file_over_its_budget_is_named_and_a_slow_machine_has_more() -> None:
    before_s = {"tests/a.py": 4.0, "tests/b.py": 0.0}
    most_s = durations.FACTOR * 4.0 + durations.SLACK_S
    assert durations.over_budget({"tests/a.py": most_s, "tests/b.py": durations.SLACK_S}, before_s, 1.0) == []
    over = {"tests/a.py": most_s + 1, "tests/new.py": durations.SLACK_S + 1}
    assert [line.partition(" took ")[0] for line in durations.over_budget(over, before_s, 0.5)] == [*over]
    assert durations.over_budget(over, before_s, 2.0) == []


def test_long_files_come_first_and_those_that_start_ranks_between_the_others() -> None:
    recorded_s = {
        "tests/mpi/a.py": 1.0,
        "tests/mpi/b.py": 9.0,
        "tests/unit/c.py": 2.0,
        "tests/unit/d.py": 3.0,
    }
    order = durations.in_order([*recorded_s, "tests/unit/new.py"], recorded_s)
    assert order[:3] == ["tests/mpi/b.py", "tests/unit/d.py", "tests/unit/new.py"]
    assert order[3:] == ["tests/unit/c.py", "tests/mpi/a.py"]


def test_each_test_is_in_one_part_and_a_functions_cases_in_the_same() -> None:
    ids = [f"tests/x.py::test_{number}[{case}]" for number in range(200) for case in range(3)]
    assert {mode.part_of(i, 10) for i in ids} == set(range(10))
    assert len({(i.partition("[")[0], mode.part_of(i, 10)) for i in ids}) == 200


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
