"""`lowshard bench plan`: how long a rank plans a reshard, from a few ranks to ten thousand."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_limits import PLAN_S
from lowshard.bench.bench_report import Beside, Limit, Report, Row
from lowshard.bench.bench_world import Progress
from lowshard.bench.machine import facts
from lowshard.bench.turn_timing import Runner, Timing, ToldClock, take_turns

if TYPE_CHECKING:
    from lowshard.reshard import ReshardPlan

DESCRIPTION = """\
Times what one rank does to plan a reshard: making the plan from two tables of layouts, its digest, and what the
rank sends and receives. Dense models, and one of DeepSeek-V3's shape (61 layers, 256 experts a layer, 45,041
tensors) from 2,048 training to 320 serving ranks. CPU time of the slowest of four ranks (first and last source,
first and last destination), nothing kept from one row to the next; the best of several rounds.
"""
EPILOG = "Exit codes: 0 done, 1 a row misses its limit (with --check), 2 wrong usage, 130 interrupted."
Tables = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class PlanCase:
    """What is planned: what makes both tables, and the ranks to plan for."""

    name: str
    tables: Tables
    ranks: tuple[int, ...]


def add_plan_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan`."""
    parser = options.add_parser(
        benches, "plan", run_plan, "time to plan a reshard, by ranks", DESCRIPTION, EPILOG
    )
    parser.add_argument(
        "--rounds", type=options.count, default=3, metavar="N", help="rounds a row (default 3)"
    )
    options.add_result_arguments(parser, "limits are seconds on a machine that does nothing else")


def run_plan(args: argparse.Namespace) -> int:
    """Run `lowshard bench plan` and return the exit code."""
    options.require_results(args)
    say = Progress("plan")
    rows = []
    for case in cases():
        say(case.name)
        rows.append(measure_plan(case, args.rounds))
    report = Report("plan", facts(), {"rounds": args.rounds}, tuple(rows))
    columns = (
        table.NAME,
        table.fact_column("tensors", "tensors"),
        table.fact_column("ranks", "at"),
        table.Column("plan", lambda row: f"{row.facts['build_s'] * 1e3:.1f}", "(ms)"),
        table.Column("rank", lambda row: f"{row.facts['rank_s'] * 1e3:.1f}", "(ms)"),
        table.fact_column("memory", "memory_mib", ".1f", "(MiB)"),
    )
    return options.conclude(report, args, table.report_lines(report, columns))


def cases() -> list[PlanCase]:
    """Return the rows."""
    from lowshard.reshard.model_tables import dense, mixture

    def halves(half: int) -> Tables:
        return lambda: (dense(256, 4, 1, half // 4), dense(256, 2, 1, half // 2, offset=half))

    found = [
        PlanCase(f"dense, {half} (TP4) to {half} (TP2)", halves(half), (0, half - 1, half, 2 * half - 1))
        for half in (8, 64, 512, 1024, 2048, 4096)
    ]
    large = PlanCase(
        "dense, 5120 (TP8 PP8 DP80) to 5120 (TP8 DP640)",
        lambda: (dense(1024, 8, 8, 80), dense(1024, 8, 1, 640, offset=5120)),
        (0, 5119, 5120, 10239),
    )
    experts = PlanCase(
        "DeepSeek-V3 shape, 2048 (PP16 EP64) to 320",
        lambda: (mixture(2048, 1, 16, 64), mixture(320, 4, 1, 320, offset=2048)),
        (0, 2047, 2048, 2367),
    )
    return [*found, large, experts]


def measure_plan(case: PlanCase, rounds: int) -> Row:
    """Return the row of a case: each round with nothing kept of the ones before."""
    src, dst = case.tables()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def build() -> float:
        forget()
        start = time.process_time()
        _build(src, dst).digest()
        return time.process_time() - start

    def slowest_rank() -> float:
        slowest = 0.0
        for rank in case.ranks:
            forget()
            plan = _build(src, dst)
            plan.kinds  # noqa: B018  made with the plan: counted above
            start = time.process_time()
            plan.for_rank(rank)
            slowest = max(slowest, time.process_time() - start)
        return slowest

    building, ranking = take_turns([Runner(build), Runner(slowest_rank)], rounds, ToldClock())
    plan = _build(src, dst)
    build_s, rank_s = min(building.seconds), min(ranking.seconds)
    ranks = len(set(plan.ranks))
    facts = {
        "tensors": len(plan.entries), "at": ranks, "series": f"{case.name.split()[0]} {len(plan.entries)} tensors",
        "build_s": build_s, "rank_s": rank_s,
        "memory_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }  # fmt: skip
    total = Timing(tuple(a + b for a, b in zip(building.seconds, ranking.seconds, strict=True)))
    row = Row(case.name, 0, total, {"building": Beside(building), "ranking": Beside(ranking)}, facts=facts)
    bound = PLAN_S.get(case.name)
    return row if bound is None else replace(row, limits=(Limit("seconds", build_s + rank_s, bound),))


def _build(src: Any, dst: Any) -> ReshardPlan:
    from lowshard.reshard import build_reshard_plan

    return build_reshard_plan(src, dst)


def forget() -> None:
    """Empty what the planner keeps between plans."""
    from lowshard.reshard import dim_sharding, rank_grid, replica_shares, tensor_layout

    for module in (dim_sharding, tensor_layout, rank_grid, replica_shares):
        for value in vars(module).values():
            clear = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()
