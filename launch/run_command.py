"""The command `lowshard run`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from lowshard.errors import LaunchError, LowshardError
from lowshard.launch.host import parse_hosts, read_hostfile, spread_over
from lowshard.launch.job import python_command, run_ranks
from lowshard.launch.mpiexec import MPI_CHOICES, find_mpi
from lowshard.launch.streams import drop_stdout
from lowshard.nearest import nearest

__all__ = ["add_run_parser", "run"]

_EPILOG = """\
examples:
  lowshard run -n 4 train.py --steps 10             4 ranks of this host
  lowshard run -n 4 -m package.train                a module, as in python -m
  lowshard run -n 8 --hosts a:4,b:4 train.py        ranks 0-3 on a, 4-7 on b, by ssh

output: each line has its rank in front. When a rank fails the others have a moment to say that they noticed; then
the job is ended, and the text of the rank that failed first comes last. Nothing stays behind: no process, no file in
/tmp or /dev/shm.

exit codes: 0 all ranks ended well; else the code of the first failure: 1 an uncaught exception,
n for sys.exit(n), 2 wrong usage, 70 a rank died or its host was cut off, 71 timed out,
72 ranks disagreed, 130 Ctrl-C

hosts: must take ssh without a password (or --ssh), see the same Python environment and working directory at the same
paths, and reach this host over TCP. They get this shell's variables (PATH too) but those that are about this host:
HOME, TMPDIR and the like. A hostfile has a line for each host, in Open MPI's syntax (a slots=4) or Hydra's (a:4); hosts
without a number share the ranks evenly. In a batch job (Slurm, PBS, LSF) without --hosts mpiexec takes the job's.

environment (what is set already stays as it is):
  OMP_NUM_THREADS       default: cores of a host / ranks on it; also for OpenBLAS, MKL and Numba
  OMPI_MCA_*, PRTE_MCA_*, MPIR_CVAR_*, HYDRA_*
                        settings of the MPI in use. Set by default under Open MPI: leave to run as root, more ranks
                        than cores, ranks not bound to cores when there are too few

inside another launcher (mpirun, srun --mpi=pmix, flux run) start the program itself:
  srun --mpi=pmix python -m lowshard.launch.child train.py
ends all ranks when one fails.
"""


def add_run_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds `run` to a command line; the parsed arguments carry the function to call as `func`."""
    parser = subparsers.add_parser(
        "run",
        help="start ranks with the MPI that fits, watch them, name the one that failed",
        description="Starts a Python script or module on N ranks, on this host or on several, and watches them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the script's own --host is no beginning of --hosts
    )
    parser.add_argument("-n", "-np", "--ranks", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as in python -m")
    parser.add_argument(
        "--mpi", choices=MPI_CHOICES, default="auto", help="insist on an MPI (default: %(default)s)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A:2,B:2", help="hosts, and how many ranks each runs")
    where.add_argument("--hostfile", metavar="FILE", help="the same from a file")
    parser.add_argument(
        "--ssh", metavar="COMMAND", default="", help="remote shell in place of ssh: COMMAND HOST WORDS..."
    )
    parser.add_argument(
        "--iface",
        metavar="NAME",
        default="",
        help="network interface that the hosts are to use (its name on all)",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end the job after S seconds, with all stacks"
    )
    parser.add_argument("--no-prefix", action="store_true", help="pass the ranks' output on as it is")
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
        folder, name = Path(target[0]).parent, Path(target[0]).name
        there = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
        is_python = name.removeprefix("python").replace(".", "").isdecimal() or name == "python"
        advice = f"; leave {target[0]!r} out: ranks run Python" if is_python else nearest(name, there)
        raise LaunchError(
            f"the script must exist, but there is no {target[0]!r} here ({os.getcwd()}){advice}"
        )
    if args.ranks < 1:
        raise LaunchError(f"a job has at least 1 rank; got n={args.ranks}")
    mpi = find_mpi(args.mpi)
    spread = None
    if args.hosts is not None or args.hostfile is not None:
        hosts = parse_hosts(args.hosts) if args.hosts is not None else read_hostfile(args.hostfile)
        spread = spread_over(hosts, args.ranks, shell=args.ssh, iface=args.iface)
    result = run_ranks(
        python_command(target[0], target[1:], module=args.module),
        args.ranks,
        timeout_s=args.timeout,
        prefix_output=not args.no_prefix,
        mpi=mpi,
        spread=spread,
    )
    if result.cause == "output" or result.exit_code == 128 + signal.SIGPIPE:
        drop_stdout()
    return result.exit_code
