"""All functions compiled side by side, a group by a process; a build runs `lowshard.warmup.compile_all FOLDER`."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from lowshard import compiled
from lowshard.compiled.level import Level, chosen, host_levels, levels_of
from lowshard.compiled.loader import quiet
from lowshard.settings import BUILD_CODE, change
from lowshard.warmup.function_list import function_groups

Group = tuple[Level | None, dict[str, str], str]
"""What came of compiling a group of functions for a level: whence each has its code, and what went wrong."""


def compile_all(levels: Sequence[Level], *, rare: bool = True) -> list[Group]:
    """Compile functions for some levels, for none: what a job here would need, on all cores of this process."""
    cores, spawn = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    # A process is for one group: what it has compiled takes memory, and it can compile for one level alone.
    pool = ProcessPoolExecutor(
        cores, spawn, signal.signal, (signal.SIGINT, signal.SIG_DFL), max_tasks_per_child=1
    )
    try:
        targets: Sequence[Level | None] = levels or [None]
        names = [name for name in function_groups() if rare or not name.startswith("rare")]
        groups = [(name, level) for name in names for level in targets]
        tasks, found = [pool.submit(compile_group, *group) for group in groups], list[Group]()
        for task in as_completed(tasks):
            found.append(task.result())
            if "compiled" in found[-1][1].values():
                text = f"lowshard: compiled {len(found)} of {len(tasks)} groups of functions"
                print(text, file=sys.stderr, flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def compile_group(group: str, level: Level | None) -> Group:
    """Compile a group in this process, which has compiled nothing else."""
    quiet.append(group)
    if level is not None:
        chosen.append(level)
    fault = ""
    try:
        for load in function_groups()[group]:
            load()
    except Exception as error:
        fault = f"{group}: {type(error).__name__}: {error}"
    return level, compiled.origins, fault


def build(folder: Path) -> str:
    """Write object code into a folder, what is in the cache as it is, and return what to say of it."""
    asked = BUILD_CODE.choice()
    levels = () if asked == "off" else levels_of() if asked == "all" else host_levels()[:1]
    if not levels:
        return f"no object code comes with this build, for {BUILD_CODE.name}={asked}: first uses compile it"
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as spare:
        cache = compiled.cache_folder()
        if not os.access(next(one for one in (cache, *cache.parents) if one.exists()), os.W_OK):
            change("NUMBA_CACHE_DIR", spare)
        for level, origins, fault in compile_all(levels, rare=asked == "all"):
            assert level is not None
            into = folder / level.name
            into.mkdir(parents=True, exist_ok=True)
            for name in (name for name, origin in origins.items() if origin != "memory"):
                shutil.copyfile(compiled.cache_folder() / level.key / f"{name}.o", into / f"{name}.o")
            if fault:
                print(f"lowshard: compiled on first use, since it failed: {fault}", file=sys.stderr)
    count, names = len(list(folder.rglob("*.o"))), " and ".join(level.name for level in levels)
    return f"{count} functions for {names} come compiled with this build ({time.monotonic() - begin_s:.0f} s)"


if __name__ == "__main__":
    print(f"lowshard: {build(Path(sys.argv[1]))}", file=sys.stderr, flush=True)
