"""The contract of communicators, and programs over them, on GPU arrays: NCCL and staged, by threads and MPI ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.case_table import GPU_LIMIT_S, cases_of_jobs, check_case, some_cases
from support.checked_gpu import checker_env
from support.comm_cases import Way, cases_for, run_case
from support.gpu import alone, alone_staged, did, nothing_told, ranks_env, run_nccl, run_staged
from support.starting import start_ranks
from support.toy_collective import every_promise

from lowshard.comm import Communicator
from lowshard.selftest import redistribute_step, refit_step, stream_step
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import STEPS, Setting

LATE, PLAIN = (Way(2, "nccl", on_gpu=True, late=True), Way(3, "nccl", on_gpu=True, compares=False))


# ---- threads


@pytest.mark.parametrize("name", cases_for(Way(1, "nccl", on_gpu=True), some_cases(6, "NCCL alone")))
def test_the_contract_holds_on_one_rank(name: str) -> None:
    with alone() as comm:
        run_case(name, comm)


@pytest.mark.whole
@pytest.mark.parametrize("name", cases_for(LATE, some_cases(10, "NCCL compared late")))
def test_the_contract_holds_where_calls_are_compared_late(name: str) -> None:
    run_nccl(2, lambda comm: run_case(name, comm), late=True)


@pytest.mark.whole
@pytest.mark.parametrize("name", cases_for(PLAIN, some_cases(6, "NCCL without control")))
def test_the_contract_holds_without_control(name: str) -> None:
    run_nccl(3, lambda comm: run_case(name, comm), control=False)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for size in mode.sample([1, 2, 3], 1, "staged")
        for name in cases_for(Way(size, "staged", on_gpu=True), some_cases(10, "staged"))
    ],
)
def test_the_contract_holds_where_arrays_are_staged(name: str, size: int) -> None:
    # Buffers of most cases take several pieces at size 2, and one at size 3.
    slot_bytes = {1: 1 << 20, 2: 3000, 3: 1 << 20}[size]
    if size == 1:
        with alone_staged(slot_bytes=slot_bytes) as comm:
            run_case(name, comm)
        return
    run_staged(size, lambda comm: run_case(name, comm), slot_bytes=slot_bytes)


@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_a_collective_in_one_record_works(run: Any) -> None:
    run(3, every_promise)


PROGRAMS = [(run, *what) for run in (run_nccl, run_staged)
            for what in ((redistribute_step.run_rank, 3), (refit_step.run_rank, 2))]  # fmt: skip


@pytest.mark.parametrize(("run", "run_rank", "size"), mode.sample(PROGRAMS, 2, "programs on a GPU"))
def test_ranks_move_and_refit(cupy: Any, run: Any, run_rank: Any, size: int) -> None:
    def work(comm: Communicator) -> Tally:
        tally = Tally()
        run_rank(comm, tally)
        return tally

    for tally in run(size, work):
        assert not tally.wrong, tally.findings
        assert tally.checks > 60
    did(cupy, "launches", "collectives" if run is run_nccl else "host_waits")


def test_started_calls_run_on_side_streams() -> None:
    tally = Tally()
    stream_step.run(Setting("cuda", 2, "", 60.0), tally)
    assert not tally.wrong, tally.findings
    assert tally.checks == 61


# ---- MPI ranks


JOBS = [(device, size) for device in ("staged", "nccl") for size in (2, 4)]


@pytest.mark.mpi
@pytest.mark.full_only
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@pytest.mark.parametrize(("device", "size"), JOBS)
def test_the_contract_holds_on_ranks_that_share_a_gpu(device: str, size: int, tmp_path: Path) -> None:
    env = ranks_env(tmp_path)
    failed = []
    for name, _ in cases_of_jobs([size], device):
        try:
            check_case(name, size, device, None, **env)
        except pytest.fail.Exception as error:
            failed.append(f"{name}: {error}")
    assert not failed, "\n\n".join(failed)
    nothing_told(tmp_path, "copies", "collectives" if device == "nccl" else "copies")


@pytest.mark.mpi
@pytest.mark.full_only
@pytest.mark.time_limit(600)
def test_the_selftest_passes(tmp_path: Path) -> None:
    steps = ",".join(step.name for step in STEPS if step.name != "bandwidths")  # which the checker has not
    command = [sys.executable, "-m", "lowshard", "selftest", "--device", "cuda", "-n", "2", "--only", steps]
    env = {**os.environ, **ranks_env(tmp_path)}
    ran = subprocess.run(
        [*command, "--out", str(tmp_path)], env=env, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    nothing_told(tmp_path, "launches", "copies", "collectives")


@pytest.mark.mpi
def test_ranks_choose_how_gpu_arrays_are_moved_alike(tmp_path: Path) -> None:
    env = checker_env(tmp_path / "reports", tmp_path / "counts")
    ended = start_ranks(Path(__file__).with_name("run_choice.py"), 2, timeout_s=60, env=env).ok()
    assert len(ended.stdout.split()) == 7, ended.text
