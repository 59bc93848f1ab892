"""A rank fails, at each place where others need it: they raise PeerFailed that names it, within 2 s.

Under `lowshard run` and under a plain mpiexec, and where mpiexec's own killing is off, so that the failure channel
alone is what ends the job. A default run draws a few cells; `--full` has each once, LOWSHARD_TEST_TIMES=N each N times.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from comm.run_failure import CAUSES, PLACES
from support import mode
from support.starting import start_bare, start_ranks

from lowshard.launch.mpiexec import find_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(110)]

PROGRAM = str(Path(__file__).resolve().parent / "run_failure.py")
RANKS = 3
LIMIT_S = 100.0  # the first of them may compile
PROMISED_S = 2.0
CODES = {"raise": 1, "sys.exit(3)": 3, "raise in a thread": 1}  # of `lowshard run`; else 70
KILLING_OFF = {
    "openmpi": {"PRTE_MCA_state_base_recoverable": "1", "PRTE_MCA_state_base_continuous": "1"},
    "mpich": {},  # Hydra has an option alone
}
CELLS = list(itertools.product(CAUSES, PLACES, ("run", "mpiexec"), ("kills", "spares")))
TIMES = int(os.environ.get("LOWSHARD_TEST_TIMES", "1"))
NAMES = ("cause", "place", "launcher", "killing")


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    text: str
    last: str


def start(launcher: str, killing: str, args: list[str]) -> Ended:
    """Runs the program under a launcher."""
    mpi = find_mpi()
    env = KILLING_OFF[mpi.family] if killing == "spares" else {}
    if launcher == "run":
        done = start_ranks(PROGRAM, RANKS, args, LIMIT_S, env=env)
        return Ended(done.returncode, done.text, done.stderr.strip().splitlines()[-1])
    more: list[str] = []
    if killing == "spares":
        more = ["-disable-auto-cleanup"] if mpi.family == "mpich" else ["--rtos", "recoverable,continuous"]
    done = start_bare([sys.executable, PROGRAM, *args], RANKS, LIMIT_S, env, more)
    return Ended(done.returncode, done.stdout + done.stderr, "")


def may_be_killed(cell: tuple[str, str, str, str]) -> bool:
    """Says whether mpiexec sees that a rank ends, and may kill the others before they can speak.

    Hydra does so after a signal, whatever it is told.
    """
    cause, _, launcher, killing = cell
    spares = killing == "spares" and not (cause == "SIGKILL" and find_mpi().family == "mpich")
    return launcher == "mpiexec" and cause in ("SIGKILL", "os._exit(0)") and not spares


@pytest.mark.parametrize("cell", mode.sample(CELLS, 8, "failures"), ids=", ".join)
def test_survivors_name_the_rank_that_failed(cell: tuple[str, str, str, str], tmp_path: Path) -> None:
    cause, place, launcher, killing = cell
    for again in range(TIMES):
        victim = mode.rng(f"{cell}{again}").integers(RANKS)
        folder = tmp_path / str(again)
        folder.mkdir()
        ended = start(launcher, killing, [cause, place, str(victim), str(folder)])
        failed_s = float((folder / "failed").read_text())
        assert not list(folder.glob("not-reached*")), ended.text
        said = {path.name: path.read_text() for path in folder.glob("said-*")}
        if not may_be_killed(cell):
            assert set(said) == {f"said-{rank}" for rank in range(RANKS) if rank != victim}, ended.text
        for text in said.values():
            at_s, name, *ranks = text.partition("\n")[0].split()
            assert (name, ranks) == ("PeerFailed", [str(victim)]), text
            assert float(at_s) - failed_s < PROMISED_S, text
        if launcher == "run":
            assert ended.code == CODES.get(cause, 70), ended.text
            assert ended.last.startswith(f"lowshard run: rank {victim} failed first: "), ended.text
        elif not may_be_killed(cell):
            assert ended.code != 0, ended.text
            assert re.search(rf"rank {victim}\b", ended.text), ended.text


@pytest.mark.parametrize("launcher", mode.sample(["run", "mpiexec"], 1, "stopped"))
def test_a_rank_that_is_stopped_is_named_at_the_deadline(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWSHARD_TIMEOUT_S", "3")
    ended = start(launcher, "kills", ["SIGSTOP", "collective", "1", str(tmp_path)])
    said = [path.read_text().split(maxsplit=2) for path in tmp_path.glob("said-*")]
    assert len(said) == 2, ended.text
    assert "TimedOut" in [name for _, name, _ in said]
    for at_s, _, text in said:
        assert 2.0 < float(at_s) - float((tmp_path / "failed").read_text()) < 6.0
        assert "rank 1 did not come to all_reduce" in text
    if launcher == "run":
        assert ended.code == 71, ended.text
        assert ended.last.startswith("lowshard run: rank 1 failed first: "), ended.text
