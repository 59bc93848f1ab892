"""A keeper on another machine than the launcher's: what it passes on, and what it leaves behind when it is killed.

No MPI: the keeper is started as mpiexec would, and told that the launcher runs on a machine with another boot id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowshard import settings
from lowshard.launch.link import Link

pytestmark = pytest.mark.time_limit(60)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
TWO = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


processes: list[subprocess.Popen[str]] = []


@pytest.fixture
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    made = Link(2, {settings.HEARTBEAT_S.name: "30"}, tmp_path_factory.mktemp("link"))
    made.start()
    yield made
    made.close()  # ends the ranks that a failed test has left
    while processes:
        processes.pop().communicate(timeout=LIMIT_S)


def alive(pid: int | str) -> bool:
    """Says whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(link: Link, folder: Path, *words: str, beat_s: float = 30.0, **env: str) -> subprocess.Popen[str]:
    """Starts rank 1 of 2 as on another machine; its temporary folder is `folder`."""
    far = dataclasses.replace(link.address, boot="another machine's")
    started = subprocess.Popen(
        [sys.executable, "-m", "lowshard.launch.child", *words],
        cwd=ROOT,
        env={
            **os.environ,
            **TWO,
            settings.JOB_DIR.name: "/no/such/folder",
            settings.LINK.name: str(far),
            settings.HEARTBEAT_S.name: str(beat_s),
            "TMPDIR": str(folder),
            **env,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes.append(started)
    return started


def script(folder: Path, text: str) -> str:
    path = folder / "prog.py"
    path.write_text(text)
    return str(path)


def _is(done: Callable[[], object]) -> bool:
    try:
        return bool(done())
    except KeyError:  # a peer that is not known yet
        return False


def wait_for(done: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not _is(done):
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.02)


def read_output(link: Link) -> list[str]:
    """Reads both streams of the rank to their end: what it wrote to stdout, and to stderr."""
    found: list[str] = ["", ""]
    for stream, connection in enumerate(connections(link)):
        connection.settimeout(LIMIT_S)
        while data := connection.recv(1 << 16):
            found[stream] += data.decode()
        connection.close()
    return found


def connections(link: Link) -> list[socket.socket]:
    """Returns the connections of the rank's stdout and stderr."""
    streams: list[tuple[socket.socket, int, int]] = []
    wait_for(lambda: streams.extend(link.streams()) or len(streams) == 2)
    assert [row[1:] for row in streams] == [(0, 1), (1, 1)]
    return [row[0] for row in streams]


def own_folders(folder: Path) -> list[Path]:
    return list(folder.glob("lowshard-rank-*"))


def test_output_record_and_exit_status_arrive_and_nothing_stays(link: Link, tmp_path: Path) -> None:
    started = start(
        link,
        tmp_path,
        script(
            tmp_path,
            "import subprocess, sys\n"
            "print('out ' + str(sys.argv[1:]))\n"
            "print('err', file=sys.stderr)\n"
            "daemon = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3)\n"
            "print(daemon.pid)\n"
            "raise ValueError('boom')\n",
        ),
        "a b",
    )
    out, err = read_output(link)
    first, pid = out.splitlines()
    assert first == "out ['a b']"
    assert err == "err\n"
    assert started.communicate(timeout=LIMIT_S) == ("", "")
    assert started.returncode == 1
    wait_for(link.failures)
    (record,) = link.failures()
    assert (record.rank, record.kind, record.message) == (1, "exception", "ValueError: boom")
    assert record.traceback.startswith("Traceback")
    assert link.first_killed() == []
    assert not alive(pid)
    assert own_folders(tmp_path) == []


def test_a_killed_keepers_rank_is_not_forgotten(link: Link, tmp_path: Path) -> None:
    shared = Path("/dev/shm") / f"mpich_shm_{uuid.uuid4().hex}"
    text = (
        "import os, signal, subprocess, time\n"
        "from pathlib import Path\n"
        "from lowshard.comm.abort import FailureRecord, write_failure\n"
        f"Path({str(shared)!r}).write_bytes(bytes(100))\n"
        "daemon = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(daemon.pid))\n"
        "record = FailureRecord(1, time.time(), 'exit', 3, 'sys.exit(3)')\n"
        "write_failure(Path(os.environ['LOWSHARD_JOB_DIR']), record)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"  # as mpiexec does once it has seen an abort
        "time.sleep(60)\n"
    )
    try:
        started = start(link, tmp_path, script(tmp_path, text))
        assert started.communicate(timeout=LIMIT_S) == ("", "")
        assert started.returncode == -signal.SIGKILL
        wait_for(link.failures)
        assert [(record.rank, record.exit_code, record.message) for record in link.failures()] == [
            (1, 3, "sys.exit(3)")
        ]
        wait_for(lambda: not own_folders(tmp_path))
        assert not alive((tmp_path / "pid").read_text())
        assert not shared.exists()
        assert link.first_killed() == []
    finally:
        shared.unlink(missing_ok=True)


def test_a_launcher_that_goes_away_takes_the_rank_along(link: Link, tmp_path: Path) -> None:
    started = start(link, tmp_path, "--exec", "sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    wait_for(lambda: link._state.peers)
    link.close()
    started.communicate(timeout=LIMIT_S)
    assert started.returncode == -signal.SIGKILL
    assert not alive((tmp_path / "pid").read_text().strip())
    assert own_folders(tmp_path) == []


def test_a_stopped_rank_is_told_of_at_once_and_reported_after_the_limit(link: Link, tmp_path: Path) -> None:
    jump = tmp_path / "jump"
    clock = f"import os, time\nreal = time.time\ntime.time = lambda: real() + 3600 * os.path.exists({str(jump)!r})\n"
    (tmp_path / "sitecustomize.py").write_text(clock)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    started = start(link, tmp_path, "--exec", "sleep", "60", beat_s=1.0, PYTHONPATH=path)
    wait_for(lambda: link._state.peers and link._state.peers[1].rank_pid)
    pid = link._state.peers[1].rank_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: link.suspects(time.time()))
    jump.touch()  # the host's clock is set
    assert link.failures() == []
    wait_for(link.failures)
    (record,) = link.failures()
    assert (record.rank, record.kind, record.exit_code) == (1, "stopped", 70)
    assert record.message.startswith("has been stopped (SIGSTOP) for 1.")
    started.terminate()  # mpiexec's way to end it, which the rank cannot hear
    started.communicate(timeout=LIMIT_S)
    assert started.returncode == -signal.SIGKILL


def test_a_stopped_rank_that_is_killed_with_its_job_is_no_cause_of_the_end(
    link: Link, tmp_path: Path
) -> None:
    started = start(link, tmp_path, "--exec", "sleep", "60", beat_s=60.0)
    wait_for(lambda: link._state.peers and link._state.peers[1].rank_pid)
    pid = link._state.peers[1].rank_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: link.suspects(time.time()))
    complained_s = time.time()
    started.terminate()  # since others have ended, sooner than the limit
    started.communicate(timeout=LIMIT_S)
    wait_for(link.failures)
    (record,) = link.failures()
    assert (record.kind, record.signal, record.consequence) == ("signal", signal.SIGKILL, True)
    assert [found.kind for found in link.suspects(complained_s)] == ["stopped"]


def test_a_job_that_is_suspended_as_a_whole_goes_on_as_if_nothing_had_been(
    link: Link, tmp_path: Path
) -> None:
    started = start(link, tmp_path, "--exec", "sleep", "60", beat_s=1.0)
    wait_for(lambda: link._state.peers and link._state.peers[1].rank_pid)
    pid = link._state.peers[1].rank_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: link.suspects(time.time()))
    started.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    started.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not link.suspects(time.time()))
    assert link.failures() == []
    os.kill(pid, signal.SIGTERM)
    started.communicate(timeout=LIMIT_S)
    assert started.returncode == -signal.SIGTERM


def test_stacks_are_shown_on_request_by_a_rank_that_can(link: Link, tmp_path: Path) -> None:
    started = start(
        link, tmp_path, script(tmp_path, "import time\ndef wait_here():\n    time.sleep(60)\nwait_here()\n")
    )
    wait_for(lambda: link._state.peers and link._state.peers[1].takes_stack_signal)
    output, errors = connections(link)
    errors.settimeout(0.2)
    seen = ""

    def shown() -> bool:  # the script may not have got there when it is asked first
        nonlocal seen
        link.ask_for_stacks()
        with contextlib.suppress(TimeoutError):
            seen += errors.recv(1 << 16).decode()
        return " in wait_here" in seen

    wait_for(shown)
    started.terminate()
    os.kill(link._state.peers[1].rank_pid or 0, signal.SIGTERM)
    started.communicate(timeout=LIMIT_S)
    output.close()
    errors.close()


def test_a_launcher_out_of_reach_is_told_by_the_keeper(tmp_path: Path) -> None:
    link = Link(2, {}, tmp_path)
    link.close()  # nobody listens
    started = start(link, tmp_path, "--exec", "true", **{settings.START_S.name: "0.4"})
    _, err = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 2
    assert err.startswith("lowshard: rank 1 on ")
    assert "must reach the launcher, but none of its addresses let it in within 0.2 s" in err
    assert "Traceback" not in err
