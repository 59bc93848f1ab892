"""`lowshard bench pick`: its table, its JSON, and what it calls a miss. No figure is judged here."""

from __future__ import annotations

import json

import pytest

from lowshard import cli
from lowshard.bench.bench_pick import MESHES, OPS, PickRow


def test_every_op_on_every_mesh_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "pick", "--rounds", "2", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["bench"]) == ("lowshard-bench-pick-1", "pick")
    assert "cpu" in report["machine"]
    rows = report["rows"]
    assert len(rows) == len(MESHES) * sum(len(ways) for _, ways in OPS)
    assert all(row["first_us"] > 0 for row in rows)
    assert {tuple(row["mesh"]) for row in rows} == set(MESHES)


def test_the_table_and_the_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowshard.bench.bench_pick.FIRST_LIMIT_US", 0.0)
    assert cli.main(["bench", "pick", "--rounds", "2"]) == 0
    assert "first sight" in capsys.readouterr().out
    assert cli.main(["bench", "pick", "--rounds", "2", "--check"]) == 1
    assert "limit 0" in capsys.readouterr().err


def test_only_matmul_has_limits() -> None:
    slow = (1e6, 1e6, 1e6)
    assert len(PickRow("matmul", (4,), ("R", "R"), *slow).misses) == 3
    assert PickRow("add", (4,), ("R", "R"), *slow).misses == []
    assert PickRow("matmul", (4,), ("R", "R"), 99.0, 4.9, 4.9).misses == []
