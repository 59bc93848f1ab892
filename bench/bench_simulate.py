"""`lowshard bench simulate`: what a reshard will take on a cluster, without running it."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from lowshard.errors import PlanError
from lowshard.flag_value import count_of
from lowshard.nearest import nearest
from lowshard.reading import READERS

if TYPE_CHECKING:
    from lowshard.reshard import ReshardPlan

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
    parser.add_argument("--node-size", type=count_of, default=8, metavar="N", help="ranks a node (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run_simulate)


def run_simulate(args: argparse.Namespace) -> int:
    """Run `lowshard bench simulate` and return the exit code."""
    from lowshard.bench.bench_progress import Progress
    from lowshard.reshard import simulate
    from lowshard.reshard.simulation import load_profile

    profile = load_profile(args.profile)
    with Progress("simulate") as progress:
        progress.expect(2)
        progress.step(f"making the plan {args.plan}")
        plan = _plan(args.plan)
        progress.step(f"{len(plan.entries)} tensors")
        made = simulate(plan, profile, args.node_size)
    print(json.dumps(made.to_json(), indent=1, allow_nan=False) if args.json else made.explain())
    return 0


def _plan(name: str) -> ReshardPlan:
    from lowshard.reshard import build_reshard_plan
    from lowshard.reshard.model_tables import dense, mixture

    if name == "dense":
        return build_reshard_plan(dense(1024, 8, 8, 80), dense(1024, 8, 1, 640, offset=5120))
    if name == "deepseek":
        return build_reshard_plan(mixture(2048, 1, 16, 64), mixture(320, 4, 1, 320, offset=2048))
    if not os.path.exists(name):
        raise PlanError(
            f"a plan is dense, deepseek, or the file of one; there is no file {name!r}"
            + nearest(name, ("dense", "deepseek"))
        )
    found: ReshardPlan = READERS["reshard plan"].file(name)
    return found
