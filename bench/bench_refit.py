"""`lowshard bench refit`: reshards of a model between layouts, beside a copy of as many bytes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard.bench.bench_device import HostDevice
from lowshard.bench.bench_meeting import timed
from lowshard.bench.json_argument import add_json_argument, natural_of, write_result
from lowshard.bench.limit import AGAIN, refit_limit
from lowshard.bench.memcpy import BesideMemcpy
from lowshard.command_line import count_of
from lowshard.errors import BufferMismatchError, LowshardError

if TYPE_CHECKING:
    from lowshard.bench.bench_seat import Seat

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
"""x memcpy that is promised at `_RANKS` ranks on one node."""
_RANKS = 4
_MEMORY = ("shown", "private")


@dataclass(frozen=True)
class Row(BesideMemcpy):
    """One reshard, measured."""

    name: str
    memory: str
    moved_bytes: int
    sent_bytes: int
    prepare_s: float
    seconds: tuple[float, ...]
    memcpy_s: tuple[float, ...]
    limit: float | None


def add_refit_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `refit`."""
    parser = benches.add_parser(
        "refit", help="reshard a model between layouts", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", type=count_of, metavar="N", help=f"ranks to start (default {_RANKS})")
    parser.add_argument("--size", type=count_of, default=268, metavar="MB", help="of the model (default 268)")
    parser.add_argument("--rounds", type=count_of, default=7, metavar="N", help="rounds a row (default 7)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose names have this in them")
    model = parser.add_argument_group("one model (--model)")
    model.add_argument(
        "--model", metavar="MODEL",
        help="a checkpoint, of which only names and shapes are read; a JSON file "
             '{"tensors": {NAME: {"dtype": "bfloat16", "shape": [..]}}}; or "sample": one like Llama, of --size MB',
    )  # fmt: skip
    model.add_argument("--from", dest="trains", default="tp=2", metavar="GRID",
                       help="of the ranks that train, such as tp=2,dp=2 (default tp=2)")  # fmt: skip
    model.add_argument("--to", dest="serves", default="tp=2", metavar="GRID",
                       help="of the ranks that serve (default tp=2)")  # fmt: skip
    model.add_argument("--together", action="store_true", help="the ranks that train serve, too")
    model.add_argument("--strategies", default="llama", metavar="FILE",
                       help="cuts by name patterns: llama, qwen, moe, bert, or your own (default llama)")  # fmt: skip
    model.add_argument(
        "--heads", type=count_of, metavar="H", help="query heads (default: the model's config)"
    )
    model.add_argument("--kv-heads", type=count_of, metavar="H", help="key-value heads (default: likewise)")
    model.add_argument("--changed", default="0.1,1,3,100", metavar="LIST",
                       help="per cent of elements that a version changes (default 0.1,1,3,100)")  # fmt: skip
    model.add_argument(
        "--seed", type=natural_of, default=1, metavar="N", help="of which elements change (default 1)"
    )
    add_json_argument(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit code 1 if a row misses its limit, measured up to twice more",
    )
    parser.set_defaults(func=run_refit)


def run_refit(args: argparse.Namespace) -> int:
    """Run `lowshard bench refit` and return the exit code."""
    from lowshard.bench.bench_world import job_size, run_entry

    if args.model is not None:
        return _run_model(args)
    ranks = job_size() or args.ranks or _RANKS
    if ranks % max(1, ranks // 2):
        raise LowshardError(f"rows go between all ranks and half of them: pass an even --ranks, got {ranks}")
    if not any(args.only in name for name in _names(ranks)):
        raise LowshardError(f"--only {args.only!r} is in no row's name: {'; '.join(_names(ranks))}")
    if args.check and ranks != _RANKS:
        raise LowshardError(
            f"--check judges rows of {_RANKS} ranks, these have {ranks}: leave one of both out"
        )
    _require_memory(args.size * 10**6, ranks)
    request = {"bytes": args.size * 10**6, "rounds": args.rounds, "only": args.only, "check": args.check}
    outcome = run_entry(measure_refits, request, args.ranks if job_size() is not None else ranks)
    if outcome.data is None or not outcome.leads:
        return outcome.finish(outcome.exit_code)
    rows = list(map(_row, outcome.data))
    return outcome.finish(_show(rows, args))


def _run_model(args: argparse.Namespace) -> int:
    from lowshard.bench.bench_world import run_entry
    from lowshard.bench.model_refit import ModelSpec, WayRow, measure_model, misses, show_ways

    spec = ModelSpec.of(args)
    ranks = spec.tables()[2]
    if args.ranks not in (None, ranks):
        raise LowshardError(
            f"the grids of --from and --to have {ranks} ranks; --ranks {args.ranks} does not fit"
        )
    request = {
        "model": spec.to_json(), "rounds": args.rounds, "changed": _percents(args.changed), "seed": args.seed,
    }  # fmt: skip
    outcome = run_entry(measure_model, request, ranks)
    if outcome.data is None or not outcome.leads:
        return outcome.finish(outcome.exit_code)
    rows = [
        WayRow(**{**row, "seconds": tuple(row["seconds"]), "memcpy_s": tuple(row["memcpy_s"])})
        for row in outcome.data
    ]
    _write(args, rows, show_ways(rows))
    missed = misses(rows) if args.check else []
    for text in missed:
        print(f"lowshard bench refit: {text}", file=sys.stderr)
    return outcome.finish(1 if missed else 0)


def _percents(text: str) -> list[float]:
    """Return the numbers of `--changed`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= percent <= 100 for percent in found):
        raise LowshardError(
            f"--changed is a list of per cent from 0 to 100, such as 0.1,1,3,100; got {text!r}"
        )
    return list(dict.fromkeys(found))


def _names(ranks: int) -> list[str]:
    """Return the names of all rows, with the memory of each."""
    return [f"{case[0]} {memory}" for case in model_cases(10**6, ranks) for memory in _MEMORY]


def _require_memory(size_bytes: int, ranks: int) -> None:
    """Raise where the ranks of this host need more memory than it has; inside a job they may have other hosts."""
    from lowshard.bench.bench_world import job_size

    copies = ranks // max(1, ranks // 2)  # of the model, in the layout with fewer cuts
    need, free = size_bytes * (1 + 3 * copies), HostDevice().free_bytes()
    if job_size() is None and free is not None and need > free:
        raise BufferMismatchError(
            f"the model and its copies take up to {need:,} bytes over {ranks} ranks, {free:,} are free; pass a "
            "smaller --size"
        )


def _write(args: argparse.Namespace, rows: Sequence[Any], table: str) -> None:
    """Print the table, and write JSON where it is asked for; to stdout in the table's place."""
    plain = [{**asdict(r), "x_memcpy": r.ratio} for r in rows]
    write_result(
        args, "refit" if args.model is None else "model-refit", {"rows": plain}, lambda: print(table)
    )


def _show(rows: Sequence[Row], args: argparse.Namespace) -> int:
    head = f"{'case':<26}{'memory':<9}{'MB':>6}{'sent MB':>9}{'ready ms':>9}{'ms':>8}{'x memcpy':>10}"
    lines = [
        f"{r.name:<26}{r.memory:<9}{r.moved_bytes / 1e6:>6.0f}{r.sent_bytes / 1e6:>9.1f}"
        f"{r.prepare_s * 1e3:>9.1f}{r.median_s * 1e3:>8.1f}{r.ratio:>10.2f}"
        for r in rows
    ]
    _write(args, rows, "\n".join([head, *lines]))
    missed = [r for r in rows if r.limit is not None and r.ratio > r.limit]
    if args.check:
        for r in missed:
            print(
                f"lowshard bench refit: {r.name}, {r.memory}: {r.ratio:.2f}, over {r.limit:g}",
                file=sys.stderr,
            )
    return 1 if args.check and missed else 0


def _row(found: dict[str, Any]) -> Row:
    return Row(**{**found, "seconds": tuple(found["seconds"]), "memcpy_s": tuple(found["memcpy_s"])})


def measure_refits(seat: Seat, request: Any) -> Any:
    """Measure every case; rows on rank 0. Collective: all ranks of the seat call this."""
    from lowshard.bench.bench_seat import Say

    rows = []
    say = Say("refit", seat.meeting.rank == 0)
    with seat.open("auto", say) as place:
        comm = place.comm
        for name, src, dst, quantised in model_cases(request["bytes"], comm.size):
            for memory in _MEMORY:
                if request["only"] not in f"{name} {memory}":
                    continue
                say(f"{name} {memory}")
                limit = refit_limit(quantised) if comm.size == _RANKS else None
                tries: list[Row] = []
                while not tries or (request["check"] and limit and len(tries) <= AGAIN):
                    found = _measure(comm, place.meeting, src, dst, quantised, memory == "shown", request)
                    tries.append(_row({"name": name, "memory": memory, "limit": limit, **found}))
                    if place.meeting.exchange(tries[-1].ratio)[0] <= (limit or 0.0):
                        break
                rows.append(asdict(min(tries, key=lambda row: row.ratio)))
    return rows if seat.meeting.rank == 0 else None


def model_cases(size_bytes: int, ranks: int) -> list[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """Return the cases for a number of ranks: name, both tables, whether it goes as MXFP8."""
    from lowshard.reshard import TensorLayout

    half = max(1, ranks // 2)
    found: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = []

    def table(count: int, tp: int, dim: int) -> dict[str, Any]:
        cols = 2048 if count == 16 else 256
        rows = max(ranks, size_bytes // (2 * cols * count) // ranks * ranks)
        axes = {"dp": (ranks // tp, tp), "tp": (tp, 1)}
        layout = TensorLayout.sharded((rows, cols), "bfloat16", axes, {dim: "tp"})
        return {f"w{i}": layout for i in range(count)}

    for count, a, b, dim in (
        (16, half, ranks, 0),
        (16, half, ranks, 1),
        (16, ranks, half, 0),
        (16, ranks, half, 1),
        (1024, half, ranks, 0),
    ):
        name = f"TP{a} to TP{b} dim {dim}, {count}"
        found.append((name, table(count, a, dim), table(count, b, dim), False))
    found.append((f"TP{half} to TP{ranks} dim 0, mxfp8", table(16, half, 0), table(16, ranks, 0), True))
    return found


def _measure(
    comm: Any, meeting: Any, src: Any, dst: Any, quantised: bool, shown: bool, request: Any
) -> dict[str, Any]:
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
    seconds, copies = [], []
    for _ in range(request["rounds"]):
        seconds.append(timed(meeting, mover.run))
        copies.append(timed(meeting, lambda: np.copyto(two, one)))
    mover.close()
    sums = meeting.exchange((gets, report.sent_bytes))
    return {
        "moved_bytes": sum(a for a, _ in sums), "sent_bytes": sum(b for _, b in sums), "prepare_s": prepare_s,
        "seconds": seconds, "memcpy_s": copies,
    }  # fmt: skip
