"""Parts of the selftest that a machine without a GPU does not come to: NCCL ranks as threads, side streams.

CuPy is NumPy here, with streams that do nothing by themselves, and NCCL the stand-in that moves host memory.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.nccl_stand_in import Host, StandInCommunicator, World, run_staged, run_stand_in

from lowshard import comm as lc
from lowshard.comm import Communicator
from lowshard.comm.nccl_bindings import Binding
from lowshard.selftest import collective_step, fold_cases, redistribute_step, refit_step, runner, stream_step
from lowshard.selftest.collective_cases import run_every_collective
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


class CuPy(ModuleType):
    """NumPy by another name, with streams of each thread's own device."""

    def __init__(self, host: threading.local) -> None:
        super().__init__("cupy")
        self._host = host
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking=False: self._host.device.new_stream(),
            get_current_stream=lambda: self._host.device.stream,
        )

    def asarray(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Device(threading.local):
    """The stand-in of the calling thread's device."""

    def __init__(self) -> None:
        self.device = Host()


@pytest.fixture
def nccl_version(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put the stand-ins where the selftest looks for CuPy and NCCL; the list holds NCCL's version."""
    here, version = Device(), [23007]
    cupy = CuPy(here)
    worlds: dict[bytes, World] = {}

    def communicator(size: int, unique: bytes, rank: int) -> StandInCommunicator:
        return StandInCommunicator(worlds.setdefault(unique, World(size)), rank, here.device)

    def load(handle: Any = None, *, with_nccl: bool = True) -> Binding:
        nccl = here.device.nccl
        nccl.NcclCommunicator = communicator  # type: ignore[attr-defined]
        nccl.get_unique_id = lambda: str(threading.get_ident()).encode() + bytes([len(worlds)])  # type: ignore[attr-defined]
        nccl.get_version = lambda: version[0]  # type: ignore[attr-defined]
        return replace(here.device.binding(), xp=cupy)

    monkeypatch.setattr(Binding, "load", load)
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    return version


def setting() -> Setting:
    return Setting("cuda", 2, "", 60.0)


def test_nccl_ranks_as_threads_run_every_collective(nccl_version: list[int]) -> None:
    tally = Tally()
    collective_step.run_threads(setting(), tally)
    assert tally.wrong == 0, tally.findings
    assert tally.checks > 900
    assert "2 and 4 ranks through NCCL" in tally.summary


def test_an_older_nccl_runs_one_rank_and_says_why(nccl_version: list[int]) -> None:
    nccl_version[0] = 22809
    tally = Tally()
    collective_step.run_threads(setting(), tally)
    assert tally.wrong == 0, tally.findings
    assert tally.summary.endswith("1 ranks through NCCL; several ranks on one GPU need NCCL 2.30.3 or newer")


def test_started_calls_run_on_side_streams(nccl_version: list[int]) -> None:
    tally = Tally()
    stream_step.run(setting(), tally)
    assert tally.wrong == 0, tally.findings
    assert tally.checks == 61


@pytest.mark.parametrize("run", [run_stand_in, run_staged])
def test_gpu_transports_run_every_collective(run: Any) -> None:
    def work(comm: Communicator) -> Tally:
        tally = Tally()
        run_every_collective(comm, tally)
        return tally

    for tally in run(3, work):
        assert tally.wrong == 0, tally.findings
        assert tally.checks > 150


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
