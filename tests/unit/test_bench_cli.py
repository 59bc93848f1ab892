"""`lowshard bench`: table, JSON, checks of limits, wrong usage, progress, interruption. No figure is judged here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowshard import __version__, cli
from lowshard.bench import bench_mxfp8, bench_pack, limit
from lowshard.bench.bench_command import Size, parse_sizes, selected
from lowshard.bench.bench_device import why_no_gpu
from lowshard.bench.bench_report import Section
from lowshard.bench.turn_timing import Row, SpeedUp
from lowshard.errors import LowshardError
from lowshard.kernels.engine import host_engine

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "mxfp8": ["bench", "mxfp8", "--device", "cpu", "--size", "6400", "--rounds", "2"],
    "pack": ["bench", "pack", "--device", "cpu", "--size", "20kB", "--boxes", "5", "--rounds", "2"],
}
NAMES = {"mxfp8": bench_mxfp8.NAMES, "pack": bench_pack.NAMES}
NO_GPU = why_no_gpu()


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled here."""
    monkeypatch.setenv("LOWSHARD_KERNELS", "plain")
    host_engine.cache_clear()
    yield
    host_engine.cache_clear()


def limits_of(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every limit one that any figure keeps or misses."""
    for name in limit.RATIO_LIMITS:
        monkeypatch.setitem(limit.RATIO_LIMITS, name, value)
    for pair in limit.SPEED_UP_LIMITS:
        monkeypatch.setitem(limit.SPEED_UP_LIMITS, pair, 1 / value if value else 1e12)


@pytest.mark.parametrize("bench", TINY)
def test_the_table_has_a_line_for_every_row_and_says_what_ran(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    assert cli.main([*TINY[bench], "--json", str(path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name in NAMES[bench]:
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1, name
    assert f"lowshard   {__version__}" in lines
    assert [row["name"] for row in json.loads(path.read_text())["sections"][0]["rows"]] == list(NAMES[bench])


@pytest.mark.parametrize("bench", TINY)
def test_json_has_every_rounds_times_and_figures_that_follow_from_them(
    bench: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TINY[bench], "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["format"], data["bench"], data["rounds"]) == ("lowshard-bench-1", bench, 2)
    assert {"lowshard", "device", "engine", "vectors", "threads", "cpu", "versions"} <= set(data["machine"])
    (section,) = data["sections"]
    assert section["sizes"]
    assert [row["name"] for row in section["rows"]] == list(NAMES[bench])
    for row in section["rows"]:
        assert len(row["work_s"]) == len(row["memcpy_s"]) == 2
        times = zip(row["work_s"], row["memcpy_s"], strict=True)
        per_byte = 2 * row["memcpy_bytes"] / row["moved_bytes"]
        ratios = [work / copy * per_byte for work, copy in times]
        assert row["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
        assert row["ratio"]["least"] == pytest.approx(min(ratios))
        assert row["ratio"]["most"] == pytest.approx(max(ratios))
        assert row["median_s"] == pytest.approx(sum(row["work_s"]) / 2)
        assert row["gb_per_s"] == pytest.approx(row["moved_bytes"] / row["median_s"] / 1e9)
        assert row["first_call_s"] > 0
        assert (row["ok"] is None) == (row["ratio_limit"] is None)
    rows = {row["name"]: row for row in section["rows"]}
    for pair in section["speed_ups"]:
        slow, fast = rows[pair["slow"]]["work_s"], rows[pair["fast"]]["work_s"]
        assert pair["times"] == pytest.approx([s / f for s, f in zip(slow, fast, strict=True)])
    assert len(section["speed_ups"]) == (bench == "pack")


@pytest.mark.parametrize("bench", TINY)
def test_check_fails_and_names_each_figure_that_misses_its_limit(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits_of(0.0, monkeypatch)
    assert cli.main([*TINY[bench], "--check", "--json", "-"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"] is False
    missed = [line for line in shown.err.splitlines() if " limit " in line]
    limited = [name for name in NAMES[bench] if name in limit.RATIO_LIMITS]
    for name in limited:
        assert sum(line.startswith(f"lowshard bench {bench}: {name}: ") for line in missed) == 1
    assert len(missed) == len(limited) + (bench == "pack")  # and the speed-up


@pytest.mark.parametrize("bench", TINY)
def test_check_passes_when_every_limit_is_kept(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits_of(1e12, monkeypatch)
    assert cli.main([*TINY[bench], "--check"]) == 0
    limited = sum(name in limit.RATIO_LIMITS for name in NAMES[bench]) + (bench == "pack")
    assert f"all {limited} limits kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [["bench"], ["bench", "no-such-benchmark"], ["bench", "mxfp8", "--size", "64 potatoes"],
     ["bench", "mxfp8", "--rounds", "0"], ["bench", "mxfp8", "--boxes", "5"], ["bench", "mxfp8", "--json", "/"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert "usage: lowshard" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--only", "quantise"], ["--check", "--only", "quantize fp16"], ["--size", "1000000Gi"]]
)
def test_what_only_a_run_can_tell_is_exit_code_2_too(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TINY["mxfp8"], *argv]) == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.skipif(NO_GPU is None, reason="CuPy sees a GPU here")
def test_a_gpu_that_is_not_there_is_an_error_and_auto_takes_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*TINY["mxfp8"], "--device", "cuda"]) == 2
    assert "--device cuda needs CuPy and a GPU" in capsys.readouterr().err
    assert cli.main([*TINY["mxfp8"], "--device", "auto", "--only", "quantize fp16", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["device"] == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU to use here: {NO_GPU}")
@pytest.mark.parametrize("bench", TINY)
def test_every_row_runs_on_a_gpu(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TINY[bench], "--device", "cuda", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"gpu", "driver"} <= set(data["machine"])
    assert [row["name"] for row in data["sections"][0]["rows"]] == list(NAMES[bench])
    assert all(min(row["work_s"]) > 0 for row in data["sections"][0]["rows"])


def test_sizes_are_elements_or_bytes_by_powers_of_ten_or_two() -> None:
    assert parse_sizes("64Mi") == (Size(64 * 2**20, False),)
    assert parse_sizes("1000000") == (Size(1_000_000, False),)
    assert parse_sizes("64MB, 1GB") == (Size(64_000_000, True), Size(1_000_000_000, True))
    assert parse_sizes("3GiB,2kB,5B") == (Size(3 * 2**30, True), Size(2000, True), Size(5, True))


def test_only_takes_whole_words_that_names_begin_with() -> None:
    assert selected(bench_pack.NAMES, None) == bench_pack.NAMES
    assert selected(bench_pack.NAMES, "pack_quantize") == (bench_pack.FUSED, "pack_quantize boxes of 4 KB")
    assert selected(bench_pack.NAMES, "unpack slice,pack boxes of 4") == (
        "pack boxes of 4 KB",
        "unpack slice of 1 KB rows",
    )
    assert all(name.startswith("quantize ") for name in selected(bench_mxfp8.NAMES, "quantize"))
    with pytest.raises(LowshardError, match="got 'quant'"):
        selected(bench_mxfp8.NAMES, "quant")


def test_of_what_is_measured_again_the_better_figure_counts_and_a_note_says_so() -> None:
    def section(ratio: float, times: float, *more: Row) -> Section:
        row = Row("a", "", 100, 50, 1.0, 0.0, (ratio,), (1.0,))
        return Section("", (), (row, *more), (SpeedUp("a", "b", 2.0, (times,)),), ("first",))

    other, right = (Row(name, "", 100, 50, 1.0, 0.0, (0.5,), (1.0,)) for name in "bc")
    first = section(1.2, 1.5, other, right)
    assert first.missed == ("a", "b")
    best = first.better(section(0.9, 1.4))
    assert [row.ratio.median for row in best.rows] == [0.9, 0.5, 0.5]
    assert best.speed_ups[0].spread.median == 1.5
    assert best.missed == ("a", "b")
    assert best.notes == ("first", "measured again with new buffers, the better one counts: a")
    assert best.better(section(1.1, 2.5)).missed == ()


@pytest.mark.time_limit(60)
@pytest.mark.full_only
def test_an_interrupted_run_ends_with_130_and_no_traceback() -> None:
    command = [sys.executable, "-m", "lowshard", *TINY["mxfp8"], "--rounds", "1000000"]
    environment: dict[str, Any] = {**os.environ, "LOWSHARD_KERNELS": "plain"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stderr is not None
            first = ""
            while "round" not in first:
                first = child.stderr.readline()
                assert first, "it ended by itself"
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130
    assert err.splitlines()[-1] == "lowshard: interrupted"
    assert "Traceback" not in err
    assert out == ""
