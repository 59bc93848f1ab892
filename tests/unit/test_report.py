"""Report pages: what is on them, that they stand alone, and how they look in a browser, narrow and wide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import browser

from lowshard import cli
from lowshard.bench import bench_fsdp, bench_plan
from lowshard.bench.bench_refit import Row as RefitRow
from lowshard.bench.model_refit import WayRow
from lowshard.demo.demo_report import DemoReport, MatrixView, PlanView
from lowshard.kernels.engine import host_engine
from lowshard.report.bench_page import model_page, redistribute_page, refit_page
from lowshard.report.demo_page import demo_page
from lowshard.report.page import render
from lowshard.report.svg import CurveLine, draw_curves, draw_matrix

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("jinja2", reason="pages need jinja2: pip install 'lowshard[plot]'")


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled here."""
    monkeypatch.setenv("LOWSHARD_KERNELS", "plain")
    host_engine.cache_clear()
    yield
    host_engine.cache_clear()


def a_demo() -> DemoReport:
    """A report as one was committed, with a plan, and with names that are hard to place."""
    report = DemoReport.from_json(json.loads((ROOT / "bench" / "results" / "demo.json").read_text()))
    plan = PlanView(
        (1_000_000,) * report.world_size, (1_000_000,) * report.world_size, 0.012, 0.034,
        f"encoder.layer.0.{'very_long_name_' * 12}weight", "step 1: all_gather along dp\n" + "x" * 300,
    )  # fmt: skip
    wide = MatrixView("a" * 90, (3, 40_000), tuple(((0, 3), (0, 40_000)) for _ in range(report.world_size)),
                      tuple(((0, 3), (10_000 * r, 10_000 * r + 10_000)) for r in range(report.world_size)))  # fmt: skip
    return replace(report, plan=plan, matrices=(*report.matrices, wide), checkpoint=f"<b>&{'n' * 80}")


def a_redistribution() -> dict[str, Any]:
    """What `lowshard bench redistribute --json` writes: one figure above its limit, one transition without one."""
    way = {"seconds": 0.012, "ratio": 1.7, "ratios": [1.7], "clean_rounds": 3}
    ways = {"shared": way, "private": {**way, "ratio": 2.1}}
    row = {
        "transition": "S0,S1->S1,S0", "mesh": [2, 2], "bytes": 64 << 20, "wrong": 0, "floor_s": 0.007, "ways": ways,
        "steps": ["all_to_all along a: float32[4096,4096] S0,S1 -> S1,S0"] * 3, "sent_bytes": [1 << 24, 1 << 25],
        "limit": 1.5, "private_limit": 2.5, "is_view": False,
    }  # fmt: skip
    other = {**row, "transition": "R->S0", "steps": [], "limit": None, "private_limit": None}
    return {"machine": {"cpu": "a processor"}, "ranks": 4, "rounds": 7, "rows": [row, other], "peers": []}


A_REFIT = (
    RefitRow("TP2 to TP4 dim 0, 16", "shown", 268_000_000, 134_000_000, 0.01, (0.1, 0.2), (0.1, 0.1), 1.6),
    RefitRow("TP2 to TP4 dim 0, mxfp8", "private", 268_000_000, 134_000_000, 0.01, (0.3,), (0.1,), 1.6),
)

A_MODEL = (
    WayRow("dense", 1.0, 67_000_000, 67_000_000, (0.03, 0.04), (0.02, 0.02), 1e-5, {"move": 0.03}),
    WayRow("gather, broadcast", 1.0, 240_000_000, 67_000_000, (0.09, 0.1), (0.02, 0.02), 0.09, {}),
)

A_PLAN = [
    bench_plan.Row("dense, 512 to 512", 256, 1024, 0.002, 0.002, 1.5, 0.003),
    bench_plan.Row(f"DeepSeek-V3 shape, {'2048 ' * 30}", 45_041, 2368, 0.4, 0.02, 42.0, 2.0),
    bench_plan.Row("dense, 8 to 8", 256, 16, 0.001, 0.002, 0.0, None),
]


def an_fsdp() -> list[dict[str, Any]]:
    """Rows of `lowshard bench fsdp --json`: one alone, one beside torch that is over its limit."""
    row = {
        "mode": "full", "ranks": 2, "params": 1_000_000, "wall_s": 0.1, "cpu_s": 0.2, "sent_bytes": 6_000_000,
        "expected_bytes": 6_000_000, "pool_bytes": 1 << 24, "state_bytes": 1 << 22, "peak_mib": 99.0, "base_mib": 50.0,
        "wait_s": 0.0,
    }  # fmt: skip
    beside = {"torch": "2.11", "torch_wall_s": 0.16, "torch_cpu_s": 1.0, "torch_peak_mib": 300.0}
    return [row, {**row, "mode": "none", **beside, "wall_ratio": 0.625, "cpu_ratio": 0.2}]


_THREADS = ("--transport", "loopback")


def pages(tmp_path: Path) -> dict[str, str]:
    """Return the pages of a demo and of benchmarks that are run here, tiny."""
    found = {
        "demo": render(demo_page(a_demo())),
        "redistribute": render(redistribute_page(a_redistribution())),
        "refit": render(refit_page(A_REFIT, 1.6)),
        "model": render(model_page(A_MODEL)),
        "plan": render(bench_plan.page_of(A_PLAN)),
        "fsdp": render(bench_fsdp.page_of(an_fsdp())),
    }
    argvs = {
        "mxfp8": ["mxfp8", "--device", "cpu", "--size", "6400", "--rounds", "2"],
        "pack": ["pack", "--device", "cpu", "--size", "20kB", "--boxes", "5", "--rounds", "2"],
        "all_reduce": ["all_reduce", "-b", "8", "-e", "4K", "-n", "2", "-m", "1", "-d", "all", *_THREADS],
        "barrier": ["barrier", "-n", "2", "-m", "1", *_THREADS],
    }  # fmt: skip
    for name, argv in argvs.items():
        assert cli.main(["bench", *argv, "--report", str(tmp_path / name)]) == 0
        assert [path.name for path in (tmp_path / name).iterdir()] == ["index.html"]
        found[name] = (tmp_path / name / "index.html").read_text(encoding="utf-8")
    return found


def test_pages_stand_alone_and_fit_at_400_and_1400_pixels(tmp_path: Path) -> None:
    made = pages(tmp_path)
    for name, page in made.items():
        assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(|<script""", page), name
        assert "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;&amp;" in made["demo"]  # names are told, never obeyed
    assert "<b>&" not in made["demo"]
    if browser.CHROMIUM is None:
        pytest.skip(browser.WHY_NOT)
    shown = [(name, width) for name in made for width in (400, 1400)]
    looks, console = browser.look([(made[name], width) for name, width in shown])
    assert {where: seen.misfits for where, seen in zip(shown, looks, strict=True) if seen.misfits} == {}
    assert console == []
    assert all(seen.elements > 20 for seen in looks)
    (dark,), _ = browser.look([(made["demo"], 400)], dark=True)
    assert dark.back != looks[0].back


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
def test_the_browser_sees_what_is_cut_off_and_what_the_console_says() -> None:
    wide = '<body><div style="width:600px">x</div><script>console.error("told")</script>'
    hidden = '<body><div style="width:100px;overflow:hidden"><p style="width:200px">x</p></div>'
    text = '<body><svg viewBox="0 0 100 20"><text x="90" y="10">much too long</text></svg>'
    looks, console = browser.look([(wide, 400), (hidden, 400), (text, 400)])
    for seen, told in zip(looks, ("outside", "overflows", "cut off"), strict=True):
        assert any(told in misfit for misfit in seen.misfits), seen
    assert any("told" in line for line in console)


def test_the_demo_page_has_every_figure_of_the_report() -> None:
    report = a_demo()
    page = render(demo_page(report))
    for row in report.rows:
        assert row.phase in page
        if row.gb_per_s is not None:
            assert f"{row.gb_per_s:.2f} GB/s" in page
    for figure in report.accuracy:
        assert figure.label in page
    assert "12.0 ms" in page  # predicted, beside
    assert "34.0 ms" in page  # measured
    failed = replace(report, rows=(replace(report.rows[0], ok=False, check="all is lost"), *report.rows[1:]))
    page = render(demo_page(failed))
    assert "a check failed" in page
    assert "FAILED: all is lost" in page


def test_pages_of_benchmarks_show_plan_prediction_and_what_is_over_its_limit() -> None:
    page = render(redistribute_page(a_redistribution()))
    assert "all_to_all along a" in page
    assert page.count('<i class="bad"') == 1  # 1.7 over 1.5; 2.1 is under 2.5
    assert "no step" in page
    page = render(refit_page(A_REFIT, 1.6))
    assert "1 rows over the limit" in page
    assert "150.0" in page  # measured


def test_pages_of_figures_say_what_is_over_its_limit_and_what_is_wrong() -> None:
    page = render(bench_plan.page_of(A_PLAN))
    assert "1 figures over their limit" in page
    assert page.count('<i class="bad"') == 1  # 4 ms over 3
    assert "1 of 2" in page
    assert "4.0 ms" in page
    page = render(bench_fsdp.page_of(an_fsdp()))
    assert "1 figures over their limit" in page  # 0.62 of torch's wall time
    assert "Beside torch FSDP2" in page
    alone = an_fsdp()[:1]
    assert "Beside torch" not in render(bench_fsdp.page_of(alone))
    page = render(bench_fsdp.page_of([{**alone[0], "sent_bytes": 4_000_000}]))
    assert "1 rows sent other bytes" in page
    assert "verdict failed" in page


def test_a_command_without_a_page_says_which_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["solve", "mlp", "--mesh", "tp=2"], ["doctor"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--report", "page"])
        assert "lowshard bench NAME --report DIR" in capsys.readouterr().err


def test_a_matrix_is_covered_by_its_holders_and_nothing_else(rng: np.random.Generator) -> None:
    for _ in range(50):
        rows, cols = (int(n) for n in rng.integers(1, 400, 2))
        cut = int(rng.integers(0, cols + 1))
        boxes = (((0, rows), (0, cut)), ((0, rows), (cut, cols)), ((0, rows), (cut, cols)))
        svg = draw_matrix((rows, cols), boxes, "m")
        _, _, wide, high = map(float, re.search(r'viewBox="([^"]+)"', svg)[1].split())  # type: ignore[index]
        rects = re.findall(
            r'<rect class="([^"]+)"(?: fill="none")? x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"',
            svg,
        )
        area = sum(float(w) * float(h) for name, _, _, w, h in rects if "c" in name.replace("edge", ""))
        assert area == pytest.approx(wide * high, rel=0.02)


def test_curves_lie_inside_their_frame() -> None:
    line = CurveLine("a", ((8.0, 0.5), (1024.0, 3.0), (2.0**30, 9000.0)), 0)
    svg = draw_curves([line], "bytes", "us")
    places = [tuple(map(float, pair)) for pair in re.findall(r'cx="([^"]+)" cy="([^"]+)"', svg)]
    assert len(places) == 3
    assert all(0 < x < 420 and 0 < y < 300 for x, y in places)
    assert draw_curves([], "bytes", "us") == ""
    assert "NaN" not in draw_curves([CurveLine("one", ((8.0, 1.0),), 1)], "bytes", "us").replace("nan", "NaN")


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    runs = [
        "mxfp8 --size 64",
        "all_reduce",
        "redistribute",
        "refit",
        "publish",
        "fsdp",
        "plan",
        "pack",
    ]
    for command in (["demo", "--synthetic"], *(["bench", *run.split()] for run in runs)):
        for place, told in (
            (tmp_path / "file", "is a file: Not a directory"),
            ("~/page", "a shell expands ~"),
        ):
            with pytest.raises(SystemExit, match="2"):
                cli.main([*command, "--report", str(place)])
            assert told in capsys.readouterr().err
