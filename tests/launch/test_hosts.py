"""Jobs over several hosts, on network namespaces of this machine: layout, output, faults, nothing left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import mode
from support.fake_hosts import ENVIRONMENT, FakeHost, cut, fake_hosts, mend, options, spread, why_not
from support.launching import ENDS_WITHIN_S, LIMIT_S, ROOT, Launcher, own_files, wait_until

from lowshard.launch import JobResult, find_mpi, python_command, run_ranks
from lowshard.launch.environment import passed_names
from lowshard.launch.mpiexec import rank_environment

REASON = why_not()
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.time_limit(90),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

FOUND_S = 15.0  # within which a host that is cut off is found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks that a test removes the hosts that it makes; other processes may have theirs."""
    yield
    mine = re.compile(rf"lowshard-{os.getpid()}-|lsh{os.getpid()}.$")
    assert wait_until(lambda: not [name for name in traces() if mine.match(name)], 5.0), traces()


def traces() -> list[str]:
    """Returns the names of what fake hosts are made of."""
    folders = (Path("/run/netns"), Path("/sys/class/net"), Path("/run"))
    return [name for folder in folders if folder.is_dir() for name in os.listdir(folder)]


def on(host: FakeHost, command: str) -> str:
    """Runs a shell command on a host and returns what it prints."""
    return subprocess.run(
        host.command(command), capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout


def reaches(host: FakeHost, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(({address!r}, {port}), timeout=0.5)"
    words = host.command(f'{sys.executable} -S -c "{program}"')
    return subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


def test_a_fake_host_has_its_own_name_network_and_shared_memory(nothing_left: None, tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    stray = Path("/dev/shm") / f"other_{os.getpid()}"
    try:
        stray.touch()
        with fake_hosts(2) as (a, b), fake_hosts(1, hide=tmp_path) as (c,):
            assert len({host.name for host in (a, b, c)}) == 3
            assert str(os.getpid()) in a.name
            assert on(a, "cat /proc/sys/kernel/hostname") == f"{a.name}\n"
            assert on(a, "ls /dev/shm") == ""
            names = {line.partition("=")[0] for line in on(a, "env").splitlines()}
            assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"HOME", "USER", "PATH", "NCCL_HOSTID"}
            assert on(b, f"ls {tmp_path}") == "seen\n"
            assert on(c, f"ls {tmp_path}") == ""
            with socket.create_server((a.here_address, 0)) as server:
                port = server.getsockname()[1]
                assert reaches(a, a.here_address, port)
                assert not reaches(c, a.here_address, port)  # another set's network
                cut(b)
                assert reaches(a, a.here_address, port)
                assert not reaches(b, a.here_address, port)
                mend(b)
                assert wait_until(lambda: reaches(b, a.here_address, port), 5.0)
            left = subprocess.Popen(a.command("sleep 60"))
        assert left.wait(timeout=LIMIT_S) == -signal.SIGKILL
    finally:
        stray.unlink()


LAYOUT = """
import json, os, socket, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
assert "LOWSHARD_LINK" in os.environ
node = world.Split_type(MPI.COMM_TYPE_SHARED)
about = [world.rank, socket.gethostname(), node.size, node.rank, os.getcwd(), os.environ.get("MY_OWN"),
         os.environ["OMP_NUM_THREADS"], os.environ["NCCL_HOSTID"], sys.argv[1:], os.environ.get("TMPDIR")]
everybody = world.gather(about)
if world.rank == 0:
    print(json.dumps(everybody))
print("note", world.rank, file=sys.stderr)
"""


def test_mpi_sees_two_hosts_with_two_ranks_each(launcher: Launcher) -> None:
    own = {**ENVIRONMENT, "MY_OWN": 'it\'s "$1"'}
    with fake_hosts(2) as hosts:
        done = launcher.run("-n", "4", *options(hosts), launcher.script(LAYOUT), "-x", "a b", **own)
    assert done.code == 0, done.err
    assert sorted(done.err.splitlines()) == [f"[{rank}] note {rank}" for rank in range(4)]
    (line,) = done.out.splitlines()
    rows = json.loads(line.removeprefix("[0] "))
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    assert [row[2:4] for row in rows] == [[2, 0], [2, 1], [2, 0], [2, 1]]
    assert [row[1] for row in rows] == [hosts[0].name] * 2 + [hosts[1].name] * 2
    for row in rows:
        assert row[4] == str(ROOT)
        assert row[5] == 'it\'s "$1"'
        assert row[6] == "1"
        assert row[7] == row[1]
        assert row[8] == ["-x", "a b"]
        assert row[9] == str(launcher.tmp)


WAITING = """
import os, sys, time
from pathlib import Path

phase, folder = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))


def sign():
    draft = Path(folder) / f"draft{rank}"
    draft.write_text(str(os.getpid()))
    draft.rename(Path(folder) / str(rank))


if phase == "start":
    sign()
    time.sleep(60)
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
sign()
if phase == "fail":
    print("before", rank)
    if rank == 3:
        raise ValueError("boom")
if phase == "idle" or world.rank == 0:
    time.sleep(60)
world.Barrier()
"""


@dataclass
class Job:
    """A job on fake hosts, run by a thread of the test."""

    hosts: list[FakeHost]
    folder: Path
    phase: str
    hidden: bool = False
    out: io.StringIO = field(default_factory=io.StringIO)
    err: io.StringIO = field(default_factory=io.StringIO)
    ended_s: float = 0.0
    result: JobResult | None = None

    def start(self, script: str, n: int = 4) -> None:
        self.folder.mkdir()
        self._thread = threading.Thread(target=self._run, args=(script, n), daemon=True)
        self._thread.start()

    def _run(self, script: str, n: int) -> None:
        env = {**os.environ, **ENVIRONMENT, "TMPDIR": str(self.folder)}
        env["PYTHONPATH"] = str(ROOT)
        self.result = run_ranks(
            python_command(script, [self.phase, str(self.folder)]),
            n,
            timeout_s=LIMIT_S,
            env=env,
            stdout=self.out,
            stderr=self.err,
            spread=spread(self.hosts, n),
        )
        self.ended_s = time.time()

    def pids(self, n: int = 4) -> list[int]:
        paths = [self.folder / str(rank) for rank in range(n)]
        assert wait_until(lambda: all(path.exists() for path in paths), LIMIT_S), self.err.getvalue()
        return [int(path.read_text()) for path in paths]

    def finish(self) -> JobResult:
        self._thread.join(LIMIT_S + 20.0)
        assert self.result is not None, self.err.getvalue()
        return self.result


def alive(pid: int) -> bool:
    """Says whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("phase", mode.sample(["start", "mpi", "idle"], 1, "phases of a cut"))
def test_a_host_that_is_cut_off_ends_the_job_in_every_phase(
    nothing_left: None, tmp_path: Path, phase: str
) -> None:
    script = tmp_path / "prog.py"
    script.write_text(WAITING)
    with fake_hosts(2) as hosts:
        job = Job(hosts, tmp_path / "job", phase)
        job.start(str(script))
        pids = job.pids()
        sent_s = time.time()
        cut(hosts[1])
        result, err = job.finish(), job.err.getvalue()
        assert (result.exit_code, result.cause, result.failed_rank in (2, 3)) == (70, "lost", True), err
        assert f"its supervisor on {hosts[1].name}" in result.message, err
        assert job.ended_s - sent_s < FOUND_S + ENDS_WITHIN_S
        assert wait_until(lambda: not any(alive(pid) for pid in pids), FOUND_S + ENDS_WITHIN_S)
        assert wait_until(lambda: [p.name for p in job.folder.iterdir() if not p.name.isdigit()] == [], 5.0)


@pytest.fixture
def hidden_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the launcher's files that no host sees, as if it were another machine's disk."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_hosts_that_see_no_file_of_the_launcher_tell_everything_over_the_connection(
    nothing_left: None, tmp_path: Path, hidden_folder: Path
) -> None:
    script = tmp_path / "prog.py"
    script.write_text(WAITING)
    with fake_hosts(2, hide=hidden_folder) as hosts:
        failing = Job(hosts, tmp_path / "failing", "fail")
        failing.start(str(script))
        result = failing.finish()
        err = failing.err.getvalue()
        assert (result.exit_code, result.cause, result.failed_rank) == (1, "exception", 3), err
        *rest, last = err.strip().splitlines()
        assert last == "lowshard run: rank 3 failed first: ValueError: boom (exit code 1)"
        assert rest[-1] == "ValueError: boom"
        assert "[3] before 3" in failing.out.getvalue().splitlines()
        # What the supervisors made on their hosts is gone; the rest are this test's marks.
        assert [path.name for path in failing.folder.iterdir() if not path.name.isdigit()] == []
        assert list(hidden_folder.iterdir()) == []


@pytest.mark.parametrize("victim", [0, 3])
def test_under_a_plain_mpiexec_ranks_of_several_hosts_are_connected_too(
    nothing_left: None, tmp_path: Path, victim: int
) -> None:
    mpi = find_mpi()
    program = [sys.executable, str(ROOT / "tests/comm/run_failure.py"), "raise", "collective", str(victim)]
    with fake_hosts(2) as hosts, own_files():
        on_hosts = spread(hosts, 4)
        (tmp_path / "hosts").write_text(on_hosts.hostfile(mpi.family))
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        env = rank_environment(mpi, 4, env, spread=on_hosts)
        command = mpi.command(
            4, [*program, str(tmp_path)], spread=on_hosts, hostfile=str(tmp_path / "hosts"), cwd=str(ROOT),
            passed=passed_names(env),
        )  # fmt: skip
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = [path.read_text().split(maxsplit=3) for path in tmp_path.glob("said-*")]
    assert [(name, rank) for _, name, rank, _ in said] == [("PeerFailed", str(victim))] * 3, done.stderr
    assert f"rank {victim} | ValueError: boom" in done.stderr + done.stdout
    assert done.returncode != 0
