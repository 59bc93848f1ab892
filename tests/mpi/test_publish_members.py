"""A publisher, a subscriber job and plain processes, started apart; they are killed, stopped, restarted at random."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from support import mode
from support.fake_hosts import FakeHost, cut, fake_hosts, mend, why_not
from support.launching import wait_until

HERE = Path(__file__).parent
pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(120)]
LIMIT_S = 60.0


def address_of(kind: str, folder: Path) -> str:
    """Return an address for a publisher of a test."""
    return f"unix:{folder}/p" if kind == "unix" else f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}"


class World:
    """The processes of one test."""

    def __init__(self, folder: Path, address: str, hosts: Mapping[str, FakeHost]) -> None:
        self.folder, self.address, self.hosts = folder, address, hosts
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.first = 0

    def _start(self, name: str, command: list[str]) -> None:
        path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
        env = {**os.environ, "PYTHONPATH": path}
        if name in self.hosts:  # which has an environment of its own
            kept = [
                f"{key}={value}"
                for key, value in env.items()
                if key.startswith(("PYTHON", "LOWSHARD_", "XDG_"))
            ]
            command = self.hosts[name].command(shlex.join(["env", "-C", os.getcwd(), *kept, *command]))
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def publisher(self, ranks: int) -> None:
        """Start the publisher, or start it again: its versions go on from ten thousand more."""
        self.first += 10_000
        script = [str(HERE / "run_publisher.py"), str(self.folder), self.address, str(self.first), "0.02"]
        self._start("publisher", self._command(ranks) + script)

    def subscriber(self, name: str, ranks: int) -> None:
        """Start a subscriber."""
        script = [str(HERE / "run_subscriber.py"), str(self.folder), self.address, name]
        self._start(name, self._command(ranks) + script)

    def _command(self, ranks: int) -> list[str]:
        if ranks == 1:
            return [sys.executable]
        return [sys.executable, "-m", "lowshard", "run", "-n", str(ranks)]

    def lines(self, name: str, rank: int = 0) -> list[str]:
        """Return what a subscriber's rank has noted."""
        path = self.folder / f"{name}.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def newest(self, name: str) -> int:
        """Return the version that a subscriber noted last, or -1."""
        found = [int(line.split()[1]) for line in self.lines(name) if line.startswith("version")]
        return found[-1] if found else -1

    def published(self) -> int:
        """Return the version that was published last."""
        path = self.folder / "published"
        text = path.read_text() if path.exists() else ""
        return int(text) if text else -1

    def kill(self, name: str) -> None:
        """End a process and what it started, by SIGKILL."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until something is so; where a member ends meanwhile, or it never is, tell what all have said."""
        ended: dict[str, int] = {}

        def over() -> bool:
            ended.update({n: p.poll() for n, p in self.running.items() if p.poll() is not None})  # type: ignore[misc]
            return bool(ended) or done()

        assert wait_until(over, LIMIT_S), f"{what}\n{self.said()}"
        assert not ended, f"{ended}\n{self.said()}"

    def wait_for(self, names: list[str], version: int) -> None:
        """Wait until subscribers have newer versions than one."""
        self.wait(lambda: all(self.newest(name) > version for name in names), f"{names} get past {version}")

    def said(self) -> str:
        """Return the last words of all."""
        texts = (
            f"--- {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob("*.*"))
            if path.is_file()
        )
        return "\n".join(texts)

    def end(self, names: list[str]) -> None:
        """Have processes end by themselves, and look at how."""
        (self.folder / "stop-subscribers").touch()
        codes = {name: self.running.pop(name).wait(LIMIT_S) for name in names}
        assert set(codes.values()) == {0}, f"{codes}\n{self.said()}"
        (self.folder / "stop").touch()
        code = self.running.pop("publisher").wait(LIMIT_S)
        assert code == 0, self.said()


@contextlib.contextmanager
def world(folder: Path, address: str, hosts: Mapping[str, FakeHost] | None = None) -> Iterator[World]:
    """Give a world, and leave no process of it."""
    made = World(folder, address, hosts or {})
    try:
        yield made
    finally:
        for name in list(made.running):
            made.kill(name)


def happen(all_: World, act: str, name: str, ranks: Mapping[str, int]) -> None:
    """Let something happen to a member, or to the publisher: the others go on meanwhile, and then all do."""
    names, others = list(ranks), [other for other in ranks if other != name]
    least = all_.published()
    if act == "cut":
        cut(all_.hosts[name])
        time.sleep(0.5)  # what was on its way has come
        held = all_.newest(name)
        all_.wait_for(others, least + 100)
        assert all_.newest(name) == held
        mend(all_.hosts[name])
    elif act == "kill":
        all_.kill(name)
        all_.wait_for(others, least)
        all_.subscriber(name, ranks[name])
    elif act == "stop":
        process = all_.running[name]
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            all_.wait_for(others, least)
        finally:
            os.killpg(process.pid, signal.SIGCONT)
    else:
        all_.kill("publisher")
        all_.publisher(2)
        least = all_.first - 1
    all_.wait_for(names, least)


def begin(all_: World, ranks: Mapping[str, int]) -> None:
    all_.publisher(2)
    for name, count in ranks.items():
        all_.subscriber(name, count)
    all_.wait_for(list(ranks), 0)


def end(all_: World, ranks: Mapping[str, int]) -> None:
    all_.end(list(ranks))
    assert not [
        line
        for name, count in ranks.items()
        for rank in range(count)
        for line in all_.lines(name, rank)
        if "WRONG" in line
    ]


@pytest.mark.parametrize("kind", mode.sample(["unix", "tcp", "streams"], 1, "members come and go"))
def test_members_come_and_go_and_each_holds_one_whole_version(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They map the publisher's memory, or read it over connections; one quantises what comes."""
    monkeypatch.setenv("LOWSHARD_CROSS_MEMORY", "off" if kind == "streams" else "auto")
    ranks = {"job": 2, "alone": 1, "other": 1, "mxfp8": 1}
    with world(tmp_path, address_of(kind, tmp_path)) as all_:
        begin(all_, ranks)
        for _ in range(20 if mode.full() else 1):
            time.sleep(float(rng.random()) * 0.2)
            happen(all_, str(rng.choice(["kill", "stop", "publisher"])), str(rng.choice(list(ranks))), ranks)
        end(all_, ranks)
    assert not (tmp_path / "p").exists()


@pytest.mark.full_only  # the same on one host above
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_members_on_three_hosts_are_killed_stopped_and_cut_off(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A publisher of two ranks, a subscriber of two and one alone, each on a host; 200 versions and more."""
    ranks, seen = {"job": 2, "mxfp8": 1}, 0
    with fake_hosts(3) as hosts:
        places = dict(zip(("publisher", *ranks), hosts, strict=True))
        address = f"tcp://{hosts[0].address}:{20000 + os.getpid() % 20000}"
        with world(tmp_path, address, places) as all_:
            begin(all_, ranks)
            for turn in range(8):
                act = ("cut", "kill", "stop", "publisher")[turn % 4]
                seen += (all_.published() - all_.first) * (act == "publisher")
                happen(all_, act, str(rng.choice(list(ranks))), ranks)
            all_.wait_for(list(ranks), all_.first + max(0, 200 - seen))
            end(all_, ranks)


def test_a_member_that_is_killed_holds_nobody_up(tmp_path: Path) -> None:
    """Others get their next version within 2 s of a death."""
    names = ["one", "two"]
    with world(tmp_path, f"unix:{tmp_path}/p") as all_:
        all_.publisher(1)
        for name in names:
            all_.subscriber(name, 1)
        all_.wait_for(names, 0)
        for _ in range(10 if mode.full() else 1):
            all_.kill("two")
            begin_s, before = time.monotonic(), all_.published()
            all_.wait_for(["one"], before)
            assert time.monotonic() - begin_s < 2.0
            all_.subscriber("two", 1)
            all_.wait_for(["two"], before)
        all_.end(names)
