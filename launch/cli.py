"""The command `lowshard run`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from lowshard.errors import LaunchError, LowshardError
from lowshard.launch.job import python_command, run_ranks
from lowshard.launch.mpiexec import MPI_CHOICES, find_mpi

__all__ = ["add_run_parser", "run"]

_EPILOG = """\
exit codes: 0 all ranks ended well; else the code of the first failure: 1 an uncaught exception,
n for sys.exit(n), 2 wrong usage, 70 a rank died, 71 timed out, 72 ranks disagreed, 130 Ctrl-C
"""


def add_run_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds `run` to a command line; the parsed arguments carry the function to call as `func`."""
    parser = subparsers.add_parser(
        "run",
        help="start ranks with the MPI that fits, watch them, name the one that failed",
        description="Starts a Python script or module on N MPI ranks of this host and watches them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--mpi", choices=MPI_CHOICES, default="auto", help="insist on an MPI (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end the job after S seconds, with all stacks"
    )
    parser.add_argument("--no-prefix", action="store_true", help="pass the ranks' output on as it is")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    parser.add_argument(
        "target", nargs=argparse.REMAINDER, metavar="script.py ...", help="what to run, its arguments"
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the job that the arguments describe, and returns its exit code."""
    try:
        return _run(args)
    except LowshardError as error:
        print(f"lowshard run: {error}", file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    """Runs the job; wrong usage raises."""
    target: list[str] = args.target[1:] if args.target[:1] == ["--"] else args.target
    if not target:
        raise LaunchError("a job needs a script or -m MODULE; write: lowshard run -n 4 script.py")
    if not args.module and not Path(target[0]).exists():
        raise LaunchError(f"the script must exist, but there is no {target[0]!r} here ({os.getcwd()})")
    result = run_ranks(
        python_command(target[0], target[1:], module=args.module),
        args.ranks,
        timeout_s=args.timeout,
        prefix_output=not args.no_prefix,
        mpi=find_mpi(args.mpi),
    )
    if result.exit_code == 128 + signal.SIGPIPE:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python complains of it at its own end
    return result.exit_code
