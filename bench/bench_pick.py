"""`lowshard bench pick`: what it takes to decide how one op shall run: first sight, again, and for new row counts."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowshard.bench.bench_progress import Progress
from lowshard.bench.json_argument import add_json_argument, write_result
from lowshard.flag_value import count_of
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Partial, Placement, Replicated, Sharded
from lowshard.solver import clear_picks, pick

DESCRIPTION = """\
Times pick() alone: one process, no arrays. Each row is one op on one mesh; the operands' placements on the last mesh
axis are named, on the others the rows are cut.
"""
EPILOG = """\
Columns, in microseconds, the median of the rounds: first sight (nothing is kept), again (the same layouts, made anew),
new rows (a row count not seen before; the pick is known from another). Limits: 100 first sight, 5 else, for matmul.
Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
FIRST_LIMIT_US, KEPT_LIMIT_US = 100.0, 5.0
MESHES = ((4,), (2, 2), (2, 2, 2))
R, P = Replicated(), Partial("sum")
S0, S1 = Sharded(0), Sharded(1)
OPS: tuple[tuple[str, tuple[tuple[Placement, ...], ...]], ...] = (
    ("matmul", ((S1, S0), (R, S1), (S0, S0), (P, S0))),
    ("add", ((S0, S0), (S0, S1))),
    ("softmax", ((S0,), (S1,))),
    ("rms_norm", ((S0, R),)),
)
NEW_ROWS = 200


@dataclass(frozen=True)
class PickRow:
    """One op on one mesh."""

    op: str
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    first_us: float
    again_us: float
    new_rows_us: float

    @property
    def misses(self) -> list[str]:
        """What is above its limit; only matmul has limits."""
        if self.op != "matmul":
            return []
        figures = (
            ("first sight", self.first_us, FIRST_LIMIT_US),
            ("again", self.again_us, KEPT_LIMIT_US),
            ("new rows", self.new_rows_us, KEPT_LIMIT_US),
        )
        name = f"{self.op} {'.'.join(self.placements)} on {'x'.join(map(str, self.mesh))}"
        return [f"{name}: {what} {us:.1f} us, limit {limit:g}" for what, us, limit in figures if us > limit]


def add_pick_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `pick`."""
    parser = benches.add_parser(
        "pick",
        help="how long deciding an op's layouts takes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=count_of, default=200, metavar="N", help="rounds (default 200)")
    add_json_argument(parser)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a figure misses its limit")
    parser.set_defaults(func=run_pick)


def run_pick(args: argparse.Namespace) -> int:
    """Run `lowshard bench pick` and return the exit code."""
    with Progress("pick") as progress:
        progress.expect(len(MESHES) * sum(len(ways) for _, ways in OPS))
        rows = measure(args.rounds, progress.step)
    write_result(args, "pick", {"rows": [asdict(row) for row in rows]}, lambda: _show(rows))
    misses = [miss for row in rows for miss in row.misses]
    if args.check and misses:
        for miss in misses:
            print(f"lowshard bench pick: {miss}", file=sys.stderr)
        return 1
    return 0


def measure(rounds: int, step: Callable[[str], object] = lambda what: None) -> list[PickRow]:
    """Return every row's figures; `step` is told each one's name."""
    rows: list[PickRow] = []
    for shape in MESHES:
        mesh = DeviceMesh(shape, ("dp", "pp", "tp")[-len(shape) :])
        for op, ways in OPS:
            for way in ways:
                step(f"{op} on {mesh}")
                rows.append(_one(op, mesh, way, rounds))
    return rows


def _one(op: str, mesh: DeviceMesh, way: tuple[Placement, ...], rounds: int) -> PickRow:
    given = _operands(op, mesh, way, 4096)

    def first() -> object:
        clear_picks()
        return pick(op, given)

    first_us = _median_us(first, rounds)
    again_us = _median_us(lambda: pick(op, _anew(given)), rounds) - _median_us(lambda: _anew(given), rounds)
    clear_picks()
    for count in (4096, 4112):
        pick(op, _operands(op, mesh, way, count))
    fresh = [_operands(op, mesh, way, 4128 + 16 * i) for i in range(NEW_ROWS)]
    clock = time.perf_counter
    each = []
    for layouts in fresh:
        start = clock()
        pick(op, layouts)
        each.append(clock() - start)
    return PickRow(
        op, mesh.shape, tuple(map(str, way)), first_us, max(again_us, 0.0), statistics.median(each) * 1e6
    )


def _operands(op: str, mesh: DeviceMesh, way: tuple[Placement, ...], rows: int) -> list[Layout]:
    shapes: list[tuple[int, ...]] = [(rows, 512)] * len(way)
    if op == "matmul":
        shapes[1] = (512, 512)
    elif op == "rms_norm":
        shapes[1] = (512,)
    lead: list[Placement] = [S0] * (mesh.ndim - 1)
    whole: list[Placement] = [R] * (mesh.ndim - 1)
    return [
        Layout(mesh, shape, "float32", (*(lead if shape[0] == rows else whole), placement))
        for shape, placement in zip(shapes, way, strict=True)
    ]


def _anew(layouts: Sequence[Layout]) -> list[Layout]:
    return [Layout(x.mesh, x.shape, x.dtype, x.placements) for x in layouts]


def _median_us(run: Callable[[], object], rounds: int) -> float:
    clock, found = time.perf_counter, []
    for _ in range(rounds):
        start = clock()
        run()
        found.append(clock() - start)
    return statistics.median(found) * 1e6


def _show(rows: Sequence[PickRow]) -> None:
    from rich.table import Table

    from lowshard.plain_console import make_console, print_table

    table = Table(title="pick(), microseconds, median")
    for name in ("op", "mesh", "operands"):
        table.add_column(name)
    for name in ("first sight", "again", "new rows"):
        table.add_column(name, justify="right")
    for row in rows:
        figures: list[Any] = [f"{us:.1f}" for us in (row.first_us, row.again_us, row.new_rows_us)]
        table.add_row(row.op, "x".join(map(str, row.mesh)), " ".join(row.placements), *figures)
    print_table(make_console(), table)
