"""The benchmarks on real MPI ranks: every collective with MPI beside it, and one small run of each of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.starting import start_ranks

from lowshard.bench.bench_report import Report
from lowshard.bench.bench_transition import ONE_AXIS, TWO_AXES
from lowshard.bench.collective_case import OPERATIONS

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = ["-b", "64", "-e", "64", "-n", "2", "-w", "1", "-m", "1"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowshard", "bench", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def report_of(path: Path, *argv: str) -> Report:
    ended = run(*argv, "--json", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Report.from_json(json.loads(path.read_text()))


def test_every_collective_is_right_in_every_form_and_mpis_own_call_stands_beside_it() -> None:
    """One job for all sweeps; mpi4py's calls compute what ours do, too."""
    ended = start_ranks(HERE / "run_bench.py", 2, timeout_s=100).ok()
    said: dict[str, list[Any]] = {}
    for kind, data in map(json.loads, ended.stdout.splitlines()):
        said.setdefault(kind, []).append(data)
    assert said["rivals"] == ["right"]
    reports = [Report.from_json(data) for data in said["sweep"]]
    assert [report.bench for report in reports[: len(OPERATIONS)]] == list(OPERATIONS)
    assert len(reports) == len(OPERATIONS) + 3
    for report in reports:
        asked = report.settings
        assert (report.wrong, report.facts["ranks"], report.facts["transport"]) == (0, 2, "mpi")
        operation = OPERATIONS[report.bench]
        placements = operation.out_of_place + operation.in_place
        cases = len(asked["sizes"]) * len(asked["dtypes"]) * max(len(asked["redops"]), 1)
        assert len(report.rows) == placements * cases
        for row in report.rows:
            assert len(row.timing.shares) == len(row.timing.seconds) >= 2
            redop, dtype = row.facts["redop"], row.facts["dtype"]
            has_one = (
                asked["compare_mpi"] and redop != "avg" and not (dtype == "bfloat16" and redop is not None)
            )
            assert ("mpi" in row.beside) == has_one
            assert ("memcpy" in row.beside) == (report.bench != "barrier")


def test_inside_a_job_every_rank_of_it_takes_part_and_rank_0_speaks() -> None:
    ended = start_ranks("lowshard", 3, ["bench", "reduce", *TINY, "-r", "2"], timeout_s=100).ok()
    rows = [line.split() for line in ended.stdout.splitlines() if not line.startswith("#")]
    assert [row[:5] for row in rows] == [["64", "16", "float32", "sum", "2"]]
    assert ended.stdout.count("# lowshard bench reduce: 3 ranks") == 1


ENDS = [
    (["--ranks", "3"], 2, "--ranks is the size of the MPI job inside one: 2; got 3"),
    (["--transport", "loopback"], 2, "loopback runs on threads of one process"),
    (["--min-busbw", "1e9"], 1, "average bus bandwidth"),
    (["-N", "1000000", "-T", "1"], 71, "was still running after 1 s"),
]


@pytest.mark.parametrize(("argv", "code", "said"), mode.sample(ENDS, 2, "ends of a bench"))
def test_inside_a_job_all_ranks_end_with_the_code_of_the_run(argv: list[str], code: int, said: str) -> None:
    ended = start_ranks("lowshard", 2, ["bench", "all_reduce", *TINY, *argv], timeout_s=100)
    assert ended.returncode == code, ended.text
    assert said in ended.text


@pytest.mark.time_limit(60)
def test_an_interrupted_run_ends_its_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = ["bench", "all_gather", "-b", "64", "-e", "64", "-N", "1000000"]
    command = [sys.executable, "-u", "-m", "lowshard", *bench]
    env = {**os.environ, "TMPDIR": str(tmp_path), "LOWSHARD_TEST_MARK": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            while (line := child.stdout.readline()).startswith("#"):
                continue
            assert line.split()[0] == "64"
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130
    assert "SIGINT" in err
    assert list(tmp_path.iterdir()) == []
    deadline_s = time.monotonic() + 5
    while (left := marked(str(tmp_path))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


def marked(text: str) -> list[int]:
    """Return the processes that have a text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"LOWSHARD_TEST_MARK={text}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# ---- the others


@pytest.mark.full_only
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_redistribute_measures_and_checks_every_transition(ranks: int, tmp_path: Path) -> None:
    report = report_of(
        tmp_path / "x.json", "redistribute", "--ranks", str(ranks), "--size", "100K", "-n", "1"
    )
    names = dict.fromkeys(row.facts["transition"] for row in report.rows)
    assert list(names) == [*ONE_AXIS, *(TWO_AXES if ranks == 4 else ())]
    assert report.wrong == 0
    for name in names:
        ways = {row.facts["way"]: row for row in report.rows if row.facts["transition"] == name}
        assert {"shared", "ordinary", "new", "pool"} <= set(ways)
        assert ways["new"].facts["is_view"] == (name == "R->S0")
        assert all(row.ratio("floor").median > 0 for row in ways.values())


@pytest.mark.full_only
@pytest.mark.time_limit(100)
def test_refit_moves_a_model_between_layouts(tmp_path: Path) -> None:
    report = report_of(tmp_path / "x.json", "refit", "--size", "4", "--rounds", "2", "--ranks", "2")
    assert len(report.rows) == 12
    sent = {row.name: row.facts["sent_bytes"] for row in report.rows}
    assert sent["TP1 to TP2 dim 0, 16, shown"] == 0  # each rank has its half
    moved = {row.name: row.moved_bytes for row in report.rows}
    assert sent["TP2 to TP1 dim 0, 16, shown"] == moved["TP2 to TP1 dim 0, 16, shown"] // 2


@pytest.mark.full_only
@pytest.mark.time_limit(100)
@pytest.mark.parametrize("grid", ["tp=2", "fsdp=2"])
def test_a_model_goes_in_every_way(grid: str, tmp_path: Path) -> None:
    """What arrives is compared within: a way that brings anything else ends the bench."""
    tensors = {
        f"model.layers.0.{name}.weight": {"dtype": dtype, "shape": shape}
        for name, dtype, shape in (
            ("mlp.up_proj", "bfloat16", [258, 64]),
            ("mlp.down_proj", "float32", [64, 258]),
            ("input_layernorm", "float16", [64]),
        )
    }
    (tmp_path / "model.json").write_text(json.dumps({"tensors": tensors}))
    grids = ["--from", grid, "--to", "dp=2,tp=2", "--together", "--changed", "1,100", "--rounds", "2"]
    report = report_of(tmp_path / "x.json", "refit", "--model", str(tmp_path / "model.json"), *grids)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["dense", "delta, 1 %", "delta, 100 %", "gather, broadcast", "tensor by tensor"]
    sent = {name: row.moved_bytes for name, row in rows.items()}
    least = {name: row.facts["least_bytes"] for name, row in rows.items()}
    up, down, norm = 258 * 64 * 2, 258 * 64 * 4, 64 * 2
    # Serving ranks 0 to 3 hold what training ranks 0 and 1 hold, twice over: ranks 2 and 3 need it.
    needed = up + down + 2 * norm
    # Down_proj is cut by rows, and serves by columns; of the norm each rank needs the other half.
    if grid == "fsdp=2":
        needed = up + 3 * down // 2 + 3 * norm
    assert sent["dense"] == least["dense"] == needed
    assert sent["tensor by tensor"] == needed
    halves = (up + down) // 2 + (norm // 2 if grid == "fsdp=2" else 0)
    assert sent["gather, broadcast"] == halves + 3 * (up + down + norm)
    assert 0.003 * needed < least["delta, 1 %"] < 0.011 * needed
    assert least["delta, 1 %"] < sent["delta, 1 %"] < 0.1 * needed
    assert sent["delta, 100 %"] <= needed * 1.02
    assert all(len(row.timing.seconds) == 2 for row in report.rows)
