"""Parts of the selftest by themselves: how steps end, what a tally says, ranks that are threads."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.selftest import fold_cases, redistribute_step, refit_step, runner
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import STEPS, Setting

# Starts processes, one a millisecond for some seconds, and does not end when it is asked to.
_BREEDER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
for _ in range(5000):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.001)
"""


def test_of_a_step_that_starts_processes_while_it_is_ended_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "_TERM_S", 0.1)
    mark = f"{os.getpid()} breeder"
    env = {**os.environ, runner._MARK: mark}
    step = subprocess.Popen([sys.executable, "-c", _BREEDER], env=env, stdout=subprocess.PIPE)
    assert step.stdout is not None
    with step.stdout:
        step.stdout.readline()
        runner._end(step, mark)
    assert runner._marked(mark) == []


@pytest.mark.parametrize("run_rank", [redistribute_step.run_rank, refit_step.run_rank])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_threads_move_and_refit_as_the_selftests_ranks(run_rank: Any, size: int) -> None:
    def work(comm: Communicator) -> Tally:
        tally = Tally()
        run_rank(comm, tally)
        return tally

    for tally in lc.run_loopback(size, work, 60):
        assert tally.wrong == 0, tally.findings
        assert tally.checks > 60


def test_folds_of_the_selftest_have_the_bits_of_plain_numpy() -> None:
    tally = Tally()
    fold_cases.run(Setting("cpu", 1, "", 60.0), tally)
    assert tally.wrong == 0, tally.findings
    assert tally.checks == 14 * 7 * 2 * 5 * 3


def test_every_step_names_what_it_runs() -> None:
    for step in STEPS:
        module, function = step.run.split(":")
        assert callable(getattr(importlib.import_module(f"lowshard.selftest.{module}"), function))


def test_a_tally_names_the_first_wrong_element_and_both_bits() -> None:
    expected = np.array([[1.0, -0.0], [np.nan, 2.0]], np.float32)
    got = expected.copy()
    tally = Tally()
    tally.same("all is well", got, expected)
    assert tally.wrong == 0
    got[0, 1], got[1, 1] = 0.0, 3.0
    tally.same("a sum", got, expected)
    assert tally.findings == [
        "a sum: element [0, 1] of [2, 2]: expected 0x80000000 (-0.0), got 0x00000000 (0.0); 2 of 4 differ"
    ]
    quiet = expected.copy()
    quiet.view(np.uint32)[1, 0] ^= 1
    tally.same("another NaN is as good", quiet, expected, any_nan=True)
    assert tally.wrong == 1
    tally.same("here it is not", quiet, expected)
    tally.same("another shape", got[0], expected)
    assert tally.wrong == 3
    assert Tally.from_json(tally.to_json()) == tally
