"""`lowshard bench`: microbenchmarks, each a subcommand."""

from __future__ import annotations

import argparse

from lowshard.bench.bench_fsdp import add_fsdp_parser
from lowshard.bench.bench_kernels import add_kernel_parsers
from lowshard.bench.bench_plan import add_plan_parser
from lowshard.bench.bench_publish import add_publish_parser
from lowshard.bench.bench_redistribute import add_redistribute_parser
from lowshard.bench.bench_refit import add_refit_parser
from lowshard.bench.collective import add_collective_parsers


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand and the benchmarks below it."""
    parser = subparsers.add_parser(
        "bench",
        help="microbenchmarks: table, JSON, plot, limits",
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
    add_kernel_parsers(benches)
