"""Ranks as threads: `main(comm)` in each, one load of the script, exit codes as for processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowshard import cli
from lowshard.errors import LaunchError
from lowshard.launch.thread_ranks import run_threads

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0

SCRIPT = """
import sys, time
import numpy as np

loads = []
loads.append(1)
met = set()


def main(comm):
    total = np.empty(1)
    comm.all_reduce(np.array([comm.rank + 1.0]), total)
    met.add(comm.rank)
    comm.barrier()
    sys.stdout.write(f"{comm.rank} of {comm.size} ")
    print(int(total[0]), len(loads), sorted(met), __name__, sys.argv[1:])
    if comm.rank == 1:
        fail(*sys.argv[1:2])
    if sys.argv[1:] == ["slow"]:
        time.sleep(60)
    comm.barrier()
    print("done", end="")


def fail(how=None):
    if how in ("raise", "slow"):
        raise ValueError("boom")
    if how == "mismatch":
        from lowshard.errors import MismatchError
        raise MismatchError("ranks differ")
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        time.sleep(60)


if __name__ == "__main__":
    raise AssertionError("a process of its own")
"""


def written(folder: Path, text: str = SCRIPT) -> str:
    script = folder / "prog.py"
    script.write_text(text)
    return str(script)


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, for ranks that do not end by themselves."""
    return subprocess.run(
        [sys.executable, "-m", "lowshard", "run", "--threads", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    """Forgets the modules that a test has loaded: the next one has others of the same name."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("prog", "mod", "lowshard_script"):
            del sys.modules[name]


def test_each_thread_runs_main_of_a_script_that_is_loaded_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv, sys.path[:], sys.stdout
    result = run_threads(written(tmp_path), ["a", "b"], 3)
    assert (result.exit_code, result.cause) == (0, "done")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        line
        for rank in range(3)
        for line in (f"[{rank}] {rank} of 3 6 1 [0, 1, 2] prog ['a', 'b']", f"[{rank}] done")
    )
    assert err == ""
    assert (sys.argv, sys.path[:], sys.stdout) == before


@pytest.mark.parametrize(
    ("how", "code", "cause", "told"),
    [
        ("raise", 1, "exception", "ValueError: boom"),
        ("exit", 3, "exit", "sys.exit(3)"),
        ("mismatch", 72, "exception", "lowshard.errors.MismatchError: ranks differ"),
    ],
)
def test_the_first_failure_gives_the_exit_code_and_is_told_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, code: int, cause: str, told: str
) -> None:
    result = run_threads(written(tmp_path), [how], 3)
    assert (result.exit_code, result.cause, result.failed_rank) == (code, cause, 1)
    _, err = capsys.readouterr()
    *rest, last = err.strip().splitlines()
    assert last == f"lowshard run: rank 1 failed first: {told} (exit code {code})"
    # Who waited says so, and is no cause.
    assert {record.rank for record in result.failures if record.consequence} == {0, 2}
    assert "PeerFailed: rank 1 failed" in err
    if how == "raise":
        assert rest[-1] == "ValueError: boom"
        assert not any("thread_ranks.py" in line for line in rest[rest.index("--- rank 1") :])


def test_ranks_that_are_busy_are_not_waited_for(tmp_path: Path) -> None:
    start_s = time.monotonic()
    done = run("-n", "3", written(tmp_path), "slow")
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - start_s < LIMIT_S / 2
    assert done.stderr.endswith("lowshard run: rank 1 failed first: ValueError: boom (exit code 1)\n")


def test_the_time_limit_shows_where_each_rank_is(tmp_path: Path) -> None:
    done = run("-n", "3", "--timeout", "1", written(tmp_path), "hang")
    assert done.returncode == 71, done.stderr
    assert any(line.startswith("[1]") and line.endswith("in fail") for line in done.stderr.splitlines())
    assert "3 ranks were still running after the limit of 1 s" in done.stderr


def test_a_wait_has_the_communicators_deadline(tmp_path: Path) -> None:
    done = run("-n", "3", written(tmp_path), "hang", LOWSHARD_TIMEOUT_S="0.5")
    assert done.returncode == 71, done.stderr
    assert "TimedOut" in done.stderr.splitlines()[-1]


def test_a_rank_that_leaves_early_is_the_cause_long_before_the_deadline(tmp_path: Path) -> None:
    start_s = time.monotonic()
    done = run("-n", "3", written(tmp_path, "def main(comm):\n    if comm.rank:\n        comm.barrier()\n"))
    assert done.returncode == 70, done.stderr
    assert time.monotonic() - start_s < LIMIT_S / 2
    assert "PeerFailed: rank 0 has ended its program without this collective" in done.stderr
    assert "rank 0 failed first: it left with exit code 0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("signal_number", [None, signal.SIGINT])
def test_a_reader_that_has_stopped_does_not_keep_it_from_ending(
    tmp_path: Path, signal_number: int | None
) -> None:
    script = written(tmp_path, "def main(comm):\n    while True:\n        print('x' * 1000)\n")
    limit = ["--timeout", "1"] if signal_number is None else []
    started = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "run", "--threads", "-n", "2", *limit, script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    started.stdout.readline()  # and no more
    if signal_number is not None:
        time.sleep(0.3)
        started.send_signal(signal_number)
    try:
        assert started.wait(LIMIT_S / 2) == (71 if signal_number is None else 130)
    finally:
        started.kill()
        out, err = started.communicate()
    assert out
    assert "have been ended" in err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_signals_that_end_a_program_end_it(tmp_path: Path, number: signal.Signals) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "lowshard", "run", "--threads", "-n", "3", written(tmp_path), "hang"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    for _ in range(3):
        started.stdout.readline()
    started.send_signal(number)
    _, err = started.communicate(timeout=LIMIT_S)
    code = 128 + number
    assert started.returncode == code
    assert err == f"lowshard run: ended by {number.name}; all ranks have been ended (exit code {code})\n"


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("int('x')\n", 1, "prog.py failed while it was loaded: ValueError"),
        ("import sys\nsys.exit(4)\n", 4, "failed while it was loaded: sys.exit(4)"),
        ("def main(comm):\n    raise SystemExit\n", 0, ""),
        ("def main(comm):\n    raise SystemExit('no more')\n", 1, "no more"),
        ("def main(comm):\n    raise SystemExit(256)\n", 0, ""),  # as the system has it
    ],
)
def test_a_script_that_ends_early_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, told: str
) -> None:
    assert run_threads(written(tmp_path, text), [], 1).exit_code == code
    err = capsys.readouterr().err
    assert told in err
    assert bool(err) == bool(told)
    assert "importlib" not in err


@pytest.mark.parametrize(("given", "code"), [("3", 3), ("'text'", 1)])
def test_a_script_may_close_stderr_before_it_ends(tmp_path: Path, given: str, code: int) -> None:
    script = written(
        tmp_path, f"import sys\ndef main(comm):\n    sys.stderr.close()\n    sys.exit({given})\n"
    )
    done = run("-n", "1", script)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n", r"prog\.py defines none; write def main\(comm\)"),
        ("main = 3\n", "defines none"),
        ("import sys\nsys.exit()\n", r"before its main\(comm\) could be called"),
        ("import sys\nsys.exit(256)\n", r"before its main\(comm\) could be called"),
    ],
)
def test_a_script_without_a_main_is_told_what_to_write(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        run_threads(written(tmp_path, text), [], 1)


def test_a_module_and_no_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mod.py").write_text("def main(comm):\n    print('plain', comm.rank, __name__)\n")
    monkeypatch.chdir(tmp_path)
    assert run_threads("mod", [], 1, module=True, prefix_output=False).exit_code == 0
    assert capsys.readouterr().out == "plain 0 mod\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "0", "--threads", __file__], "at least 1 rank"),
        (["-n", "1", "--threads", "--timeout", "0", __file__], "timeout_s must be positive"),
        (["-n", "1", "--threads", "-m", "no_such_module"], "no module named 'no_such_module'"),
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_threads_and_hosts_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "-n", "1", "--threads", "--fake-hosts", "2", __file__])
    assert end.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
