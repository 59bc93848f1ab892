"""`lowshard bench refit`: reshards of a model between layouts, beside a copy of as many bytes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import HostDevice, require_memory
from lowshard.bench.bench_limits import AGAIN, REFIT_RANKS, refit_limit
from lowshard.bench.bench_report import Beside, Report, Row, better
from lowshard.bench.bench_world import Progress, Rank, job_size, run_entry
from lowshard.bench.machine import rank_facts
from lowshard.bench.model_refit import SAMPLE, ModelSpec, measure_model
from lowshard.bench.turn_timing import Runner, take_turns
from lowshard.errors import LowshardError

DESCRIPTION = """\
Moves a model of 268 MB (--size) between layouts of tensor parallelism, on ranks it starts itself or on those of the
MPI job it runs in: TP2 to TP4 and back, by rows and by columns, in 16 tensors and in 1,024. Sources lie in memory
that neighbours see ("shown", arrays of comm.empty) or not ("private"); "mxfp8" quantises before sending. Each
round is followed by a copy, on every rank, of as many bytes as it gets; x memcpy is the median of the ratios.

With --model it takes one model from ranks that train (--from) to ranks that serve (--to) in several ways in turn: a
dense refit, refits of what changed (--changed), and what most stacks do: gathering each tensor on one rank that
broadcasts it, and sending tensor by tensor. Sent beside the least that has to be, the time, and how long a reader of
the weights finds no whole version. What each way has brought is compared with the sources.
"""
EPILOG = "Exit codes: 0 done, 1 a row misses its limit (with --check), 2 wrong usage, 70 a rank died, 130 interrupted."
_MEMORY = ("shown", "private")


def add_refit_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `refit`."""
    parser = options.add_parser(
        benches, "refit", run_refit, "reshard a model between layouts", DESCRIPTION, EPILOG
    )
    add = parser.add_argument
    add("--ranks", type=options.count, metavar="N", help=f"ranks to start (default {REFIT_RANKS})")
    add("--size", type=options.count, default=268, metavar="MB", help="of the model (default 268)")
    add("--rounds", type=options.count, default=7, metavar="N", help="rounds a row (default 7)")
    add("--only", default="", metavar="TEXT", help="rows whose names have this in them")
    add = parser.add_argument_group("one model (--model)").add_argument
    add("--model", metavar="MODEL",
        help="a checkpoint, of which only names and shapes are read; a JSON file "
        '{"tensors": {NAME: {"dtype": "bfloat16", "shape": [..]}}}; or "sample", like Llama, of --size MB')  # fmt: skip
    add("--from", dest="trains", default="tp=2", metavar="GRID",
        help="of the ranks that train, such as fsdp=2,tp=2 (axes tp, ep, dp and fsdp; default tp=2)")  # fmt: skip
    add("--to", dest="serves", default="tp=2", metavar="GRID", help="of the ranks that serve (default tp=2)")
    add("--together", action="store_true", help="the ranks that train serve, too")
    add("--strategies", default="llama", metavar="FILE",
        help="cuts by name patterns: llama, qwen, moe, bert, or your own (default llama)")  # fmt: skip
    add("--heads", type=options.count, metavar="H", help="query heads (default: the model's config)")
    add("--kv-heads", type=options.count, metavar="H", help="key-value heads (default: likewise)")
    add("--changed", type=_percents, default="0.1,1,3,100", metavar="LIST",
        help="per cent of elements that a version changes (default 0.1,1,3,100)")  # fmt: skip
    add("--seed", type=options.natural, default=1, metavar="N", help="of which elements change (default 1)")
    options.add_result_arguments(parser, f"rows of {REFIT_RANKS} ranks, measured up to twice more")


def run_refit(args: argparse.Namespace) -> int:
    """Run `lowshard bench refit` and return the exit code."""
    options.require_results(args)
    if args.model is not None or (args.trains, args.serves) != ("tp=2", "tp=2"):
        args.model = args.model or SAMPLE
        return _run_model(args)
    ranks = job_size() or args.ranks or REFIT_RANKS
    if ranks % max(1, ranks // 2):
        raise LowshardError(f"rows go between all ranks and half of them: pass an even --ranks, got {ranks}")
    names = [f"{case[0]}, {memory}" for case in model_cases(10**6, ranks) for memory in _MEMORY]
    if not any(args.only in name for name in names):
        raise LowshardError(f"--only {args.only!r} is in no row's name: {'; '.join(names)}")
    if args.check_limits and ranks != REFIT_RANKS:
        raise LowshardError(f"--check judges rows of {REFIT_RANKS} ranks, these have {ranks}: leave one out")
    if job_size() is None:  # inside a job ranks may have other hosts
        copies = ranks // max(1, ranks // 2)  # of the model, in the layout with fewer cuts
        require_memory(args.size * 10**6 * (1 + 3 * copies), HostDevice().free_bytes())
    request = {
        "bytes": args.size * 10**6,
        "rounds": args.rounds,
        "only": args.only,
        "again": args.check_limits,
    }
    outcome = run_entry(measure_refits, request, args.ranks if job_size() is not None else ranks)
    if outcome.data is None or not outcome.leads:
        return outcome.finish(outcome.exit_code)
    report = Report.from_json(outcome.data)
    sent = table.fact_column("sent", "sent_bytes", ",.1f", "(MB)", 1e-6)
    ready = table.fact_column("ready", "prepare_s", ".1f", "(ms)", 1e3)
    columns = (*table.standard("memcpy"), sent, ready)
    return outcome.finish(options.conclude(report, args, table.report_lines(report, columns)))


def _run_model(args: argparse.Namespace) -> int:
    spec = ModelSpec.of(args)
    ranks = spec.tables()[2]
    if args.ranks not in (None, ranks):
        raise LowshardError(
            f"the grids of --from and --to have {ranks} ranks; --ranks {args.ranks} does not fit"
        )
    request = {"model": spec.to_json(), "rounds": args.rounds, "changed": args.changed, "seed": args.seed}
    outcome = run_entry(measure_model, request, ranks)
    if outcome.data is None or not outcome.leads:
        return outcome.finish(outcome.exit_code)
    report = Report.from_json(outcome.data)
    least = table.Column("x least", lambda row: f"{row.moved_bytes / max(1, row.facts['least_bytes']):.2f}")
    pause = table.fact_column("pause", "pause_s", ".3f", "(ms)", 1e3)
    columns = (*table.standard("memcpy"), least, table.x_column("dense"), pause)
    return outcome.finish(options.conclude(report, args, table.report_lines(report, columns)))


def _percents(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(
            f"expected per cent from 0 to 100, such as 0.1,1,3,100; got {text!r}"
        )
    return list(dict.fromkeys(found))


def measure_refits(rank: Rank, request: Any) -> Any:
    """Measure every case; the report on rank 0. Collective: all ranks call this."""
    rows = []
    host = rank.host
    say = Progress("refit", host.rank == 0)
    with rank.open("auto") as comm:
        machine = rank_facts(host, comm, rank.mpi_comm)
        for name, src, dst, quantised in model_cases(request["bytes"], comm.size):
            for memory in _MEMORY:
                if request["only"] not in f"{name}, {memory}":
                    continue
                say(f"{name}, {memory}")
                limit = refit_limit(quantised) if comm.size == REFIT_RANKS else None
                measure = partial(
                    _measure, rank, comm, src, dst, quantised, memory == "shown", request["rounds"]
                )
                row = measure(f"{name}, {memory}", say).limited("memcpy", limit)
                for _ in range(AGAIN if request["again"] else 0):
                    if host.exchange(row.is_missed)[0]:
                        row = better(row, measure(row.name, say).limited("memcpy", limit))
                rows.append(row)
    settings = {"bytes": request["bytes"], "rounds": request["rounds"], "ranks": host.size}
    return Report("refit", machine, settings, tuple(rows)).to_json() if host.rank == 0 else None


def model_cases(size_bytes: int, ranks: int) -> list[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Return the cases for a number of ranks: name, both tables, whether it goes as MXFP8."""
    from lowshard.reshard import TensorLayout

    half = max(1, ranks // 2)
    found: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = []

    def table(tensors: int, tp: int, dim: int) -> dict[str, Any]:
        cols = 2048 if tensors == 16 else 256
        rows = max(ranks, size_bytes // (2 * cols * tensors) // ranks * ranks)
        axes = {"dp": (ranks // tp, tp), "tp": (tp, 1)}
        layout = TensorLayout.sharded((rows, cols), "bfloat16", axes, {dim: "tp"})
        return {f"w{i}": layout for i in range(tensors)}

    for tensors, a, b, dim in (
        (16, half, ranks, 0),
        (16, half, ranks, 1),
        (16, ranks, half, 0),
        (16, ranks, half, 1),
        (1024, half, ranks, 0),
    ):
        name = f"TP{a} to TP{b} dim {dim}, {tensors}"
        found.append((name, table(tensors, a, dim), table(tensors, b, dim), False))
    found.append((f"TP{half} to TP{ranks} dim 0, mxfp8", table(16, half, 0), table(16, ranks, 0), True))
    return found


def _measure(
    rank: Rank, comm: Any, src: Any, dst: Any, quantised: bool, shown: bool, rounds: int, name: str,
    say: Callable[[str], object],
) -> Row:  # fmt: skip
    from lowshard import dtypes
    from lowshard.kernels import MXFP8Tensor
    from lowshard.reshard import MXFP8ReshardTransform, Reshard, build_reshard_plan

    plan = build_reshard_plan(src, dst)
    bf16 = dtypes.get("bfloat16").numpy

    def make(shape: Any) -> Any:
        array = comm.empty(shape, "bfloat16") if shown else comm.xp.empty(shape, bf16)
        array.view(np.uint16)[...] = 0x3F80 + comm.rank
        return array

    sources = {name: make(layout.local_shape(comm.rank)) for name, layout in src.items()}
    shapes = {name: layout.local_shape(comm.rank) for name, layout in dst.items()}
    how, targets = None, {}
    if quantised:
        buffers = {
            n: MXFP8Tensor(comm.xp.zeros(s, np.uint8), comm.xp.zeros((s[0], s[1] // 32), np.uint8))
            for n, s in shapes.items()
        }
        how = MXFP8ReshardTransform(buffers, buffers, convert_on_send=True)
    else:
        targets = {name: make(shape) for name, shape in shapes.items()}
    gets = sum(2 * s[0] * s[1] for s in shapes.values())
    start = time.perf_counter()
    mover = Reshard(plan, sources, targets, comm, how)
    prepare_s = time.perf_counter() - start
    one, two = np.ones(gets, np.uint8), np.ones(gets, np.uint8)
    report = mover.run()
    works = Runner(mover.run), Runner(lambda: np.copyto(two, one))
    own, copy = take_turns(works, rounds, rank.clock(), say=lambda turn: say(f"{name}, {turn}"))
    mover.close()
    sums = rank.host.exchange((gets, report.sent_bytes))
    facts = {"sent_bytes": sum(b for _, b in sums), "prepare_s": prepare_s}
    return Row(name, sum(a for a, _ in sums), own, {"memcpy": Beside(copy)}, facts=facts)
