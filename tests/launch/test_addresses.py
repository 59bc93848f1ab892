"""Ranks of a job on one host are not to be reached from other hosts, and make groups all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launching import MARK, Launcher
from support.listening import public_ports

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


def read(path: Path) -> bytes:
    """Return what a file of /proc says; nothing where the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_no_rank_of_a_job_on_one_host_is_to_be_reached_from_others(launcher: Launcher, folder: Path) -> None:
    started = launcher.start("run", "-n", "2", launcher.script(WORK), str(folder))
    launcher.marked(2, folder)
    mark = f"{MARK}={launcher.mark}".encode()
    job = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path)]
    assert started.pid in job
    assert len(job) >= 6  # the launcher, mpiexec, two supervisors and two ranks
    ours = [pid for pid in job if read(Path(f"/proc/{pid}/cmdline")).split(b"\0")[1:2] == [b"-m"]]
    assert len(ours) >= 5  # all but mpiexec and its daemon
    of_mpiexec = {
        port for pid in {*job} - {*ours} for port in public_ports(pid)
    }  # Hydra's children have them too
    assert {pid: {*public_ports(pid)} - of_mpiexec for pid in ours} == {pid: set() for pid in ours}
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
