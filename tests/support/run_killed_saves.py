"""Saves a checkpoint again and again in forked processes, each killed at a moment of its own; judges what is left.

Arguments: folder, sharded or merged, number of kills, seed. Prints JSON: kills by phase, outcomes, loads.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from support.checkpoints import local_of, on_ranks, same

from lowshard.checkpoint import Catalog
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load, plan_load, save

PHASES = ("starting", "data", "index", "published", "done")
OLD_OUTCOMES, NEW_OUTCOMES = 10, 5
RANKS = 2
TILINGS = {
    "a": ShardingStrategy.stacked_qkv(RANKS, 5, 40).layout((600, 700)),
    "b": ShardingStrategy.replicate(RANKS).layout((500, 300)),
    "c": ShardingStrategy.columnwise(RANKS).layout((40, 30), "bf16"),
}


def values(version: int) -> dict[str, np.ndarray]:
    return {
        n: np.full(t.shape, version, dtype=np.float32).astype("float32") if t.dtype == "float32"
        else (np.zeros(t.shape, np.uint16) + version).view(np.uint16)
        for n, t in TILINGS.items()
    }  # fmt: skip


def state(version: int, rank: int) -> dict[str, tuple[Tiling, np.ndarray | None]]:
    from lowshard import dtypes

    made = {}
    for name, tiling in TILINGS.items():
        value = values(version)[name]
        typed = value.view(dtypes.get(tiling.dtype).numpy) if tiling.dtype == "bfloat16" else value
        made[name] = (tiling, local_of(typed, tiling, rank))
    return made


def one_save(target: Path, merged: bool, version: int, note: mmap.mmap) -> None:
    """Save, telling the phase in shared memory as it goes."""
    real_open, real_replace = os.open, os.replace
    times = [time.perf_counter()]

    def enter(phase: int) -> None:
        if note[0] < phase:
            note[0] = phase
            note[8 * phase : 8 * phase + 8] = np.float64(time.perf_counter() - times[0]).tobytes()

    def opening(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        name = os.path.basename(os.fspath(path))
        if flags & os.O_CREAT:
            enter(2 if name.startswith(".lowshard.index") else 1)
        return real_open(path, flags, *rest, **more)

    def replacing(source: Any, to: Any, **more: Any) -> None:
        if merged:
            enter(2)
        real_replace(source, to, **more)
        enter(3)

    os.open, os.replace = opening, replacing
    on_ranks(RANKS, lambda c: save(target, state(version, c.rank), c, merged=merged))
    enter(4)


def version_of(target: Path) -> int | None:
    """Return which version is there, or None where it is not whole; raises what loading raises."""
    whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in TILINGS.items()}
    found = load(Catalog.open(target), plan_load(target, whole))
    seen = {int(found["a"].reshape(-1)[0])}
    for version in seen:
        right = values(version)
        if all(same(found[n].view(right[n].dtype), right[n]) for n in right):
            return version
    return None


def main(target: Path, merged: bool, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    note = mmap.mmap(-1, 4096)

    def fork(version: int) -> int:
        note[0 : 8 * 6] = bytes(48)
        pid = os.fork()
        if pid == 0:
            try:
                one_save(target, merged, version, note)
                os._exit(0)
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(1)
        return pid

    spans = []
    for version in (1, 2, 3):
        os.waitpid(fork(version), 0)
        assert version_of(target) == version
        spans.append([np.frombuffer(note[8 * p : 8 * p + 8])[0] for p in range(5)])
    bounds = np.median(spans, axis=0)
    bounds[0] = 0.0  # note[0] is the phase, no time
    by_phase, outcomes = dict.fromkeys(PHASES, 0), {"old": 0, "new": 0}
    current, number = 3, 0

    def poorest() -> int | None:
        """Return the phase in which kills are still wanting, or None."""
        if outcomes["new"] < NEW_OUTCOMES:
            return 3
        if outcomes["old"] < OLD_OUTCOMES:
            return 0
        missing = [p for p in range(4) if by_phase[PHASES[p]] == 0]
        return missing[0] if missing else None

    # a busy machine moves the kills into other phases than those aimed at: more of them then, up to tenfold
    while number < kills or (poorest() is not None and number < 10 * kills):
        phase = number % 4 if number < kills else poorest() or 0
        moment = rng.uniform(0, bounds[phase + 1] - bounds[phase])
        version = 4 + number
        pid = fork(version)
        deadline = time.perf_counter() + 20
        while note[0] < phase and time.perf_counter() < deadline:
            time.sleep(0)  # the phase is seen to begin, however slow this machine is just now
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        by_phase[PHASES[note[0]]] += 1
        found = version_of(target)
        if found not in (current, version):
            raise AssertionError(
                f"kill {number} in {PHASES[note[0]]}: found {found}, not {current} or {version}"
            )
        if found == version:
            outcomes["new"] += 1
        else:
            outcomes["old"] += 1
        if note[0] < 2:
            assert found == current
        if note[0] >= 3:
            assert found == version
        current, number = found, number + 1
    os.waitpid(fork(9999), 0)
    assert version_of(target) == 9999
    left = sorted(os.listdir(target.parent if merged else target))
    return {
        "kills": number,
        "by_phase": by_phase,
        "outcomes": outcomes,
        "left": left,
        "span_ms": list(bounds * 1e3),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2] == "merged", int(sys.argv[3]), int(sys.argv[4]))))
