"""Jobs under attack: strangers at the launcher's door and at rank 0's change nothing; ranks are not to be reached."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import fake_hosts, hostile, mode
from support.fake_hosts import FakeHost
from support.launching import ENDS_WITHIN_S, MARK, Launcher, wait_until
from support.listening import public_doors

from lowshard.errors import InternalError
from lowshard.launch import python_command, run_ranks
from lowshard.launch.link import Link

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(400)]

COUNT = 10_000 if mode.full() else 200
SLOWEST_STEP_S = 5.0  # of a program under attack, on a machine that is busy with it
DOORS = ["launcher", "launcher between hosts", "side channel", "side channel by TCP"]
LATER_S = 2.0  # than undisturbed, on a busy machine

# Adds numbers up until the file "over" appears. With "late" rank 1 stands still at rank 0's door until then.
WORK = """
import os, sys, time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import lowshard.comm as lc
from lowshard.comm import watch, watch_setup

folder, is_late = Path(sys.argv[1]), sys.argv[2] == "late"
world = MPI.COMM_WORLD


def sign():
    (folder / f"draft{world.rank}").write_text(str(os.getpid()))
    (folder / f"draft{world.rank}").rename(folder / str(world.rank))


def connect_late(offer, *args):
    (folder / "address").write_text(*offer.addresses)
    sign()
    while not (folder / "over").exists():
        time.sleep(0.01)
    return connect(offer, *args)


connect = watch_setup.connect
if is_late:
    watch.Watch.start.__func__.__kwdefaults__["connect_limit_s"] = 300.0
    watch_setup.connect = connect_late
if world.rank == 0 or not is_late:
    sign()
comm = lc.from_mpi(world)
slowest_s, steps = 0.0, 0
while steps == 0 or not world.bcast((folder / "over").exists()):
    start_s = time.monotonic()
    send, recv = np.full(1000, world.rank + 1.0), np.empty(1000)
    comm.all_reduce(send, recv)
    assert (recv == world.size * (world.size + 1) / 2).all()
    slowest_s, steps = max(slowest_s, time.monotonic() - start_s), steps + 1
    time.sleep(0.002)
comm.close()
print("slowest", round(slowest_s, 3))
print("right")
"""


@pytest.fixture
def folder(launcher: Launcher) -> Iterator[Path]:
    made = launcher.folder / "work"
    made.mkdir()
    yield made
    (made / "over").touch()  # ends what a failed test has left


def link_of(rank_pid: int) -> str:
    """Return the address of the launcher's door, as a rank's environment has it."""
    variables = Path(f"/proc/{rank_pid}/environ").read_bytes().split(b"\0")
    [link] = [one.partition(b"=")[2].decode() for one in variables if one.startswith(b"LOWSHARD_LINK=")]
    return link.split(",", 2)[2]


def read(path: Path) -> bytes:
    """Return what a file of /proc says; nothing where the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("door", mode.sample(DOORS, 1, "doors"))
def test_a_job_under_attack_ends_as_if_nothing_had_been(launcher: Launcher, folder: Path, door: str) -> None:
    """10,000 greetings with --full, from a process that does not know the token; few descriptors for the launcher."""
    if door == "launcher between hosts" and (reason := fake_hosts.why_not()):
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = stack.enter_context(fake_hosts.fake_hosts(2)) if door == "launcher between hosts" else []
        calm = work(launcher, folder, door, 0, hosts)
        (folder / "over").unlink()
        ended = work(launcher, folder, door, COUNT, hosts)
    assert (ended.code, ended.err, ended.said) == (0, "", ["right", "right"]), ended
    assert (calm.code, calm.err, calm.said) == (ended.code, ended.err, ended.said), calm
    assert ended.end_s < calm.end_s + LATER_S
    assert ended.slowest_step_s < SLOWEST_STEP_S
    print(
        f"{door}: {COUNT} greetings, slowest step {ended.slowest_step_s} s (undisturbed {calm.slowest_step_s} s), "
        f"end after {ended.end_s:.2f} s ({calm.end_s:.2f} s)"
    )


@dataclass(frozen=True)
class Outcome:
    """How a job ended that worked until it was told to stop, and how long that took then."""

    code: int
    err: str
    said: list[str]
    slowest_step_s: float
    end_s: float


def work(launcher: Launcher, folder: Path, door: str, greetings: int, hosts: list[FakeHost]) -> Outcome:
    """Run a job until so many strangers have knocked at one of its doors."""
    where = fake_hosts.options(hosts) if hosts else []
    late = "late" if door.startswith("side") else "early"
    env = {"LOWSHARD_INTERFACE": "lo"} if door == "side channel by TCP" else {}
    more = fake_hosts.ENVIRONMENT if hosts else env
    started = launcher.start("run", "-n", "2", *where, launcher.script(WORK), str(folder), late, **more)
    pids = launcher.marked(2, folder)
    address = (folder / "address").read_text() if late == "late" else link_of(pids[0])
    assert address.startswith("tcp:" if hosts or env else "unix:")
    if greetings:
        open_files = len(os.listdir(f"/proc/{started.pid}/fd"))
        resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (open_files + 20,) * 2)
        with hostile.attack(address, "mixed", greetings, mode.seed()) as attacker:
            assert hostile.tried(attacker) == greetings
    (folder / "over").touch()
    over_s = time.time()
    ended = launcher.finish(started)
    for rank in range(2):
        (folder / str(rank)).unlink()
    lines = sorted(line.partition("] ")[2] for line in ended.out.splitlines())
    slowest_s = max((float(line.split()[1]) for line in lines if line.startswith("slowest ")), default=0.0)
    said = [line for line in lines if not line.startswith("slowest ")]
    return Outcome(ended.code, ended.err, said, slowest_s, ended.ended_s - over_s)


@pytest.mark.full_only  # a door in a flood: tests/unit/test_door.py
def test_the_launcher_outlives_a_flood_beyond_its_descriptors_from_the_start(
    launcher: Launcher, folder: Path
) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(WORK), str(folder), "early")
    assert wait_until(lambda: any(launcher.tmp.glob("lowshard-job-*/door")), ENDS_WITHIN_S)
    resource.prlimit(started.pid, resource.RLIMIT_NOFILE, (48, 48))
    [door] = launcher.tmp.glob("lowshard-job-*/door")
    with hostile.attack(f"unix:{door}", "flood", 2000, mode.seed()):
        launcher.marked(2, folder)  # both keepers have come in meanwhile
        (folder / "over").touch()
        ended = launcher.finish(started)
    assert (ended.code, ended.err) == (0, "")


def test_no_rank_of_a_job_on_one_host_is_to_be_reached_from_others(launcher: Launcher, folder: Path) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(WORK), str(folder), "early")
    launcher.marked(2, folder)
    mark = f"{MARK}={launcher.mark}".encode()
    job = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path)]
    assert started.pid in job
    assert len(job) >= 6  # the launcher, mpiexec, two keepers and two ranks
    ours = [pid for pid in job if read(Path(f"/proc/{pid}/cmdline")).split(b"\0")[1:2] == [b"-m"]]
    assert len(ours) >= 5  # all but mpiexec and its daemon
    of_mpiexec = {
        door for pid in {*job} - {*ours} for door in public_doors(pid)
    }  # Hydra's children have them too
    assert {pid: {*public_doors(pid)} - of_mpiexec for pid in ours} == {pid: set() for pid in ours}
    (folder / "over").touch()
    assert launcher.finish(started).code == 0


def test_ranks_without_a_network_make_groups_and_meet_across_them(launcher: Launcher) -> None:
    program = """
import numpy as np
from mpi4py import MPI
import lowshard.comm as lc
world = MPI.COMM_WORLD
mine = world.Split(world.rank % 2)
between = mine.Create_intercomm(0, world, 1 - world.rank % 2)
assert between.allgather(world.rank) == list(range(1 - world.rank % 2, world.size, 2))
both = between.Merge()
comm = lc.from_mpi(both)
out = np.empty(1)
comm.all_reduce(np.ones(1), out)
assert out[0] == world.size
comm.close()
"""
    ended = launcher.run("-n", "4", launcher.script(program))
    assert (ended.code, ended.err) == (0, "")


def test_a_link_that_breaks_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(link: Link, now_s: float) -> None:
        if link._state.peers:
            raise RecursionError("made for this test")

    monkeypatch.setattr(Link, "_judge", break_down)
    script = tmp_path / "prog.py"
    script.write_text("import time\ntime.sleep(300)\n")
    start_s = time.monotonic()
    with pytest.raises(
        InternalError, match=r"link to its ranks broke: RecursionError\('made for this test'\)"
    ):
        run_ranks(python_command(str(script)), 2)
    assert time.monotonic() - start_s < 4 * ENDS_WITHIN_S
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if bytes(script) in read(path)]
