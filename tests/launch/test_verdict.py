"""What a job's end means: which failure was first, which exit code, which text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowshard.comm.abort import FailureRecord, record_of
from lowshard.launch.verdict import (
    Leaver,
    failure_text,
    first_cause,
    judge,
    place_in,
    unwritten,
)


def record(rank: int, kind: str, **more: object) -> FailureRecord:
    return FailureRecord(rank, kind, 1, "", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([record(2, "exception"), record(1, "exception")], 2),
        ([record(2, "exception", consequence=True), record(1, "exception")], 1),
        (
            [
                record(2, "signal", signal=15, consequence=True),
                record(1, "exception", consequence=True),
            ],
            1,
        ),
        ([record(2, "exception", error="mpi4py.MPI.Exception"), record(1, "signal", signal=9)], 1),
        (
            [
                record(2, "exception", error="mpi4py.MPI.Exception"),
                record(1, "signal", consequence=True),
            ],
            2,
        ),
        ([record(2, "exception", error="ValueError"), record(1, "signal", signal=9)], 2),
        ([record(2, "exception", consequence=True)], 2),
        ([record(1, "exception", error="mpi4py.MPI.Exception"), record(2, "lost")], 2),
        ([record(3, "lost"), record(2, "lost")], 3),
    ],
)
def test_the_first_cause_is_the_earliest_that_is_no_consequence(
    failures: list[FailureRecord], rank: int
) -> None:
    cause = first_cause(failures)
    assert cause is not None
    assert cause.rank == rank
    assert first_cause([]) is None


def test_what_ended_the_launcher_and_the_time_limit_come_before_the_ranks_failures() -> None:
    failures = (FailureRecord(1, "exception", 1, "ValueError: boom"),)
    assert judge(failures, 2, 1.0, status=1, ended_by=15, limit_s=3.0).exit_code == 143
    late = judge(failures, 2, 1.0, status=1, limit_s=3.0)
    assert (late.exit_code, late.cause) == (71, "timeout")
    assert "3 s" in late.message
    failed = judge(failures, 2, 1.0, status=1)
    assert (failed.exit_code, failed.cause, failed.failed_rank) == (1, "exception", 1)
    assert judge((), 2, 1.0, status=0).exit_code == 0


@pytest.mark.parametrize(("status", "code"), [(7, 7), (1, 1), (137, 1), (255, 1), (-9, 1)])
def test_mpiexecs_own_status_counts_where_no_rank_left_a_record(status: int, code: int) -> None:
    result = judge((), 2, 1.0, status=status)
    assert (result.exit_code, result.cause) == (code, "mpiexec")
    assert f"status {status}" in result.message


def test_ranks_with_one_text_are_told_together_and_the_first_cause_last() -> None:
    failures = (
        FailureRecord(1, "exception", 1, "ValueError: boom", "Traceback\nValueError: boom\n"),
        FailureRecord(2, "exception", 70, "PeerFailed", "Traceback\nPeerFailed\n", consequence=True),
        FailureRecord(0, "exception", 70, "PeerFailed", "Traceback\nPeerFailed\n", consequence=True),
        FailureRecord(3, "signal", 70, "killed by signal 15", signal=15, consequence=True),
    )
    assert failure_text(judge(failures, 4, 1.0, status=1)) == (
        "--- ranks 0, 2\nTraceback\nPeerFailed\n--- rank 1\nTraceback\nValueError: boom\n"
        "lowshard run: rank 1 failed first: ValueError: boom (exit code 1)\n"
    )
    assert failure_text(judge((), 4, 1.0, status=0)) == ""


def test_output_that_is_lost_is_told_and_is_no_success() -> None:
    done = judge((), 2, 1.0, status=0)
    full = unwritten(done, OSError(28, "No space left on device"))
    assert (full.exit_code, full.cause) == (1, "output")
    assert "cannot be written: No space left on device" in failure_text(full)
    assert "closed file" in unwritten(done, ValueError("I/O operation on closed file")).message
    gone = unwritten(done, BrokenPipeError(32, "Broken pipe"))
    assert (gone.exit_code, gone.cause) == (141, "interrupt")


def test_a_kill_that_nobody_did_hints_at_the_memory() -> None:
    killed = judge((FailureRecord(0, "signal", 70, "killed", signal=9),), 1, 1.0, status=137)
    assert "dmesg" in killed.message


SURVIVORS = [
    record(0, "exception", consequence=True, about=(1,)),
    record(1, "exception", consequence=True, about=(3,)),
    record(2, "signal", signal=15, consequence=True),
]


@pytest.mark.parametrize(
    ("failures", "leavers", "rank", "kind"),
    [
        (SURVIVORS, [Leaver(3, in_order=True)], 3, "left"),
        (SURVIVORS, [Leaver(3, in_order=False)], 3, "left"),
        (SURVIVORS, [], 3, "exception"),  # it is the one that they waited for, whatever became of it
        ([record(2, "signal", signal=15, consequence=True)], [Leaver(3, in_order=False)], 3, "left"),
        ([record(2, "lost")], [Leaver(3, in_order=False)], 2, "lost"),
        ([record(2, "lost")], [Leaver(3, in_order=True)], 2, "lost"),
        ([record(2, "exception", error="mpi4py.MPI.Exception")], [Leaver(3, in_order=False)], 3, "left"),
        ([record(0, "exception", error="TimedOut", about=(3,))], [Leaver(3, in_order=True)], 3, "left"),
        ([record(0, "exception", error="TimedOut", about=(3,))], [], 3, "exception"),
        # Another failure than that of a wait: those who have left had done their part.
        ([record(0, "exception", error="ValueError")], [Leaver(3, in_order=False)], 0, "exception"),
        ([*SURVIVORS, record(3, "exception", error="ValueError")], [], 3, "exception"),
    ],
)  # fmt: skip
def test_a_rank_that_left_or_never_came_is_the_cause_of_what_the_others_met(
    failures: list[FailureRecord], leavers: list[Leaver], rank: int, kind: str
) -> None:
    cause = first_cause(failures, leavers)
    assert cause is not None
    assert (cause.rank, cause.kind) == (rank, kind)


def test_a_rank_that_left_inside_its_program_is_the_cause_where_it_left_others_alone() -> None:
    leavers = [Leaver(2, in_order=True), Leaver(3, in_order=False)]
    left = judge((), 4, 1.0, leavers=leavers, has_abrupt_leaver=True)
    assert (left.exit_code, left.cause, left.failed_rank) == (70, "left", 3)
    assert judge((), 4, 1.0, leavers=leavers).exit_code == 0


def test_the_line_of_an_exception_is_told_and_not_its_note() -> None:
    error = OSError(28, "No space left on device")
    error.add_note("a hint of somebody's")
    told = record_of(1, error)
    assert told.message == "OSError: [Errno 28] No space left on device"
    assert "a hint of somebody's" in told.traceback
    assert record_of(1, SyntaxError("no sense", ("a.py", 3, 1, "x x"))).message == "SyntaxError: no sense"


def test_a_time_limit_tells_who_had_left_or_who_was_elsewhere() -> None:
    late = judge((), 3, 1.0, status=1, limit_s=3.0, leavers=[Leaver(2, in_order=True)])
    assert late.message.startswith("ranks 0, 1 of 3 were still running")
    assert late.message.endswith("; rank 2 had left with exit code 0")
    stacks = (
        b'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 7 in work\n\nCurrent thread 0x2 '
    )
    stacks += b'(most recent call first):\n  File "<frozen runpy>", line 1 in run\n  File "/x/a.py", line 31 in main\n'
    assert place_in(stacks) == "a.py:31"
    assert place_in(b"") == ""
    late = judge((), 3, 1.0, status=1, limit_s=3.0, places={0: "train.py:31", 1: "", 2: "train.py:31"})
    assert late.message.endswith("; ranks 0, 2 were in train.py:31, rank 1 was in an unknown line")


PROGRAM = """\
import sys, threading, time
from lowshard.comm.abort import install_abort_hook

def mine(*args):
    print("the program's own hook", flush=True)
    raise KeyError("a fault of the hook")

{first}
sys.excepthook = threading.excepthook = mine
install_abort_hook(1)
{fails}
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("first", "fails"),
    [
        ("", "raise ValueError('boom')"),
        ("install_abort_hook(1)", "threading.Thread(target=int, args='x').start()"),
    ],
    ids=["program", "thread under a launcher"],
)
def test_a_hook_of_the_program_is_called_and_the_job_ends_whatever_it_does(first: str, fails: str) -> None:
    program = PROGRAM.format(first=first, fails=fails)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "the program's own hook\n"), done.stderr
    assert "rank 1 | ValueError: " in done.stderr
    assert "a fault of the hook" in done.stderr


def test_a_text_without_end_is_cut() -> None:
    told = record_of(1, ValueError("x" * (10 << 20)))
    assert len(told.message) + len(told.traceback) < 1 << 20
    assert told.message.startswith("ValueError: xxx")
