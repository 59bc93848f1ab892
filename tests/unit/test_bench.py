"""`lowshard bench`: the harness that all benchmarks share, and one small run of each. No figure is judged here."""

from __future__ import annotations

import csv
import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowshard import cli
from lowshard import comm as lc
from lowshard.bench import bench_argument as options
from lowshard.bench import bench_kernels, bench_limits, plot
from lowshard.bench.bench_device import HostDevice, why_no_gpu
from lowshard.bench.bench_limits import CollectiveRun
from lowshard.bench.bench_report import Beside, Limit, Report, Row, Spread, better
from lowshard.bench.bench_table import standard
from lowshard.bench.bench_transition import ONE_AXIS, TWO_AXES, floor_of, transitions
from lowshard.bench.bench_world import ThreadHostComm
from lowshard.bench.collective import size_list
from lowshard.bench.collective_case import OPERATIONS, Case, Settings
from lowshard.bench.turn_timing import RankClock, Runner, Timing, ToldClock, combined, take_turns
from lowshard.bench.value_pattern import Pattern
from lowshard.errors import LowshardError
from lowshard.kernels.engine import host_engine

QUICK = ["--transport", "loopback", "-n", "2", "-w", "1", "-m", "1"]
SMALL = [*QUICK, "-b", "64", "-e", "4K", "-f", "8"]
KERNELS = {
    "mxfp8": ["--size", "6400", "--rounds", "2"],
    "pack": ["--size", "20kB", "--boxes", "5", "--rounds", "2"],
}
NO_GPU = why_no_gpu()


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled here."""
    monkeypatch.setenv("LOWSHARD_KERNELS", "plain")
    host_engine.cache_clear()
    yield
    host_engine.cache_clear()


def timing(*us: float, share: float | None = None) -> Timing:
    return Timing(tuple(u * 1e-6 for u in us), () if share is None else (share,) * len(us))


def run(tmp_path: Path, *argv: str, code: int = 0) -> Report:
    """Run a benchmark and return its report, as its JSON file has it."""
    path = tmp_path / "report.json"
    assert cli.main(["bench", *argv, "--json", str(path)]) == code
    return Report.from_json(json.loads(path.read_text()))


# ---- taking turns


def test_in_each_round_every_work_runs_once_and_warm_rounds_do_not_count() -> None:
    log: list[str] = []

    def told(name: str) -> Runner:
        def work() -> float:
            log.append(name)
            return float(len(log))

        return Runner(work, before=lambda: log.append(f"<{name}"), after=lambda: log.append(f"{name}>"))

    first, second = take_turns([told("a"), told("b")], 2, ToldClock(), warm=1)
    a_round = ["<a", "a", "a>", "<b", "b", "b>"]
    assert log == a_round * 3
    assert (first.seconds, second.seconds) == ((8.0, 14.0), (11.0, 17.0))
    log.clear()
    take_turns([told("a"), told("b")], 2, ToldClock(), order=lambda turn: (1, 0) if turn else (0, 1))
    assert [name for name in log if len(name) == 1] == ["a", "b", "b", "a"]


def test_ranks_begin_together_and_batches_have_as_many_calls_as_asked_for() -> None:
    import threading

    barrier, slots, calls = threading.Barrier(3), [None] * 3, [0] * 3

    def work(comm: Any) -> list[Timing]:
        host = ThreadHostComm(barrier, slots, comm.rank)

        def count() -> None:
            calls[comm.rank] += 1

        return take_turns([Runner(count), Runner(comm.barrier)], 4, RankClock(host, 3, calls=5), warm=1)

    every = lc.run_loopback(3, work)
    assert calls == [25] * 3
    assert every[0] == every[1] == every[2]
    assert all(len(found.seconds) == 4 and found.calls == 5 and min(found.seconds) > 0 for found in every[0])


def test_the_time_of_a_batch_is_a_ranks_or_the_span_of_a_host() -> None:
    rng = np.random.default_rng(1)
    begins = rng.random((4, 9))
    ends = begins + rng.random((4, 9))
    spans = ends - begins
    for how, wanted in enumerate((spans[0], spans.mean(0), spans.min(0), spans.max(0))):
        assert np.array_equal(combined(begins, ends, how, "aabb"), wanted)  # type: ignore[arg-type]
    assert np.array_equal(combined(begins, ends, "span", "aaaa"), ends.max(0) - begins.min(0))
    two = [ends[at].max(0) - begins[at].min(0) for at in (slice(0, 2), slice(2, 4))]
    assert np.array_equal(combined(begins, ends, "span", "aabb"), np.maximum(*two))


# ---- what counts


@pytest.mark.parametrize("seed", range(5))
def test_a_ratio_is_the_median_over_the_rounds_that_were_clean_for_both(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine, theirs, a, b = rng.random((4, 30)) + 0.1
    a, b = a > 0.5, b > 0.5
    work, copy = (Timing(tuple(s), tuple(0.5 + 0.5 * c)) for s, c in ((mine, a), (theirs, b)))
    row = Row("x", 100, work, {"memcpy": Beside(copy, 2.0)})
    kept = 2 * (mine / theirs)[a & b]
    spread = row.ratio("memcpy")
    assert spread.median == pytest.approx(np.median(kept))
    assert (spread.low, spread.high) == pytest.approx(tuple(np.percentile(kept, (25, 75))))
    assert (spread.least, spread.most) == pytest.approx((kept.min(), kept.max()))
    assert work.median_s == pytest.approx(np.median(mine[a]))
    assert row.gb_per_s == pytest.approx(100 / work.median_s / 1e9)


def test_without_enough_clean_rounds_all_count_and_the_figure_is_a_bound() -> None:
    busy = Timing((1.0, 2.0, 6.0, 9.0), (0.95, 0.92, 0.5, 0.5))
    assert (busy.is_bound, busy.median_s) == (True, 4.0)
    calm = Timing((1.0, 2.0, 6.0, 9.0), (0.95, 0.92, 0.91, 0.5))
    assert (calm.is_bound, calm.median_s) == (False, 2.0)
    assert Spread.of(calm.over(busy)).median == 1.0
    assert Timing((1.0, 2.0)).is_bound is False
    column = standard("memcpy")[4]
    assert column.cell(Row("x", 1, busy, {"memcpy": Beside(calm)})) == "~1.00"


# ---- limits


def test_limits_are_at_most_at_least_or_not_judged() -> None:
    assert [Limit("f", m, 2.0).ok for m in (1.9, 2.0, 2.1)] == [True, True, False]
    assert [Limit("f", m, 2.0, at_least=True).ok for m in (1.9, 2.0, 2.1)] == [False, True, True]
    assert Limit("f", 2.1, 2.0, is_judged=False).ok is None
    row = Row("x", 1, timing(30.0), {"memcpy": Beside(timing(10.0))})
    near, far = row.limited("memcpy", 2.9), row.limited("memcpy", 2.0)
    assert row.limited("memcpy", None) is row
    assert near.is_missed
    assert better(far, near) is near
    assert better(near, None) is near


def test_check_ends_with_1_and_names_each_figure_that_misses_its_limit(
    capsys: pytest.CaptureFixture[str], plain_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for limit, code in ((0.0, 1), (1e12, 0)):
        for name in bench_limits.KERNELS:
            monkeypatch.setitem(bench_limits.KERNELS, name, limit)
        report = run(tmp_path, "mxfp8", "--device", "cpu", *KERNELS["mxfp8"], "--check", code=code)
        said = capsys.readouterr().err.splitlines()
        limited = [name for name in bench_kernels.MXFP8_NAMES if name in bench_limits.KERNELS]
        for name in limited if code else ():
            assert sum(line.startswith(f"lowshard bench mxfp8: {name}: x memcpy ") for line in said) == 1
        assert len(said) == len(limited) * code
        # Measured again, none lost.
        assert [row.name for row in report.rows] == list(bench_kernels.MXFP8_NAMES)


def collective_row(size: int, us: float, memcpy_us: float, mpi_us: float | None = None, **more: Any) -> Row:
    beside = {"memcpy": Beside(timing(memcpy_us))}
    if mpi_us is not None:
        beside["mpi"] = Beside(timing(mpi_us))
    facts = {"size_bytes": size, "placement": "out-of-place", "apart": False, **more}
    return Row("r", size, timing(us, share=more.pop("share", 1.0)), beside, facts=facts)


def test_limits_of_collectives_are_for_their_form_sizes_and_ranks() -> None:
    def judged(run: CollectiveRun, *rows: Row) -> list[tuple[float, bool | None]]:
        return [(limit.bound, limit.ok) for row in rows for limit in run.judge(row).limits]

    mega = 1 << 20
    window = CollectiveRun("all_reduce", 2, "mpi", "hash", "window")
    rows = [
        collective_row(size * mega, us, 10.0) for size, us in ((1, 90.0), (16, 20.0), (64, 21.0), (128, 90.0))
    ]
    assert judged(window, *rows) == [(2.0, True), (2.0, False)]
    busy = collective_row(64 * mega, 21.0, 10.0, share=0.5)
    assert judged(window, busy) == [(2.0, None)]
    for other in (replace(window, form=""), replace(window, ranks=4), replace(window, transport="nccl")):
        assert judged(other, *rows) == []
    plain = CollectiveRun("all_reduce", 2, "mpi", "hash", small_all_reduce_s=2e-6)
    for (size, us, mpi_us, more), found in (  # that share no cache; then some microseconds at most
        ((65536, 12.0, 10.0, {}), (1.2, True)), ((mega, 13.0, 10.0, {}), (1.2, False)),
        ((mega, 13.0, 10.0, {"apart": None}), (1.85, True)), ((1024, 10.0, 3.0, {}), (pytest.approx(9.0), False)),
    ):  # fmt: skip
        assert judged(plain, collective_row(size, us, 1.0, mpi_us, **more)) == [found]
    assert window.why_none(mega * 16, True, False) is None
    assert window.why_none(mega, False, False) is not None
    assert plain.why_none(64, False, True) is None
    assert replace(plain, check="full").why_none(64, False, True) is not None


# ---- table, JSON, plot


def a_report() -> Report:
    rows = [
        Row(f"row {i}", 1 << (10 + i), timing(10.0 * i + 1, 3, 5), {"mpi": Beside(timing(4, 5, 6, share=0.9), 1.5)},
            facts={"series": "line", "at": 1 << (10 + i), "wrong": 0, "none": None}).limited("mpi", 2.0)
        for i in range(3)
    ]  # fmt: skip
    return Report(
        "made",
        (("cpu", "x"),),
        {"rounds": 3},
        tuple(rows),
        (Limit("g", 1.0, 2.0, at_least=True),),
        ("a note",),
    )


def test_a_report_comes_back_from_json_the_same() -> None:
    report = a_report()
    again = Report.from_json(json.loads(report.dump()))
    assert again == report
    assert again.dump() == report.dump()
    data = report.to_json()
    assert data["ok"] is False
    assert data["rows"][0]["beside"]["mpi"]["ratio"]["median"] == report.rows[0].ratio("mpi").median
    assert data["rows"][0]["limits"][0]["ok"] is report.rows[0].limits[0].ok


def test_json_is_printed_in_the_tables_place_or_written_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "broadcast", *SMALL]
    for dash in ([], ["-"]):
        assert cli.main([*argv, "--json", *dash]) == 0
        assert json.loads(capsys.readouterr().out)["bench"] == "broadcast"
    assert cli.main([*argv, "--json", str(tmp_path / "x.json")]) == 0
    assert "out-of-place" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text())["bench"] == "broadcast"
    # As in the other commands.
    assert cli.main(["doctor", "--settings", "--json", str(tmp_path / "s.json")]) == 0
    assert "LOWSHARD_CHECK = " in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())[0]["name"].startswith("LOWSHARD_")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_has_lines_over_sizes_or_a_bar_a_row(suffix: str, tmp_path: Path) -> None:
    report = a_report()
    lines = plot.lines_of(report.rows)
    assert {name: [at for at, _, _ in line] for name, line in lines.items()} == {
        "line": [1024, 2048, 4096], "line, mpi4py": [1024, 2048, 4096],
    }  # fmt: skip
    bars = replace(report, rows=tuple(replace(row, facts={}) for row in report.rows))
    for name, drawn in (("lines", report), ("bars", bars)):
        path = tmp_path / f"{name}{suffix}"
        plot.draw(drawn, path)
        assert path.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    with pytest.raises(LowshardError, match=r"\.png"):
        plot.require_plot(tmp_path / "x.gif")


# ---- options


def test_sizes_and_counts_are_read_as_they_are_written() -> None:
    assert [options.size(text) for text in ("1024", "1k", "64M", "1.5K", "2KB")] == [
        1024, 1024, 64 << 20, 1536, 2048,
    ]  # fmt: skip
    assert options.sizes("64Mi, 1GB,5B") == (
        options.Size(64 << 20, False), options.Size(10**9, True), options.Size(5, True)
    )  # fmt: skip
    assert options.list_of(options.count)("4,1,4") == (4, 1)
    wrong = (
        (options.size, ("", "1X", "-1", "0", "1.3", "1e3")), (options.sizes, ("64 potatoes", "0", "1,")),
        (options.count, ("0", "-1", "x", "9" * 12)), (options.positive, ("nan", "inf", "0", "x")),
        (options.file, ("/no/such/folder/x", "/", "~/x")),
    )  # fmt: skip
    for kind, texts in wrong:
        for text in texts:
            with pytest.raises(ArgumentTypeError):
                kind(text)
    assert size_list(1024, 9000, 2, None) == (1024, 2048, 4096, 8192)
    assert size_list(1, 4, 1.2, None) == (1, 2, 3)
    assert size_list(100, 300, 2, 100) == (100, 200, 300)
    for begin, end, factor in ((10, 5, 2.0), (1, 10, 1.0), (8, 64, nan)):
        with pytest.raises(LowshardError, match=r"-[ef]"):
            size_list(begin, end, factor, None)
    settings = Settings("all_reduce", (1, 2), redops=("sum",), each=True)
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    "line",
    [
        "all_reduce -b 4K -e 1K", "broadcast -r 2 --ranks 2", "all_reduce --compare-mpi --transport loopback",
        "all_reduce --transport loopback -b 1024G -e 1024G", "all_reduce --plot x.gif", "all_reduce --check -e 1K",
        "mxfp8 --only quantise", "mxfp8 --device cpu --check --only quantize-no", "mxfp8 --device cpu --size 1000000Gi",
        "redistribute --only S0->S1,R", "redistribute --only S0,S1->S1,S0 --ranks 2",
        "refit --model sample --from fsdp=x",
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    line: str, capsys: pytest.CaptureFixture[str], plain_kernels: None
) -> None:
    assert cli.main(["bench", *line.split()]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.err.startswith("lowshard: error: ")
    assert shown.out == ""


# ---- one small run of each that needs no MPI


@pytest.mark.parametrize("bench", KERNELS)
def test_kernels_are_measured_beside_a_copy_of_the_same_traffic(
    bench: str, tmp_path: Path, plain_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path, bench, "--device", "cpu", *KERNELS[bench], "--plot", str(tmp_path / "x.png"))
    names = bench_kernels.MXFP8_NAMES if bench == "mxfp8" else bench_kernels.PACK_NAMES
    assert [row.name for row in report.rows] == list(names)
    shown = capsys.readouterr().out.splitlines()
    for row in report.rows:
        assert sum(line.startswith(f"{row.name}  ") for line in shown) == 1
        assert len(row.timing.seconds) == 2
        assert row.beside["memcpy"].scale == pytest.approx(1, rel=0.01)
    moved = {row.name: row.moved_bytes for row in report.rows}
    if bench == "mxfp8":
        assert moved["quantize bf16 -> e4m3 rceil"] == 6400 * 3 + 200
        assert moved["dequantize e4m3 -> fp32"] == 6400 * 5 + 200
    else:
        assert moved["pack boxes of 4 KB"] >= 20_000
        assert "in turn" in next(row for row in report.rows if row.name == bench_kernels.FUSED).beside
    assert (tmp_path / "x.png").stat().st_size > 0


def test_packing_rows_move_their_boxes(plain_kernels: None) -> None:
    boxes = bench_kernels._Boxes(HostDevice(), 5, 20_000)
    move = boxes.group(bench_kernels.BIG).moves[0]
    boxes.packed_boxes(bench_kernels.BIG, "").run()
    bits = move.array.view(np.uint16)
    wanted = np.concatenate([bits[start:stop] for ((start, stop),) in move.table.boxes])
    assert np.array_equal(move.packed.view(np.uint16), wanted)
    bits[:] = 0
    boxes.unpacked_boxes(bench_kernels.BIG, "").run()
    assert np.array_equal(np.concatenate([bits[a:b] for ((a, b),) in move.table.boxes]), wanted)


@pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU to use here: {NO_GPU}")
@pytest.mark.parametrize("bench", KERNELS)
def test_every_row_runs_on_a_gpu(bench: str, tmp_path: Path) -> None:
    report = run(tmp_path, bench, "--device", "cuda", *KERNELS[bench])
    assert {"gpu", "driver"} <= set(dict(report.machine))
    assert all(min(row.timing.seconds) > 0 for row in report.rows)


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_collective_is_right_and_has_a_row_a_size_and_placement(op: str, tmp_path: Path) -> None:
    report = run(tmp_path, op, *(QUICK if op == "barrier" else SMALL), "--ranks", "3")
    operation = OPERATIONS[op]
    assert (report.wrong, report.facts["ranks"], report.facts["transport"]) == (0, 3, "loopback")
    places = ["out-of-place"] * operation.out_of_place + ["in-place"] * operation.in_place
    wanted = [(size, place) for size in ((0,) if op == "barrier" else (64, 512, 4096)) for place in places]
    for row, (size, place) in zip(report.rows, wanted, strict=True):
        assert (row.facts["size_bytes"], row.facts["placement"]) == (
            operation.sizes(size, 4, 3).size_bytes,
            place,
        )
        assert row.timing.median_s > 0
        assert ("memcpy" in row.beside) == (op != "barrier")
        assert row.facts["algbw_gb_per_s"] == pytest.approx(row.gb_per_s)


def test_forms_types_reductions_csv_and_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(
        tmp_path, "reduce_scatter", *SMALL, "-d", "all", "-o", "all", "-e", "64", "--order", "tree", "-I"
    )
    assert (len(report.rows), report.wrong) == (10 * 5 * 2, 0)
    assert run(tmp_path, "all_gather", *SMALL, "--window").wrong == 0
    table = tmp_path / "table.csv"
    report = run(
        tmp_path, "broadcast", *SMALL, "--csv", str(table), "--plot", str(tmp_path / "x.svg"), "-r", "1"
    )
    for line, row in zip(csv.DictReader(table.read_text().splitlines()), report.rows, strict=True):
        assert (line["op"], line["placement"], line["root"], line["wrong"]) == (
            "broadcast",
            "in-place",
            "1",
            "0",
        )
        assert float(line["time_us"]) == pytest.approx(row.median_s * 1e6)
        assert float(line["x_memcpy"]) == pytest.approx(row.ratio("memcpy").median)
    run(tmp_path, "all_gather", *SMALL, "--min-busbw", "1e6", code=1)
    assert "average bus bandwidth" in capsys.readouterr().err


def test_a_wrong_value_is_counted_and_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Corrupting(lc.Communicator):  # type: ignore[misc, name-defined]
        after, calls = 0, 0

        def all_reduce(self, send: Any, recv: Any, *args: Any, **options: Any) -> None:
            super().all_reduce(send, recv, *args, **options)
            self.calls += 1
            if self.rank == 1 and self.calls > self.after:
                recv[-1] += 1

    monkeypatch.setattr(sys.modules["lowshard.comm.loopback"], "Communicator", Corrupting)
    report = run(tmp_path, "all_reduce", *SMALL, "-c", "3", code=1)
    # Three checks, each with exact and with random data; out of place once more after the timed calls.
    assert [row.facts["wrong"] for row in report.rows] == [7, 6] * 3
    monkeypatch.setattr(Corrupting, "after", 5)  # two checks and one warm-up a placement, then timed calls
    report = run(tmp_path, "all_reduce", *SMALL, "-e", "64", code=1)
    assert [row.facts["wrong"] for row in report.rows] == [1, 0]


def test_a_result_that_was_there_before_the_call_does_not_count() -> None:
    (comm,) = lc.loopback(1)
    case = Case(comm, Settings("all_gather", (64,)).request(64, "float32"), "out-of-place")
    pattern = Pattern("float32", 1, None)
    assert case.check(pattern) == 0
    pattern.fill(case.recv, 0)
    case.run = lambda: None
    assert case.check(pattern) == 16


@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_a_floor_writes_each_element_of_the_result(name: str) -> None:
    (made,) = transitions([name], 4, 1 << 18)
    elems = int(np.prod(made.dst.local_shape(3)))
    floor = floor_of(made, elems)
    floor()
    folded = made.terms > 1 and -(-elems // made.spread) >= elems
    wanted = sum(range(made.terms)) if folded else 1
    assert floor._out.size == elems
    assert (floor._out == wanted).all()


@pytest.mark.time_limit(60)
def test_publish_measures_between_two_processes(tmp_path: Path) -> None:
    report = run(tmp_path, "publish", "--size", "20M", "--rounds", "2")
    whole, changed = report.rows
    assert whole.moved_bytes == report.settings["bytes"] == 20 << 20
    assert 0.01 * whole.moved_bytes < changed.moved_bytes < 0.03 * whole.moved_bytes
    assert all(len(row.timing.seconds) == 2 and "bare" in row.beside for row in report.rows)
    assert changed.facts["of_whole"] > 0


def test_plan_measures_every_model(tmp_path: Path) -> None:
    report = run(tmp_path, "plan", "--rounds", "1", "--plot", str(tmp_path / "x.png"))
    assert {row.name for row in report.rows} >= set(bench_limits.PLAN_S)
    assert sum(len(row.limits) for row in report.rows) == len(bench_limits.PLAN_S)
