"""Versions that come in the background: readers see whole ones only, waited for by none; and how a job then ends."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest
from support import mode
from support.launching import ENDS_WITHIN_S, Launcher, stray_files, wait_until
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(120)]

RUNNER = Path(__file__).with_name("run_refit_background.py")
MB, VERSIONS = (268, 10) if mode.full() else (48, 10)
PAUSE_S = 2e-3


def test_who_reads_all_the_time_sees_whole_versions_and_waits_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = start_ranks(RUNNER, 4, ["reads", str(MB), str(VERSIONS)], 110).ok()
    for rank, said in enumerate(json.loads(ended.stdout), 2):
        assert said["wrong"] == []
        assert said["looks"] > 100
        assert said["seen"] > VERSIONS // 2, "all of it was read in few versions"
        raw, own = (sorted(gaps) for gaps in zip(*said["gaps_s"], strict=True))
        with capsys.disabled():
            print(
                f"\nrank {rank}: {MB} MB of each of {VERSIONS} versions came in {1e3 * min(said['spans_s']):.0f} ms or "
                f"more while a thread looked {said['looks']} times; longest time between two looks, version by "
                f"version: {1e3 * raw[0]:.1f} to {1e3 * raw[-1]:.1f} ms, without waits for a core "
                f"{1e3 * own[0]:.1f} to {1e3 * own[-1]:.1f} ms; pause_s at most {1e3 * said['pauses_s'][-1]:.3f} ms"
            )
        # What a refit itself keeps readers waiting it does with every version; the other tests of a
        # default run may take its core in any one of them.
        assert own[0] <= PAUSE_S or not mode.full()
        assert said["pauses_s"][-1 if mode.full() else VERSIONS // 2] <= PAUSE_S


@pytest.mark.parametrize("victim", mode.sample([0, 1], 1, "interrupted"))
def test_a_wait_for_a_version_can_be_interrupted_and_the_job_ends(tmp_path: Path, victim: int) -> None:
    launcher = Launcher(tmp_path, uuid.uuid4().hex, stray_files())
    started = launcher.start(
        "run", "-n", "3", "--timeout", "60", str(RUNNER), "interrupt", str(tmp_path), str(victim)
    )
    assert wait_until((tmp_path / "pid").exists, 50)
    time.sleep(0.5)
    began_s = time.time()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    ended = launcher.finish(started)
    assert ended.code == 130, ended.err
    assert ended.ended_s - began_s < ENDS_WITHIN_S, ended.err
    assert f"rank {victim}" in ended.err
    assert "KeyboardInterrupt" in ended.err
    launcher.check_nothing_left()


@pytest.mark.full_only
def test_a_process_does_not_end_before_the_version_that_is_under_way_has_come() -> None:
    ended = start_ranks(RUNNER, 3, ["leaves"], 60).ok()
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank}: version 1" for rank in range(3)]
