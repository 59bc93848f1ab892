"""`lowshard warmup`: everything that lowshard compiles, compiled for this very processor."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DESCRIPTION = """\
Compiles every function for this very processor and keeps it in the cache folder, so that no job has to. What is there
already is not compiled again. Without it a job uses the code that came with the package, which is for a level of
processors, and compiles what it lacks, once for all of its ranks.
"""
EPILOG = "Exit codes: 0 all is kept, 1 something was not compiled or kept, 2 wrong usage, 130 Ctrl-C."
_EVERY_S = 5.0


def add_warmup_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "warmup", help="compile everything for this processor now", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit code."""
    from lowshard import compiled
    from lowshard.errors import DependencyError
    from lowshard.warmup.compile_jobs import FUNCTIONS, compile_groups
    from lowshard.warmup.function_list import function_groups

    fault = compiled.numba_fault()
    if fault:
        raise DependencyError(f"nothing can be compiled here: {fault}; pip install numba")
    begin_s = time.monotonic()
    with _shown("compiling", "functions", FUNCTIONS) as tell:
        outcome = compile_groups(function_groups(), [None], tell)[None]
    for fault in outcome.faults:
        print(f"not compiled: {fault}", file=sys.stderr)
    now = sum(origin != "disk" for origin in outcome.origins.values())
    unkept = sum(origin == "memory" for origin in outcome.origins.values())
    print(
        f"{len(outcome.origins) - unkept} functions in {compiled.cache_folder()}, {now} of them compiled now in "
        f"{time.monotonic() - begin_s:.0f} s"
    )
    return 1 if outcome.faults or unkept else 0


@contextmanager
def _shown(doing: str, things: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield what is called for each thing: it moves a bar where a person watches, else says a line now and then."""
    from rich.console import Console
    from rich.progress import Progress

    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(doing, total=total)
            yield lambda: progress.advance(task)
            progress.update(task, completed=total)
        return
    done, said_s = 0, time.monotonic()

    def tell() -> None:
        nonlocal done, said_s
        done += 1
        if time.monotonic() > said_s + _EVERY_S:
            said_s = time.monotonic()
            print(f"lowshard warmup: {doing}, {done} of {total} {things}", file=sys.stderr, flush=True)

    yield tell
