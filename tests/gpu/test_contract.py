"""The contract of communicators, and programs over them, on GPU arrays: NCCL and staged, by threads and MPI ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.case_table import GPU_LIMIT_S, cases_of_jobs, check_case, some_cases
from support.comm_cases import Way, cases_for, run_case
from support.fsdp_kit import UNITS, filler, optimizer
from support.gpu import checked_ranks, on_gpu, run_nccl, run_staged
from support.toy_collective import every_promise

from lowshard import comm as lc
from lowshard.checkpoint import CheckpointReader
from lowshard.comm import Communicator
from lowshard.fsdp import FSDP, Precision, ShardingStrategy
from lowshard.selftest import redistribute_step, refit_step
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import STEPS

NCCL, STAGED = (partial(Way, transport=name, on_gpu=True) for name in ("nccl", "staged"))
WAYS: dict[str, tuple[Way, int, Any]] = {
    "one rank": (NCCL(1), 2, partial(run_nccl, control=False)),
    "compared late": (NCCL(2, late=True), 4, partial(run_nccl, late=True)),
    "without control": (NCCL(3, compares=False), 2, partial(run_nccl, control=False)),
    "staged, one rank": (STAGED(1), 1, run_staged),
    "staged in pieces": (STAGED(2), 5, partial(run_staged, slot_bytes=3000)),
    "staged": (STAGED(3), 1, run_staged),
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


PROGRAMS = [(run, *what) for run in (run_nccl, run_staged)
            for what in ((redistribute_step.run_rank, 3), (refit_step.run_rank, 2))]  # fmt: skip


@pytest.mark.parametrize(("run", "run_rank", "size"), mode.sample(PROGRAMS, 1, "programs on a GPU"))
def test_ranks_move_and_refit(run: Any, run_rank: Any, size: int) -> None:
    def work(comm: Communicator) -> Tally:
        tally = Tally()
        run_rank(comm, tally)
        return tally

    for tally in run(size, work):
        assert not tally.wrong, tally.findings
        assert tally.checks > 60


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


MODEL = {unit: UNITS[unit] for unit in ("l0", "l1")}
HALF, SPLIT = (
    Precision(compute="bfloat16", reduce="bfloat16"),
    ShardingStrategy.HybridShard(intra_node_size=2),
)


def train(comm: Communicator, path: Path, strategy: Any, precision: Precision) -> bytes:
    """Return the file of a model that was trained by gradients that the ranks make on the host."""
    with FSDP(MODEL, comm, strategy, precision=precision) as engine:
        engine.fill(filler)
        for step in range(3):
            with engine.step():
                for unit in MODEL:
                    engine.open(unit, "backward")
                    for name, view in engine.grads(unit).items():
                        rng = np.random.default_rng([comm.rank, step, *name.encode()])
                        view[...] = on_gpu(comm, rng.normal(size=view.shape).astype(view.dtype))
                    engine.reduce(unit)
                    engine.close(unit)
            engine.join()
            engine.clip(0.4)
            engine.update(optimizer())
            engine.broadcast_updated_params()
        engine.save(path)
        saved = path.read_bytes()
        engine.load(path)
        with CheckpointReader(path) as reader:
            engine.fill(reader.read_box)
        comm.barrier()
        engine.save(path)
        assert path.read_bytes() == saved
    return saved


@pytest.mark.parametrize("how", [Precision(), HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [ShardingStrategy.FullShard, ShardingStrategy.NoShard, SPLIT], ids=str)
@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_a_model_trains_to_the_bits_of_the_cpus(run: Any, kind: Any, how: Any, tmp_path: Path) -> None:
    size = 4 if kind is SPLIT else 2
    wanted = lc.run_loopback(size, lambda comm: train(comm, tmp_path / "cpu", kind, how), 60.0)
    assert run(size, lambda comm: train(comm, tmp_path / "gpu", kind, how)) == wanted
