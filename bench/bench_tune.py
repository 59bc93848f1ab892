"""`lowshard bench tune`: finds below which sizes MPI's own calls beat the node engine here, and writes it down.

Both ways run in one job, on a communicator each, and take turns; LOWSHARD_CPU_PATH chooses the way when a
communicator is made.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.bench.collective import count_of, natural_of, seconds_of, size_of
from lowshard.bench.operation import OPERATIONS
from lowshard.bench.sweep_setting import Settings, redop_list, size_list
from lowshard.comm import tuned
from lowshard.errors import LowshardError
from lowshard.settings import CPU_PATH, change

if TYPE_CHECKING:
    from lowshard.bench.bench_seat import Seat
    from lowshard.bench.sweep import Place

DESCRIPTION = """\
Times each collective by the node engine and by MPI's own call, size by size, taking turns, and writes the sizes
below which MPI's own is taken for this MPI library, number of ranks and number of cores. Communicators read the
table when they are made. Ranks of one host.
"""
OPS = tuple(op for op in OPERATIONS if op not in ("send_recv", "barrier"))
_WAYS = ("window", "mpi")
_TIE = 0.03  # closer than this the two are as good as each other, and the engine is taken


def add_tune_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tune`."""
    parser = benches.add_parser(
        "tune",
        help="find where MPI's own calls beat the node engine",
        description=DESCRIPTION,
        epilog="Exit codes: 0 done, 1 a wrong value (nothing is written), 2 wrong usage, 70 a rank died, 71 timed "
        "out, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=count_of, metavar="N", help="ranks to start (default 2)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE",
                        help="the table (default tuned.json in lowshard's cache folder)")  # fmt: skip
    parser.add_argument("-b", "--minbytes", type=size_of, default="64", metavar="SIZE",
                        help="smallest size (default 64)")  # fmt: skip
    parser.add_argument("-e", "--maxbytes", type=size_of, default="1M", metavar="SIZE",
                        help="largest size (default 1M)")  # fmt: skip
    parser.add_argument("-f", "--stepfactor", type=float, default=2.0, metavar="F",
                        help="multiply by this from size to size (default 2)")  # fmt: skip
    parser.add_argument(
        "-n", "--iters", type=count_of, default=20, metavar="N", help="timed rounds (default 20)"
    )
    parser.add_argument(
        "-w", "--warmup_iters", type=natural_of, default=5, metavar="N", help="calls before (default 5)"
    )
    parser.add_argument("-m", "--agg_iters", type=count_of, default=0, metavar="N",
                        help="calls in a round, timed as one (default: as many as last 2 ms)")  # fmt: skip
    parser.add_argument("-T", "--timeout", type=seconds_of, metavar="S", help="end the run after S seconds")
    parser.set_defaults(func=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    """Run `lowshard bench tune` and return the exit code."""
    from lowshard.bench.bench_world import DEFAULT_RANKS, job_size, run_entry

    if (job_size() or args.ranks or DEFAULT_RANKS) < 2:
        raise LowshardError("over one rank there is nothing to tune: --ranks is 2 or more")
    sizes = size_list(args.minbytes, args.maxbytes, args.stepfactor, None)
    request = {
        "sizes": list(sizes), "rounds": args.iters, "warmups": args.warmup_iters, "calls": args.agg_iters,
    }  # fmt: skip
    outcome = run_entry(measure_ways, request, args.ranks, "mpi", args.timeout)
    if not outcome.leads:
        return outcome.finish(0)
    if outcome.data is None:
        return outcome.exit_code
    return outcome.finish(_conclude(outcome.data, args.out or tuned.default_path()))


def measure_ways(seat: Seat, request: Any) -> Any:
    """Time every collective both ways; times and machine on rank 0.

    Collective: all ranks of the seat call this.
    """
    from lowshard.bench.bench_seat import MpiSeat, Say

    assert isinstance(seat, MpiSeat)
    if len(set(seat.meeting.exchange(socket.gethostname()))) > 1:
        raise LowshardError("lowshard bench tune is for the ranks of one host; start it on each kind of host")
    from mpi4py import MPI

    machine = tuned.Machine.of(MPI.get_vendor(), seat.meeting.exchange(sorted(os.sched_getaffinity(0))))
    say = Say("tune", seat.meeting.rank == 0)
    rows = []
    with ExitStack() as stack:
        places = []
        for way in _WAYS:
            with _forced(way):
                places.append(stack.enter_context(seat.open("mpi", say)))
        for op in OPS:
            rows += [_time_both(places, op, size, request) for size in request["sizes"]]
    found = {"mpi": machine.mpi, "ranks": machine.ranks, "cores": machine.cores, "rows": rows}
    return found if seat.meeting.rank == 0 else None


def _time_both(places: Sequence[Place], op: str, size: int, request: Any) -> dict[str, Any]:
    """Check and time one size by both ways."""
    from lowshard.bench.batch import Runner
    from lowshard.bench.case import Case, Request
    from lowshard.bench.sweep import check_all
    from lowshard.bench.value_pattern import Pattern

    redops = redop_list(op, "sum")
    settings = Settings(op, (size,), redops=redops, warmups=request["warmups"], memcpy=False)
    asked = Request.of(settings, size, "float32", redops[0] if redops else None)
    placement = asked.placements(("out", "in"))[0]
    cases = [Case(place.comm, asked, placement) for place in places]
    wrong = sum(
        sum(check_all(place, settings, asked, [case])) for place, case in zip(places, cases, strict=True)
    )
    for case in cases:
        case.load(Pattern("float32", places[0].comm.size, asked.redop))
        for _ in range(settings.warmups):
            case.run()
    runners = [Runner(case.run, case.finish) for case in cases]
    what = f"{op} of {size:,} bytes"
    window, mpi = places[0].measure(runners, request["rounds"], what, calls=request["calls"])
    return {
        "op": op, "size_bytes": size, "window_s": window.median_s, "mpi_s": mpi.median_s,
        "ratio": window.over(mpi), "wrong": sum(places[0].meeting.exchange(wrong)),
        "bound": window.is_bound or mpi.is_bound,
    }  # fmt: skip


def crossover(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """Return the size below which MPI's own call is taken: the cut that costs least over all measured sizes.

    Args:
        sizes: bytes, growing.
        ratios: time of the node engine over that of MPI's own call, for each size.

    Returns:
        0 if the node engine is taken throughout; twice the largest size if it never is.
    """
    logs = [0.0 if abs(math.log(ratio)) < _TIE else math.log(ratio) for ratio in ratios]
    # What is lost, against the better way each time, when the engine begins at each of the sizes.
    costs = [sum(max(-x, 0.0) for x in logs[:cut]) + sum(max(x, 0.0) for x in logs[cut:])
             for cut in range(len(logs) + 1)]  # fmt: skip
    cut = costs.index(min(costs))
    return 0 if cut == 0 else sizes[cut] if cut < len(sizes) else 2 * sizes[-1]


def crossovers(rows: Sequence[dict[str, Any]]) -> tuned.Crossover:
    """Return the crossover of every collective that was timed."""
    found = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = sorted((row["size_bytes"], row["ratio"]) for row in rows if row["op"] == op)
        found[op] = crossover([size for size, _ in mine], [ratio for _, ratio in mine])
    return tuned.Crossover.of(found)


def _conclude(data: Any, path: Path) -> int:
    """Print the times and the crossovers, write the table, and return the exit code."""
    machine = tuned.Machine(data["mpi"], data["ranks"], data["cores"])
    wrong = sum(row["wrong"] for row in data["rows"])
    found = crossovers(data["rows"])
    print(*_describe(machine, data["rows"], found), sep="\n")
    if wrong:
        print(f"lowshard bench tune: {wrong} elements were wrong; nothing is written", file=sys.stderr)
        return 1
    tuned.save(path, machine, found)
    print(f"# written: {path}")
    return 0


def _describe(
    machine: tuned.Machine, rows: Sequence[dict[str, Any]], found: tuned.Crossover
) -> Iterator[str]:
    yield f"# lowshard bench tune: {machine}"
    yield f"#{'collective':>15}{'size':>12}{'engine us':>12}{'MPI us':>12}{'ratio':>8}  taken"
    for row in rows:
        taken = "MPI" if found.takes_mpi(row["op"], row["size_bytes"]) else "engine"
        yield (
            f"{row['op']:>16}{row['size_bytes']:>12}{row['window_s'] * 1e6:>12.2f}{row['mpi_s'] * 1e6:>12.2f}"
            f"{row['ratio']:>8.2f}  {taken}{' ~' if row['bound'] else ''}"
        )
    for op, size in found.sizes:
        yield f"# {op}: " + (f"MPI's own call below {size:,} bytes" if size else "the node engine throughout")
    if any(row["bound"] for row in rows):
        yield "# ~ the machine was busy in every round: better tune again when it is not"


@contextmanager
def _forced(way: str) -> Iterator[None]:
    """Have communicators that are made inside take one way."""
    before = CPU_PATH.text() if CPU_PATH.is_set() else None
    change(CPU_PATH.name, way)
    try:
        yield
    finally:
        change(CPU_PATH.name, before)
