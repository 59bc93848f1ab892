"""`lowshard bench publish`: it runs, says which goals are missed, and leaves nothing of its processes behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import wait_until

from lowshard.bench.bench_publish import LEAST_OF_RAW, MOST_OF_WHOLE, Row, misses
from lowshard.cli import main


def _rows(of_raw: float, of_whole: float) -> list[Row]:
    return [
        Row("whole version", 1000, (1.0, 1.0, 9.0), (of_raw, of_raw, 9.0)),
        Row("1 % changed", 30, (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), of_whole),
    ]


def test_goals_are_checked_by_the_median_of_ratios() -> None:
    assert list(misses(_rows(LEAST_OF_RAW, MOST_OF_WHOLE))) == []
    assert len(list(misses(_rows(LEAST_OF_RAW - 0.05, MOST_OF_WHOLE)))) == 1
    assert len(list(misses(_rows(LEAST_OF_RAW, MOST_OF_WHOLE + 0.1)))) == 1


@pytest.mark.time_limit(60)
def test_it_measures_between_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "publish", "--size", "20M", "--rounds", "2"]
    assert main([*argv, "--json", str(tmp_path / "found.json")]) == 0
    assert "whole version" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    whole, changed = found["rows"]
    assert whole["bytes"] == found["bytes"] == 20 << 20
    assert 0.01 * found["bytes"] < changed["bytes"] < 0.03 * found["bytes"]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in found["rows"])
    assert whole["of_raw"] > 0
    assert changed["of_whole"] > 0


def _sides(parent: int) -> dict[str, int]:
    """Return the processes that a process has started, by what they are."""
    found = {}
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path("/proc", pid, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if b"lowshard.bench.publish_side" in words:
            found[words[-1].decode()] = int(pid)
    return found


def _is_gone(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


@pytest.mark.time_limit(60)
@pytest.mark.full_only
def test_ctrl_c_leaves_no_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "bench", "publish", "--size", "8M", "--rounds", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process:
        try:
            while "round" not in process.stderr.readline():
                assert process.poll() is None
            sides = _sides(process.pid)
            assert set(sides) == {"giver", "taker"}
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert wait_until(lambda: all(map(_is_gone, sides.values())), 5.0)


def test_it_is_refused_inside_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["bench", "publish"]) != 0
    assert "outside of an MPI job" in capsys.readouterr().err
