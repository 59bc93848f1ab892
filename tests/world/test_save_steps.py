"""Every step of a save fails in turn: the old checkpoint or the new one is whole, and the next save leaves nothing."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path

import pytest
from support import mode
from support.save_steps import OPERATIONS, Steps, watched
from support.savers import RANKS, SAVERS, Ended, Saver, attempt, judge

import lowshard
from lowshard import comm as lc
from lowshard.comm.loopback import LoopbackTransport

VICTIMS = (0, 2)


def run(saver: Saver, victim: int, steps: Steps, *, breaks: bool) -> list[Ended | None]:
    """Try to save version 2; return how it ended on each rank. Where a fault breaks the group, others hear of it."""
    ended: list[Ended | None] = [None] * RANKS

    def job(comm: lc.Communicator) -> None:
        error = attempt(saver, comm, victim, steps)
        ended[comm.rank] = Ended.of(error)
        if breaks and error is not None:
            raise error

    with suppress(BaseException):
        lc.run_loopback(RANKS, job, 20)
    return ended


def count(saver: Saver, victim: int, *, fresh: bool) -> Steps:
    steps = Steps()
    saver.start(fresh=fresh)
    with watched(saver.folder / "c", LoopbackTransport):
        assert run(saver, victim, steps, breaks=False) == [Ended()] * RANKS
    return steps


def test_every_operation_that_changes_something_is_a_step() -> None:
    """What else of `os` and `fcntl` stands where checkpoints are written only looks, or lets go."""
    looks = {
        "close", "dup", "fdopen", "fsencode", "fspath", "fstat", "getpid", "stat", "statvfs", "path", "pread", "preadv",
        "posix_fadvise", "PathLike",
    }  # fmt: skip
    used = {
        node.attr
        for folder in ("checkpoint", "weights", "fsdp")
        for file in (Path(lowshard.__file__).parent / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("os", "fcntl")
        and not node.attr.isupper()
    }
    assert {"open", "pwrite", "fsync", "replace", "flock"} <= used
    assert used - looks <= {name for _, name in OPERATIONS}


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("name", mode.sample([*SAVERS], 5, "savers that fail"))
def test_a_save_that_fails_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = SAVERS[name](tmp_path).prepare()
    cases = [
        (victim, fresh, at, fault)
        for victim in VICTIMS
        for fresh in (False, True)
        for at, fault in count(saver, victim, fresh=fresh).faults
    ]
    tried, committed = mode.sample(cases, 7, f"save steps {name}"), 0
    for victim, fresh, at, fault in tried:
        saver.start(fresh=fresh)
        before, files, steps = saver.inode(), saver.files(), Steps(at, fault)
        breaks = not fault.startswith("E")
        try:
            with watched(saver.folder / "c", LoopbackTransport):
                ended = run(saver, victim, steps, breaks=breaks)
            assert len(steps.names) >= at
            if not breaks:  # the same error on all ranks, or none
                assert len({(e.kind, e.said.partition("\n")[0]) for e in ended if e is not None}) == 1, ended
            is_removal = steps.names[at - 1] in ("unlink", "rmdir")
            committed += judge(saver, before, files, ended, told=not breaks and not is_removal)
        except BaseException as error:
            error.add_note(
                f"{name}: {fault} at step {at} of rank {victim}, {'fresh' if fresh else 'over version 1'}"
            )
            error.add_note(f"steps: {list(enumerate(steps.names, 1))}")
            raise
    assert len(cases) > 100
    assert committed < len(tried)
    assert committed or not mode.full()  # few are tried, and most steps are before the commit
    with capsys.disabled():
        print(
            f"\n{name}, ranks {VICTIMS}: {len(tried)} of {len(cases)} faults tried, {committed} after the commit"
        )
