"""A sharded model on GPU arrays trains to the bits of the CPU's, from host values, a file or a box of a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fsdp_kit import UNITS, filler, optimizer
from support.gpu import on_gpu, run_nccl, run_staged

from lowshard import comm as lc
from lowshard.checkpoint import CheckpointReader
from lowshard.fsdp import FSDP, Precision, ShardingStrategy

MODEL = {unit: UNITS[unit] for unit in ("l0", "l1")}
STRATEGIES = {
    "full": ShardingStrategy.FullShard, "none": ShardingStrategy.NoShard,
    "hybrid": ShardingStrategy.HybridShard(intra_node_size=2),
}  # fmt: skip
PRECISIONS = {"float32": Precision(), "bfloat16": Precision(compute="bfloat16", reduce="bfloat16")}


def train(comm: lc.Communicator, path: Path, strategy: Any, precision: Precision) -> bytes:
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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", [run_nccl, run_staged])
def test_a_model_trains_to_the_bits_of_the_cpus(
    run: Any, strategy: str, precision: str, tmp_path: Path
) -> None:
    how, size = (STRATEGIES[strategy], PRECISIONS[precision]), 4 if strategy == "hybrid" else 2
    wanted = lc.run_loopback(size, lambda comm: train(comm, tmp_path / "cpu", *how), 60.0)
    assert run(size, lambda comm: train(comm, tmp_path / "gpu", *how)) == wanted
