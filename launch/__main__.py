"""`python -m lowshard.launch run | doctor`: the launcher alone."""

from __future__ import annotations

import argparse
import sys

from lowshard.command_parser import CommandParser
from lowshard.launch.doctor_command import add_doctor_parser
from lowshard.launch.run_command import add_run_parser

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser: argparse.ArgumentParser = CommandParser(prog="python -m lowshard.launch", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_run_parser(subparsers)
    add_doctor_parser(subparsers)
    args = parser.parse_args(argv)
    code: int = args.func(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
