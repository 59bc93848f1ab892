"""`lowshard bench redistribute`: transitions beside the least work they could be, and beside other libraries."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard.bench.bench_transition import ONE_AXIS, TWO_AXES, Transition, floor_of, mpi_way, transitions
from lowshard.bench.json_argument import add_json_argument, size_of, write_result
from lowshard.command_line import count_of, seconds_of
from lowshard.errors import BufferMismatchError, LowshardError

if TYPE_CHECKING:
    from lowshard.bench.bench_seat import Seat
    from lowshard.bench.sweep import Place

DESCRIPTION = """\
Moves a square fp32 matrix from one layout to another, transition by transition, and prints each way's time as a
multiple of a floor that is taken in turn with it, in the same processes: every rank fills a warm buffer of its
result's size once; where terms are summed it adds its share of them, in blocks that stay in a cache. Ways: the source
in memory that the ranks share (comm.empty), in ordinary memory, both with a warm out=; a new result; a result of a
BufferPool; mpi4py's own call. Limits are promised from 64 MB on, on one machine. --peers adds
PyTorch's DTensor over gloo and JAX, each in processes of its own, where they are installed.
"""
EPILOG = """\
Inside an MPI job (lowshard run -n 4 --module lowshard bench redistribute) its ranks are used. Transitions of two mesh
axes take 4 ranks or more. Every result is compared with slices of the matrix.
Rounds in which other programs took part of the cores are left out; ~: there were hardly any others.
Exit codes: 0 done, 1 a wrong value or, with --check-limits, a figure above its limit, 2 wrong usage, 70 a rank died,
71 timed out, 130 interrupted.
"""
_OWN_SHARE = 0.8
"""Of the cores that the ranks can fill: a round with less was disturbed by others, and does not count."""
_CLEAN_ROUNDS = 3
WAYS = ("shared", "private", "new", "pool", "mpi")
_HEADS = {
    "shared": "shared", "private": "ordinary", "new": "new result", "pool": "pool", "mpi": "MPI",
    "dtensor": "DTensor", "jax": "JAX",
}  # fmt: skip


def add_redistribute_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `redistribute`."""
    parser = benches.add_parser(
        "redistribute",
        help="transitions between layouts, beside a floor and other libraries",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=count_of, metavar="N", help="ranks to start (default 2)")
    parser.add_argument("--size", type=_sizes_of, default="64M", metavar="SIZE[,SIZE...]",
                        help="bytes of the matrix (default 64M)")  # fmt: skip
    parser.add_argument(
        "--only", action="append", metavar="TRANSITION",
        help="only this one, such as 'S0->S1' or 'S0,S1->S1,S0'; may be given again. Default: "
        + ", ".join((*ONE_AXIS, *TWO_AXES)),
    )  # fmt: skip
    parser.add_argument("-n", "--iters", type=count_of, default=7, metavar="N", help="rounds (default 7)")
    parser.add_argument("--peers", action="store_true", help="also DTensor and JAX, where they are installed")
    parser.add_argument("--peer-python", action="append", metavar="FILE", default=[],
                        help="a Python that has PyTorch or JAX installed (default: this one)")  # fmt: skip
    add_json_argument(parser)
    parser.add_argument("--check-limits", action="store_true",
                        help="exit code 1 if a figure is above its limit")  # fmt: skip
    parser.add_argument("-T", "--timeout", type=seconds_of, metavar="S", help="end the run after S seconds")
    parser.set_defaults(func=run_redistribute)


def run_redistribute(args: argparse.Namespace) -> int:
    """Run `lowshard bench redistribute` and return the exit code."""
    from lowshard.bench.bench_device import HostDevice
    from lowshard.bench.bench_world import DEFAULT_RANKS, job_size, run_entry

    ranks = job_size() or args.ranks or DEFAULT_RANKS
    names = args.only or [*ONE_AXIS, *TWO_AXES]
    every = [t for size in args.size for t in transitions(names, ranks, size)]
    if not every:
        raise LowshardError(f"over {ranks} ranks there is nothing to measure of {', '.join(names)}")
    need = max(10 * ranks * size for size in args.size)
    if job_size() is None and need > HostDevice().free_bytes():
        raise BufferMismatchError(
            f"the matrix and its copies take up to {need:,} bytes over {ranks} ranks, more than is free; "
            "pass a smaller --size"
        )
    request = {"names": list(names), "sizes": list(args.size), "rounds": args.iters}
    outcome = run_entry(measure_transitions, request, args.ranks, "mpi", args.timeout)
    if not outcome.leads:
        return outcome.finish(0)
    if outcome.data is None:
        return outcome.exit_code
    report = outcome.data
    if args.peers:
        from lowshard.bench.peer import peer_rows

        report["peers"] = peer_rows(request, ranks, args.peer_python or [sys.executable])
    return outcome.finish(_conclude(report, args))


def measure_transitions(seat: Seat, request: Any) -> Any:
    """Measure every transition on this rank; rows on rank 0. Collective."""
    from lowshard.bench.bench_seat import Say, collective_facts

    say = Say("redistribute", seat.meeting.rank == 0)
    with seat.open("mpi", say) as place:
        facts = collective_facts(place)
        rows = []
        for size in request["sizes"]:
            for transition in transitions(request["names"], seat.meeting.size, size):
                say(f"{transition.name}, {size >> 20} MB")
                rows.append(_measure(place, transition, request["rounds"]))
    if seat.meeting.rank:
        return None
    return {"machine": dict(facts), "ranks": seat.meeting.size, "rounds": request["rounds"],
            "rows": rows, "peers": []}  # fmt: skip


def wall_s(place: Place, work: Callable[[], object]) -> tuple[float, bool]:
    """Return seconds from the first begin to the last end, and whether the cores were the ranks' own. Collective."""
    place.meeting.barrier()
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    spent_s = time.process_time() - cpu_s
    spans = place.meeting.exchange((begin_s, time.perf_counter(), spent_s))
    wall = float(max(row[1] for row in spans) - min(row[0] for row in spans))
    return wall, sum(row[2] for row in spans) >= _OWN_SHARE * wall * (place.cores or 1)


def _measure(place: Place, transition: Transition, rounds: int) -> dict[str, Any]:
    from lowshard import BufferPool, execute, plan_redistribute

    comm, rank = place.comm, place.meeting.rank
    src, dst = transition.src, transition.dst
    plan = plan_redistribute(src, dst)
    private = transition.value(src.box(rank))
    wanted = transition.value(dst.box(rank), transition.terms)
    shared = comm.empty(private.shape)
    shared[...] = private
    out, packed = np.zeros_like(wanted), np.zeros_like(wanted)
    floor = floor_of(transition, wanted.size)
    pool = BufferPool(comm)
    ways: dict[str, Callable[[], Any]] = {
        "shared": lambda: execute(plan, shared, comm, out),
        "private": lambda: execute(plan, private, comm, out),
        "new": lambda: execute(plan, shared, comm),
        "pool": lambda: execute(plan, shared, comm, pool=pool),
    }
    own = mpi_way(place.mpi_comm, transition, private, packed) if place.mpi_comm is not None else None
    if own is not None:
        ways["mpi"] = own
    wrong = 0
    for name, work in ways.items():
        out[...] = packed[...] = -1
        made = work()
        got = packed if name == "mpi" else made
        wrong += int(np.count_nonzero(got != wanted))
        del made, got
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    clean: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            (seconds, own_cores), (floor_s, floor_own_cores) = wall_s(place, work), wall_s(place, floor)
            times[name].append((seconds, floor_s))
            if own_cores and floor_own_cores:
                clean[name].append((seconds, floor_s))
    counted = {name: len(pairs) for name, pairs in clean.items()}
    times = {name: clean[name] if counted[name] >= _CLEAN_ROUNDS else pairs for name, pairs in times.items()}
    row: dict[str, Any] = {
        "transition": transition.name, "mesh": list(transition.grid), "bytes": src.size_bytes,
        "wrong": sum(place.meeting.exchange(wrong)),
        "floor_s": statistics.median(floor_s for pairs in times.values() for _, floor_s in pairs),
        "steps": [str(step) for step in plan.steps],
        "sent_bytes": [plan.sent_bytes(r) for r in range(place.meeting.size)],
        "limit": transition.limit(), "private_limit": transition.limit(private=True),
        "is_view": wanted.size > 0 and not any(plan.sent_bytes(r) for r in range(place.meeting.size)),
        "ways": {
            name: {
                "seconds": statistics.median(s for s, _ in pairs),
                "ratio": statistics.median(s / floor_s for s, floor_s in pairs),
                "ratios": [round(s / floor_s, 3) for s, floor_s in pairs],
                "clean_rounds": counted[name],
            }
            for name, pairs in times.items()
        },
    }  # fmt: skip
    return row


def _conclude(report: dict[str, Any], args: argparse.Namespace) -> int:
    """Print the table, write the JSON, and return the exit code."""
    write_result(args, "redistribute", report, lambda: _show(report))
    wrong = sum(row["wrong"] for row in report["rows"])
    if wrong:
        print(f"lowshard bench redistribute: {wrong} elements are wrong", file=sys.stderr)
    misses = list(above_limits(report)) if args.check_limits else []
    for miss in misses:
        print(f"lowshard bench redistribute: {miss}", file=sys.stderr)
    return 1 if wrong or misses else 0


def above_limits(report: dict[str, Any]) -> Sequence[str]:
    """Return what is above its limit, a sentence each."""
    found = []
    for row in report["rows"]:
        for way, limit in (("shared", row["limit"]), ("private", row["private_limit"])):
            ratio = row["ways"][way]["ratio"]
            if limit is not None and ratio > limit:
                found.append(
                    f"{row['transition']} of {row['bytes'] >> 20} MB, source in {_HEADS[way]} memory: {ratio:.2f} "
                    f"times the floor, promised {limit:.1f}"
                )
    return found


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    from lowshard.plain_console import make_console, print_table

    console = make_console()
    for name, value in report["machine"].items():
        console.print(f"# {name}: {value}", soft_wrap=True)
    peers = {(p["peer"], p["transition"], p["bytes"]): p for p in report["peers"] if "ratio" in p}
    names = [n for n in ("dtensor", "jax") if any(key[0] == n for key in peers)]
    table = Table(title=f"times the floor, {report['ranks']} ranks, median of {report['rounds']} rounds")
    for head in ("transition", "MB", "floor ms", *(_HEADS[w] for w in (*WAYS, *names)), "limit"):
        table.add_column(head, justify="left" if head == "transition" else "right")
    for row in report["rows"]:
        cells = [_ratio(row["ways"].get(way)) for way in WAYS]
        if row["is_view"]:
            cells[2] = "view"
        cells += [_ratio(peers.get((n, row["transition"], row["bytes"]))) for n in names]
        limit = "" if row["limit"] is None else f"{row['limit']:.1f} / {row['private_limit']:.1f}"
        table.add_row(
            row["transition"], f"{row['bytes'] >> 20}", f"{row['floor_s'] * 1e3:.1f}", *cells, limit
        )
    print_table(console, table)
    for peer in report["peers"]:
        if "missing" in peer:
            console.print(f"# {peer['missing']}", soft_wrap=True)


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{'~' if found.get('clean_rounds', _CLEAN_ROUNDS) < _CLEAN_ROUNDS else ''}{found['ratio']:.2f}"


def _sizes_of(text: str) -> tuple[int, ...]:
    return tuple(size_of(part) for part in text.split(","))
