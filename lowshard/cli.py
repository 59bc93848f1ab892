"""The `lowshard` command: one parser over the subcommands' own."""

from __future__ import annotations

import argparse
import errno
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from lowshard._version import __version__
from lowshard.argument import printable
from lowshard.errors import LowshardError
from lowshard.launch.interrupt import ended_by_signals, signal_of
from lowshard.launch.streams import drop_stdout, open_closed_streams
from lowshard.nearest import nearest

DESCRIPTION = "Place, move and quantise raw array buffers over many processes."
EPILOG = """\
examples:
  lowshard doctor                            what is installed, and what to do about the rest
  lowshard demo --synthetic                  the main job on 4 ranks, without a download
  lowshard run -n 4 examples/all_reduce.py   a program of yours on 4 ranks
  lowshard bench all_reduce --ranks 2        how fast a collective is here

Exit codes: 0 done, 1 failed, 2 wrong usage, 70 a rank died (signal, lost host), 71 timed out, 72 ranks disagreed,
129 SIGHUP, 130 Ctrl-C, 141 nobody reads the output any more, 143 SIGTERM.
"""
COMMANDS = {
    "demo": "lowshard.demo.demo_command",
    "run": "lowshard.launch.run_command",
    "doctor": "lowshard.launch.doctor_command",
    "selftest": "lowshard.selftest.selftest_command",
    "rules": "lowshard.rules.rules_command",
    "reshard": "lowshard.weights.reshard_command",
    "inspect": "lowshard.checkpoint.inspect_command",
    "solve": "lowshard.solver.solve_command",
    "bench": "lowshard.bench.bench_command",
    "warmup": "lowshard.warmup.warmup_command",
}
"""Each command's module, which has a function `add_NAME_parser`, in the order of the help."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what was meant."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2; subcommands' parsers are of this class too."""
        if wrong := re.search(r"invalid choice: '(\S+)' \(choose from (.*)\)", message):
            message += nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        elif axis := re.search(r"unrecognized arguments: .*?--(tp|ep|dp)[ =](\d+)", message):
            message += f"; did you mean --to {axis[1]}={axis[2]}?"
        elif self.prog.endswith(" run") and "-n/" in message:
            message += "; options stand before the program: lowshard run -n 4 program.py"
        super().error(message)


def build_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of these commands; only their modules are imported."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="lowshard", description=DESCRIPTION, epilog=EPILOG, formatter_class=plain)
    parser.add_argument("--version", action="version", version=f"lowshard {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        getattr(import_module(COMMANDS[name]), f"add_{name}_parser")(subparsers)
    return parser


def _named(argv: Sequence[str]) -> Iterable[str]:
    """Return the commands that a command line can be about: all of them where its first word is none."""
    first = argv[0] if argv else ""
    return () if first == "--version" else (first,) if first in COMMANDS else COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # names of tensors and files are text that a stream may not have
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            words = sys.argv[1:] if argv is None else list(argv)
            with ended_by_signals():
                args = build_parser(_named(words)).parse_args(words)
                return int(args.func(args))
        finally:
            sys.stdout.flush()  # what fails here is told here, not by Python at its end
    except BrokenPipeError:  # whoever reads this has read enough: lowshard ... | head
        drop_stdout()
        return 128 + signal.SIGPIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends so, with 1, as a failed command does
            return 128 + signal.SIGPIPE
        raise
    except LowshardError as error:  # some are OSErrors too
        # Names of files and tensors are of others: none of them acts on the terminal.
        print(f"lowshard: error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            print(f"lowshard: error: the system refused: {error}", file=sys.stderr)
            return 1
        drop_stdout()
        print(f"lowshard: error: what this prints cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as end:
        number = signal_of(end)
        how = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        print(f"lowshard: {how}", file=sys.stderr)
        return 128 + number
