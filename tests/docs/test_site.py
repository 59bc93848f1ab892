"""The site is built without a warning, such as of a broken link, and fetches nothing from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pages import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="the site needs mkdocs-material and mkdocstrings: pip install -e '.[docs]'",
)

_FETCHED = re.compile(
    r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//[^"]*"'
    r'|<link[^>]*\srel="(?:stylesheet|preconnect|icon|preload)"[^>]*\shref="(?:https?:)?//[^"]*"'
    r'|<link[^>]*\shref="(?:https?:)?//[^"]*"[^>]*\srel="(?:stylesheet|preconnect|icon|preload)"'
    r"|@import\s+url|url\((?:https?:)?//"
)

PACKAGES = (
    "lowshard", "lowshard.comm", "lowshard.kernels", "lowshard.reshard", "lowshard.weights", "lowshard.checkpoint",
    "lowshard.fsdp", "lowshard.rules", "lowshard.solver", "lowshard.op", "lowshard.launch", "lowshard.errors",
)  # fmt: skip
NO_PAGE = {"__version__", "KERNELS"}
"""Public names that are values, which the reference does not list."""


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site; with --quiet no warning would count."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ran = build(ROOT, folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.time_limit(300)
def test_the_site_fetches_nothing_from_another_host(site: Path) -> None:
    texts = [p for p in site.rglob("*") if p.suffix in (".html", ".css")]
    assert len(texts) > 40
    found = {m.group(0) for p in texts for m in _FETCHED.finditer(p.read_text(encoding="utf-8"))}
    assert found == set()
    assert _FETCHED.search('<script src="https://example.org/x.js">')
    assert _FETCHED.search('<link href="//example.org/a.css" rel="stylesheet">')


def test_the_reference_shows_what_is_public_and_settings_all_variables(site: Path) -> None:
    from lowshard.settings import SETTINGS

    comm = (site / "reference" / "comm" / "index.html").read_text(encoding="utf-8")
    assert 'id="lowshard.comm.communicator.Communicator.all_reduce"' in comm
    for package in PACKAGES:
        page = package.removeprefix("lowshard.").partition(".")[0]
        text = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
        shown = set(re.findall(r'id="lowshard\.(?:[a-z_]+\.)*(\w+)"', text))
        assert set(import_module(package).__all__) - NO_PAGE - shown == set(), package
    assert 'id="lowshard.comm.Any"' not in comm
    assert 'id="lowshard.comm.deadline_s"' not in comm
    settings = (site / "settings" / "index.html").read_text(encoding="utf-8")
    assert all(setting.name in settings for setting in SETTINGS)
    commands = (site / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "lowshard bench all_reduce" in commands
    assert "--compare-mpi" in commands
