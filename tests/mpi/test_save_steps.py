"""A rank of a save is killed, or fails, at every step: the old checkpoint or the new one is whole, byte for byte.

Each kill is a job of its own. A default run tries a few steps; a full run all of them, on rank 0 and on another.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import mode
from support.save_steps import KILL, Steps
from support.savers import RANKS, SAVERS, Ended, Saver, judge
from support.starting import Finished, start_ranks

RUNNER = Path(__file__).with_name("run_save_steps.py")
CASES = [(name, victim) for name in SAVERS for victim in (0, 2)]
DIED = 70
pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(300)]


def start(task: str, saver: Saver, name: str, victim: int, *more: object, limit_s: float = 60) -> Finished:
    arguments = [task, name, str(saver.folder), str(victim), *map(str, more)]
    return start_ranks(RUNNER, RANKS, arguments, timeout_s=limit_s)


def count(saver: Saver, name: str, victim: int, *, fresh: bool) -> Steps:
    """Return the steps of a rank in a save without a fault."""
    saver.start(fresh=fresh)
    start("count", saver, name, victim).ok()
    assert saver.holds(2)
    return Steps(names=json.loads((saver.folder / "steps.json").read_text()))


def ended(saver: Saver) -> list[Ended | None]:
    """Return how the save ended on each rank that lived to say so."""
    files = [saver.folder / f"ended{rank}.json" for rank in range(RANKS)]
    return [Ended(**json.loads(f.read_text())) if f.exists() else None for f in files]


def forget(saver: Saver) -> None:
    for file in (*saver.folder.glob("ended*.json"), saver.folder / "steps.json"):
        file.unlink(missing_ok=True)


@pytest.mark.full_only  # tests/world/test_save_killed.py kills forked processes at these steps
@pytest.mark.parametrize(("name", "victim"), CASES)
def test_a_rank_that_dies_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, name: str, victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, cases = SAVERS[name](tmp_path).prepare(), []
    for fresh in (False, True) if (mode.full(), name, victim) == (True, "sharded", 0) else (False,):
        names = count(saver, name, victim, fresh=fresh).names
        cases += [(fresh, at, step) for at, step in enumerate(names, 1)]
    tried, committed = mode.sample(cases, 1, f"save killed {name} {victim}"), 0
    for fresh, at, step in tried:
        forget(saver)
        saver.start(fresh=fresh)
        before, files = saver.inode(), saver.files()
        ran = start("fail", saver, name, victim, at, KILL)
        try:
            assert ran.returncode == DIED
            committed += judge(saver, before, files, ended(saver), told=False)
        except AssertionError as error:
            error.add_note(f"{name}: rank {victim} killed at step {at}, {step}, fresh={fresh}\n{ran.text}")
            raise
    with capsys.disabled():
        print(
            f"\n{name}, rank {victim}: {len(tried)} of {len(cases)} kills tried, {committed} after the commit"
        )
    assert len(cases) >= 10  # a rank that only writes its part has few


@pytest.mark.full_only  # tests/world/test_save_steps.py has these faults, on threads
@pytest.mark.parametrize(("name", "victim"), CASES)
def test_a_rank_that_fails_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, name: str, victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = SAVERS[name](tmp_path).prepare()
    cases = [
        (fresh, at, fault)
        for fresh in mode.sample((False, True), 1, f"fresh {name} {victim}")
        for at, fault in count(saver, name, victim, fresh=fresh).faults
        if fault.startswith("E")
    ]
    tried = mode.sample(cases, 4, f"save fails {name} {victim}")
    start("many", saver, name, victim, json.dumps(tried), limit_s=1000 if mode.full() else 100).ok()
    done, committed = json.loads((saver.folder / "many.json").read_text())
    assert done == len(tried)
    with capsys.disabled():
        print(f"\n{name}, rank {victim}: {done} of {len(cases)} faults tried, {committed} after the commit")
