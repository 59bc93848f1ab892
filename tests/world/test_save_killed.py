"""A rank of a save is killed at every step, and at random moments around the commit, while the others live on.

The old checkpoint or the new one is whole, byte for byte, what the survivors say of it is true, and the next save
leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from support import mode
from support.forked import ForkedTransport, run_forked
from support.save_steps import KILL, Steps, watched
from support.savers import RANKS, SAVERS, Ended, Saver, attempt, judge

from lowshard.comm import Communicator

CASES = mode.sample([(name, victim) for name in SAVERS for victim in (0, 2)], 4, "savers killed")


def run(saver: Saver, victim: int, steps: Steps) -> tuple[list[int], list[Ended | None]]:
    """Try to save version 2 while one rank may be killed; return exit codes, and how it ended on those that live."""
    notes = [saver.folder / f"ended{rank}.json" for rank in range(RANKS)]

    def job(comm: Communicator) -> None:
        found = attempt(saver, comm, victim, steps)
        notes[comm.rank].write_text(json.dumps(asdict(Ended.of(found))))
        if comm.rank == victim:
            (saver.folder / "steps.json").write_text(json.dumps(steps.names))

    for note in notes:
        note.unlink(missing_ok=True)
    with watched(saver.place, ForkedTransport):
        codes = run_forked(RANKS, job)
    return codes, [Ended(**json.loads(n.read_text())) if n.exists() else None for n in notes]


@pytest.mark.time_limit(300)
@pytest.mark.parametrize(("name", "victim"), CASES)
def test_a_rank_killed_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, name: str, victim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, cases = SAVERS[name](tmp_path).prepare(), []
    for fresh in (False, True):
        saver.start(fresh=fresh)
        codes, ended = run(saver, victim, Steps())
        assert (codes, ended) == ([0] * RANKS, [Ended()] * RANKS)
        names = json.loads((saver.folder / "steps.json").read_text())
        cases += [(fresh, at, step) for at, step in enumerate(names, 1)]
    tried, committed = mode.sample(cases, 1, f"save killed {name} {victim}"), 0
    for fresh, at, step in tried:
        saver.start(fresh=fresh)
        before, files = saver.inode(), saver.files()
        codes, ended = run(saver, victim, Steps(at, KILL))
        try:
            assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]
            committed += judge(saver, before, files, ended, told=False)
        except AssertionError as error:
            error.add_note(f"{name}: rank {victim} killed at step {at}, {step}, fresh={fresh}: {ended}")
            raise
    with capsys.disabled():
        print(
            f"\n{name}, rank {victim}: {len(tried)} of {len(cases)} kills tried, {committed} after the commit"
        )


def kill_from_outside(saver: Saver, victim: int, pause_s: float, *, until_commit: bool) -> tuple[bool, float]:
    """Kill a rank some time after a save began, or after it committed.

    Returns:
        Whether the new version is in place, and the seconds until the commit was seen.
    """
    saver.start(fresh=False)
    before, files, seen_s = saver.inode(), saver.files(), 0.0
    note, killed = saver.folder / "ended", saver.folder / "killed"
    for file in (note, killed):
        file.unlink(missing_ok=True)

    def job(comm: Communicator) -> None:
        error = attempt(saver, comm, -1, Steps())
        if comm.rank == 0:
            written = note.with_suffix(".new")  # the kill may come amid this
            written.write_text(json.dumps(asdict(Ended.of(error))))
            written.replace(note)
        limit = time.monotonic() + 20
        while not killed.exists() and time.monotonic() < limit:  # the kill comes while the rank lives
            time.sleep(0.001)

    def kill(pids: list[int]) -> None:
        nonlocal seen_s
        begin = end = time.perf_counter()
        while until_commit and saver.inode() in (before, 0) and end < begin + 10:
            end = time.perf_counter()
        seen_s = end - begin
        while time.perf_counter() < end + pause_s:
            pass
        os.kill(pids[victim], signal.SIGKILL)
        killed.touch()

    codes = run_forked(RANKS, job, kill)
    assert codes[victim] == -signal.SIGKILL
    said = Ended(**json.loads(note.read_text())) if note.exists() else None
    return judge(saver, before, files, [said], told=False), seen_s


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", mode.sample(["sharded", "merged"], 1, "killed at random"))
def test_ranks_killed_at_random_moments_around_the_commit(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, rng = SAVERS[name](tmp_path).prepare(), random.Random(mode.seed())
    kills, committed, typical_s = 200 if mode.full() else 5, 0, 0.01
    for number in range(kills):
        until_commit = number % 4 != 3  # else at any time before, mostly
        pause_s = rng.uniform(0, 300e-6) if until_commit else rng.uniform(0.3, 1) * typical_s
        try:
            is_new, seen_s = kill_from_outside(saver, number % RANKS, pause_s, until_commit=until_commit)
        except AssertionError as error:
            error.add_note(
                f"kill {number} of rank {number % RANKS}, {pause_s:.6f} s, until_commit={until_commit}"
            )
            raise
        committed += is_new
        typical_s = seen_s if until_commit else typical_s
    with capsys.disabled():
        print(f"\n{name}: {kills} kills from outside, {committed} after the commit")
    assert (kills // 2 if mode.full() else 1) <= committed <= kills
