"""`lowshard solve`: the layouts of a graph file, greedy beside graph."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from math import prod

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.errors import LayoutError, MeshError, ShardingError, SolverError
from lowshard.mesh import DeviceMesh
from lowshard.placement import MOST_DIGITS
from lowshard.plain_console import add_json_argument, busy, put_json
from lowshard.solver.graph.bound_graph import BoundGraph
from lowshard.solver.graph.graph_file import examples, load_graph
from lowshard.solver.graph.graph_rates import Rates
from lowshard.solver.graph.graph_solver import GraphSolver, solve_graph
from lowshard.solver.greedy import GreedyReshard

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SHOWN = 120
_RUN_BYTES = 10**9
DESCRIPTION = (
    "Choose a layout for every tensor of a graph: least compute + collectives + redistribution, by built-in guesses "
    "of a cluster, within a memory budget a device. Shows what an op-by-op solver (GreedyReshard, free tensors "
    "replicated) would do beside it."
)
EPILOG = (
    "Exit codes: 0 solved, 1 nothing fits the budget (the tightest tensor and the smallest budget are named), 2 wrong "
    "usage."
)


def add_solve_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `solve` command."""
    parser = subparsers.add_parser(
        "solve", help="layouts for a graph file, greedy beside graph", description=DESCRIPTION, epilog=EPILOG
    )
    add = parser.add_argument
    add("graph", metavar="GRAPH.yaml", help=f"a graph file, or an example: {', '.join(examples())}")
    add("--mesh", required=True, metavar="AXIS=N,...", help="the mesh, such as dp=2,tp=4")
    add("--budget", metavar="BYTES", help="what a device may hold at any time, such as 40GB or 512MiB")
    add(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="a number for a symbol in shapes; repeated",
    )
    add("--flops", type=float, default=5e10, metavar="N", help="flops a device does in a second (5e10)")
    add(
        "--memory-bandwidth",
        type=float,
        default=1e10,
        metavar="BYTES",
        help="bytes a device moves a second (1e10)",
    )
    add("--node-size", type=int, metavar="N", help="ranks a node; default: all on one")
    add(
        "--keep-activations",
        action="store_true",
        help="count tensors to the end, as a backward pass needs them",
    )
    add("--no-partial-to-sharded", action="store_true", help="never reduce a partial tensor to shards")
    add("--rules", choices=("extended", "documented"), default="extended", help="rows that ops offer")
    add("--time-limit", type=float, default=15.0, metavar="S", help="seconds for HiGHS (15)")
    add(
        "--run",
        action="store_true",
        help="run the plan on random arrays, a thread a rank, and compare the results",
    )
    add_json_argument(parser)
    parser.set_defaults(func=run_solve)


def run_solve(args: argparse.Namespace) -> int:
    """Solve, print, and run if asked."""
    mesh = parse_mesh(args.mesh)
    graph, sizes = load_graph(args.graph)
    sizes.update(_sizes(args.size, graph.symbols))
    bound = graph.bind(sizes)
    try:
        solver = GraphSolver(
            rates=Rates(args.flops, args.memory_bandwidth),
            budget_bytes=None if args.budget is None else parse_bytes(args.budget),
            allow_partial_to_sharded=not args.no_partial_to_sharded,
            keep_activations=args.keep_activations,
            node_size=args.node_size,
            time_limit_s=args.time_limit,
        )
    except SolverError as error:  # an option that cannot be is wrong usage
        raise ShardingError(str(error)) from None
    if args.run:
        _check_size(bound)
    with busy("solve", f"solving {len(bound.nodes)} ops on {mesh}"):
        plans = {"graph": solver.solve(bound, mesh, rules=args.rules)}
        try:
            per_op = GreedyReshard(allow_partial_to_sharded=not args.no_partial_to_sharded)
            plans["greedy"] = solve_graph(bound, mesh, per_op, rules=args.rules, prices=solver)
        except SolverError:
            pass
        errors: dict[str, float] = {}
        if args.run:
            from lowshard.op.graph_run import prove

            errors = {name: prove(plan) for name, plan in plans.items()}
    told = {"greedy": None, **{name: plan.to_json() for name, plan in plans.items()}}
    if put_json(args.json, lambda: json.dumps({**told, "largest_error": errors}, indent=1)):
        return 0
    print(plans["graph"].explain(_SHOWN))
    if "greedy" in plans:
        print(f"op by op: {plans['greedy']}", *plans["greedy"].why(), sep="\n  ")
    print("times are of the built-in profile, not of this machine")
    for name, largest in errors.items():
        print(f"ran {name} on {mesh.size} ranks: equal to the unsharded result within {largest:.1e}")
    return 0


def parse_mesh(text: str) -> DeviceMesh:
    """Return the mesh of text such as "dp=2,tp=4"."""
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if not all(name and _is_number(size) for name, _, size in pairs):
        raise MeshError(f"a mesh is written AXIS=N,AXIS=N such as dp=2,tp=4, got {brief(text)}")
    return DeviceMesh([int(size) for _, _, size in pairs], [name for name, _, _ in pairs])


def parse_bytes(text: str) -> float:
    """Return the bytes of text such as "40GB" (10^9) or "512MiB" (2^20)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise SolverError(f"a budget is a number of bytes such as 40GB, 512MiB or 1e9, got {brief(text)}")
    return float(match[1]) * _UNITS[match[2].upper()]


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _sizes(given: Sequence[str], symbols: Sequence[str]) -> dict[str, int]:
    found = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in symbols or not _is_number(number):
            raise LayoutError(
                f"--size is NAME=N with a symbol of the graph ({', '.join(symbols) or 'none'}), got {brief(text)}"
            )
        found[name] = int(number)
    return found


def _check_size(graph: BoundGraph) -> None:
    total = sum(
        prod(s) * dtypes.get(d).itemsize_bytes for s, d in zip(graph.shapes, graph.dtypes, strict=True)
    )
    if total > _RUN_BYTES:
        raise LayoutError(
            f"--run holds all tensors of graph {graph.name!r} in this process: {total / 1e9:.3g} GB, allowed are "
            f"{_RUN_BYTES / 1e9:g}; make it smaller with --size NAME=N"
        )
