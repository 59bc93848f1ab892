"""Report pages: what is on them, that they stand alone, and how they look in a browser, narrow and wide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import browser

from lowshard import cli
from lowshard.demo.demo_report import DemoReport, MatrixView, PlanView
from lowshard.kernels.engine import host_engine
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


_THREADS = ("--transport", "loopback")


def pages(tmp_path: Path) -> dict[str, str]:
    """Return the pages of a demo and of benchmarks that are run here, tiny."""
    found = {"demo": render(demo_page(a_demo()))}
    argvs = {
        "mxfp8": ["mxfp8", "--device", "cpu", "--size", "6400", "--rounds", "2"],
        "pack": ["pack", "--device", "cpu", "--size", "20kB", "--boxes", "5", "--rounds", "2"],
        "all_reduce": ["all_reduce", "-b", "8", "-e", "32K", "-n", "2", "-m", "1", "-d", "all", *_THREADS],
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
    for name, page in made.items():
        for width in (400, 1400):
            seen = browser.look(page, width)
            assert seen["found"] == [], (name, width)
            assert seen["console"] == [], (name, width)
    light, dark = (browser.look(made["demo"], 400, dark=is_dark)["scheme"] for is_dark in (False, True))
    assert light != dark


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
def test_the_browser_test_sees_what_is_cut_off_and_what_the_console_says() -> None:
    wide = '<body><div style="width:600px">x</div><script>console.error("told")</script>'
    seen = browser.look(wide, 400)
    assert any("outside" in text for text in seen["found"])  # type: ignore[union-attr]
    assert any("told" in line for line in seen["console"])  # type: ignore[union-attr]


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
    for command in (["demo", "--synthetic"], ["bench", "mxfp8", "--size", "64"], ["bench", "all_reduce"]):
        assert cli.main([*command, "--report", str(tmp_path / "file")]) == 2
        assert "--report takes a folder" in capsys.readouterr().err
