"""The contract of communicators, and programs over them, on GPU arrays, by threads and by MPI ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.case_table import GPU_LIMIT_S, cases_of_jobs, check_case, some_cases
from support.comm_cases import Way, cases_for, run_case
from support.fsdp_kit import UNITS, filler
from support.gpu import checked_ranks, run_nccl, run_staged
from support.toy_collective import every_promise

from lowshard import comm as lc
from lowshard.checkpoint import CheckpointReader
from lowshard.comm import Communicator
from lowshard.fsdp import FSDP, Precision, ShardingStrategy
from lowshard.selftest import fsdp_step, redistribute_step, refit_step
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import STEPS

NCCL, STAGED = (partial(Way, transport=name, on_gpu=True) for name in ("nccl", "staged"))
WAYS: dict[str, tuple[Way, int, Any]] = {
    "one rank": (NCCL(1), 2, partial(run_nccl, control=False)),
    "two ranks": (NCCL(2, late=True), 4, run_nccl),
    "never compared": (NCCL(3, compares=False), 2, partial(run_nccl, control=False)),
    "staged, one rank": (STAGED(1), 1, run_staged),
    "staged": (STAGED(3), 6, run_staged),
}
"""What cases need to know, how many are tried in a default run, what runs the ranks, which are threads."""
ALWAYS = ("a_work_holds_its_buffers", "close_waits_for_messages_that_were_started")
CASES = [
    (how, name)
    for how, (way, few, _) in WAYS.items()
    for name in cases_for(way, dict.fromkeys([*ALWAYS, *some_cases(few, how)]))
]


@pytest.mark.whole
@pytest.mark.parametrize(("how", "name"), CASES)
def test_the_contract_holds(how: str, name: str) -> None:
    way, _, run = WAYS[how]
    run(way.size, lambda comm: run_case(name, comm))


@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_a_collective_in_one_record_works(run: Any) -> None:
    run(3, every_promise)


PROGRAMS = [
    (step, run)
    for step in (redistribute_step, refit_step, fsdp_step)
    for run in mode.sample([run_nccl, run_staged], 1, step.__name__)
]


@pytest.mark.whole
@pytest.mark.parametrize(("step", "run"), PROGRAMS)
def test_ranks_move_refit_and_train(step: Any, run: Any) -> None:
    def work(comm: Communicator) -> Tally:
        tally = Tally()
        step.run_rank(comm, tally)
        return tally

    for tally in run(2, work):
        assert not tally.wrong, tally.findings
        assert tally.checks > 30


@pytest.mark.mpi
@pytest.mark.full_only
@pytest.mark.time_limit(GPU_LIMIT_S + 30)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("device", ["staged", "nccl"])
def test_the_contract_holds_on_ranks_that_share_a_gpu(device: str, size: int, tmp_path: Path) -> None:
    failed = []
    with checked_ranks(tmp_path, "copies", "collectives" if device == "nccl" else "copies") as env:
        for name, _ in cases_of_jobs([size], device):
            try:
                check_case(name, size, device, None, **env)
            except pytest.fail.Exception as error:
                failed.append(f"{name}: {error}")
        assert not failed, "\n\n".join(failed)


@pytest.mark.mpi
@pytest.mark.full_only
@pytest.mark.time_limit(600)
def test_the_selftest_passes(tmp_path: Path) -> None:
    steps = ",".join(step.name for step in STEPS if step.name != "bandwidths")  # which the checker has not
    command = [sys.executable, "-m", "lowshard", "selftest", "--device", "cuda", "-n", "2", "--only", steps]
    with checked_ranks(tmp_path, "launches", "copies", "collectives") as env:
        env = {**os.environ, **env}
        ran = subprocess.run([*command, "--out", str(tmp_path)], env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_a_sharded_model_is_saved_as_on_a_cpu_and_loaded(run: Any, tmp_path: Path) -> None:
    model = {unit: UNITS[unit] for unit in ("l0", "l1")}
    how = Precision(compute="bfloat16", reduce="bfloat16")

    def saved(comm: Communicator, path: Path) -> bytes:
        with FSDP(model, comm, ShardingStrategy.HybridShard(intra_node_size=2), precision=how) as engine:
            engine.fill(filler)
            engine.save(path)
            content = path.read_bytes()
            engine.load(path)
            with CheckpointReader(path) as reader:
                engine.fill(reader.read_box)
            comm.barrier()
            engine.save(path)
            assert path.read_bytes() == content
        return content

    wanted = lc.run_loopback(4, lambda comm: saved(comm, tmp_path / "cpu"), 60.0)
    assert run(4, lambda comm: saved(comm, tmp_path / "gpu")) == wanted
