"""The benchmarks of collectives on real MPI ranks: every collective, MPI beside it."""

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

from lowshard.bench.figure import CollectiveReport
from lowshard.bench.operation import OPERATIONS

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = ["-b", "64", "-e", "64", "-n", "2", "-w", "1", "-m", "1"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What two ranks say: one job for all sweeps."""
    ended = start_ranks(HERE / "run_bench.py", 2, timeout_s=100).ok()
    said: dict[str, list[Any]] = {}
    for kind, data in map(json.loads, ended.stdout.splitlines()):
        said.setdefault(kind, []).append(data)
    return said


def reports(found: dict[str, list[Any]]) -> list[CollectiveReport]:
    return [CollectiveReport.from_json(data) for data in found["sweep"]]


def test_every_collective_is_right_in_every_form(found: dict[str, list[Any]]) -> None:
    swept = reports(found)
    assert [report.settings.op for report in swept[: len(OPERATIONS)]] == list(OPERATIONS)
    assert len(swept) == len(OPERATIONS) + 6
    for report in swept:
        assert report.wrong == 0, report.settings
        assert (report.ranks, report.transport) == (2, "mpi")
        settings = report.settings
        assert len(report.rows) == len(settings.sizes) * len(settings.dtypes) * max(len(settings.redops), 1)
        for row in report.rows:
            operation = OPERATIONS[row.op]
            assert (row.out is not None) == (operation.out_of_place or settings.shared)
            assert (row.inside is not None) == (operation.in_place and not settings.shared)
            for _, figure in row.figures:
                assert len(figure.timing.shares) == len(figure.timing.seconds) >= 2
                assert figure.timing.median_s > 0


def test_mpis_own_call_stands_beside_each_figure_where_it_has_one(found: dict[str, list[Any]]) -> None:
    for report in reports(found):
        for row in report.rows:
            for _, figure in row.figures:
                has_one = report.settings.compare_mpi and row.redop != "avg" and not (
                    row.dtype == "bfloat16" and row.redop is not None
                )  # fmt: skip
                assert (figure.mpi is not None) == (figure.x_mpi is not None) == has_one
                assert (figure.x_memcpy is not None) == (row.op != "barrier")
        assert (report.small_all_reduce_s is not None) == report.settings.compare_mpi


def test_mpis_own_calls_compute_what_ours_do(found: dict[str, list[Any]]) -> None:
    assert found["rivals"] == ["right"]


# ---- the command line


def run(*argv: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowshard", "bench", *argv], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.full_only
def test_it_starts_its_own_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = run("all_gather", *TINY, "--ranks", "2", "--json", str(tmp_path / "x.json"), TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if not line.startswith("#")]
    assert [row[:3] for row in rows] == [["64", "8", "float32"]]
    assert "# Out of bounds values : 0 OK" in ended.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_inside_a_job_every_rank_of_it_takes_part_and_rank_0_speaks() -> None:
    ended = start_ranks("lowshard", 3, ["bench", "reduce", *TINY, "-r", "2"], timeout_s=100).ok()
    rows = [line.split() for line in ended.stdout.splitlines() if not line.startswith("#")]
    assert [row[:5] for row in rows] == [["64", "16", "float32", "sum", "2"]]
    assert ended.stdout.count("# lowshard bench reduce: 3 ranks") == 1


ENDS = [
    (["--ranks", "3"], 2, "--ranks is the size of the MPI job inside one: 2; got 3"),
    (["--transport", "loopback"], 2, "loopback runs on threads of one process"),
    (["--min-busbw", "1e9"], 1, "below 1e+09 GB/s"),
    (["-N", "1000000", "-T", "1"], 71, "was still running after 1 s"),
]


@pytest.mark.parametrize(("argv", "code", "said"), mode.sample(ENDS, 2, "ends of a bench"))
def test_inside_a_job_all_ranks_end_with_the_code_of_the_run(argv: list[str], code: int, said: str) -> None:
    ended = start_ranks("lowshard", 2, ["bench", "all_reduce", *TINY, *argv], timeout_s=100)
    assert ended.returncode == code, ended.text
    assert said in ended.text


@pytest.mark.time_limit(60)
def test_an_interrupted_run_ends_its_ranks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-u",
        "-m",
        "lowshard",
        "bench",
        "all_gather",
        "-b",
        "64",
        "-e",
        "64",
        "-N",
        "1000000",
    ]
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


@pytest.mark.full_only
@pytest.mark.time_limit(100)
def test_a_model_goes_in_every_way(tmp_path: Path) -> None:
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
    report = tmp_path / "ways.json"
    grids = ["--from", "tp=2", "--to", "dp=2,tp=2", "--together", "--changed", "1,100"]
    options = ["--rounds", "2", "--json", str(report)]
    ended = run("refit", "--model", str(tmp_path / "model.json"), *grids, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["way"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["dense", "delta, 1 %", "delta, 100 %", "gather, broadcast", "tensor by tensor"]
    up, down, norm = 258 * 64 * 2, 258 * 64 * 4, 64 * 2
    # Serving ranks 0 to 3 hold what training ranks 0 and 1 hold, twice over: ranks 2 and 3 need it.
    needed = up + down + 2 * norm
    assert rows["dense"]["sent_bytes"] == rows["dense"]["least_bytes"] == needed
    assert rows["tensor by tensor"]["sent_bytes"] == needed
    assert rows["gather, broadcast"]["sent_bytes"] == (up + down) // 2 + 3 * (up + down + norm)
    assert 0.003 * needed < rows["delta, 1 %"]["least_bytes"] < 0.011 * needed
    assert rows["delta, 1 %"]["least_bytes"] < rows["delta, 1 %"]["sent_bytes"] < 0.1 * needed
    assert rows["delta, 100 %"]["sent_bytes"] <= needed * 1.02
    assert all(len(row["seconds"]) == 2 for row in rows.values())
