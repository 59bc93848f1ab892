"""`lowshard bench all_reduce` and the others, on threads: table, JSON, CSV, plot, wrong values, comparison, limits."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowshard import cli
from lowshard import comm as lc
from lowshard.bench import promise
from lowshard.bench.batch import Timing
from lowshard.bench.case import Case, Request
from lowshard.bench.figure import CollectiveReport, Figure, Row
from lowshard.bench.json_argument import size_of
from lowshard.bench.listing import Listing
from lowshard.bench.operation import OPERATIONS
from lowshard.bench.plot import draw, lines
from lowshard.bench.sweep import need_bytes, require_fits
from lowshard.bench.sweep_setting import Settings, dtype_list, size_list
from lowshard.bench.value_pattern import Pattern
from lowshard.errors import BufferMismatchError, LowshardError

ROOT = Path(__file__).resolve().parents[2]


QUICK = ["--transport", "loopback", "-n", "2", "-w", "1", "-m", "1"]
SMALL = [*QUICK, "-b", "64", "-e", "4K", "-f", "8"]


def bench(op: str, *argv: str) -> int:
    return cli.main(["bench", op, *(QUICK if op == "barrier" else SMALL), *argv])


def measured(op: str, tmp_path: Path, *argv: str) -> CollectiveReport:
    """Run a benchmark and return its report, as its JSON file has it."""
    path = tmp_path / "report.json"
    assert bench(op, *argv, "--json", str(path)) == 0
    return CollectiveReport.from_json(json.loads(path.read_text()))


# ---- flags


def test_sizes_are_written_as_nccl_tests_takes_them() -> None:
    assert [size_of(text) for text in ("1024", "1k", "64M", "1.5K", "2KB")] == [
        1024,
        1024,
        64 << 20,
        1536,
        2048,
    ]
    for text in ("", "1X", "-1", "0", "1.3", "1e3", "9" * 400):
        with pytest.raises(ArgumentTypeError):
            size_of(text)


def test_sizes_go_from_one_to_another_by_a_factor_or_a_step() -> None:
    assert size_list(1024, 8192, 2, None) == (1024, 2048, 4096, 8192)
    assert size_list(1024, 9000, 2, None)[-1] == 8192
    assert size_list(10, 40, 1.5, None) == (10, 15, 22, 33)
    assert size_list(1, 4, 1.2, None) == (1, 2, 3)
    assert size_list(100, 300, None, 100) == (100, 200, 300)
    assert size_list(5, 5, 2, None) == (5,)
    for begin, end, factor in ((10, 5, 2.0), (1, 10, 1.0), (1, 10, 0.0), (8, 64, nan)):
        with pytest.raises(LowshardError, match=r"-[ef]"):
            size_list(begin, end, factor, None)


def test_settings_come_back_from_json_and_contradictions_are_refused() -> None:
    settings = Settings("all_reduce", (1, 2), redops=("sum",), each=True)
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    with pytest.raises(LowshardError, match="--shared is for all_reduce, all_gather, broadcast"):
        Settings("reduce", (1,), shared=True)
    with pytest.raises(LowshardError, match="--compare-mpi"):
        Settings("reduce", (1,), compare_mpi=True, transport="loopback")


@pytest.mark.parametrize(
    "argv",
    [["all_reduce", "-b", "0"], ["all_reduce", "-o", "mean"], ["all_gather", "-o", "sum"], ["barrier", "-b", "1K"],
     ["all_reduce", "--json", "/no/such/folder/x.json"], ["all_gather", "--min-busbw", "nan"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *argv])
    assert "usage: lowshard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["all_reduce", "-b", "4K", "-e", "1K"], "-e"),
        (["broadcast", "-r", "2", "--ranks", "2"], "-r"),
        (["all_reduce", "--compare-mpi", "--transport", "loopback"], "--compare-mpi"),
        (["all_reduce", "--transport", "loopback", "-b", "1024G", "-e", "1024G"], "smaller -e"),
        (["all_reduce", "--plot", "x.gif"], ".png"),
        (["all_reduce", "--check-limits", "-e", "1K"], "--window"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


# ---- the run and its table


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_collective_is_right_and_has_a_row_a_size(op: str, tmp_path: Path) -> None:
    found = measured(op, tmp_path, "--ranks", "3")
    operation = OPERATIONS[op]
    assert (found.wrong, found.ranks, found.transport) == (0, 3, "loopback")
    for one, size in zip(found.rows, (0,) if op == "barrier" else (64, 512, 4096), strict=True):
        sizes = operation.sizes(size, 4, 3)
        assert (one.size_bytes, one.count) == (sizes.size_bytes, sizes.count)
        assert (one.out is not None) is operation.out_of_place
        assert (one.inside is not None) is operation.in_place
        assert all(figure.timing.median_s > 0 for _, figure in one.figures)


@pytest.mark.parametrize("argv", [("--shared",), ("--shared", "--window"), ("--window",)])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast"])
def test_shared_results_and_buffers_of_the_communicator(
    op: str, argv: tuple[str, ...], tmp_path: Path
) -> None:
    report = measured(op, tmp_path, *argv)
    assert report.wrong == 0
    for row in report.rows:
        shared = "--shared" in argv
        assert (row.out is None) is (op == "broadcast" and not shared)
        assert (row.inside is None) is shared


def test_types_and_reductions_go_one_after_the_other(tmp_path: Path) -> None:
    report = measured("reduce_scatter", tmp_path, "-d", "all", "-o", "all", "-e", "64", "--order", "tree")
    assert len(report.rows) == 10 * 5
    assert report.wrong == 0
    assert [row.dtype for row in report.rows[::5]] == list(dtype_list("all"))
    assert [row.redop for row in report.rows[:5]] == ["sum", "prod", "min", "max", "avg"]
    assert report.settings.order == "tree"


def test_one_rank_is_a_run_too(tmp_path: Path) -> None:
    for op in ("all_reduce", "send_recv", "all_to_all_v"):
        report = measured(op, tmp_path, "--ranks", "1")
        assert report.ranks == 1
        assert report.wrong == 0


# ---- wrong values


def corrupt(monkeypatch: pytest.MonkeyPatch, only_rank: int, after: int) -> None:
    """Have loopback communicators whose all-reduce is one too high in its last element, on one rank, after a while."""
    module = sys.modules["lowshard.comm.loopback"]

    class Corrupting(lc.Communicator):  # type: ignore[misc, name-defined]
        calls = 0

        def all_reduce(self, send: Any, recv: Any, *args: Any, **options: Any) -> None:
            super().all_reduce(send, recv, *args, **options)
            self.calls += 1
            if self.rank == only_rank and self.calls > after:
                recv[-1] += 1

    monkeypatch.setattr(module, "Communicator", Corrupting)


def test_a_wrong_value_is_counted_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt(monkeypatch, only_rank=1, after=0)
    assert bench("all_reduce", "-c", "3", "--json", "-") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    # Three checks, each with exact and with random data; out of place once more after the timed calls.
    assert [(row["out"]["wrong"], row["inside"]["wrong"]) for row in rows] == [(7, 6)] * 3


def test_a_result_that_was_there_before_the_call_does_not_count() -> None:
    (comm,) = lc.loopback(1)
    case = Case(comm, Request("all_gather", 64, "float32"), "out")
    pattern = Pattern("float32", 1, None)
    assert case.check(pattern) == 0
    pattern.fill(case.recv, 0)
    case.run = lambda: None
    assert case.check(pattern) == 16


def test_operands_of_timed_reductions_in_place_are_zeros_which_any_number_of_calls_leaves_so() -> None:
    (comm,) = lc.loopback(1)
    for redop, placement, calm in (("sum", "in", True), ("sum", "out", False), (None, "in", False)):
        op = "all_gather" if redop is None else "all_reduce"
        case = Case(comm, Request(op, 64, "float32", redop), placement)  # type: ignore[arg-type]
        case.load(Pattern("float32", 1, redop))
        case.calm()
        assert case.send is not None
        assert bool((case.send == 0).all()) is calm


def test_a_value_that_is_wrong_only_after_many_calls_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corrupt(monkeypatch, only_rank=0, after=5)  # two checks and one warm-up a placement, then timed calls
    path = tmp_path / "report.json"
    assert bench("all_reduce", "-e", "64", "--json", str(path)) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["out"]["wrong"] == 1
    assert row["inside"]["wrong"] == 0


# ---- JSON, CSV, plot


def test_json_has_every_rounds_times_and_figures_that_follow_from_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench("reduce_scatter", "--json", "-", "--ranks", "4") == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert "Out of bounds values" in shown.err
    assert (data["format"], data["bench"], data["ok"]) == (
        "lowshard-bench-collective-1",
        "reduce_scatter",
        True,
    )
    assert {"lowshard", "transport", "hosts", "cpu", "load", "versions", "check", "path"} <= set(
        data["machine"]
    )
    busbw = []
    for row, size in zip(data["rows"], (64, 512, 4096), strict=True):
        assert row["size_bytes"] == size
        for figure in (row["out"], row["inside"]):
            assert len(figure["timing"]["seconds"]) == 2
            assert figure["time_s"] == pytest.approx(np.median(figure["timing"]["seconds"]))
            assert figure["algbw_gb_per_s"] == pytest.approx(size / figure["time_s"] / 1e9)
            assert figure["busbw_gb_per_s"] == pytest.approx(0.75 * figure["algbw_gb_per_s"])
            assert figure["x_memcpy"] > 0
            assert figure["x_mpi"] is None
            busbw.append(figure["busbw_gb_per_s"])
    assert data["average_busbw_gb_per_s"] == pytest.approx(np.mean(busbw))
    report = CollectiveReport.from_json(data)
    assert json.loads(report.dump()) == data


def test_csv_says_the_same_as_json_and_a_plot_is_drawn(tmp_path: Path) -> None:
    table, plot = tmp_path / "table.csv", tmp_path / "plot.png"
    found = measured("broadcast", tmp_path, "--csv", str(table), "--plot", str(plot), "-r", "1")
    for line, one in zip(csv.DictReader(io.StringIO(table.read_text())), found.rows, strict=True):
        assert one.inside is not None
        assert (line["op"], line["placement"], line["root"], line["wrong"]) == (
            "broadcast",
            "in-place",
            "1",
            "0",
        )
        assert float(line["time_us"]) == pytest.approx(one.inside.timing.median_s * 1e6)
        assert float(line["busbw_gb_per_s"]) == pytest.approx(one.busbw(one.inside))
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---- figures made by hand


def timing(*us: float, share: float | None = None) -> Timing:
    return Timing(tuple(u * 1e-6 for u in us), () if share is None else (share,) * len(us), 1)


def row(size: int, out: Figure | None, inside: Figure | None = None, **more: Any) -> Row:
    plain = {
        "op": "all_reduce",
        "ranks": 2,
        "count": size // 4,
        "dtype": "float32",
        "redop": "sum",
        "root": None,
    }
    return Row(size_bytes=size, out=out, inside=inside, **{**plain, **more})


def report(rows: Sequence[Row], **more: Any) -> CollectiveReport:
    settings = Settings(
        "all_reduce", tuple(row.size_bytes for row in rows), redops=("sum",), transport="mpi", **more
    )
    return CollectiveReport((("lowshard", "1"), ("load", "x")), settings, 2, "mpi", tuple(rows))


def test_a_busy_machine_is_said_and_its_figures_are_marked() -> None:
    busy = report(
        [row(1024, Figure(timing(5.0, 7.0, share=0.5), 0)), row(2048, Figure(timing(5.0, share=1.0), 0))]
    )
    listing = Listing(busy.settings, ("x memcpy",))
    (first,), (second,) = (list(listing.row(one)) for one in busy.rows)
    assert "~6.00" in first
    assert "~" not in second
    assert "busy" in "\n".join(listing.close(busy))
    calm = report([row(1024, Figure(timing(5.0, share=0.97), 0))])
    assert "busy" not in "\n".join(listing.close(calm))


def test_too_little_bandwidth_is_exit_code_1() -> None:
    assert bench("all_gather", "--min-busbw", "1e6") == 1
    assert bench("all_gather", "--min-busbw", "0") == 0


def test_a_plot_has_a_line_for_each_placement_and_rival(tmp_path: Path) -> None:
    mpi = timing(20.0)
    found = report(
        [row(s, Figure(timing(10.0), 0, 1, 0.5, mpi), Figure(timing(30.0), 0)) for s in (1024, 2048)]
    )
    drawn = {name: (sizes, times, busbw) for name, sizes, times, busbw in lines(found)}
    assert set(drawn) == {"float32 sum, out-of-place", "float32 sum, in-place", "float32 sum, mpi4py's own"}
    sizes, times, busbw = drawn["float32 sum, mpi4py's own"]
    assert sizes == [1024, 2048]
    assert times == pytest.approx([20.0, 20.0])
    assert busbw == pytest.approx([1024 / 20e-6 / 1e9, 2048 / 20e-6 / 1e9])
    draw(found, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_bytes().startswith(b"<?xml")


# ---- promises


def judged(found: CollectiveReport, check: str = "hash") -> list[tuple[float, str, bool | None]]:
    return [(v.limit, v.unit, v.ok) for v in promise.verdicts(found, check)]


def test_promised_multiples_of_a_memcpy_hold_for_their_form_and_sizes() -> None:
    def one(size: int, x: float, share: float = 1.0) -> Row:
        return row(size, Figure(timing(10.0, share=share), 0, x), Figure(timing(10.0), 0, 99.0))

    mega = 1 << 20
    rows = [
        one(mega, 9),
        one(16 * mega, 2.004),
        one(64 * mega, 2.1),
        one(64 * mega, 2.1, 0.5),
        one(128 * mega, 9),
    ]
    assert judged(report(rows, window=True)) == [
        (2.0, "x memcpy", True),
        (2.0, "x memcpy", False),
        (2.0, "x memcpy", None),  # it missed, but the machine was busy
    ]
    assert judged(report(rows)) == []
    assert judged(report(rows, window=True, order="rank")) == []
    assert judged(dataclasses.replace(report(rows, window=True), ranks=4)) == []
    assert judged(dataclasses.replace(report(rows, window=True), transport="nccl")) == []


def test_promised_times_beside_mpi_are_a_ratio_from_64_kb_and_microseconds_below() -> None:
    def one(size: int, us: float, mpi_us: float, apart: bool | None = False) -> Row:
        return row(size, Figure(timing(us), 0, 9.0, us / mpi_us, timing(mpi_us)), apart=apart)

    rows = [
        one(65536, 12, 10),
        one(1 << 20, 13, 10),
        one(1 << 20, 13, 10, None),
        one(1024, 8, 3),
        one(512, 10, 3),
    ]
    found = dataclasses.replace(report(rows, compare_mpi=True), small_all_reduce_s=2e-6)
    assert judged(found) == [
        (1.2, "x mpi", True),
        (1.2, "x mpi", False),
        (1.85, "x mpi", True),  # cores that share no cache
        (pytest.approx(9.0), "us", True),
        (pytest.approx(9.0), "us", False),
    ]
    assert [(limit, ok) for limit, _, ok in judged(found, "off")[3:]] == [(pytest.approx(6.0), False)] * 2
    assert len(judged(found, "full")) == 3


def test_what_has_no_limit_is_known_before_the_run() -> None:
    def why(ranks: int = 2, check: str = "hash", **settings: Any) -> str | None:
        base = Settings("all_reduce", (1 << 10, 16 << 20), redops=("sum",))
        return promise.why_no_limits(dataclasses.replace(base, **settings), ranks, check)

    assert why(window=True) is None
    assert why(compare_mpi=True) is None
    assert why(compare_mpi=True, check="full") is None
    assert why(compare_mpi=True, check="full", sizes=(64,)) is not None
    assert why(window=True, ranks=4) is not None
    assert why(window=True, sizes=(1024,)) is not None
    assert why() is not None
    assert why(window=True, redops=("max",)) is not None


# ---- memory, progress, interruption


def test_buffers_that_would_not_fit_are_refused() -> None:
    settings = Settings("all_gather", (1 << 20, 1 << 10))
    assert need_bytes(settings, 2) == 3 * 2 << 20  # two placements and the copy, two buffers each
    require_fits(10, 10)
    require_fits(10, None)
    with pytest.raises(BufferMismatchError, match="smaller -e"):
        require_fits(2_000_000_000, 1_000_000_000)
