"""Commands whose standard streams are closed work as with open ones, and say no less on those that are open."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from support import mode

ROOT = Path(__file__).resolve().parents[2]
CLOSED = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "all": "<&- >&- 2>&-"}
WORDS = ["--help", "run --help", "doctor --settings", "rules check --help"]
# Each rank makes a file: what it did is seen where it can print nothing, and files must not get the streams' numbers.
RANKS = """
import sys
from pathlib import Path
from mpi4py import MPI
from lowshard import comm as lc
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    comm.barrier()
    with open(Path(sys.argv[1]) / f"rank{comm.rank}", "w") as file:
        assert file.fileno() > 2
        print("in the file", file=file)
    print("on stdout", comm.rank)
    print("on stderr", comm.rank, file=sys.stderr)
"""


def ran(words: str, closed: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python FLAGS -m lowshard WORDS` with streams closed."""
    command = f"exec {sys.executable} {' '.join(flags)} -m lowshard {words} {CLOSED[closed]}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=100, check=False, cwd=cwd, env=env
    )


@pytest.mark.mpi
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("closed", CLOSED if mode.full() else ["all"])
def test_a_job_runs_whatever_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = ran("run -n 2 ranks.py .", closed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in (0, 1)] == ["in the file\n"] * 2
    outputs = {"stdout": sorted(done.stdout.splitlines()), "stderr": sorted(done.stderr.splitlines())}
    for name, lines in outputs.items():
        open_lines = [f"[{r}] on {name} {r}" for r in (0, 1)]
        assert lines == ([] if closed in (name, "all") else open_lines)


@pytest.mark.mpi
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("closed", mode.sample(list(CLOSED), 1, "fails"))
def test_a_job_that_fails_says_so_where_it_can(closed: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('boom')\n")
    done = ran("run -n 2 fails.py", closed, cwd=tmp_path)
    assert done.returncode == 1
    assert ("ValueError: boom" in done.stderr) == (closed in ("stdout", "stdin"))


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("words", "closed"), mode.sample(list(product(WORDS, CLOSED)), 1, "words"))
def test_commands_work(closed: str, words: str, tmp_path: Path) -> None:
    assert ran(words, closed, cwd=tmp_path).returncode == 0
    assert ran("no-such-command", closed, cwd=tmp_path).returncode == 2


@pytest.mark.full_only
@pytest.mark.mpi
@pytest.mark.time_limit(120)
def test_a_job_runs_optimised_and_unbuffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    (tmp_path / "ranks.py").write_text(RANKS)
    done = ran("run -n 2 ranks.py .", "stdin", "-OO", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] on stdout 0", "[1] on stdout 1"]
