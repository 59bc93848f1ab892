"""`lowshard bench`: runs a benchmark, prints its table or JSON, and checks the figures that are promised."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowshard.bench.bench_fsdp import add_fsdp_parser
from lowshard.bench.bench_plan import add_plan_parser
from lowshard.bench.bench_publish import add_publish_parser
from lowshard.bench.bench_redistribute import add_redistribute_parser
from lowshard.bench.bench_refit import add_refit_parser
from lowshard.bench.collective import add_collective_parsers
from lowshard.bench.json_argument import add_json_argument
from lowshard.command_line import count_of
from lowshard.errors import LowshardError
from lowshard.nearest import nearest

if TYPE_CHECKING:
    from lowshard.bench.bench_device import Device
    from lowshard.bench.bench_progress import Progress
    from lowshard.bench.bench_report import BenchReport, Section
    from lowshard.bench.turn_timing import Workload

    Build = Callable[[Device, "Size", tuple[str, ...]], Workload]

MXFP8 = """\
Quantises and dequantises whole arrays of weights, N(0, 0.02), between bf16, fp16, fp32 and MXFP8. Every row is
compared with a copy that reads and writes as many bytes, in the same rounds: bf16 to e4m3 moves 3.03125 bytes an
element (2 read, 1 written, 1/32 of scale) and is compared with a copy of half as many bytes.
"""
PACK = """\
Packs boxes of a bf16 array into a 1-D buffer and back: tables of 4 KB and of 512 B boxes at random places, and 1 KB
of each row of a matrix; plain, and quantised to MXFP8 in the same pass. Every row is compared with a copy that reads
and writes as many bytes, in the same rounds.
"""
EPILOG = """\
Columns: bytes the work reads and writes; median time; GB/s (10^9) of these bytes; x memcpy, the median over the
rounds of (time of the work / time of its copy, run right after it), with the quartiles of these ratios; the
speed of that copy; the first call, which compiles or loads and counts nowhere else; the promised figure, if any.
Host kernels run on one thread. GPU times are taken by events on the stream, without the launch.
Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
ROUND_BYTES_PROMISED = 100_000_000
"""Bytes a round from which on the limits are promised."""


@dataclass(frozen=True)
class Size:
    """A number of elements or of bytes."""

    count: int
    in_bytes: bool


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and the benchmarks below it."""
    parser = subparsers.add_parser(
        "bench",
        help="microbenchmarks: table, JSON",
        description="Runs one benchmark and prints a table, or JSON with every round's times.",
        epilog="See lowshard bench NAME --help. Figures of a CPU are ratios to a memcpy in the same run.",
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    add_collective_parsers(benches)
    add_redistribute_parser(benches)
    add_fsdp_parser(benches)
    add_refit_parser(benches)
    add_publish_parser(benches)
    add_plan_parser(benches)
    mxfp8 = _add(benches, "mxfp8", "quantise and dequantise whole arrays", MXFP8, run_mxfp8)
    mxfp8.add_argument(
        "--size", type=parse_sizes, metavar="N[,N...]",
        help="elements (64Mi), or bytes of the bf16 array (128MiB, 1GB), in whole blocks of 32. Default 64Mi; 1Mi "
        "with the plain engine; 64MB,1GB on a GPU. Takes about 31 bytes of memory an element",
    )  # fmt: skip
    pack = _add(benches, "pack", "pack, unpack and quantise boxes and slices", PACK, run_pack)
    pack.add_argument(
        "--size", type=parse_sizes, metavar="BYTES[,BYTES...]",
        help="bytes that each row moves in a round, at least; small tables are rotated to reach it. Default 100MB; "
        "10MB with the plain engine; 64MB,1GB on a GPU. Takes about 15 times as much memory",
    )  # fmt: skip
    pack.add_argument(
        "--boxes", type=count_of, default=10_000, metavar="N", help="boxes a table (default 10000)"
    )


def _add(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = benches.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=count_of, default=15, metavar="N", help="rounds that count (default 15)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to run; auto, the default, takes a GPU if CuPy sees one",
    )
    parser.add_argument(
        "--only",
        metavar="WORDS[,WORDS...]",
        help="only rows whose names begin with these words, such as quantize or 'pack boxes of 4 KB'",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit code 1, and say which, if a figure misses its limit, measured up to twice more with new buffers; "
        "limits hold for the host and rounds of 100 MB",
    )
    parser.set_defaults(func=run)
    return parser


def run_mxfp8(args: argparse.Namespace) -> int:
    """Run `lowshard bench mxfp8` and return the exit code."""
    from lowshard.bench import bench_mxfp8 as mxfp8

    def build(device: Device, size: Size, names: tuple[str, ...]) -> Workload:
        elems = size.count // 2 if size.in_bytes else size.count
        return mxfp8.build(device, max(elems // 32, 1) * 32, names)

    return _run(args, "mxfp8", mxfp8.NAMES, {"numba": "64Mi", "plain": "1Mi", "cuda": "64MB,1GB"}, build)


def run_pack(args: argparse.Namespace) -> int:
    """Run `lowshard bench pack` and return the exit code."""
    from lowshard.bench import bench_pack as pack

    def build(device: Device, size: Size, names: tuple[str, ...]) -> Workload:
        return pack.build(device, args.boxes, size.count, names)

    return _run(args, "pack", pack.NAMES, {"numba": "100MB", "plain": "10MB", "cuda": "64MB,1GB"}, build)


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Return sizes written as 64Mi, 1000000, 128MiB or 1GB, separated by commas."""
    return tuple(_size(part.strip()) for part in text.split(","))


def selected(names: Sequence[str], only: str | None) -> tuple[str, ...]:
    """Return the names that begin with one of some comma-separated words; all of them for None."""
    if only is None:
        return tuple(names)
    wanted = [part.split() for part in only.split(",")]
    for words in wanted:
        if not words or not any(_begins(name, words) for name in names):
            raise LowshardError(
                f"--only takes words that names of rows begin with, got {' '.join(words)!r}; the rows are: "
                + "; ".join(names)
                + nearest(" ".join(words), names)
            )
    return tuple(name for name in names if any(_begins(name, words) for words in wanted))


def _run(
    args: argparse.Namespace,
    bench: str,
    all_names: Sequence[str],
    default_sizes: dict[str, str],
    build: Build,
) -> int:
    """Measure size after size, show what came out, and return the exit code."""
    from lowshard.bench.bench_device import open_device
    from lowshard.bench.bench_progress import Progress
    from lowshard.bench.bench_report import BenchReport
    from lowshard.bench.limit import AGAIN, ratio_limit
    from lowshard.bench.machine import facts
    from lowshard.kernels.engine import host_engine

    names = selected(all_names, args.only)
    device = open_device(args.device)
    if args.check and all(ratio_limit(name, device.kind) is None for name in names):
        raise LowshardError(
            "--check needs a row with a limit, and none of these has one; limits are for the host (--device cpu)"
        )
    with Progress(bench) as progress:
        progress.expect(1)
        progress.step("loading the kernels")
        ran = facts(device)
        engine = device.kind if device.kind == "cuda" else host_engine().name
        sizes = args.size or parse_sizes(default_sizes[engine])
        sections = []
        for size in sizes:
            section = _section(device, size, names, args.rounds, build, progress)
            for _ in range(AGAIN if args.check else 0):
                if missed := section.missed:
                    again = _section(device, size, missed, args.rounds, build, progress)
                    section = section.better(again)
            sections.append(section)
    report = BenchReport(bench, ran, args.rounds, tuple(sections))
    _show(report, args.json)
    if args.check and report.misses:
        for miss in report.misses:
            print(f"lowshard bench {bench}: {miss}", file=sys.stderr)
        return 1
    return 0


def _section(
    device: Device,
    size: Size,
    names: tuple[str, ...],
    rounds: int,
    build: Build,
    progress: Progress,
) -> Section:
    """Measure one size; its arrays are given back when this returns."""
    from lowshard.bench.bench_report import Section
    from lowshard.bench.turn_timing import measure, speed_ups

    progress.expect(1)
    progress.step("making the arrays")
    workload = build(device, size, names)
    progress.expect(len(workload.cases) + 1 + rounds)
    rows = measure(workload.cases, rounds, device.clock, progress.step)
    notes = list(workload.notes)
    small = [row for row in rows if row.ratio_limit is not None and row.moved_bytes < ROUND_BYTES_PROMISED]
    if small:
        notes.append(
            "limits are promised for rounds of 100 MB and more; these rows move less, perhaps in cache"
        )
    return Section(workload.title, workload.sizes, rows, speed_ups(rows, workload.pairs), tuple(notes))


def _show(report: BenchReport, target: str | None) -> None:
    """Print the table, and write the JSON; or print the JSON alone."""
    from lowshard.bench.bench_report import dump_json, render_table

    if target == "-":
        sys.stdout.write(dump_json(report))
        return
    from lowshard.plain_console import make_console

    render_table(report, make_console())
    if target is not None:
        from lowshard.command_line import write_whole

        write_whole(Path(target), dump_json(report).encode())
        print(f"written: {target}")


def _begins(name: str, words: list[str]) -> bool:
    return name.split()[: len(words)] == words


def _size(text: str) -> Size:
    found = re.fullmatch(r"(\d+)([kKMG]?i?)(B?)", text)
    powers = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
    powers |= {"ki": 2**10, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    if found is None or found[2] not in powers or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"a size is written as 64Mi, 1000000, 128MiB or 1GB, got {text!r}")
    return Size(int(found[1]) * powers[found[2]], bool(found[3]))
