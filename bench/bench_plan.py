"""`lowshard bench plan`: how long a rank plans a reshard, from a few ranks to ten thousand."""

from __future__ import annotations

import argparse
import io
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowshard.bench.json_argument import add_json_argument, file_of, write_result
from lowshard.command_line import count_of

if TYPE_CHECKING:
    from lowshard.reshard import ReshardPlan

DESCRIPTION = """\
Times what one rank does to plan a reshard: making the plan from two tables of layouts, its digest, and what the
rank sends and receives. Dense models, and one of DeepSeek-V3's shape (61 layers, 256 experts a layer, 45,041
tensors) from 2,048 training to 320 serving ranks. CPU time of the slowest of four ranks (first and last source,
first and last destination), nothing kept from one row to the next; the best of several rounds.
"""
EPILOG = "Exit codes: 0 done, 1 a row misses its limit (with --check), 2 wrong usage, 130 interrupted."


@dataclass(frozen=True)
class Row:
    """One plan, timed."""

    name: str
    tensors: int
    ranks: int
    build_s: float
    rank_s: float
    memory_mib: float
    limit_s: float | None

    @property
    def total_s(self) -> float:
        """CPU time from tables to what a rank does."""
        return self.build_s + self.rank_s


def add_plan_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan`."""
    parser = benches.add_parser(
        "plan", help="time to plan a reshard, by ranks", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=count_of, default=3, metavar="N", help="rounds a row (default 3)")
    add_json_argument(parser)
    parser.add_argument(
        "--plot", type=file_of, metavar="FILE", help="draw time over ranks (.png, .svg, .pdf)"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a row misses its limit")
    parser.set_defaults(func=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Run `lowshard bench plan` and return the exit code."""
    from lowshard.bench.bench_progress import Progress

    if args.plot is not None:
        from lowshard.bench.plot import require_plot

        require_plot(args.plot)
    made = cases()
    with Progress("plan") as progress:
        progress.expect(len(made))
        rows = []
        for case in made:
            progress.step(case[0])
            rows.append(measure_plan(*case, args.rounds))
    write_result(args, "plan", {"rows": [asdict(row) for row in rows]}, lambda: _show(rows))
    if args.plot is not None:
        draw(rows, args.plot)
        print(f"written: {args.plot}", file=sys.stderr if args.json == "-" else sys.stdout)
    missed = [row for row in rows if row.limit_s is not None and row.total_s > row.limit_s]
    if args.check:
        for row in missed:
            print(
                f"lowshard bench plan: {row.name}: {row.total_s:.3f} s, over {row.limit_s:g} s",
                file=sys.stderr,
            )
    return 1 if args.check and missed else 0


def _show(rows: Sequence[Row]) -> None:
    print(f"{'case':<44}{'tensors':>8}{'ranks':>7}{'plan ms':>9}{'rank ms':>9}{'limit':>8}{'MiB':>7}")
    for row in rows:
        limit = "" if row.limit_s is None else f"{row.limit_s * 1e3:.0f}"
        print(
            f"{row.name:<44}{row.tensors:>8}{row.ranks:>7}{row.build_s * 1e3:>9.1f}{row.rank_s * 1e3:>9.1f}"
            f"{limit:>8}{row.memory_mib:>7.1f}"
        )


def cases() -> list[tuple[str, Callable[[], tuple[Any, Any]], tuple[int, ...], float | None]]:
    """Return the rows: name, what makes both tables, the ranks to plan for, and the limit in seconds."""
    from lowshard.reshard.model_tables import dense, mixture

    found: list[tuple[str, Callable[[], tuple[Any, Any]], tuple[int, ...], float | None]] = []

    def halves(half: int) -> Callable[[], tuple[Any, Any]]:
        return lambda: (dense(256, 4, 1, half // 4), dense(256, 2, 1, half // 2, offset=half))

    for half in (8, 64, 512, 1024, 2048, 4096):
        limit = 0.030 if half == 512 else None
        ranks = (0, half - 1, half, 2 * half - 1)
        found.append((f"dense, {half} (TP4) to {half} (TP2)", halves(half), ranks, limit))
    found.append(
        (
            "dense, 5120 (TP8 PP8 DP80) to 5120 (TP8 DP640)",
            lambda: (dense(1024, 8, 8, 80), dense(1024, 8, 1, 640, offset=5120)),
            (0, 5119, 5120, 10239),
            0.100,
        )
    )
    found.append(
        (
            "DeepSeek-V3 shape, 2048 (PP16 EP64) to 320",
            lambda: (mixture(2048, 1, 16, 64), mixture(320, 4, 1, 320, offset=2048)),
            (0, 2047, 2048, 2367),
            2.0,
        )
    )
    return found


def measure_plan(
    name: str, make: Callable[[], tuple[Any, Any]], ranks: tuple[int, ...], limit_s: float | None, rounds: int
) -> Row:
    """Return the best of several rounds, each with nothing kept of the ones before."""
    src, dst = make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    build_s, rank_s = [], []
    for _ in range(rounds):
        slowest = 0.0
        forget()
        start = time.process_time()
        plan = _build(src, dst)
        plan.digest()
        build_s.append(time.process_time() - start)
        for rank in ranks:
            forget()
            plan = _build(src, dst)
            plan.kinds  # noqa: B018  made with the plan: counted above
            start = time.process_time()
            plan.for_rank(rank)
            slowest = max(slowest, time.process_time() - start)
        rank_s.append(slowest)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    both = len(set(plan.ranks))
    return Row(name, len(plan.entries), both, min(build_s), min(rank_s), grown, limit_s)


def _build(src: Any, dst: Any) -> ReshardPlan:
    from lowshard.reshard import build_reshard_plan

    return build_reshard_plan(src, dst)


def forget() -> None:
    """Empty what the planner keeps between plans."""
    from lowshard.reshard import cut, rank_grid, replica_shares, tensor_layout

    for module in (cut, tensor_layout, rank_grid, replica_shares):
        for value in vars(module).values():
            clear = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()


def draw(rows: list[Row], path: Path) -> None:
    """Draw the time of a rank over the number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lowshard.command_line import write_whole

    picture = Figure(figsize=(7.0, 4.4), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    grows = [row for row in rows if row.name.startswith("dense") and row.tensors == rows[0].tensors]
    axes.plot(
        [r.ranks for r in grows], [r.total_s * 1e3 for r in grows], marker="o", label="dense, 256 tensors"
    )
    for row in rows:
        if row not in grows:
            axes.plot([row.ranks], [row.total_s * 1e3], marker="s", linestyle="", label=row.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks of both sides")
    axes.set_ylabel("CPU time of one rank, ms")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    drawn = io.BytesIO()
    picture.savefig(drawn, format=path.suffix[1:])
    write_whole(path, drawn.getvalue())
