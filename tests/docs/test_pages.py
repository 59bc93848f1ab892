"""Every program and command of README and docs runs as written, and prints what the page shows."""

from __future__ import annotations

import ast
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from support import mode
from support.pages import ROOT, fits, pages, run, steps
from support.sources import tree_of


def chosen() -> list[Path]:
    """Return what a newcomer reads first; with --full all pages, as .ci/run has it."""
    if mode.full():
        return [page for page in pages() if list(steps((ROOT / page).read_text(encoding="utf-8")))]
    return [Path("README.md")]


def test_every_block_of_every_page_is_of_a_known_kind() -> None:
    counts = {page: len(list(steps((ROOT / page).read_text(encoding="utf-8")))) for page in pages()}
    assert sum(counts.values()) > 40
    assert counts[Path("README.md")] == 1


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.time_limit(400)
@pytest.mark.parametrize("page", chosen(), ids=str)
def test_what_the_page_shows_is_what_runs(page: Path, tmp_path: Path, full: bool) -> None:
    missing: set[str] = set()
    for step in steps((ROOT / page).read_text(encoding="utf-8")):
        if step.slow and not full:
            continue
        if step.missing:
            missing.add(step.missing)
            continue
        printed = run(step, tmp_path)
        told = (
            f"{page}, line {step.line}: {step.command}\nthe page shows:\n{step.shown}\nit prints:\n{printed}"
        )
        assert fits(step.shown, printed), told
    if missing:  # and all else is as the page says
        pytest.skip(f"programs of {page} need {', '.join(sorted(missing))}, not installed here")


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 1300


def test_the_readme_has_the_page_of_figures_figures() -> None:
    row = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| all_reduce")
    )
    found = re.findall(r"0\.\d+ to 0\.\d+", row)
    assert found
    assert all(figure in (ROOT / "docs/developer/figures.md").read_text() for figure in found)


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of the site are checked where it is built."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert "//" not in path, link
        target = ROOT / (path or "README.md")
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}
            assert anchor in slugs, link


def test_headings_of_troubleshooting_are_words_of_messages() -> None:
    texts = []
    for folder in ("lowshard", "kernels", "launch", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                    value = node.value
                    texts.append(value if isinstance(value, str) else value.decode("latin-1"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(headings) > 20
    assert [heading for heading in headings if not any(heading in text for text in texts)] == []


def test_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "pictures"
    spec = spec_from_file_location("draw", folder / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.glob("*.svg")}
    for path in tmp_path.iterdir():
        assert path.read_text() == (folder / path.name).read_text(), (
            f"run docs/pictures/draw.py for {path.name}"
        )
