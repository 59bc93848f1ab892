"""Ranks 0 and 1 train the demo's transformer in bf16, 2 and 3 serve it: what differs from step to step, and its bytes.

Arguments: steps at the rate that it learns to write with, before the first version; then steps at 3e-6, each served.
Prints, as JSON, the share of elements that changed and that of the bytes that were sent, of those steps.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.demo.transformer import Shape, Transformer, batch_of, text
from lowshard.fsdp import FSDP, Precision
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

BF16 = dtypes.get("bfloat16").numpy


class Adam:
    """Adam on weights that rest in bf16, as they are trained in: moments in float32, and each update rounded."""

    def __init__(self) -> None:
        self.moments: dict[str, list[np.ndarray]] = {}
        self.lr = 3e-3

    def __call__(self, slot: Any) -> None:
        grad = slot.grad.astype(np.float32)
        first, second = self.moments.setdefault(slot.unit, [np.zeros_like(grad), np.zeros_like(grad)])
        first += 0.1 * (grad - first)
        second += 0.001 * (grad * grad - second)
        scale = np.sqrt(1 - 0.999**slot.step) / (1 - 0.9**slot.step)
        slot.param[...] = slot.param.astype(np.float32) - self.lr * scale * first / (np.sqrt(second) + 1e-8)


def main(before: int, steps: int) -> None:
    world = MPI.COMM_WORLD
    comm = lc.from_mpi(world, device="cpu")
    trains = comm.rank < 2
    part = comm.split(int(trains), comm.rank)
    assert part is not None
    shape = Shape()
    params = {f"{u}.{p.name}": p.shape for u, unit in shape.units.items() for p in unit if not p.tie}
    src = {n: TensorLayout.sharded(s, "bfloat16", {"tp": (2, 1)}, {0: "tp"}) for n, s in params.items()}
    dst = {
        n: TensorLayout.sharded(s, "bfloat16", {"tp": (2, 1)}, {len(s) - 1: "tp"}, offset=2)
        for n, s in params.items()
    }
    side = src if trains else dst
    arrays = {n: np.zeros(x.local_shape(comm.rank) or (), BF16) for n, x in side.items()}
    refit = Refit(
        build_reshard_plan(src, dst), comm, arrays if trains else {}, {} if trains else arrays, delta="auto"
    )
    engine = None
    if trains:
        engine = FSDP(shape.units, part, precision=Precision(master="bfloat16"), open_limit=3)
        engine.fill(shape.first)
        model, rule, data = Transformer(shape, engine), Adam(), text()
    changed = sent = dense = 0
    for step in range(-before, steps + 1):
        whole: dict[str, np.ndarray] = {}
        if engine is not None and step:
            rule.lr = 3e-3 if step < 0 else 3e-6
            with engine.step():
                model.loss(*batch_of(data, shape, 8, (before + step, comm.rank)))
            engine.join()
            engine.clip(1.0)
            engine.update(rule)
        if step < 0:
            continue
        if engine is not None:
            for name, array in arrays.items():
                whole[name] = np.array(engine.full(name))
                assert whole[name].dtype == BF16
                rows = len(array)
                array[...] = whole[name][rows * comm.rank : rows * (comm.rank + 1)]
            refit.push(step)
        else:
            refit.pull()
        served = world.gather({n: a.view(np.uint16) for n, a in refit.weights.items()})
        if served is not None:
            for name, array in whole.items():
                joined = np.concatenate([served[2][name], served[3][name]], axis=array.ndim - 1)
                assert np.array_equal(joined, array.view(np.uint16)), (step, name)
        if step:
            said = refit.report()
            changed, sent = changed + said["changed_elems"], sent + said["sent_bytes"]
            dense += said["dense_bytes"]
    total = world.allreduce(np.array([changed, sent, dense]))
    if comm.rank == 0:
        print(
            json.dumps({"changed": 2 * int(total[0]) / int(total[2]), "sent": int(total[1]) / int(total[2])})
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
