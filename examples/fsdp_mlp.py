"""Train a small network with FSDP, without a framework.

    lowshard run -n 4 examples/fsdp_mlp.py

Parameters, gradients and optimizer state are sharded over the ranks. A unit is gathered when it is opened, and its
parameters are views of one buffer. Sums run in a tree, so that 1, 2 and 4 ranks train to the same bits on the same
micro-batches.

Output of rank 0:

    step   0  loss 0.519
    step  50  loss 0.030
    step 100  loss 0.005
    step 150  loss 0.003
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.fsdp import FSDP, AdamW, Param, ShardingStrategy

WIDTH, BATCH = 32, 64
units = {
    "hidden": [Param("w", (2, WIDTH)), Param("b", (WIDTH,))],
    "out": [Param("w", (WIDTH, 1)), Param("b", (1,))],
}


def first(name: str, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Return the first values of a box of a parameter: the same for every sharding."""
    shape = next(p.shape for p in units[name.split(".")[0]] if p.name == name.split(".")[1])
    scale = 0.0 if name.endswith("b") else shape[0] ** -0.5
    whole = scale * np.random.default_rng([*name.encode()]).standard_normal(shape)
    return whole[tuple(slice(*edges) for edges in box)]


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    engine = FSDP(units, comm, strategy=ShardingStrategy.FullShard)
    engine.fill(first)
    adam, mean = AdamW(lr=2e-2), np.empty(1, np.float32)
    for step in range(151):
        x = np.random.default_rng([step, comm.rank]).uniform(-1, 1, (BATCH, 2)).astype(np.float32)
        wanted = np.sin(3 * x[:, :1]) * x[:, 1:]
        with engine.step():
            p = engine.open("hidden")
            h = np.tanh(x @ p["w"] + p["b"])
            engine.close("hidden")
            p = engine.open("out")
            error = h @ p["w"] + p["b"] - wanted

            dy = 2 * error / BATCH
            grads = engine.grads("out")
            grads["w"][...], grads["b"][...] = h.T @ dy, dy.sum(0)
            dh = dy @ p["w"].T * (1 - h * h)
            engine.reduce("out")
            engine.close("out")
            engine.open("hidden", "backward")
            grads = engine.grads("hidden")
            grads["w"][...], grads["b"][...] = x.T @ dh, dh.sum(0)
            engine.reduce("hidden")
            engine.close("hidden")
        engine.join()
        engine.clip(1.0)
        engine.update(adam)
        comm.all_reduce(np.array([np.mean(error**2)], np.float32), mean, op="avg")
        if comm.rank == 0 and step % 50 == 0:
            print(f"step {step:3}  loss {mean[0]:.3f}")
