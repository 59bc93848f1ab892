"""`lowshard warmup`: everything that lowshard compiles, compiled before a job needs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

DESCRIPTION = """\
Compiles every function that did not come compiled with the package and keeps it in the cache folder, so that no job
has to: one compiles what it lacks on first use, once for all of its ranks. What is there already is not compiled again.
"""
EPILOG = "Exit codes: 0 all is kept, 1 something was not compiled or kept, 2 wrong usage, 130 Ctrl-C."


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
    from lowshard.compiled.level import host_levels
    from lowshard.compiled.store import package_level
    from lowshard.errors import DependencyError
    from lowshard.warmup.compile_all import compile_all

    fault = compiled.numba_fault()
    if fault:
        raise DependencyError(f"nothing can be compiled here: {fault}; pip install numba")
    begin_s, best = time.monotonic(), host_levels()[:1]
    groups = compile_all(best if package_level() not in best else ())  # that of a lesser level does not count
    for fault in filter(None, (fault for *_, fault in groups)):
        print(f"not compiled: {fault}", file=sys.stderr)
    found = {one for _, origins, _ in groups for one in origins.items()}
    found -= {(name, "disk") for name, what in found if what == "compiled"}  # by one group, for another too
    count = Counter(what for _, what in found)
    print(
        f"{count['shipped']} functions came compiled, {count['disk'] + count['compiled']} are in "
        f"{compiled.cache_folder()}, {count['compiled']} of them compiled now in {time.monotonic() - begin_s:.0f} s"
    )
    return 1 if any(fault for *_, fault in groups) or count["memory"] else 0
