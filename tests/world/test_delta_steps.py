"""An error at any step of a delta's way: the old version or the new one is whole, and the next push is right."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import BF16, arrays_of, local_part, weights

from lowshard.comm import run_loopback
from lowshard.errors import LowshardError, PeerFailed
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

RANKS, LIMIT_S = 4, 20
GIVER, TAKER = 1, 2
BROKEN = 3
"""The version in which something fails."""
_WATCHED = ("/reshard/", "/transfer/", "/kernels/change", "/kernels/cpu/compiled_changes.py")
SRC = {n: TensorLayout.sharded((40, 64), "bfloat16", {"tp": (2, 1)}, {0: "tp"}) for n in ("a", "b")}
DST = {n: TensorLayout.sharded((40, 64), "bfloat16", {"tp": (2, 1)}, {1: "tp"}, offset=2) for n in SRC}
PLAN = build_reshard_plan(SRC, DST)


class Planted(Exception):
    """What fails a step."""


@dataclass
class Calls:
    """The calls of functions that a version goes through on one thread; the `at`-th raises, 0 none."""

    at: int = 0
    names: list[str] = field(default_factory=list)

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        code = frame.f_code
        if code.co_flags & inspect.CO_GENERATOR:  # nobody hears of what is raised while one is closed
            return
        if event == "call" and any(part in code.co_filename for part in _WATCHED):
            self.names.append(code.co_qualname)
            if len(self.names) == self.at:
                raise Planted(code.co_qualname)


def versions(rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Return versions of which one tensor changes little, and the other a lot: it goes whole."""
    made = [{n: weights(rng, 40, 64) for n in SRC}]
    for _ in range(6):
        new = {n: a.copy() for n, a in made[-1].items()}
        for name, share in (("a", 0.002), ("b", 0.9)):
            new[name].view(np.uint16)[rng.random((40, 64)) < share] ^= 0x0101
        made.append(new)
    return made


def run(
    made: list[dict[str, np.ndarray]], victim: int, buffering: Any, calls: Calls
) -> tuple[list[BaseException | None], list[int | None]]:
    """Push all versions; return, by rank, what the broken one raised and which version was served after it."""
    errors: list[BaseException | None] = [None] * RANKS
    served: list[int | None] = [None] * RANKS
    wrong: list[AssertionError] = []

    def work(comm: Any) -> None:
        try:
            follow(comm)
        except AssertionError as error:
            wrong.append(error)
            raise

    def follow(comm: Any) -> None:
        mine = arrays_of(SRC, comm.rank, made[0])
        out = {n: np.zeros((40, 32), BF16) for n in DST} if comm.rank >= 2 else {}
        refit = Refit(PLAN, comm, mine, out, buffering=buffering, delta="auto")

        def push(number: int) -> None:
            for name, array in mine.items():
                array[...] = local_part(SRC[name], comm.rank, made[number][name])
            refit.push(number) if mine else refit.pull()

        def require_whole(number: int | None) -> None:
            assert number is not None
            assert refit.version == number
            for name, got in refit.weights.items():
                assert got.tobytes() == local_part(DST[name], comm.rank, made[number][name]).tobytes(), name

        for number in range(BROKEN):
            push(number)
            require_whole(number)
        try:
            sys.setprofile(calls if comm.rank == victim else None)
            push(BROKEN)
        except BaseException as error:
            errors[comm.rank] = error
        finally:
            sys.setprofile(None)
        served[comm.rank] = refit.version
        if refit.torn:
            assert buffering == "in_place"
        else:
            require_whole(refit.version)
        error = errors[comm.rank]
        if error is not None and (isinstance(error, PeerFailed) or not isinstance(error, LowshardError)):
            raise error  # the others hear of it, and there is no next push
        for number in range(BROKEN + 1, len(made)):
            push(number)
            require_whole(number)
            said = refit.report()
            if mine and number > BROKEN + 1:  # what could not be kept makes one go whole
                assert said["sent_bytes"] < 0.7 * said["dense_bytes"]

    with suppress(LowshardError, Planted, AssertionError):
        run_loopback(RANKS, work, LIMIT_S)
    if wrong:
        raise wrong[0]
    return errors, served


@pytest.mark.time_limit(400)
@pytest.mark.parametrize("buffering", mode.sample(["double", "in_place"], 1, "errors of deltas"))
def test_an_error_at_any_call_leaves_a_whole_version(
    rng: np.random.Generator, buffering: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = versions(rng)
    tried: list[tuple[int, int]] = []
    for victim in (GIVER, TAKER):
        run(made, victim, buffering, Calls())  # what is looked up for the first time has more calls
        calls = Calls()
        errors, served = run(made, victim, buffering, calls)
        assert errors == [None] * RANKS
        assert served == [BROKEN] * RANKS
        assert len(calls.names) > 100
        tried += [(victim, at) for at in range(1, len(calls.names) + 1)]
    told = 0
    picked = mode.sample(tried, 24, f"delta steps {buffering}")
    for victim, at in picked:
        calls = Calls(at)
        try:
            errors, served = run(made, victim, buffering, calls)
            assert len(calls.names) == at
            assert set(served) <= {BROKEN - 1, BROKEN}
            if all(isinstance(e, LowshardError) for e in errors):  # kept until all have met: the same on all
                assert len({str(e).partition("\n")[0] for e in errors}) == 1, errors
                assert len(set(served)) == 1
                told += 1
        except BaseException as error:
            error.add_note(f"call {at} of rank {victim}, {calls.names[-1]}")
            raise
    with capsys.disabled():
        print(f"\n{buffering}: {len(picked)} of {len(tried)} calls failed, {told} told to all")
    assert told
