"""The demo's report: its table and its picture."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowshard import DeviceMesh, Layout
from lowshard.demo import demo_picture, demo_report


def matrix(name: str, ranks: int, spec: tuple[str | None, str | None]) -> dict[str, Any]:
    before = Layout.from_spec(DeviceMesh((ranks,), ("fsdp",)), (192, 192), "float32", ("fsdp", None))
    after = Layout.from_spec(DeviceMesh((2, ranks // 2), ("dp", "tp")), (192, 192), "float32", spec)
    boxes = {when: [lay.box(r) for r in range(ranks)] for when, lay in (("before", before), ("after", after))}
    return {"name": name, "shape": [192, 192], **boxes}


def row(phase: str, moved: int | None, seconds: float, check: str, ok: bool = True) -> dict[str, Any]:
    return {"phase": phase, "moved_bytes_per_rank": moved, "seconds": seconds, "check": check, "ok": ok}


def figure(label: str, kind: str, measured: float | None, bound: float, ok: bool = True) -> dict[str, Any]:
    return {"label": label, "kind": kind, "measured": measured, "bound": bound, "ok": ok}


@pytest.fixture
def whole() -> dict[str, Any]:
    at = "encoder.layer.0.attention."
    return {
        "checkpoint": "all-MiniLM-L6-v2", "checkpoint_bytes": 90868376, "world_size": 4, "ok": True,
        "before": "every tensor cut on dim 0", "after": "dp 2 x tp 2",
        "rows": [
            row("move to the serving layout", 68151282, 0.043, "moved what was planned"),
            row("encode with fp32 weights", None, 1.02, "max difference"),
        ],
        "accuracy": [
            figure("fp32 weights", "max_difference", 1.4e-7, 1e-5), figure("MXFP8 weights", "cosine", 0.9972, 0.99),
        ],
        "accuracy_note": "32 sentences, tokenizer.json",
        "matrices": [
            matrix(f"{at}self.query.weight", 4, ("tp", None)), matrix(f"{at}output.dense.weight", 4, (None, "tp")),
        ],
        "environment": {"machine": "2 cores", "python": "3.11.7"},
    }  # fmt: skip


def render(report: dict[str, Any], width: int) -> str:
    out = io.StringIO()
    demo_report.render_table(report, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 110])
def test_the_table_shows_every_figure_and_the_verdict(whole: dict[str, Any], width: int) -> None:
    text = render(whole, width)
    for shown in ("68.2 MB", "0.043", "moved what was planned", "dp 2 x tp 2", "3.11.7", "every check holds"):
        assert shown in text
    assert "all-MiniLM-L6-v2, 90.9 MB, 4 ranks" in " ".join(text.split())
    assert "…" not in text
    assert "FAILED" not in text
    bad = render({**whole, "ok": False, "rows": [{**whole["rows"][0], "ok": False}]}, width)
    assert "not every check holds" in bad
    assert bad.count("FAILED") == 2


def test_the_picture_can_be_drawn_of_little_and_of_odd_reports(whole: dict[str, Any], tmp_path: Path) -> None:
    bad = [figure("a", "cosine", None, 0.99, False), figure("b", "max_difference", 0.0, 1e-5)]
    for report in (
        whole,
        {**whole, "matrices": [], "accuracy": [], "accuracy_note": "no forward pass: " + "why " * 40},
        {
            **whole,
            "matrices": [matrix("w" * 200, 20, ("tp", None))],
            "world_size": 20,
            "ok": False,
            "accuracy": bad,
        },
    ):
        demo_picture.draw(report, tmp_path / "demo.png")
        data = (tmp_path / "demo.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == (1360, 1280)
        assert len(data) > 30_000
        assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]
