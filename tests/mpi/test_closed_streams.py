"""A job whose standard streams are closed works as with open ones, and says no less on those that are open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import mode

ROOT = Path(__file__).resolve().parents[2]
CLOSED = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "all": "<&- >&- 2>&-"}
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


@pytest.mark.mpi
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("closed", CLOSED if mode.full() else ["all"])
def test_a_job_runs_whatever_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m lowshard run -n 2 ranks.py . {CLOSED[closed]}"],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in (0, 1)] == ["in the file\n"] * 2
    outputs = {"stdout": sorted(done.stdout.splitlines()), "stderr": sorted(done.stderr.splitlines())}
    for name, lines in outputs.items():
        open_lines = [f"[{r}] on {name} {r}" for r in (0, 1)]
        assert lines == ([] if closed in (name, "all") else open_lines)
