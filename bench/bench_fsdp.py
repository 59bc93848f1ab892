"""`lowshard bench fsdp`: a step of sharded training on ranks of this machine, beside torch FSDP2 where it is there.

The model is an MLP in plain NumPy: Linear and GELU (the last without), squared error, AdamW; `rival_torch` has it too.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_limits import OF_TORCH
from lowshard.bench.bench_report import Beside, Limit, Report, Row
from lowshard.bench.bench_world import Progress, Rank, ask_rival, has_package, leads, run_entry
from lowshard.bench.machine import facts
from lowshard.bench.turn_timing import Timing
from lowshard.errors import DependencyError, LowshardError

if TYPE_CHECKING:
    from lowshard.fsdp import FSDP, ShardingStrategy

DESCRIPTION = """\
Trains an MLP (eight layers of 2560 by default, 52 million parameters, AdamW, one thread a rank) in NumPy with each
sharding strategy, and prints the time and processor seconds of a step, the bytes each rank sends beside what the
formula says, and memory. With --compare-torch the same model is trained by torch FSDP2 (DDP for none) over gloo
right before.
"""
EPILOG = """\
Columns: median wall time of a step; processor seconds of all ranks; bytes sent by all ranks, in parameters of four
bytes, counted and by the formula; pool and optimizer state of a rank; peak resident memory of the largest rank, with
what it maps of its neighbours'; with torch, the ratios of wall and processor time, below 1 where lowshard is faster.
Exit codes: 0 done, 1 bytes other than the formula's (or, with --check, a ratio above a half), 2 wrong usage, 70 a rank
died, 71 timed out, 130 interrupted.
"""
MODES = ("full", "sgo", "sgo-replicated", "none", "hybrid")
_GELU = math.sqrt(2 / math.pi)
_TIMEOUT_S = 600.0
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def add_fsdp_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `fsdp`."""
    summary = "steps of sharded training, beside torch FSDP2"
    parser = options.add_parser(benches, "fsdp", run_fsdp, summary, DESCRIPTION, EPILOG)
    add = parser.add_argument
    add(
        "--ranks",
        type=options.list_of(options.count),
        default="2",
        metavar="N[,N...]",
        help="ranks to start (default 2)",
    )
    add("--mode", type=_modes, default="full", metavar="NAME[,NAME...]",
        help=f"strategies, of {', '.join(MODES)}, or all (default full)")  # fmt: skip
    add("--intra", type=options.count, default=2, metavar="N", help="shard group of hybrid (default 2)")
    add("--width", type=options.count, default=2560, metavar="N", help="width of a layer (default 2560)")
    add("--layers", type=options.count, default=8, metavar="N", help="layers (default 8)")
    add("--batch", type=options.count, default=16, metavar="N", help="rows a rank (default 16)")
    add("--steps", type=options.count, default=5, metavar="N", help="steps that count (default 5)")
    add("--warmup", type=options.natural, default=2, metavar="N", help="steps before them (default 2)")
    add("--compute", default=None, choices=("float32", "bfloat16"), help="Precision.compute")
    add("--prefetch", type=options.natural, default=1, metavar="N", help="units gathered ahead (default 1)")
    add("--communicators", type=int, default=1, choices=(1, 2), help="2: reductions have their own")
    add("--compare-torch", action="store_true", help="also torch FSDP2, which must be installed")
    options.add_result_arguments(parser, f"ratios to torch are at most {OF_TORCH}")


def run_fsdp(args: argparse.Namespace) -> int:
    """Run `lowshard bench fsdp` and return the exit code."""
    options.require_results(args)
    if args.check_limits and not args.compare_torch:
        raise LowshardError("--check judges ratios to torch: pass --compare-torch with it")
    if args.compare_torch and not has_package(sys.executable, "torch"):
        raise DependencyError("--compare-torch needs torch, which is not installed: pip install torch")
    cases = [(n, mode) for n in args.ranks for mode in args.mode if mode != "hybrid" or n % args.intra == 0]
    if not cases:
        raise LowshardError(
            f"hybrid cuts the ranks into groups of --intra {args.intra}, which divides none of --ranks "
            f"{','.join(map(str, args.ranks))}: pass a divisor"
        )
    rows = []
    say = Progress("fsdp", leads())
    settings = {
        "dims": [args.width] * (args.layers + 1), "intra": args.intra, "batch": args.batch, "steps": args.steps,
        "warmup": args.warmup, "compute": args.compute, "prefetch": args.prefetch, "communicators": args.communicators,
    }  # fmt: skip
    finish: Any = int
    for ranks, mode in cases:
        request = {**settings, "ranks": ranks, "mode": mode, "what": "fsdp"}
        theirs = None
        if args.compare_torch and leads():
            say(f"torch {mode} on {ranks} ranks")
            script = "lowshard.bench.rival_torch"
            theirs = ask_rival(sys.executable, script, request, _TIMEOUT_S, _ONE_THREAD)[0]["ranks"]
        say(f"{mode} on {ranks} ranks")
        outcome = run_entry(measure_steps, request, ranks, "mpi", _TIMEOUT_S, _ONE_THREAD)
        finish = outcome.finish
        if outcome.exit_code:
            return outcome.exit_code
        if outcome.leads:
            rows.append(_row(f"{mode} on {ranks}", mode, outcome.data, theirs))
    if not rows:
        return int(finish(0))
    report = Report("fsdp", facts(), settings, tuple(rows))
    return int(
        finish(options.conclude(report, args, table.report_lines(report, _columns(args.compare_torch))))
    )


def _columns(compared: bool) -> Sequence[table.Column]:
    def mib(key: str) -> table.Column:
        return table.fact_column(key.partition("_")[0], key, ".0f", "(MiB)", 2**-20)

    def of_params(head: str, key: str) -> table.Column:
        return table.Column(head, lambda row: f"{row.facts[key] / (4 * row.facts['params']):.4f}")

    columns = [
        table.NAME, table.Column("wall", lambda row: f"{row.median_s:.3f}", "(s)"),
        table.fact_column("cpu", "cpu_s", ".3f", "(s)"), of_params("sent", "sent_bytes"),
        of_params("formula", "expected_bytes"), mib("pool_bytes"), mib("state_bytes"),
        table.fact_column("peak", "peak_mib", ".0f", "(MiB)"),
    ]  # fmt: skip
    if compared:
        columns += [
            table.x_column("torch"), table.fact_column("x torch cpu", "cpu_ratio", ".2f"),
            table.fact_column("torch", "torch_peak_mib", ".0f", "(MiB)"),
        ]  # fmt: skip
    return columns


def _row(
    name: str, mode: str, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]] | None
) -> Row:
    own = Timing(tuple(ours[0]["walls_s"]))
    sent, expected = (sum(r[key] for r in ours) for key in ("sent_bytes", "expected_bytes"))
    found: dict[str, Any] = {
        "mode": mode, "ranks": len(ours), "params": ours[0]["params"], "cpu_s": _cpu_s(ours), "sent_bytes": sent,
        "expected_bytes": expected, "wrong": abs(sent - expected), "pool_bytes": ours[0]["pool_bytes"],
        "state_bytes": ours[0]["state_bytes"], "peak_mib": max(r["peak_mib"] for r in ours),
        "base_mib": max(r["base_mib"] for r in ours), "wait_s": max(r["wait_s"] for r in ours),
    }  # fmt: skip
    if theirs is None:
        return Row(name, sent, own, facts=found)
    torch = Timing(tuple(theirs[0]["walls_s"]))
    found |= {
        "torch": theirs[0]["torch"], "cpu_ratio": found["cpu_s"] / _cpu_s(theirs),
        "torch_peak_mib": max(r["peak_mib"] for r in theirs),
    }  # fmt: skip
    # Steps of two runs, one after the other: the ratio is that of the medians.
    walls = Limit("x torch, wall time", own.median_s / torch.median_s, OF_TORCH)
    cpus = Limit("x torch, processor time", found["cpu_ratio"], OF_TORCH)
    return Row(name, sent, own, {"torch": Beside(torch)}, (walls, cpus), found)


def _cpu_s(ranks: Sequence[dict[str, Any]]) -> float:
    """Return the processor seconds of a step, over all ranks: the sum of each one's median."""
    return sum(Timing(tuple(rank["cpus_s"])).median_s for rank in ranks)


def _modes(text: str) -> list[str]:
    names = list(MODES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"strategies are {', '.join(MODES)}, or all; got {unknown[0]!r}")
    return names


# ---- on the ranks


def strategy_of(mode: str, intra: int) -> ShardingStrategy:
    """Return the strategy that a mode's name stands for."""
    from lowshard.fsdp import ShardingStrategy

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
        from lowshard.fsdp import Param

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
    from lowshard.fsdp import FSDP, AdamW, Precision

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
