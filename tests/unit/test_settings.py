"""Where lowshard keeps files: the user's cache, and what serves a user who has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.other_user import as_root, as_user

from lowshard.settings import cache_root

ROOT = Path(__file__).resolve().parents[2]


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
from lowshard.comm import tuned
from lowshard.compiled import cache_folder, origins
from lowshard.demo.source import cached_minilm
from lowshard.kernels import quantize_mxfp8
quantize_mxfp8(np.ones((1, 32), np.float32))
assert cached_minilm() is None and not tuned.default_path().exists()
print(cache_folder(), set(origins.values()))
"""


@as_root
@pytest.mark.time_limit(120)
def test_a_user_without_home_and_passwd_entry_has_a_folder_of_its_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    keep = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k in keep} | {"TMPDIR": str(tmp_path)}
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
