"""Refits in which a rank is killed: the others are left with whole versions, and with one."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.launching import Launcher, stray_files, wait_until

pytestmark = pytest.mark.mpi

HERE = Path(__file__).parent
PLACES = ("before the vote", "between vote and switch")
HOWS = ("slots", "messages", "shown", "private")
"""How bytes move in a job; see run_refit_fault.py."""


@dataclass(frozen=True)
class Kill:
    """One job: how bytes move, who dies, and when: at a share of the span of a refit, or at a place in it.

    Every second one pushes in the background.
    """

    number: int
    how: str
    victim: int
    where: str
    share: float

    def __str__(self) -> str:
        when = f"at {self.share:.2f} of a refit" if self.where == "outside" else self.where
        return f"{self.number}: {self.how}, {self.waits}, rank {self.victim} {when}"

    @property
    def waits(self) -> str:
        return "beside" if self.number % 2 and not self.where.startswith("call") else "waiting"


def kills() -> list[Kill]:
    places = [
        Kill(200 + i, how, victim, where, 0.0)
        for i, (how, victim, where) in enumerate((h, v, w) for h in HOWS for w in PLACES for v in (0, 3))
    ]
    rng = mode.rng("refit kills")
    outside = [
        Kill(30 * n + i, how, (0, 2, 4, 1, 3)[i % 5], "outside", share)
        for n, how in enumerate(HOWS)
        for i, share in enumerate(rng.random(30).tolist())
    ]
    deltas = [
        *(Kill(300 + i, "delta", victim, f"call {share:.4f}", share)
          for i, share in enumerate(rng.random(60).tolist()) for victim in ((0, 2, 1, 3, 4)[i % 5],)),
        *(Kill(360 + 2 * i, "delta", victim, where, 0.0)
          for i, (victim, where) in enumerate((v, w) for v in (0, 3) for w in PLACES)),
    ]  # fmt: skip
    return [
        *mode.sample([*places, *outside], 1, "kill times"), *mode.sample(deltas, 1, "kill deltas"),
    ]  # fmt: skip


KILLS = kills()


def run(kill: Kill, folder: Path) -> tuple[dict[int, dict[str, Any]], int, str]:
    """Run the job of a kill, and return what the survivors noted, the exit code, and what was said."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    launcher = Launcher(folder, uuid.uuid4().hex, stray_files())
    started = launcher.start(
        "run", "-n", "5", "--timeout", "90", str(HERE / "run_refit_fault.py"), str(notes), str(kill.victim), kill.where,
        "4", kill.how, kill.waits,
    )  # fmt: skip
    ready = [notes / f"ready-{rank}" for rank in range(5)]
    wait_until(lambda: all(p.exists() for p in ready) or started.poll() is not None, 80.0)
    if kill.where == "outside" and all(p.exists() for p in ready):
        fields = json.loads(ready[kill.victim].read_text())
        time.sleep(kill.share * fields["span_s"])
        os.kill(fields["pid"], signal.SIGKILL)
    ended = launcher.finish(started)
    launcher.check_nothing_left()
    left = {int(p.name.rpartition("-")[2]): json.loads(p.read_text()) for p in notes.glob("left-*")}
    return left, ended.code, ended.err


@pytest.fixture(scope="module")
def over(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Kill, Future[Any]]]:
    """The jobs of all kills that pytest has selected, one after the other beside the tests."""
    folder = tmp_path_factory.mktemp("kills")
    selected = mode.selected(request, "kill")
    with ThreadPoolExecutor(1) as pool:
        yield {k: pool.submit(run, k, folder / str(k.number)) for k in KILLS if k in selected}
        pool.shutdown(cancel_futures=True)


@pytest.mark.time_limit(140)
@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_killed_rank_leaves_whole_versions(kill: Kill, over: dict[Kill, Future[Any]]) -> None:
    left, code, err = over[kill].result()
    assert code == 70, err
    assert set(left) == set(range(5)) - {kill.victim}, f"only {sorted(left)} raised PeerFailed\n{err}"
    serving = [left[rank] for rank in (2, 3) if rank != kill.victim]
    for fields in serving:
        assert not fields["torn"]
        assert fields["values"] == [float(fields["version"])], "a mix of versions"
        assert fields["version"] in (fields["done"], fields["trying"])
    assert len({fields["version"] for fields in left.values()}) == 1, "ranks are on different versions"
    if kill.where == "between vote and switch":
        assert all(fields["version"] == 3 for fields in serving)  # all had voted: the others did switch
