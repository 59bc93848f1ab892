"""The `lowshard` command: one parser over the subcommands' own."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Sequence

from lowshard._version import __version__
from lowshard.command_parser import CommandParser
from lowshard.errors import LowshardError
from lowshard.streams import drop_stdout, open_closed_streams

DESCRIPTION = "Place, move and quantise raw array buffers over many processes."
EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 70 a rank died (signal, lost host), 71 timed out, "
    "72 ranks disagreed."
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every subcommand."""
    from lowshard.bench.bench_command import add_bench_parser
    from lowshard.checkpoint.inspect_command import add_inspect_parser
    from lowshard.demo.demo_command import add_demo_parser
    from lowshard.launch.doctor_command import add_doctor_parser
    from lowshard.launch.run_command import add_run_parser
    from lowshard.rules.rules_command import add_rules_parser
    from lowshard.selftest.selftest_command import add_selftest_parser
    from lowshard.solver.solve_command import add_solve_parser
    from lowshard.warmup.warmup_command import add_warmup_parser
    from lowshard.weights.reshard_command import add_reshard_parser

    parser: argparse.ArgumentParser = CommandParser(prog="lowshard", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"lowshard {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_demo_parser(subparsers)
    add_run_parser(subparsers)
    add_doctor_parser(subparsers)
    add_selftest_parser(subparsers)
    add_rules_parser(subparsers)
    add_reshard_parser(subparsers)
    add_inspect_parser(subparsers)
    add_solve_parser(subparsers)
    add_bench_parser(subparsers)
    add_warmup_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    open_closed_streams()
    try:
        try:
            args = build_parser().parse_args(sys.argv[1:] if argv is None else list(argv))
            return int(args.func(args))
        finally:
            sys.stdout.flush()  # what fails here is told here, not by Python at its end
    except BrokenPipeError:  # whoever reads this has read enough: lowshard ... | head
        drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        drop_stdout()
        print(f"lowshard: error: what this prints cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except LowshardError as error:
        print(f"lowshard: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("lowshard: interrupted", file=sys.stderr)
        return 130
