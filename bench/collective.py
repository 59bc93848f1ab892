"""`lowshard bench all_reduce` and the other collectives: flags, the sweep over sizes on all ranks, table, CSV."""

from __future__ import annotations

import argparse
import csv
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, cast

import numpy as np

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import HostDevice, require_memory, why_no_gpu
from lowshard.bench.bench_limits import FROM_BYTES, TO_BYTES, CollectiveRun
from lowshard.bench.bench_report import Beside, Facts, Limit, Report, Row
from lowshard.bench.bench_world import DEFAULT_RANKS, Progress, Rank, job_size, run_entry
from lowshard.bench.collective_case import (
    ALL_REDOPS,
    DTYPES,
    MORE_DTYPES,
    OPERATIONS,
    TRANSPORTS,
    Case,
    Placement,
    Request,
    Settings,
)
from lowshard.bench.machine import rank_facts
from lowshard.bench.rival_mpi import SMALL_BYTES, is_apart, plain_all_reduce, rival
from lowshard.bench.turn_timing import CLEAN_SHARE, RankClock, Runner, Timing, take_turns
from lowshard.bench.value_pattern import Pattern, is_float
from lowshard.cost import factor
from lowshard.errors import CommError, DependencyError, LowshardError
from lowshard.settings import CHECK

DESCRIPTION = """\
Times the communicator's {op} over sizes, types and reductions, and checks every result: whole numbers that
must come out to the bit, and random ones within what rounding can do. Table, flags and bandwidths are those of
nccl-tests; a size is the bytes of the larger of a rank's two buffers. Outside an MPI job it starts its own ranks.
"""
EPILOG = """\
x memcpy: time over that in which all ranks at once copy as many bytes, the median over rounds in which they take
turns. ~: other programs took part of the machine in every round; the time is an upper bound.
Sizes are written 1024, 1K, 64M, 1G (powers of 1024). Bandwidths are in 10^9 bytes a second.
Exit codes: 0 done, 1 a wrong value, too little bandwidth (--min-busbw) or a missed limit (--check), 2 wrong usage,
70 a rank died, 71 timed out, 130 interrupted.
"""
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
AVERAGES = ("rank 0", "average", "fastest", "slowest")
MOST_SIZES = 10_000
_NCCL_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
_FIRST_SEED = 1


def add_collective_parsers(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add a benchmark for each collective."""
    for op, summary in SUMMARIES.items():
        parser = options.add_parser(benches, op, run_collective, summary, DESCRIPTION.format(op=op), EPILOG)
        _add_what(parser, op)
        _add_how(parser)
        options.add_result_arguments(parser, "limits are for 2 ranks on one host")
        parser.add_argument(
            "--csv", type=options.file, metavar="FILE", help="write a line for each size and placement"
        )
        parser.add_argument("--min-busbw", type=options.positive, metavar="GBPS",
                            help="exit code 1 if the average bus bandwidth is below this")  # fmt: skip
        parser.set_defaults(op=op)


def _add_what(parser: argparse.ArgumentParser, op: str) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    if op != "barrier":
        size = options.size
        add("-b", "--minbytes", type=size, default="1K", metavar="SIZE", help="smallest size (default 1K)")
        add("-e", "--maxbytes", type=size, default="64M", metavar="SIZE", help="largest size (default 64M)")
        add("-i", "--stepbytes", type=size, metavar="SIZE", help="add this from size to size")
        add("-f", "--stepfactor", type=float, default=2.0, metavar="F",
            help="multiply by this from size to size (default 2)")  # fmt: skip
        add("-d", "--datatype", type=lambda text: _NCCL_DTYPES.get(text, text),
            choices=(*DTYPES, *MORE_DTYPES, "all"), default="float32", metavar="TYPE",
            help="element type, or all (bfloat16 too; default float32)")  # fmt: skip
    if OPERATIONS[op].reduces:
        add("-o", "--op", dest="redop", choices=(*ALL_REDOPS, "all"), default="sum",
            help="reduction (default sum)")  # fmt: skip
        add("--order", choices=("fast", "tree", "rank"), default="fast",
            help="order of the operands (default fast, the transport's own)")  # fmt: skip
    if OPERATIONS[op].rooted:
        add("-r", "--root", type=options.natural, default=0, metavar="RANK", help="root (default 0)")
    if op != "barrier":
        add("--window", action="store_true", help="buffers from comm.empty, which other ranks read directly")
    add("--ranks", type=options.count, metavar="N",
        help="ranks to start (default 2); inside an MPI job all of its ranks take part")  # fmt: skip
    add("--transport", choices=TRANSPORTS, default="auto",
        help="auto: NCCL where every rank has a GPU, else mpi; loopback: threads; staged: GPU buffers by MPI through "
        "the host")  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is measured").add_argument
    add("-n", "--iters", type=options.count, default=20, metavar="N", help="timed rounds (default 20)")
    add("-w", "--warmup_iters", type=options.natural, default=5, metavar="N", help="calls before (default 5)")
    add("-m", "--agg_iters", type=options.count, default=0, metavar="N",
        help="calls in a round, timed as one (default: as many as last 2 ms)")  # fmt: skip
    add("-c", "--checks", type=options.count, default=1, metavar="N",
        help="check results N times, each with other data (default 1)")  # fmt: skip
    add("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3,
        help="whose time: 0 rank 0's, 1 average, 2 fastest, 3 slowest rank's (default 3)")  # fmt: skip
    add("-I", "--per-iteration", action="store_true",
        help="time each call by itself, and show min, median, p99, max and cv")  # fmt: skip
    add("-N", "--run_cycles", type=options.count, default=1, metavar="N",
        help="go through everything N times (default 1)")  # fmt: skip
    add("-T", "--timeout", type=options.positive, metavar="S", help="end the run after S seconds")
    add("--compare-mpi", action="store_true",
        help="also time mpi4py's own call on NumPy buffers, taking turns")  # fmt: skip


def run_collective(args: argparse.Namespace) -> int:
    """Run `lowshard bench COLLECTIVE` and return the exit code."""
    settings = settings_of(args)
    ranks = job_size() or args.ranks or DEFAULT_RANKS
    # Whatever can be refused is refused before anything is measured.
    options.require_results(args)
    if args.check_limits:
        run = CollectiveRun(settings.op, ranks, settings.transport, CHECK.text(), settings.form)
        in_range = any(FROM_BYTES <= size <= TO_BYTES for size in settings.sizes)
        reason = run.why_none(max(settings.sizes), in_range, settings.compare_mpi)
        if reason is not None:
            raise LowshardError(f"--check has nothing to judge here: {reason}")
    _require_possible(settings, ranks)
    request = {"settings": settings.to_json(), "table": args.json != "-"}
    outcome = run_entry(measure_collective, request, args.ranks, settings.transport, args.timeout)
    if not outcome.leads:
        return outcome.finish(0)
    if outcome.data is None:
        return outcome.exit_code
    report = Report.from_json(outcome.data)
    if args.min_busbw is not None:
        average = report.facts["average_busbw_gb_per_s"]
        limit = Limit("average bus bandwidth, GB/s", average, args.min_busbw, at_least=True)
        report = replace(report, limits=(limit,))
    if args.csv is not None:
        write_csv(report, args.csv)
    return outcome.finish(options.conclude(report, args, closing(report)))


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what the flags ask for."""
    op = args.op
    sizes: tuple[int, ...] = (0,)
    if op != "barrier":
        sizes = size_list(args.minbytes, args.maxbytes, args.stepfactor, args.stepbytes)
    datatype, redop = getattr(args, "datatype", "float32"), getattr(args, "redop", None)
    return Settings(
        op, sizes, DTYPES if datatype == "all" else (datatype,),
        () if redop is None else ALL_REDOPS if redop == "all" else (redop,),
        root=getattr(args, "root", 0), rounds=args.iters, warmups=args.warmup_iters, calls=args.agg_iters,
        checks=args.checks, average=args.average, cycles=args.run_cycles, each=args.per_iteration,
        transport=args.transport, window=getattr(args, "window", False),
        order=getattr(args, "order", "fast"), compare_mpi=args.compare_mpi,
    )  # fmt: skip


def size_list(begin: int, end: int, factor: float, step: int | None) -> tuple[int, ...]:
    """Return the sizes from one to another, by a step, or else by a factor."""
    if end < begin:
        raise LowshardError(f"-e is at least -b, got -b {begin} -e {end}")
    if step is None and not 1 < factor < inf:
        raise LowshardError(f"-f is a factor above 1, got {factor:g}")
    sizes: dict[int, None] = {}
    at: float = begin
    for _ in range(MOST_SIZES):
        if at > end:
            return tuple(sizes)
        sizes[int(at)] = None  # a small factor comes to some sizes again
        at = at * factor if step is None else at + step
    raise LowshardError(
        f"a sweep has less than {MOST_SIZES:,} sizes, from -b {begin} to -e {end} there are more: pass a larger "
        + ("-f" if step is None else "-i")
    )


def _require_possible(settings: Settings, ranks: int) -> None:
    """Raise what a rank would raise, before any is started; inside a job each rank looks for itself."""
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
        require_memory(ranks * need_bytes(settings, ranks), HostDevice().free_bytes(), "-e")


# ---- on the ranks


def measure_collective(rank: Rank, request: Any) -> Any:
    """Sweep on this rank, and print the table's lines as they come; the report's data on rank 0. Collective."""
    settings = Settings.from_json(request["settings"])
    first = rank.host.rank == 0
    say = Progress(settings.op, first)
    with rank.open(settings.transport) as comm:
        machine = rank_facts(rank.host, comm, rank.mpi_comm)
        listing = Listing(settings, comm.xp is np)
        shows = first and request["table"]

        def show(rows: Sequence[Row]) -> None:
            if shows:
                print(*listing.lines(rows), sep="\n", flush=True)
                say.shown()

        if shows:
            print(*listing.head(machine, comm.size), sep="\n", flush=True)
        report = sweep(rank, comm, settings, machine, show, say)
    return report.to_json() if first else None


def sweep(
    rank: Rank,
    comm: Any,
    settings: Settings,
    machine: Facts = (),
    show: Callable[[Sequence[Row]], object] = lambda rows: None,
    say: Callable[[str], object] = lambda what: None,
) -> Report:
    """Run a sweep and return what it found, the same on every rank. Collective."""
    _require(rank, comm, settings)
    made = _Sweep(rank, comm, settings, say)
    rows: list[Row] = []
    for cycle in range(settings.cycles):
        for dtype in settings.dtypes:
            for redop in settings.redops or (None,):
                for size_bytes in settings.sizes:
                    found = made.rows(settings.request(size_bytes, dtype, redop), cycle)
                    show(found)
                    rows += found
    shares = [share for row in rows for share in row.timing.shares]
    busbw = [row.facts["busbw_gb_per_s"] for row in rows]
    facts = {
        "ranks": comm.size, "transport": comm.transport, "small_all_reduce_s": made.small_s,
        "average_busbw_gb_per_s": float(np.mean(busbw)),
        "cpu_share": float(np.median(shares)) if shares else None,
    }  # fmt: skip
    run = CollectiveRun(
        settings.op, comm.size, comm.transport, CHECK.text(), settings.form, made.small_s or 0.0
    )  # fmt: skip
    return Report(settings.op, machine, settings.to_json(), tuple(map(run.judge, rows)), facts=facts)


class _Sweep:
    """One rank's part in a sweep."""

    def __init__(self, rank: Rank, comm: Any, settings: Settings, say: Callable[[str], object]) -> None:
        self._rank, self._comm, self._settings, self._say = rank, comm, settings, say
        most = max(
            settings.request(s, d).sizes(comm.size).size_bytes
            for s in settings.sizes
            for d in settings.dtypes
        )
        self._copies: tuple[Any, Any] | None = None
        if comm.xp is np and most:
            device, kind = HostDevice(), np.dtype(np.uint8)
            source, target = device.empty((most,), kind), device.empty((most,), kind)
            source.fill(1)  # pages that were never written would all be read from one page of zeros
            target.fill(2)
            self._copies = (source, target)
        self._probing = rank.clock(comm, 3, calls=0, add_rounds=True)
        calls = 1 if settings.each else settings.calls
        self._clock = rank.clock(comm, settings.average, calls=calls, add_rounds=True)
        self.small_s: float | None = None
        if settings.compare_mpi:
            small = Runner(plain_all_reduce(rank.rivals, SMALL_BYTES))
            (timing,) = self._time([small], settings.rounds, "MPI's small all-reduce", self._probing)
            self.small_s = timing.median_s

    def _time(self, runners: list[Runner], rounds: int, what: str, clock: RankClock) -> list[Timing]:
        return take_turns(runners, rounds, clock, say=lambda turn: self._say(f"{what}, {turn}"))

    def rows(self, request: Request, cycle: int) -> list[Row]:
        """Check and time one size: a row for each placement."""
        comm, settings, rivals = self._comm, self._settings, self._rank.rivals
        sizes = request.sizes(comm.size)
        what = f"{sizes.size_bytes:,} bytes of {request.dtype}"
        self._say(f"{what}, checking")
        cases = [Case(comm, request, placement) for placement in request.placements()]
        wrong = check_all(comm.size, settings, request, cases)
        last = Pattern(request.dtype, comm.size, request.redop)
        for case in cases:
            case.load(last)
            case.calm()
            for _ in range(settings.warmups):
                case.run()
            case.finish()
        runners = [Runner(case.run, case.finish) for case in cases]
        beside: list[dict[str, int]] = [{} for _ in cases]
        if self._copies is not None:
            source, target = (buf[: sizes.size_bytes] for buf in self._copies)
            for places in beside:
                places["memcpy"] = len(runners)
            runners.append(Runner(partial(np.copyto, target, source)))
        for case, places in zip(cases, beside, strict=True):
            call = rival(rivals, request, case.placement, case) if settings.compare_mpi else None
            if call is not None:
                places["mpi"] = len(runners)
                runners.append(Runner(call))
        has_rivals = any("mpi" in places for places in beside)
        probe = [Runner(plain_all_reduce(rivals))] if has_rivals and comm.size == 2 else []
        before = self._time(probe, 3, what, self._probing) if probe else []
        timings = self._time(runners, settings.rounds, what, self._clock)
        after = self._time(probe, 3, what, self._probing) if probe else []
        apart = is_apart([timing.median_s for timing in before + after]) if probe else None
        for index, case in enumerate(cases):
            if (
                case.placement == "out-of-place"
            ):  # what a run of calls without a pause has left must be right too
                if has_rivals:  # and theirs came last
                    case.load(last)
                    for _ in range(max(1, settings.warmups)):
                        case.run()
                    case.finish()
                wrong[index] += case.wrong(last)
        totals = np.sum(self._rank.host.exchange(wrong), axis=0).tolist()
        found = []
        for case, timing, places, total in zip(cases, timings, beside, totals, strict=False):
            found.append(
                self._row(request, case.placement, timing, {n: Beside(timings[i]) for n, i in places.items()},
                          {"wrong": int(total), "cycle": cycle, "apart": apart})
            )  # fmt: skip
        return found

    def _row(
        self, request: Request, placement: Placement, timing: Timing, beside: dict[str, Beside], more: dict[str, Any]
    ) -> Row:  # fmt: skip
        ranks, sizes = self._comm.size, request.sizes(self._comm.size)
        algbw = sizes.size_bytes / timing.median_s / 1e9
        kind = " ".join(filter(None, (request.dtype, request.redop, placement)))
        facts = {
            "size_bytes": sizes.size_bytes, "count": sizes.count, "dtype": request.dtype, "redop": request.redop,
            "root": request.root if request.operation.rooted else None, "ranks": ranks, "placement": placement,
            "algbw_gb_per_s": algbw, "busbw_gb_per_s": algbw * factor(request.op, ranks),
            "series": kind, "at": sizes.size_bytes, **more,
        }  # fmt: skip
        return Row(f"{request.op} {kind} {sizes.size_bytes} B", sizes.size_bytes, timing, beside, facts=facts)


def check_all(ranks: int, settings: Settings, request: Request, cases: list[Case]) -> list[int]:
    """Return how many elements each case gets wrong here: exact data, then random, other values each time."""
    wrong = [0] * len(cases)
    for turn in range(settings.checks):
        for exact in (True, False) if is_float(request.dtype) else (True,):
            pattern = Pattern(request.dtype, ranks, request.redop, _FIRST_SEED + turn, exact)
            for index, case in enumerate(cases):
                wrong[index] += case.check(pattern)
    return wrong


def _require(rank: Rank, comm: Any, settings: Settings) -> None:
    """Raise, on every rank, what keeps the sweep from running here."""
    if not 0 <= settings.root < comm.size:
        raise CommError(f"-r is a rank, 0 to {comm.size - 1}, got {settings.root}")
    if settings.compare_mpi and (rank.rivals is None or comm.xp is not np):
        raise LowshardError("--compare-mpi needs MPI ranks and host memory: pass --transport mpi")
    if comm.xp is not np:
        return
    host = rank.host
    least = min(host.exchange(HostDevice().free_bytes() or (1 << 62)))
    hosts = host.exchange(socket.gethostname())
    require_memory(need_bytes(settings, comm.size) * max(map(hosts.count, hosts)), least, "-e")


def need_bytes(settings: Settings, ranks: int) -> int:
    """Return the host memory that the buffers of each rank take at most."""
    pairs = 2 + OPERATIONS[settings.op].in_place + 2 * settings.compare_mpi
    return (
        2
        * pairs
        * max(settings.request(s, d).sizes(ranks).size_bytes for s in settings.sizes for d in settings.dtypes)
    )


# ---- the table, in nccl-tests' form, and CSV

_WHAT = (
    table.Column("size", lambda row: str(row.facts["size_bytes"]), "(B)", 12),
    table.Column("count", lambda row: str(row.facts["count"]), "(elements)", 13),
    table.Column("type", lambda row: row.facts["dtype"], "", 10),
    table.Column("redop", lambda row: row.facts["redop"] or "none", "", 8),
    table.Column("root", lambda row: "-1" if row.facts["root"] is None else str(row.facts["root"]), "", 6),
    table.Column("   ", lambda row: "", "", 3),
)


class Listing:
    """Lines of a table; a line for both placements of a size."""

    def __init__(self, settings: Settings, on_host: bool) -> None:
        self._settings = settings
        ratios = ["memcpy"] if on_host and settings.op != "barrier" else []
        ratios += ["mpi"] if on_host and settings.compare_mpi else []
        self._block = (
            table.Column("time", _time_cell, "(us)", 10),
            table.Column("algbw", partial(_speed_cell, "algbw_gb_per_s"), "(GB/s)", 8),
            table.Column("busbw", partial(_speed_cell, "busbw_gb_per_s"), "(GB/s)", 8),
            table.Column("#wrong", lambda row: str(row.facts["wrong"]), "", 7),
            *(table.Column(f"x {name}", partial(_ratio_cell, name), "", 9) for name in ratios),
        )

    def head(self, machine: Facts, ranks: int) -> Iterator[str]:
        """Yield what ran where, and the columns."""
        settings = self._settings
        yield from table.head_lines(settings.op, machine, f"{ranks} rank{'s' * (ranks != 1)}")
        average = AVERAGES[cast(int, settings.average)]
        how = [f"time of the {average} rank" if settings.average != 1 else "average over ranks"]
        how.append(
            "each call timed by itself" if settings.each else f"{settings.rounds} rounds of batches of calls"
        )
        how += ["buffers from comm.empty"] * settings.window
        how += [f"order {settings.order}"] * (settings.order != "fast")
        yield f"# {'how':<10} {', '.join(how)}"
        block = sum(column.width for column in self._block)
        above = f"{'':>52}{'out-of-place':^{block}}{'in-place':^{block}}"
        yield from table.column_lines((*_WHAT, *self._block, *self._block), above)

    def lines(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield a size's line; with `-I` one more for each placement, on how its calls spread."""
        placed = {row.facts["placement"]: row for row in rows}
        cells = [column.cell(rows[0]) for column in _WHAT]
        for placement in ("out-of-place", "in-place"):
            row = placed.get(placement)
            cells += [table.EMPTY if row is None else column.cell(row) for column in self._block]
        yield table.line_of((*_WHAT, *self._block, *self._block), cells)
        for row in rows if self._settings.each else ():
            timing = row.timing
            times = (min(timing.counted), timing.median_s, timing.p99_s, max(timing.counted))
            least, middle, p99, most = map(_time, times)
            yield (
                f"#{'':>14}{row.facts['placement']}: min {least}, median {middle}, p99 {p99}, max {most} us, "
                f"cv {100 * timing.cv:.1f}% over {len(timing.counted)} calls"
            )


def closing(report: Report) -> Iterator[str]:
    """Yield the closing lines: wrong values, limits, average bus bandwidth, whether the machine was busy."""
    yield from table.closing_lines(report)
    if report.bench != "barrier":
        yield f"# Avg bus bandwidth    : {report.facts['average_busbw_gb_per_s']:.4g} GB/s"
    names = {name for row in report.rows for name in row.beside}
    if "memcpy" in names:
        yield "# x memcpy: time over that in which all ranks at once copy as many bytes, taking turns with it"
    if "mpi" in names:
        yield "# x mpi: time over that of mpi4py's own call on NumPy buffers, taking turns with it"
    bounds, share = sum(row.timing.is_bound for row in report.rows), report.facts["cpu_share"]
    if bounds or (share is not None and share < CLEAN_SHARE):
        yield (
            f"# machine busy: the ranks got {min(100, round(100 * (share or 0.0)))}% of the CPU time that they can "
            f"fill, in the median over all rounds; {CLEAN_SHARE:.0%} makes a round clean"
        )
    if bounds:
        yield f"# ~ {bounds} times are upper bounds: hardly a round of theirs was clean"


CSV_HEAD = (
    "op", "size_bytes", "count", "dtype", "redop", "root", "ranks", "placement", "time_us", "algbw_gb_per_s",
    "busbw_gb_per_s", "wrong", "x_memcpy", "x_mpi", "mpi_us", "min_us", "max_us", "p99_us", "cv", "rounds",
    "clean_rounds", "upper_bound", "cycle",
)  # fmt: skip


def write_csv(report: Report, path: Any) -> None:
    """Write a line for each size and placement, with a head line."""
    with open(path, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, CSV_HEAD, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in report.rows:
            timing, mpi = row.timing, row.beside.get("mpi")
            writer.writerow({
                **row.facts, "op": report.bench, "time_us": row.median_s * 1e6, "x_memcpy": row.x("memcpy"),
                "x_mpi": row.x("mpi"), "mpi_us": None if mpi is None else mpi.timing.median_s * 1e6,
                "min_us": min(timing.counted) * 1e6, "max_us": max(timing.counted) * 1e6,
                "p99_us": timing.p99_s * 1e6, "cv": timing.cv, "rounds": len(timing.seconds),
                "clean_rounds": sum(timing.clean), "upper_bound": int(timing.is_bound),
            })  # fmt: skip


def _time(seconds: float) -> str:
    """Return microseconds with three digits or more, as nccl-tests writes them."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 1000 else f"{us:.1f}" if us < 100_000 else f"{us:.0f}"


def _time_cell(row: Row) -> str:
    return ("~" if row.timing.is_bound else "") + _time(row.median_s)


def _speed_cell(key: str, row: Row) -> str:
    return f"{row.facts[key]:.2f}" if row.facts["size_bytes"] else table.EMPTY


def _ratio_cell(name: str, row: Row) -> str:
    found = row.x(name)
    return table.EMPTY if found is None else f"{found:.2f}"
