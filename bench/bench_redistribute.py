"""`lowshard bench redistribute`: transitions beside the least work they could be, and beside other libraries."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import HostDevice, require_memory
from lowshard.bench.bench_limits import redistribute_limit
from lowshard.bench.bench_report import Beside, Report, Row
from lowshard.bench.bench_transition import ONE_AXIS, TWO_AXES, Transition, floor_of, transitions
from lowshard.bench.bench_world import (
    DEFAULT_RANKS,
    Progress,
    Rank,
    ask_rival,
    has_package,
    job_size,
    run_entry,
)
from lowshard.bench.machine import rank_facts
from lowshard.bench.plot import size_text
from lowshard.bench.rival_mpi import transition_by_mpi
from lowshard.bench.turn_timing import Runner, Timing, take_turns
from lowshard.errors import LowshardError

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
Exit codes: 0 done, 1 a wrong value or, with --check, a figure above its limit, 2 wrong usage, 70 a rank died,
71 timed out, 130 interrupted.
"""
CLEAN_SHARE = 0.8
"""Of the cores that the ranks can fill, from the first begin of a round to its last end."""
PEERS = {"DTensor": ("torch", "rival_torch"), "JAX": ("jax", "rival_jax")}
"""By name: the package that must be there, and the script."""
_PEER_S = 900.0


def add_redistribute_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `redistribute`."""
    parser = options.add_parser(
        benches, "redistribute", run_redistribute, "transitions between layouts, beside a floor and other libraries",
        DESCRIPTION, EPILOG,
    )  # fmt: skip
    parser.add_argument("--ranks", type=options.count, metavar="N", help="ranks to start (default 2)")
    parser.add_argument("--size", type=options.list_of(options.size), default="64M", metavar="SIZE[,SIZE...]",
                        help="bytes of the matrix (default 64M)")  # fmt: skip
    parser.add_argument(
        "--only", action="append", metavar="TRANSITION",
        help="only this one, such as 'S0->S1' or 'S0,S1->S1,S0'; may be given again. Default: "
        + ", ".join((*ONE_AXIS, *TWO_AXES)),
    )  # fmt: skip
    parser.add_argument(
        "-n", "--iters", type=options.count, default=7, metavar="N", help="rounds (default 7)"
    )
    parser.add_argument("--peers", action="store_true", help="also DTensor and JAX, where they are installed")
    parser.add_argument("--peer-python", action="append", metavar="FILE", default=[],
                        help="a Python that has PyTorch or JAX installed (default: this one)")  # fmt: skip
    parser.add_argument(
        "-T", "--timeout", type=options.positive, metavar="S", help="end the run after S seconds"
    )
    options.add_result_arguments(parser, "limits hold from 64 MB on")


def run_redistribute(args: argparse.Namespace) -> int:
    """Run `lowshard bench redistribute` and return the exit code."""
    options.require_results(args)
    ranks = job_size() or args.ranks or DEFAULT_RANKS
    names = args.only or [*ONE_AXIS, *TWO_AXES]
    if not any(transitions(names, ranks, size) for size in args.size):
        raise LowshardError(f"over {ranks} ranks there is nothing to measure of {', '.join(names)}")
    if job_size() is None:
        require_memory(max(10 * ranks * size for size in args.size), HostDevice().free_bytes())
    request = {"names": list(names), "sizes": list(args.size), "rounds": args.iters}
    outcome = run_entry(measure_transitions, request, args.ranks, "mpi", args.timeout)
    if not outcome.leads:
        return outcome.finish(0)
    if outcome.data is None:
        return outcome.exit_code
    report = Report.from_json(outcome.data)
    if args.peers:
        found, notes = peer_rows(request, ranks, args.peer_python or [sys.executable])
        # A peer's row comes behind the transition's own.
        order = {row.group: i for i, row in enumerate(report.rows)}
        rows = sorted((*report.rows, *found), key=lambda row: order[row.group])
        report = replace(report, rows=tuple(rows), notes=(*report.notes, *notes))
    columns = (*table.standard("floor"), table.fact_column("floor", "floor_s", ".1f", "(ms)", 1e3))
    return outcome.finish(
        options.conclude(report, args, table.report_lines(report, columns, f"{ranks} ranks"))
    )


def measure_transitions(rank: Rank, request: Any) -> Any:
    """Measure every transition on this rank; the report on rank 0. Collective."""
    say = Progress("redistribute", rank.host.rank == 0)
    with rank.open("mpi") as comm:
        machine = rank_facts(rank.host, comm, rank.mpi_comm)
        rows: list[Row] = []
        for size_bytes in request["sizes"]:
            for transition in transitions(request["names"], rank.host.size, size_bytes):
                say(f"{transition.name}, {size_text(size_bytes)}")
                rows += _measure(rank, comm, transition, request["rounds"], say)
    report = Report("redistribute", machine, request | {"ranks": rank.host.size}, tuple(rows))
    return report.to_json() if rank.host.rank == 0 else None


def _measure(
    rank: Rank, comm: Any, transition: Transition, rounds: int, say: Callable[[str], object]
) -> list[Row]:
    from lowshard import BufferPool, execute, plan_redistribute

    host, me = rank.host, rank.host.rank
    src, dst = transition.src, transition.dst
    plan = plan_redistribute(src, dst)
    private = transition.value(src.box(me))
    wanted = transition.value(dst.box(me), transition.terms)
    shared = comm.empty(private.shape)
    shared[...] = private
    out, packed = np.zeros_like(wanted), np.zeros_like(wanted)
    floor = floor_of(transition, wanted.size)
    pool = BufferPool(comm)
    ways: dict[str, Callable[[], Any]] = {
        "shared": lambda: execute(plan, shared, comm, out),
        "ordinary": lambda: execute(plan, private, comm, out),
        "new": lambda: execute(plan, shared, comm),
        "pool": lambda: execute(plan, shared, comm, pool=pool),
    }
    by_mpi = None
    if rank.rivals is not None:
        by_mpi = transition_by_mpi(rank.rivals, transition.name, transition.side, private, packed)
    if by_mpi is not None:
        ways["mpi"] = by_mpi
    wrong = {}
    for name, work in ways.items():
        out[...] = packed[...] = -1
        made = work()
        got = packed if name == "mpi" else made
        wrong[name] = sum(host.exchange(int(np.count_nonzero(got != wanted))))
        del made, got
    runners = [Runner(work) for way in ways.values() for work in (way, floor)]
    clock = rank.clock(comm, clean_share=CLEAN_SHARE)
    timings = take_turns(runners, rounds, clock, say=lambda turn: say(f"{transition.name}, {turn}"))
    sent = [plan.sent_bytes(r) for r in range(host.size)]
    rows = []
    for way, own, least in zip(ways, timings[::2], timings[1::2], strict=True):
        facts = {
            "transition": transition.name, "mesh": list(transition.grid), "way": way, "wrong": wrong[way],
            "floor_s": least.median_s, "steps": list(map(str, plan.steps)), "sent_bytes": sent,
            "is_view": way == "new" and wanted.size > 0 and not any(sent),
        }  # fmt: skip
        name = f"{transition.name} {way}" + (", a view" if facts["is_view"] else "")
        row = Row(name, src.size_bytes, own, {"floor": Beside(least)}, facts=facts, group=_group(transition))
        if way in ("shared", "ordinary"):
            row = row.limited(
                "floor", redistribute_limit(transition.name, transition.side**2 * 4, way == "ordinary")
            )
        rows.append(row)
    return rows


def _group(transition: Transition) -> str:
    mesh = " x ".join(map(str, transition.grid))
    return f"{transition.name} of {size_text(transition.side**2 * 4)} on {mesh} ranks"


def peer_rows(request: Any, ranks: int, pythons: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Return the rows of the peers that are installed, and a note for each that is not, or that fails."""
    rows: list[Row] = []
    notes = []
    for title, (package, script) in PEERS.items():
        python = next((p for p in pythons if has_package(p, package)), None)
        if python is None:
            notes.append(f"{title} is left out: no {package} for {', '.join(pythons)} (--peer-python)")
            continue
        print(f"lowshard bench redistribute: {title}", file=sys.stderr, flush=True)
        try:
            asked = {**request, "ranks": ranks, "what": "redistribute"}
            found = ask_rival(python, f"lowshard.bench.{script}", asked, _PEER_S)
        except LowshardError as error:
            notes.append(f"{title} is left out: {error}")
            continue
        of = partial(_peer_row, title)
        rows += map(of, (t for s in request["sizes"] for t in transitions(request["names"], ranks, s)), found)
    return rows, notes


def _peer_row(title: str, transition: Transition, found: dict[str, Any]) -> Row:
    own, least = Timing(tuple(found["seconds"])), Timing(tuple(found["floor_s"]))
    facts = {
        "transition": transition.name, "way": title, "peers_wrong": found["wrong"], "version": found["version"],
        "floor_s": least.median_s,
    }  # fmt: skip
    beside = {"floor": Beside(least)}
    moved = transition.side**2 * 4
    return Row(f"{transition.name} {title}", moved, own, beside, facts=facts, group=_group(transition))
