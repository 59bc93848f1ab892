"""`lowshard bench simulate`: what a reshard will take on a cluster, without running it."""

from __future__ import annotations

import argparse
import json

from lowshard.errors import PlanError
from lowshard.reading import parse_json, read_text

DESCRIPTION = """\
Predicts the time of a reshard, and what ranks and nodes give and take, from the plan and a cluster profile (lowshard
bench profile) alone. The plan is a JSON file of ReshardPlan.to_json(), or one of the models: "dense", 1,024 tensors
from 5,120 training to 5,120 serving ranks, and "deepseek", the shape of DeepSeek-V3 from 2,048 to 320.
"""


def add_simulate_parser(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate`."""
    parser = benches.add_parser(
        "simulate", help="predict a reshard at any number of ranks", description=DESCRIPTION,
        epilog="Exit codes: 0 done, 2 wrong usage, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("plan", metavar="PLAN.json|dense|deepseek", help="what to predict")
    parser.add_argument(
        "--profile", metavar="FILE", help="cluster profile; without one a default, with wide bars"
    )
    parser.add_argument("--node-size", type=int, default=8, metavar="N", help="ranks a node (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Run `lowshard bench simulate` and return the exit code."""
    from lowshard.bench.bench_progress import Progress
    from lowshard.reshard import ReshardPlan, build_reshard_plan, simulate
    from lowshard.reshard.model_tables import dense, mixture
    from lowshard.reshard.simulation import load_profile

    profile = load_profile(args.profile)
    if args.plan == "dense":
        plan = build_reshard_plan(dense(1024, 8, 8, 80), dense(1024, 8, 1, 640, offset=5120))
    elif args.plan == "deepseek":
        plan = build_reshard_plan(mixture(2048, 1, 16, 64), mixture(320, 4, 1, 320, offset=2048))
    else:
        text = read_text(args.plan, "reshard plan", PlanError)
        plan = ReshardPlan.from_json(parse_json(text, f"{args.plan} is not a reshard plan", PlanError))
    with Progress("simulate") as progress:
        progress.expect(1)
        progress.step(f"{len(plan.entries)} tensors")
        made = simulate(plan, profile, args.node_size)
    print(json.dumps(made.to_json(), indent=1) if args.json else made.explain())
    return 0
