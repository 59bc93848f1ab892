"""What each rank of `lowshard bench fsdp` runs: an MLP in plain NumPy, sharded, trained and watched.

Eight times Linear and GELU (the last without), squared error, AdamW: the model of the torch side, `rival_torch`.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.bench.bench_world import Rank
from lowshard.fsdp import FSDP, AdamW, Param, Precision, ShardingStrategy

MODES = ("full", "sgo", "sgo-replicated", "none", "hybrid")
_GELU = math.sqrt(2 / math.pi)


def strategy_of(mode: str, intra: int) -> ShardingStrategy:
    """Return the strategy that a mode's name stands for."""
    return {
        "full": ShardingStrategy.FullShard,
        "sgo": ShardingStrategy.ShardGradOp(rest="sharded"),
        "sgo-replicated": ShardingStrategy.ShardGradOp,
        "none": ShardingStrategy.NoShard,
        "hybrid": ShardingStrategy.HybridShard(intra_node_size=intra),
    }[mode]


class MLP:
    """Layers of y = gelu(x @ w.T + b), forward and backward by hand."""

    def __init__(self, dims: Sequence[int]) -> None:
        self.dims = list(dims)
        self.units = {
            f"l{i}": [Param("w", (out, into)), Param("b", (out,))]
            for i, (into, out) in enumerate(pairwise(dims))
        }

    def fill(self, name: str, box: Any) -> np.ndarray:
        """Return first values of a box of a parameter, rows seeded one by one so that any cut gives the same."""
        scale = 0.02 if len(box) == 1 else self.dims[0] ** -0.5
        rows = range(*box[0])
        columns = slice(*box[1]) if len(box) > 1 else slice(None)
        seed = int(name[1:-2])
        if len(box) == 1:
            whole = np.random.default_rng([seed, 1]).standard_normal(self.dims[seed + 1], np.float32)
            return np.asarray(whole[slice(*box[0])] * np.float32(scale))
        made = [
            np.random.default_rng([seed, 0, r]).standard_normal(self.dims[seed], np.float32)[columns]
            for r in rows
        ]
        return np.asarray(np.stack(made) * np.float32(scale))

    def step(self, engine: FSDP, x: np.ndarray, target: np.ndarray) -> float:
        """Run forward and backward of one micro-batch and start all reductions; returns the loss."""
        last = len(self.units) - 1
        inputs, sums = [], []
        for i in range(last + 1):
            p = engine.open(f"l{i}")
            inputs.append(x)
            s = x @ p["w"].T
            s += p["b"]
            engine.close(f"l{i}")
            sums.append(s)
            x = s if i == last else gelu(s)
        error = x - target
        loss = float(np.mean(error * error))
        d = error * np.float32(2 / error.size)
        for i in range(last, -1, -1):
            p = engine.open(f"l{i}", "backward")
            if i != last:
                d *= gelu_slope(sums[i])
            g = engine.grads(f"l{i}", zero=False)
            np.matmul(d.T, inputs[i], out=g["w"])
            np.sum(d, axis=0, out=g["b"])
            engine.reduce(f"l{i}")
            if i:
                d = d @ p["w"]
            engine.close(f"l{i}")
        return loss


def gelu(x: np.ndarray) -> np.ndarray:
    """Return GELU by its tanh form (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return np.asarray(0.5 * x * (1 + np.tanh(_GELU * (x + 0.044715 * x * x * x))), np.float32)


def gelu_slope(x: np.ndarray) -> np.ndarray:
    """Return the derivative of `gelu`."""
    t = np.tanh(_GELU * (x + 0.044715 * x * x * x))
    return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _GELU * (1 + 0.134145 * x * x), np.float32)


def expected_bytes(engine: FSDP) -> int:
    """Return the bytes that this rank sends in one step of one micro-batch, from the formula alone."""
    shards, replicas = engine.grid.shards, engine.grid.replicas
    gathers = 0 if shards == 1 else 1 if engine.strategy.keeps_open else 2
    sent = 0
    for unit in engine.plan.units:
        whole = unit.elems * unit.formats.item("compute")
        grad = unit.grad_elems * unit.formats.item("reduce")
        sent += (gathers * whole + (grad if shards > 1 else 0)) * (shards - 1) // shards
        part = unit.grad_elems // shards
        own = part // replicas + (engine.grid.replica_rank < part % replicas)
        if replicas > 1:
            sent += ((part - own) + own * (replicas - 1)) * unit.formats.item("reduce")
    return sent


def measure_steps(rank: Rank, request: dict[str, Any]) -> Any:
    """Train on this rank; the figures of all ranks on rank 0. Collective: all ranks call this."""
    model = MLP(request["dims"])
    base_mib = status_mib("VmRSS")
    with rank.open("mpi") as comm:
        engine = FSDP(
            model.units, comm, strategy_of(request["mode"], request["intra"]),
            precision=Precision(compute=request["compute"]), communicators=request["communicators"],
            prefetch=request["prefetch"],
        )  # fmt: skip
        engine.fill(model.fill)
        rule = AdamW(lr=1e-3, weight_decay=0.01)
        walls, cpus, sent = [], [], []
        for step in range(request["warmup"] + request["steps"]):
            if step == request["warmup"]:
                reset_peak()
            rng = np.random.default_rng([77, step, comm.rank])
            x = rng.standard_normal((request["batch"], model.dims[0]), np.float32)
            y = rng.standard_normal((request["batch"], model.dims[-1]), np.float32)
            before = engine.report().total_wire_bytes
            comm.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            with engine.step():
                model.step(engine, x, y)
            engine.join()
            engine.update(rule)
            engine.broadcast_updated_params()
            comm.barrier()
            if step >= request["warmup"]:
                walls.append(time.perf_counter() - began_s)
                cpus.append(time.process_time() - began_cpu_s)
                sent.append(engine.report().total_wire_bytes - before)
        report = engine.report()
        found = {
            "walls_s": walls, "cpus_s": cpus, "sent_bytes": int(statistics.median(sent)),
            "expected_bytes": expected_bytes(engine), "pool_bytes": report.pool.total_bytes,
            "state_bytes": report.state_bytes, "base_mib": base_mib, "peak_mib": status_mib("VmHWM"),
            "wait_s": sum(report.wait_s.values()) / (request["warmup"] + request["steps"]),
            "params": engine.plan.elems,
        }  # fmt: skip
        comm.barrier()
        engine.shut()
    every = rank.host.exchange(found)
    return every if rank.host.rank == 0 else None


def status_mib(field: str) -> float:
    """Return a line of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak() -> None:
    """Make the peak that of what follows, where the system lets us."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
