"""`lowshard warmup`: everything that lowshard compiles, compiled before a job needs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DESCRIPTION = """\
Compiles every function that did not come compiled with the package and keeps it in the cache folder, so that no job
has to: one compiles what it lacks on first use, once for all of its ranks. What is there already is not compiled again.
"""
EPILOG = "Exit codes: 0 all is kept, 1 something was not compiled or kept, 2 wrong usage, 130 Ctrl-C."
_EVERY_S = 5.0


def add_warmup_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "warmup", help="compile now what did not come compiled", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard import compiled
    from lowshard.errors import DependencyError
    from lowshard.warmup.compile_jobs import compile_groups
    from lowshard.warmup.function_list import function_groups

    fault = compiled.numba_fault()
    if fault:
        raise DependencyError(f"nothing can be compiled here: {fault}; pip install numba")
    begin_s = time.monotonic()
    with _shown() as tell:
        outcome = compile_groups(function_groups(), [None], tell)[None]
    for fault in outcome.faults:
        print(f"not compiled: {fault}", file=sys.stderr)
    count = Counter(outcome.origins.values())
    print(
        f"{count['shipped']} functions came compiled, {count['disk'] + count['compiled']} are in "
        f"{compiled.cache_folder()}, {count['compiled']} of them compiled now in {time.monotonic() - begin_s:.0f} s"
    )
    return 1 if outcome.faults or count["memory"] else 0


@contextmanager
def _shown() -> Iterator[Callable[[], None]]:
    """Yield what is called for each function: it moves a bar where a person watches, else says a line now and then."""
    from rich.console import Console
    from rich.progress import Progress

    from lowshard.warmup.compile_jobs import FUNCTIONS

    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("compiling", total=FUNCTIONS)
            yield lambda: progress.advance(task)
            progress.update(task, completed=FUNCTIONS)
        return
    done, said_s = 0, time.monotonic()

    def tell() -> None:
        nonlocal done, said_s
        done += 1
        if time.monotonic() > said_s + _EVERY_S:
            said_s = time.monotonic()
            print(f"lowshard warmup: {done} of {FUNCTIONS} functions", file=sys.stderr, flush=True)

    yield tell
