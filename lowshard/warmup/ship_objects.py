"""Object code for a package that is being built: `python -m lowshard.warmup.ship_objects FOLDER`.

What an earlier build has compiled of the same source is taken from the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lowshard.compiled import cache_folder, shipped
from lowshard.compiled.shipped import Level
from lowshard.settings import BUILD_CODE, change
from lowshard.warmup.compile_jobs import FUNCTIONS, compile_groups
from lowshard.warmup.function_list import function_groups

_EVERY_S = 10.0


def main(folder: str) -> int:
    """Write object code into a folder for the levels that the build is for; return how many files."""
    missing = [name for name in ("numba", "llvmlite", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return _none(f"{missing[0]} is not installed in the environment that builds")
    asked = BUILD_CODE.choice()
    if asked == "off":
        return _none(f"{BUILD_CODE.name}=off")
    host = shipped.host_level()
    levels = shipped.levels_here() if asked == "all" else tuple(filter(None, [host]))
    if not levels:
        return _none("there is no level of processors that this one belongs to")
    with tempfile.TemporaryDirectory() as spare:
        if not _can_keep():
            change("NUMBA_CACHE_DIR", spare)
        return _ship(Path(folder), levels)


def _ship(folder: Path, levels: Sequence[Level]) -> int:
    begin_s = said_s = time.monotonic()
    done, names = 0, " and ".join(level.name for level in levels)

    def tell() -> None:
        nonlocal done, said_s
        done += 1
        if time.monotonic() > said_s + _EVERY_S:
            said_s = time.monotonic()
            _say(f"compiling for {names}: {done} functions of about {FUNCTIONS * len(levels)}")

    outcomes = compile_groups(function_groups(), levels, tell)
    written = 0
    folder.mkdir()
    for level, outcome in outcomes.items():
        assert level is not None
        for fault in outcome.faults:
            _say(f"compiled on first use, since it failed for {level.name}: {fault}")
        into = folder / level.name
        into.mkdir()
        for name, origin in outcome.origins.items():
            if origin != "memory":
                made = cache_folder() / level.key / f"{name}.o"
                shutil.copyfile(made, into / made.name)  # which gives it the rights of a new file
                written += 1
    took_s = time.monotonic() - begin_s
    _say(f"{written} functions for {names} come compiled with this build ({took_s:.0f} s)")
    return written


def _can_keep() -> bool:
    """Say whether the user's cache folder can be written to, which some builders do not let one."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(cache_folder(), os.W_OK)


def _none(why: str) -> int:
    _say(f"no object code comes with this build, functions are compiled on first use: {why}")
    return 0


def _say(text: str) -> None:
    print(f"lowshard: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
