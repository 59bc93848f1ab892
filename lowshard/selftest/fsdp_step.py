"""The step `fsdp`: sharded training over MPI ranks, compared with the same training on threads and NumPy arrays."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from lowshard import comm as lc
from lowshard.box import Box, slices_of
from lowshard.comm import Communicator
from lowshard.foreign_array import host_of
from lowshard.fsdp import FSDP, AdamW, Param, Precision, ShardingStrategy
from lowshard.selftest.arrays import ordinary, put
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.ranks import run_over_mpi
from lowshard.selftest.steps import Setting

_STEPS = 6
_SHAPES = {"hidden.w": (37, 64), "hidden.b": (64,), "out.w": (64, 5), "out.b": (5,)}
_STRATEGIES = (ShardingStrategy.FullShard, ShardingStrategy.ShardGradOp, ShardingStrategy.NoShard)
_WIRES = (None, "bfloat16", "mxfp8")
_WAIT_S = 20.0


def run(setting: Setting, tally: Tally) -> None:
    """Train on ranks."""
    through = run_over_mpi("fsdp_step", setting, tally)
    tally.summary = (
        f"{tally.checks} parameters after {_STEPS} steps, {setting.ranks} MPI ranks through {through}"
    )


def run_rank(comm: Communicator, tally: Tally) -> None:
    """Train in every way as one rank, and compare the parameters bit for bit. Collective."""
    for strategy, wire in product(_STRATEGIES, _WIRES):
        train = partial(_trained, strategy=strategy, wire=wire)
        wanted = lc.run_loopback(comm.size, train, _WAIT_S)[comm.rank]
        for name, value in train(comm).items():
            what = (
                f"{name} by {strategy}, gathered as {wire or 'float32'}, on rank {comm.rank} of {comm.size}"
            )
            tally.same(what, value, wanted[name])


def _trained(comm: Communicator, strategy: ShardingStrategy, wire: str | None) -> dict[str, np.ndarray]:
    """Return all parameters after some steps whose gradients are the parameters times random numbers."""
    units: dict[str, list[Param]] = {"hidden": [], "out": []}
    for name, shape in _SHAPES.items():
        unit, _, short = name.partition(".")
        units[unit].append(Param(short, shape))
    with FSDP(units, comm, strategy=strategy, precision=Precision(wire=wire)) as engine:
        engine.fill(_first)
        adam = AdamW(lr=2e-2)
        for step in range(_STEPS):
            with engine.step():
                for unit in units:
                    engine.open(unit)
                    engine.close(unit)
                for unit in reversed(units):
                    values, grads = engine.open(unit, "backward"), engine.grads(unit)
                    for name, grad in grads.items():
                        random = ordinary(grad.shape, "float32", "gradient", step, comm.rank, unit, name)
                        grad[...] = values[name] * put(comm.xp, random)
                    engine.reduce(unit)
                    engine.close(unit)
            engine.join()
            engine.clip(1.0)
            engine.update(adam)
            engine.broadcast_updated_params()
        return {name: host_of(engine.full(name)) for name in _SHAPES}


def _first(name: str, box: Box) -> np.ndarray:
    """Return a box of a parameter before the first step, in host memory."""
    return ordinary(_SHAPES[name], "float32", "first", name)[slices_of(box)]
