"""What each rank does of a refit in which one rank is killed: refit after refit, until the others hear of it.

Arguments: the folder for notes; the victim's rank; where it kills itself ("outside": the test does it; "call 0.4": at
that share of the Python calls of a version); size in MiB; how bytes move: "slots", "messages", "shown" (receivers read
memory that they map), "private" (they read by a call) or "delta" (only what differs goes, and little does); "beside"
where a thread pushes.
Ranks 0 and 1 train, 2 and 3 serve, 4 takes part with nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.errors import PeerFailed
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

WARM = 3
STEP = 64
"""Every so many columns change from version to version, where only what differs goes."""


def die(*_: object) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Calls:
    """Counts the Python calls of this thread in lowshard, and kills the process at one."""

    def __init__(self, fatal: float = float("inf")) -> None:
        self.count, self.fatal = 0, fatal

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if event == "call" and (
            "/lowshard/" in frame.f_code.co_filename or "/kernels/" in frame.f_code.co_filename
        ):
            self.count += 1
            if self.count >= self.fatal:
                die()


def main(folder: Path, victim: int, where: str, size_mib: int, how: str, waits: bool) -> None:
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    rows = size_mib * 256
    src = {
        "a": TensorLayout.sharded((rows, 512), "float32", {"tp": (2, 1)}, {0: "tp"}),
        "b": TensorLayout.sharded((512, rows), "float32", {"tp": (2, 1)}, {1: "tp"}),
        "c": TensorLayout.sharded((rows // 2, 512), "float32", {"tp": (2, 1)}, {0: "tp"}),
    }
    dst = {
        "a": TensorLayout.sharded((rows, 512), "float32", {"tp": (2, 1)}, {1: "tp"}, offset=2),
        "b": TensorLayout.sharded((512, rows), "float32", {"dp": (2, 1)}, offset=2),
        "c": TensorLayout.sharded((rows // 2, 512), "float32", {"dp": (2, 1)}, offset=2),
    }
    # Private memory: c's long runs are read across, the short ones of a and b go through slots.
    make: Any = comm.empty if how == "shown" else np.empty
    mine = {k: make(x.local_shape(comm.rank), np.float32) for k, x in src.items() if comm.rank in x}
    out = {k: np.zeros(x.local_shape(comm.rank) or (), np.float32) for k, x in dst.items() if comm.rank in x}
    direct, delta = how in ("shown", "private"), how == "delta"
    way: Any = "direct" if direct else "auto" if delta else how
    refit = Refit(
        build_reshard_plan(src, dst), comm, mine, out, way=way, checksums=not direct, version=0,
        delta="auto" if delta else "off",
    )  # fmt: skip
    calls = Calls()
    span_s, done, version = 0.0, 0, 0
    try:
        for version in range(1, 100_000):
            for array in mine.values():
                array[:, :: STEP if delta else 1] = version
            comm.barrier()
            if version == WARM:
                note(folder, f"ready-{comm.rank}", {"pid": os.getpid(), "span_s": span_s})
                if comm.rank == victim:
                    if where == "before the vote":
                        refit._vote.decide = die  # type: ignore[method-assign]
                    if where == "between vote and switch":
                        refit._switch = die  # type: ignore[method-assign]
            if where.startswith("call") and comm.rank == victim:
                last = calls.count  # of a version like this one
                calls = Calls(last * float(where.split()[1]) if version > WARM else float("inf"))
                sys.setprofile(calls)
            start_s = time.monotonic()
            begun: Any = refit.push(version, wait=waits) if mine else refit.pull(wait=waits)
            if not waits:
                begun.wait()
            sys.setprofile(None)
            if version > WARM and comm.rank == victim and where.startswith("call"):
                die()
            if delta and version > 1 and mine:
                assert refit.report()["sent_bytes"] < refit.report()["dense_bytes"] / 8
            span_s, done = time.monotonic() - start_s, version
    except PeerFailed as error:
        parts = [a[:, ::STEP] for a in refit.weights.values()] if delta else [*refit.weights.values()]
        found = {float(v) for a in parts for v in (a.min(), a.max())}
        if delta:  # nothing else has come to anywhere
            assert all(np.count_nonzero(a) in (0, a[:, ::STEP].size) for a in refit.weights.values())
        note(
            folder,
            f"left-{comm.rank}",
            {
                "error": str(error), "values": sorted(found), "version": refit.version, "torn": refit.torn,
                "done": done, "trying": version,
            },
        )  # fmt: skip
        raise


def note(folder: Path, name: str, fields: dict[str, object]) -> None:
    draft = folder / f"draft-{name}"
    draft.write_text(json.dumps(fields))
    draft.rename(folder / name)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        sys.argv[5],
        sys.argv[6] != "beside",
    )
