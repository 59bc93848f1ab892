"""`lowshard bench profile`: measures the collectives, fits the cost model, and writes a cluster profile."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.bench.collective import NCCL_TESTS, require_possible
from lowshard.bench.fit import Point, fit_profile
from lowshard.bench.operation import OPERATIONS
from lowshard.bench.sweep_setting import TRANSPORTS, Settings, redop_list, size_list
from lowshard.command_parser import expect_habits
from lowshard.cost import ClusterProfile, Curve, Level
from lowshard.errors import LowshardError
from lowshard.flag_value import count_of, counts_of, natural_of, seconds_of, size_of, target_of
from lowshard.nearest import nearest

if TYPE_CHECKING:
    from lowshard.bench.bench_seat import Seat
    from lowshard.bench.figure import CollectiveReport

DESCRIPTION = """\
Measures the collectives over sizes and numbers of ranks and fits t = steps(n) alpha + factor(n) S beta + sums(n) S
gamma to each, in up to three pieces of sizes. The result is a JSON file that plans are priced with; predicted is
printed beside measured. Outside an MPI job it starts its own ranks on this host, for each number of --ranks. In a
job over several hosts it measures two levels: the ranks of a host, and one rank a host.
"""
OPS = tuple(op for op in OPERATIONS if op != "all_to_all_v")
"""What is measured by default; an uneven exchange is priced as the even one."""


def add_profile_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `profile`."""
    parser = benches.add_parser(
        "profile",
        help="measure a cluster profile for the cost model",
        description=DESCRIPTION,
        epilog="Exit codes: 0 done, 1 a wrong value, 2 wrong usage, 70 a rank died, 71 timed out, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=counts_of, metavar="N[,N...]", help="numbers of ranks to start (default 2)"
    )
    parser.add_argument("-o", "--out", type=target_of, default="profile.json", metavar="FILE",
                        help="where the profile goes (default profile.json; - prints it, and no table)")  # fmt: skip
    parser.add_argument("--ops", type=_ops, default=OPS, metavar="NAME[,NAME...]",
                        help="collectives to measure (default all)")  # fmt: skip
    parser.add_argument("-b", "--minbytes", type=size_of, default="256", metavar="SIZE",
                        help="smallest size (default 256)")  # fmt: skip
    parser.add_argument("-e", "--maxbytes", type=size_of, default="64M", metavar="SIZE",
                        help="largest size (default 64M)")  # fmt: skip
    parser.add_argument("-f", "--stepfactor", type=float, default=2.0, metavar="F",
                        help="multiply by this from size to size (default 2)")  # fmt: skip
    parser.add_argument(
        "-n", "--iters", type=count_of, default=10, metavar="N", help="timed rounds (default 10)"
    )
    parser.add_argument(
        "-w", "--warmup_iters", type=natural_of, default=3, metavar="N", help="calls before (default 3)"
    )
    parser.add_argument("-m", "--agg_iters", type=count_of, default=0, metavar="N",
                        help="calls in a round, timed as one (default: as many as last 2 ms)")  # fmt: skip
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="as of the collectives")
    parser.add_argument("-T", "--timeout", type=seconds_of, metavar="S",
                        help="end the run of each number of ranks after S seconds")  # fmt: skip
    expect_habits(
        parser,
        {
            "--json": "the profile is JSON already: write -o FILE, or -o - to print it and no table",
            **NCCL_TESTS,
        },
    )
    parser.set_defaults(func=run_profile)


def run_profile(args: argparse.Namespace) -> int:
    """Run `lowshard bench profile` and return the exit code."""
    from lowshard.bench.bench_world import DEFAULT_RANKS, Outcome, job_size, run_entry

    sizes = size_list(args.minbytes, args.maxbytes, args.stepfactor, None)
    if len(sizes) < 2:
        raise LowshardError(f"a fit needs two sizes or more, got {sizes}; pass a larger -e or a smaller -f")
    inside = job_size()
    if inside is not None and args.ranks not in (None, (inside,)):
        raise LowshardError(f"inside an MPI job the profile is of its {inside} ranks: leave --ranks out")
    if inside is None and min(args.ranks or (DEFAULT_RANKS,)) < 2:
        raise LowshardError("over one rank nothing moves: --ranks are 2 or more")
    request = {
        "sizes": list(sizes), "ops": list(args.ops), "rounds": args.iters, "warmups": args.warmup_iters,
        "calls": args.agg_iters, "transport": args.transport,
    }  # fmt: skip
    for op in args.ops:
        settings = Settings(op, sizes, transport=args.transport, memcpy=False)
        require_possible(settings, inside or max(args.ranks or (DEFAULT_RANKS,)))
    points: list[Point] = []
    machine: dict[str, str] = {}
    wrong = 0
    outcome = Outcome(0)
    for ranks in [None] if inside is not None else args.ranks or (DEFAULT_RANKS,):
        outcome = run_entry(measure_points, request, ranks, args.transport, args.timeout)
        if not outcome.leads:
            return outcome.finish(0)
        if outcome.data is None:
            return outcome.exit_code
        points += [Point(**point) for point in outcome.data["points"]]
        machine |= outcome.data["machine"]
        wrong += outcome.data["wrong"]
    profile = fit_profile(points, tuple(machine.items()))
    return outcome.finish(_conclude(profile, points, wrong, args.out))


def measure_points(seat: Seat, request: Any) -> Any:
    """Measure every collective at every level; points, machine and wrong values on rank 0.

    Collective: all ranks of the seat call this.
    """
    from lowshard.bench.bench_seat import Say, collective_facts, hosts_of
    from lowshard.bench.sweep import sweep

    first = seat.meeting.rank == 0
    found: dict[str, Any] = {"points": [], "machine": {}, "wrong": 0}
    hosts = hosts_of(seat.meeting)
    for level, group in _levels(seat):
        if group is None:
            seat.meeting.barrier()
            continue
        say = Say("profile", first)
        with group.open(request["transport"], say) as place:
            # On all ranks of the group, whatever they have by now: it is collective.
            facts = dict(collective_facts(place)) | {"hosts": hosts}
            found["machine"] = found["machine"] or facts
            for op in request["ops"]:
                settings = Settings(
                    op,
                    (0,) if op == "barrier" else tuple(request["sizes"]),
                    redops=redop_list(op, "sum"),
                    rounds=request["rounds"],
                    warmups=request["warmups"],
                    calls=request["calls"],
                    transport=request["transport"],
                    memcpy=False,
                    placements=("out",),
                )
                say(f"{op} at the {level} level over {group.meeting.size} ranks")
                report = sweep(place, settings)
                found["points"] += list(_points(report, level))
                found["wrong"] += report.wrong
        seat.meeting.barrier()
    return found if first else None


def _points(report: CollectiveReport, level: Level) -> Iterator[dict[str, Any]]:
    for row in report.rows:
        yield {
            "op": row.op, "transport": report.transport, "level": level, "ranks": report.ranks,
            "size_bytes": row.size_bytes, "seconds": row.main.timing.median_s,
        }  # fmt: skip


def _levels(seat: Seat) -> list[tuple[Level, Seat | None]]:
    """Return the levels there are, with this rank's seat in each; None where it takes no part.

    Collective: all ranks of the seat call this.
    """
    places = colours(seat.meeting.exchange(socket.gethostname()), seat.meeting.rank)
    if places is None:
        return [("node", seat)]
    from lowshard.bench.bench_seat import MpiSeat

    assert isinstance(seat, MpiSeat)
    return [(level, seat.group(colour)) for level, colour in places]


def colours(hosts: Sequence[str], rank: int) -> list[tuple[Level, int | None]] | None:
    """Return a rank's colour at each level: ranks of the first host, and one rank a host; None on one host alone.

    The node level is left out where the first host has one rank only.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    on_first = hosts[rank] == names[0]
    leads = rank == hosts.index(hosts[rank])
    found: list[tuple[Level, int | None]] = [("network", 0 if leads else None)]
    if hosts.count(names[0]) > 1:
        found.insert(0, ("node", 0 if on_first else None))
    return found


def _conclude(profile: ClusterProfile, points: Sequence[Point], wrong: int, out: str) -> int:
    """Print predicted beside measured, write the profile, and return the exit code."""
    from lowshard.flag_value import write_whole

    text = json.dumps(profile.to_json(), indent=1, allow_nan=False) + "\n"
    if out == "-":
        sys.stdout.write(text)
    else:
        print(*describe(profile, points), sep="\n")
        write_whole(Path(out), text.encode())
        print(f"# written: {out}")
    if wrong:
        print(f"lowshard bench profile: {wrong} elements of the results were wrong", file=sys.stderr)
    return 1 if wrong else 0


def describe(profile: ClusterProfile, points: Sequence[Point]) -> Iterator[str]:
    """Yield what was fitted, and what it predicts beside what was measured."""
    for name, value in profile.machine:
        yield f"# {name:<10} {value}"
    for curve in profile.curves:
        mine = [p for p in points if (p.op, p.transport, p.level, p.ranks)
                == (curve.op, curve.transport, curve.level, curve.ranks)]  # fmt: skip
        yield "#"
        yield f"# {curve.op}, {curve.transport}, {curve.level}, {curve.ranks} ranks"
        yield from _describe_pieces(curve)
        yield f"#{'size':>11}{'measured us':>14}{'predicted us':>14}{'error':>8}"
        errors = []
        for point in mine:
            predicted = profile.seconds(
                curve.op, curve.ranks, point.size_bytes, curve.level, curve.transport
            ).seconds
            errors.append(predicted / point.seconds - 1.0)
            yield (
                f"{point.size_bytes:>12}{point.seconds * 1e6:>14.2f}{predicted * 1e6:>14.2f}{100 * errors[-1]:>+7.1f}%"
            )
        middle = sorted(abs(error) for error in errors)[len(errors) // 2]
        yield f"# fit error: {100 * middle:.1f}% median, {100 * max(map(abs, errors)):.1f}% at most"


def _describe_pieces(curve: Curve) -> Iterator[str]:
    low = curve.least_bytes
    for piece in curve.pieces:
        up = "up" if piece.below_bytes is None else f"to {piece.below_bytes:,} B"
        speeds = [
            f"{name} {1e9 * cost:.4f} ns/B"
            for name, cost in (("beta", piece.beta_s_per_byte), ("gamma", piece.gamma_s_per_byte))
            if cost
        ]
        yield f"#   from {low:,} B {up}: alpha {piece.alpha_s * 1e6:.2f} us, {', '.join(speeds) or 'no bytes'}"
        low = piece.below_bytes or low


def _ops(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        near = nearest(unknown[0], OPERATIONS)
        raise argparse.ArgumentTypeError(
            f"the collectives are {', '.join(OPERATIONS)}; got {unknown[0]!r}{near}"
        )
    return names
