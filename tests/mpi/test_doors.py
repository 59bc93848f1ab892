"""A job's doors: strangers at the launcher's change nothing, ranks are not to be reached from other hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.launching import ENDS_WITHIN_S, MARK, Launcher
from support.listening import public_doors

from lowshard.errors import InternalError
from lowshard.launch import python_command, run_ranks
from lowshard.launch.link import Link

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(400)]

# Adds numbers up until the file "over" appears.
WORK = """
import os, sys, time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import lowshard.comm as lc

folder, world = Path(sys.argv[1]), MPI.COMM_WORLD
(folder / f"draft{world.rank}").write_text(str(os.getpid()))
(folder / f"draft{world.rank}").rename(folder / str(world.rank))
with lc.from_mpi(world) as comm:
    while not world.bcast((folder / "over").exists()):
        send, recv = np.full(1000, world.rank + 1.0), np.empty(1000)
        comm.all_reduce(send, recv)
        assert (recv == world.size * (world.size + 1) / 2).all()
        time.sleep(0.002)
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


def test_strangers_at_the_launcher_s_door_change_nothing(launcher: Launcher, folder: Path) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(WORK), str(folder))
    address = link_of(launcher.marked(2, folder)[0])
    assert address.startswith("unix:")
    with ExitStack() as stack:
        for turn in range(100):  # more than the door holds
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):  # turned away
                stranger.connect(address.removeprefix("unix:"))
                stranger.sendall(b"[" * (1 << turn % 20))
        (folder / "over").touch()
        ended = launcher.finish(started)
    assert (ended.code, ended.err) == (0, "")


def test_no_rank_of_a_job_on_one_host_is_to_be_reached_from_others(launcher: Launcher, folder: Path) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(WORK), str(folder))
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
