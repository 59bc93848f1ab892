"""`lowshard bench all_reduce` and the other collectives: flags, the run on all ranks, what is made of its figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.bench.json_argument import bandwidth_of, file_of, natural_of, size_of, target_of
from lowshard.bench.operation import ALL_REDOPS, OPERATIONS
from lowshard.bench.sweep_setting import (
    DTYPES,
    MORE_DTYPES,
    TRANSPORTS,
    Settings,
    dtype_list,
    redop_list,
    size_list,
)
from lowshard.command_line import count_of, seconds_of
from lowshard.errors import DependencyError, LowshardError
from lowshard.settings import CHECK

if TYPE_CHECKING:
    from lowshard.bench.bench_seat import Seat
    from lowshard.bench.figure import CollectiveReport, Row

DESCRIPTION = """\
Times the communicator's {op} over sizes, types and reductions, and checks every result: whole numbers that
must come out to the bit, and random ones within what rounding can do. Table, flags and bandwidths are those of
nccl-tests; a size is the bytes of the larger of a rank's two buffers. Outside an MPI job it starts its own ranks.
"""
EPILOG = """\
x memcpy: time over that in which all ranks at once copy as many bytes, the median over rounds in which they take
turns. ~: other programs took part of the machine in every round; the time is an upper bound.
Sizes are written 1024, 1K, 64M, 1G (powers of 1024). Bandwidths are in 10^9 bytes a second.
Exit codes: 0 done, 1 a wrong value, too little bandwidth (--min-busbw) or a missed limit (--check-limits), 2 wrong
usage, 70 a rank died, 71 timed out, 130 interrupted.
"""
_NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
SUMMARIES = {
    "all_reduce": "reduce on all ranks",
    "all_gather": "gather on all ranks",
    "reduce_scatter": "reduce, each rank keeps a part",
    "all_to_all": "exchange equal parts",
    "all_to_all_v": "exchange parts of uneven size",
    "broadcast": "one rank's buffer to all",
    "reduce": "reduce on one rank",
    "gather": "gather on one rank",
    "scatter": "one rank's parts to all",
    "send_recv": "to the next rank, from the one before",
    "barrier": "wait for all ranks",
}


def add_collective_parsers(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add a benchmark for each collective."""
    for op, summary in SUMMARIES.items():
        parser = benches.add_parser(
            op,
            help=summary,
            description=DESCRIPTION.format(op=op),
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_what(parser, op)
        _add_how(parser, op)
        _add_results(parser)
        parser.set_defaults(func=run_collective, op=op)


def _add_what(parser: argparse.ArgumentParser, op: str) -> None:
    group = parser.add_argument_group("what is measured")
    if op != "barrier":
        group.add_argument("-b", "--minbytes", type=size_of, default="1K", metavar="SIZE",
                           help="smallest size (default 1K)")  # fmt: skip
        group.add_argument("-e", "--maxbytes", type=size_of, default="64M", metavar="SIZE",
                           help="largest size (default 64M)")  # fmt: skip
        group.add_argument(
            "-i", "--stepbytes", type=size_of, metavar="SIZE", help="add this from size to size"
        )
        group.add_argument("-f", "--stepfactor", type=float, default=2.0, metavar="F",
                           help="multiply by this from size to size (default 2)")  # fmt: skip
        group.add_argument("-d", "--datatype", type=_dtype_of,
                           choices=(*DTYPES, *MORE_DTYPES, "all"), default="float32",
                           metavar="TYPE", help="element type, or all (bfloat16 too; default float32)")  # fmt: skip
    if OPERATIONS[op].reduces:
        group.add_argument("-o", "--op", dest="redop", choices=(*ALL_REDOPS, "all"), default="sum",
                           help="reduction (default sum)")  # fmt: skip
        group.add_argument("--order", choices=("fast", "tree", "rank"), default="fast",
                           help="order of the operands (default fast, the transport's own)")  # fmt: skip
    if OPERATIONS[op].rooted:
        group.add_argument(
            "-r", "--root", type=natural_of, default=0, metavar="RANK", help="root (default 0)"
        )
    if OPERATIONS[op].shared:
        group.add_argument("--shared", action="store_true",
                           help="the result is one read-only array for the node")  # fmt: skip
    if op != "barrier":
        group.add_argument("--window", action="store_true",
                           help="buffers from comm.empty, which other ranks read directly")  # fmt: skip
    group.add_argument("--ranks", type=count_of, metavar="N",
                       help="ranks to start (default 2); inside an MPI job all of its ranks take part")  # fmt: skip
    group.add_argument("--transport", choices=TRANSPORTS, default="auto",
                       help="auto: NCCL where every rank has a GPU, else mpi; loopback: threads; staged: GPU buffers "
                       "by MPI through the host")  # fmt: skip


def _add_how(parser: argparse.ArgumentParser, op: str) -> None:
    group = parser.add_argument_group("how it is measured")
    group.add_argument(
        "-n", "--iters", type=count_of, default=20, metavar="N", help="timed rounds (default 20)"
    )
    group.add_argument(
        "-w", "--warmup_iters", type=natural_of, default=5, metavar="N", help="calls before (default 5)"
    )
    group.add_argument("-m", "--agg_iters", type=count_of, default=0, metavar="N",
                       help="calls in a round, timed as one (default: as many as last 2 ms)")  # fmt: skip
    group.add_argument("-c", "--check", type=_checks_of, default=1, metavar="N",
                       help="check results N times, each with other data (default 1)")  # fmt: skip
    group.add_argument("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3,
                       help="whose time: 0 rank 0's, 1 average, 2 fastest, 3 slowest rank's (default 3)")  # fmt: skip
    group.add_argument("-I", "--per-iteration", action="store_true",
                       help="time each call by itself, and show min, median, p99, max and cv")  # fmt: skip
    group.add_argument("-N", "--run_cycles", type=count_of, default=1, metavar="N",
                       help="go through everything N times (default 1)")  # fmt: skip
    group.add_argument("-T", "--timeout", type=seconds_of, metavar="S", help="end the run after S seconds")
    group.add_argument("--compare-mpi", action="store_true",
                       help="also time mpi4py's own call on NumPy buffers, taking turns")  # fmt: skip


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=target_of, metavar="FILE",
                       help="write JSON with every round's times; -: print it, and no table")  # fmt: skip
    group.add_argument("--csv", type=file_of, metavar="FILE", help="write a line for each size and placement")
    group.add_argument(
        "--plot", type=file_of, metavar="FILE", help="draw time and bus bandwidth over size (.png, .svg)"
    )
    group.add_argument("--min-busbw", type=bandwidth_of, metavar="GBPS",
                       help="exit code 1 if the average bus bandwidth is below this")  # fmt: skip
    group.add_argument("--check-limits", action="store_true",
                       help="exit code 1 if a promised figure is missed (2 ranks on one host)")  # fmt: skip


def run_collective(args: argparse.Namespace) -> int:
    """Run `lowshard bench COLLECTIVE` and return the exit code."""
    from lowshard.bench.bench_world import DEFAULT_RANKS, job_size, run_entry
    from lowshard.bench.figure import CollectiveReport
    from lowshard.bench.plot import require_plot
    from lowshard.bench.promise import why_no_limits

    settings = settings_of(args)
    ranks = job_size() or args.ranks or DEFAULT_RANKS
    # Whatever can be refused is refused before anything is measured.
    if args.plot is not None:
        require_plot(args.plot)
    if args.check_limits:
        reason = why_no_limits(settings, ranks, _check_mode())
        if reason is not None:
            raise LowshardError(f"--check-limits has nothing to judge here: {reason}")
    require_possible(settings, ranks)
    request = {"settings": settings.to_json(), "table": args.json != "-"}
    outcome = run_entry(measure_collective, request, args.ranks, settings.transport, args.timeout)
    if not outcome.leads:
        return outcome.finish(0)
    if outcome.data is None:
        return outcome.exit_code
    return outcome.finish(_conclude(CollectiveReport.from_json(outcome.data), args))


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what the flags ask for."""
    op = args.op
    sizes: Sequence[int] = (0,)
    if op != "barrier":
        factor = None if args.stepbytes else args.stepfactor
        sizes = size_list(args.minbytes, args.maxbytes, factor, args.stepbytes)
    return Settings(
        op=op,
        sizes=tuple(sizes),
        dtypes=dtype_list(getattr(args, "datatype", "float32")),
        redops=redop_list(op, getattr(args, "redop", None)),
        root=getattr(args, "root", 0),
        rounds=args.iters,
        warmups=args.warmup_iters,
        calls=args.agg_iters,
        checks=args.check,
        average=args.average,
        cycles=args.run_cycles,
        each=args.per_iteration,
        transport=args.transport,
        shared=getattr(args, "shared", False),
        window=getattr(args, "window", False),
        order=getattr(args, "order", "fast"),
        compare_mpi=args.compare_mpi,
    )


def measure_collective(seat: Seat, request: Any) -> Any:
    """Sweep on this rank, and print the table's lines as they come; the report's data on rank 0. Collective."""
    from lowshard.bench.bench_seat import Say, collective_facts
    from lowshard.bench.listing import Listing, ratios_of
    from lowshard.bench.sweep import sweep

    settings = Settings.from_json(request["settings"])
    first = seat.meeting.rank == 0
    say = Say(settings.op, first)
    with seat.open(settings.transport, say) as place:
        facts = collective_facts(place)
        listing = Listing(settings, ratios_of(settings, place.comm.xp.__name__ == "numpy"))

        def show(row: Row) -> None:
            if first and request["table"]:
                print(*listing.row(row), sep="\n", flush=True)
                say.shown()

        if first and request["table"]:
            print(*listing.head(facts, place.comm.size), sep="\n", flush=True)
        report = sweep(place, settings, facts, show)
    return report.to_json() if first else None


def _conclude(report: CollectiveReport, args: argparse.Namespace) -> int:
    """Print the closing lines, write the files, and return the exit code."""
    from lowshard.bench.figure import dump_csv
    from lowshard.bench.listing import Listing, ratios_of
    from lowshard.bench.plot import draw
    from lowshard.bench.promise import verdicts
    from lowshard.command_line import write_whole

    listing = Listing(report.settings, ratios_of(report.settings, "gpu" not in dict(report.facts)))
    # With JSON on stdout what people read goes to stderr.
    out = sys.stderr if args.json == "-" else sys.stdout
    print(*listing.close(report), sep="\n", file=out)
    failed = report.wrong > 0
    if args.check_limits:
        judged = verdicts(report, _check_mode())
        for verdict in judged:
            print(f"# {verdict}", file=out)
        failed |= any(verdict.ok is False for verdict in judged) or all(v.ok is None for v in judged)
    if args.min_busbw is not None and report.average_busbw < args.min_busbw:
        print(f"# the average bus bandwidth is below {args.min_busbw:g} GB/s", file=out)
        failed = True
    if args.json == "-":
        sys.stdout.write(report.dump())
    for target, text in ((args.json, report.dump), (args.csv, lambda: dump_csv(report))):
        if target not in (None, "-"):
            write_whole(Path(target), text().encode())
    if args.plot is not None:
        draw(report, args.plot)
    written = [str(path) for path in (args.json, args.csv, args.plot) if path not in (None, "-")]
    if written:
        print(f"# written: {', '.join(written)}", file=out)
    return 1 if failed else 0


def require_possible(settings: Settings, ranks: int) -> None:
    """Raise what a rank would raise, before any is started; inside a job each rank looks for itself."""
    from lowshard.bench.bench_device import HostDevice, why_no_gpu
    from lowshard.bench.bench_world import job_size
    from lowshard.bench.sweep import need_bytes, require_fits

    if settings.root >= ranks:
        raise LowshardError(f"-r is a rank, 0 to {ranks - 1}, got {settings.root}")
    if job_size() is not None:
        return
    reason = why_no_gpu() if settings.transport in ("auto", "nccl", "staged") else None
    if reason is not None and settings.transport != "auto":
        raise DependencyError(
            f"--transport {settings.transport} needs CuPy and a GPU: {reason}; install the cuda12 or cuda13 extra of "
            "lowshard, and see `lowshard doctor`"
        )
    if reason is not None or settings.transport in ("mpi", "loopback"):
        require_fits(ranks * need_bytes(settings, ranks), HostDevice().free_bytes())


def _check_mode() -> str:
    return CHECK.text()


def _dtype_of(text: str) -> str:
    return _NCCL_DTYPES.get(text, text)


def _checks_of(text: str) -> int:
    if text == "0":
        raise argparse.ArgumentTypeError("results are always checked, once at least; leave -c 0 out")
    return count_of(text)
