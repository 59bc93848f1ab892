"""The environment is read in one place, which knows every variable; where lowshard keeps files."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.other_user import as_root, as_user
from support.sources import tree_of

from lowshard import settings
from lowshard.cli import main
from lowshard.errors import CommError
from lowshard.settings import SETTINGS, Setting, cache_root

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("lowshard", "kernels", "launch", "bench") for path in (ROOT / folder).rglob("*.py")
)
KNOWN = {value.name for value in vars(settings).values() if isinstance(value, Setting)}


def test_no_other_module_reads_or_changes_the_environment() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {place.partition(":")[0] for place in found} == {"lowshard/settings.py"}


def test_every_variable_that_code_or_docs_name_is_a_setting() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    texts = {path: path.read_text(encoding="utf-8") for path in (*SOURCES, *pages)}
    named = {name for text in texts.values() for name in re.findall(r"LOWSHARD_[A-Z0-9_]*[A-Z0-9]", text)}
    # The last one keeps another from being lost by mpiexec, and is read by nobody.
    assert named - KNOWN == {"LOWSHARD_LAST"}


def test_a_setting_that_is_none_of_its_values_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWSHARD_CHECK", "some")
    with pytest.raises(
        CommError, match="LOWSHARD_CHECK is off, hash or full, got 'some': what ranks compare"
    ):
        settings.CHECK.choice()
    assert settings.CHECK.choice({"LOWSHARD_CHECK": "full"}) == "full"
    assert settings.CHECK.choice({}) == "hash"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_default_is_one_of_the_values(setting: Setting) -> None:
    if "|" in setting.values and setting.default:
        assert setting.choice({}) == setting.default
    elif setting.values == "seconds":
        assert setting.seconds({}) == float(setting.default)


def test_the_doctor_prints_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWSHARD_TIMEOUT_S", "7")
    assert main(["doctor", "--settings"]) == 0
    shown = capsys.readouterr().out
    for setting in SETTINGS:
        assert setting.name in shown
        assert setting.meaning in shown
    assert "LOWSHARD_TIMEOUT_S = '7', from the environment" in shown
    assert main(["doctor", "--settings", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [setting.name for setting in SETTINGS]
    assert rows["LOWSHARD_TIMEOUT_S"]["value"] == "7"


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "lowshard"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root() == tmp_path / "home" / ".cache" / "lowshard"


PROGRAM = """
import sys
import numpy as np
from lowshard.compiled import cache_folder, origins
from lowshard.demo.source import cached_minilm
from lowshard.kernels import quantize_mxfp8
quantize_mxfp8(np.ones((1, 32), np.float32))
assert cached_minilm() is None
print(cache_folder(), set(origins.values()))
"""


@pytest.mark.full_only
@as_root
@pytest.mark.time_limit(120)
def test_a_user_without_home_and_passwd_entry_has_a_folder_of_its_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    keep = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k in keep} | {
        "TMPDIR": str(tmp_path),
        "LOWSHARD_SHIPPED_CODE": "off",
    }
    said = []
    for _ in range(2):
        ran = subprocess.run(
            [*as_user(54321), sys.executable, "-W", "error", "-c", PROGRAM], env=env, cwd=ROOT, capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout)
    folder = tmp_path / "lowshard-cache-54321" / "compiled"
    assert said == [f"{folder} {{'compiled'}}\n", f"{folder} {{'disk'}}\n"]
    assert folder.stat().st_mode & 0o777 == 0o700
