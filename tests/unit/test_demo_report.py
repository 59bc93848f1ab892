"""The demo's report: verdicts, JSON both ways, the table, the picture, progress lines."""

from __future__ import annotations

import io
import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from lowshard import DeviceMesh, Layout
from lowshard.demo import demo_picture, demo_report, encoder
from lowshard.demo.demo_report import Accuracy, DemoReport, MatrixView, PhaseRow, speed_text
from lowshard.demo.progress_bar import Progress
from lowshard.demo.source import SYNTHETIC_CONFIG
from lowshard.errors import CheckpointError


def view_of(name: str, shape: tuple[int, int], ranks: int) -> MatrixView:
    view = encoder.shard_view(name, shape, SYNTHETIC_CONFIG)
    spec = encoder.tensor_parallel_specs(SYNTHETIC_CONFIG, {name: shape})[name]
    before = Layout.from_spec(DeviceMesh((ranks,), ("fsdp",)), shape, "float32", ("fsdp", None))
    after = Layout.from_spec(DeviceMesh((2, ranks // 2), ("dp", "tp")), view, "float32", spec)
    return MatrixView(
        name,
        shape,
        tuple(before.box(rank) for rank in range(ranks)),
        tuple(encoder.flat_box(name, after.box(rank), SYNTHETIC_CONFIG) for rank in range(ranks)),
        spec.index("tp"),
        SYNTHETIC_CONFIG.num_heads,
    )


@pytest.fixture
def whole() -> DemoReport:
    at = "encoder.layer.0.attention."
    return DemoReport(
        checkpoint="all-MiniLM-L6-v2",
        checkpoint_bytes=90868376,
        world_size=4,
        before="fsdp 4, every tensor cut on dim 0",
        after="dp 2 x tp 2",
        rows=(
            PhaseRow("read, training layout", 22717094, 0.031, 0.73, 3.1, "own byte ranges only"),
            PhaseRow("move to serving layout", 68151282, 0.043, 1.58, 1.9, "105 tensors, bit for bit"),
            PhaseRow("encode unsharded, one process", None, 1.02, None, None, "32 sentences"),
        ),
        memcpy_gb_per_s=3.02,
        accuracy=(
            Accuracy("fp32 weights", "max_difference", 1.4e-7, 1e-5),
            Accuracy("MXFP8 weights", "cosine", 0.9972, 0.99),
        ),
        accuracy_note="32 sentences, tokenizer.json",
        matrices=(
            view_of(f"{at}self.query.weight", (192, 192), 4),
            view_of(f"{at}output.dense.weight", (192, 192), 4),
        ),
        environment=(("machine", "2 cores"), ("python", "3.11.7")),
    )


def test_a_report_is_the_same_after_json(whole: DemoReport, tmp_path: Path) -> None:
    assert DemoReport.from_json(whole.to_json()) == whole
    demo_report.write_json(whole, tmp_path / "new" / "demo.json")
    text = (tmp_path / "new" / "demo.json").read_text()
    assert json.loads(text) == whole.to_json()
    assert DemoReport.from_json(json.loads(text)) == whole
    assert json.loads(text)["ok"] is True
    assert json.loads(text)["accuracy"][1]["ok"] is True
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["demo.json"]


def test_other_json_is_refused() -> None:
    with pytest.raises(CheckpointError, match="format 'lowshard-demo-1', got 'x'"):
        DemoReport.from_json({"format": "x"})


def test_one_bad_check_makes_the_report_bad(whole: DemoReport) -> None:
    assert whole.ok
    assert not replace(whole, rows=(replace(whole.rows[0], ok=False), *whole.rows[1:])).ok
    for figure, measured in (
        (whole.accuracy[0], 1.1e-5),
        (whole.accuracy[1], 0.98),
        (whole.accuracy[1], math.nan),
    ):
        bad = replace(whole, accuracy=(replace(figure, measured=measured),))
        assert not bad.ok
        assert bad.to_json()["accuracy"][0]["ok"] is False
        assert not DemoReport.from_json(bad.to_json()).ok


def render(demo: DemoReport, width: int = 110) -> str:
    from rich.console import Console

    out = io.StringIO()
    demo_report.render_table(demo, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_shows_every_figure_and_the_verdict(whole: DemoReport) -> None:
    text = render(whole)
    for shown in ("all-MiniLM-L6-v2, 90.9 MB, 4 ranks", "68.2 MB", "0.043", "1.58", "1.9", "bit for bit",
                  "1.4e-07", "at most 1e-05", "0.997200", "at least 0.99", "dp 2 x tp 2", "3.11.7"):  # fmt: skip
        assert shown in text
    assert "every check holds" in text
    assert "FAILED" not in text
    bad = render(replace(whole, rows=(replace(whole.rows[0], ok=False),)))
    assert "not every check holds" in bad
    assert bad.count("FAILED") == 2


def test_a_narrow_table_puts_the_checks_below_and_cuts_nothing(whole: DemoReport) -> None:
    wide, narrow = render(whole), render(whole, 80)
    assert "move to serving layout: 105 tensors, bit for bit" in narrow
    assert "move to serving layout: " not in wide
    assert "…" not in wide + narrow
    assert max(map(len, narrow.splitlines())) <= 80


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_picture_is_a_png_of_a_sensible_size(whole: DemoReport, tmp_path: Path) -> None:
    demo_picture.draw(whole, tmp_path / "demo.png")
    assert png_size(tmp_path / "demo.png") == (1360, 1920)
    assert 50_000 < (tmp_path / "demo.png").stat().st_size < 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


def test_the_picture_can_be_drawn_of_little_and_of_odd_reports(whole: DemoReport, tmp_path: Path) -> None:
    at = "encoder.layer.0.attention."
    odd = (
        replace(
            whole, rows=(), matrices=(), accuracy=(), memcpy_gb_per_s=None, accuracy_note=None, world_size=1
        ),
        replace(whole, matrices=(view_of(f"{at}self.query.weight", (192, 192), 20),), world_size=20),
        replace(
            whole,
            accuracy=(
                replace(whole.accuracy[0], measured=0.0),
                replace(whole.accuracy[1], measured=math.nan),
            ),
        ),
        replace(whole, rows=(replace(whole.rows[0], gb_per_s=0.0, ok=False),), memcpy_gb_per_s=0.0),
    )
    for demo in odd:
        demo_picture.draw(demo, tmp_path / "demo.png")
        assert png_size(tmp_path / "demo.png") == (1360, 1920)


def test_only_rank_0_prints_progress() -> None:
    for rank, lines in ((0, 6), (1, 0)):
        out = io.StringIO()
        progress = Progress(rank, out)
        with progress.phase("move") as note:
            note("68.2 MB a rank")
        with progress.transfer("fetch", 100) as update:
            for done_bytes in (10, 30, 60, 70, 100):
                update(done_bytes)
        assert len(out.getvalue().splitlines()) == lines
    assert rank == 1


def test_plain_progress_says_phase_time_and_note() -> None:
    out = io.StringIO()
    with Progress(0, out).phase("move") as note:
        note("68.2 MB a rank")
    assert out.getvalue().startswith("lowshard demo: ok move ")
    assert out.getvalue().endswith(" s  68.2 MB a rank\n")
    with pytest.raises(ValueError, match="stop"), Progress(0, out).phase("verify"):
        raise ValueError("stop")
    assert "lowshard demo: FAILED verify" in out.getvalue()


def test_a_terminal_gets_bars() -> None:
    out = io.StringIO()
    progress = Progress(0, out, terminal=True)
    with progress.transfer("fetch a[b]", 100) as update:
        update(50)
    with progress.phase("move"):
        pass
    with progress.phase("read c[/d]"):  # as markup it closes what was never opened
        pass
    assert "fetch a[b]" in out.getvalue()
    assert "\x1b[" in out.getvalue()
    assert "✓" in out.getvalue()


def test_a_slow_phase_has_a_speed_above_zero() -> None:
    assert [speed_text(speed) for speed in (12.345, 0.1, 0.0456, 0.0012)] == [
        "12.35",
        "0.10",
        "0.046",
        "0.0012",
    ]
