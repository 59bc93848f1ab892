"""What each rank does while versions come in the background. Arguments: the task, and

reads MB VERSIONS        ranks 0 and 1 train, 2 and 3 serve, and threads of theirs read all the time; rank 0 prints
                         a line of JSON: what each server's readers saw
interrupt FOLDER VICTIM  the victim waits for a version that the last rank never comes to, and is interrupted
leaves                   the program ends right after it has begun a push; each rank prints its version at exit
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard import dtypes
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

BF16 = dtypes.get("bfloat16").numpy
COLUMNS = 4096
PAUSE_S = 50e-6  # a server does something between two reads; one that only reads would take the interpreter for itself


class CoreWaits:
    """Seconds that threads of this process have waited for a core: the reader's own, and the one that moves a version.

    While that one holds the interpreter and waits for a core the reader waits with it. On an idle core neither does.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def so_far_s(self) -> float:
        movers = [t.native_id for t in threading.enumerate() if t.name.startswith("lowshard refit")]
        return sum(self._of(thread) for thread in (threading.get_native_id(), *movers) if thread)

    def _of(self, thread: int) -> float:
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
            return int(os.pread(self._files[thread], 100, 0).split()[1]) / 1e9
        except OSError:  # it has ended
            return 0.0


class Readers:
    """Two threads that read what a refit serves: one looks at some elements all the time, one at all of them."""

    def __init__(self, refit: Refit) -> None:
        self._refit, self._over = refit, threading.Event()
        self.gaps_s: dict[int | None, tuple[float, float]] = {}
        """By version: the longest time between two looks while it came."""
        self.looks = self.scans = 0
        self.wrong: list[str] = []
        self.seen: set[int | None] = set()
        self._threads = [threading.Thread(target=self._guarded, args=(f,)) for f in (self._look, self._scan)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, run: Any) -> None:
        try:
            run()
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        waits = CoreWaits()
        last_s, waited_s = time.perf_counter(), waits.so_far_s()
        while not self._over.is_set():
            version = self._refit.version
            found = {int(a[at, -1].view(np.uint16)) for a in self._refit.weights.values() for at in (0, -1)}
            now_s = time.perf_counter()
            if len(found) != 1:
                self.wrong.append(f"a look at {found}")
            now_waited_s = waits.so_far_s()
            gap_s = now_s - last_s
            own_s = gap_s - max(0.0, now_waited_s - waited_s)
            raw, own = self.gaps_s.get(version, (0.0, 0.0))
            self.gaps_s[version] = max(raw, gap_s), max(own, own_s)
            self.looks, last_s, waited_s = self.looks + 1, now_s, now_waited_s
            time.sleep(PAUSE_S)

    def _scan(self) -> None:
        while not self._over.is_set():
            with self._refit.reading() as (version, weights):
                for array in weights.values():
                    bits = array.view(np.uint16)
                    if not (bits == (0 if version is None else version)).all():
                        self.wrong.append(f"version {version} holds something else")
            self.seen.add(version)
            self.scans += 1
            time.sleep(0.01)

    def next_look(self) -> None:
        """Return when a look was begun after this call."""
        until = self.looks + 2
        while self.looks < until and not self.wrong:
            time.sleep(0.001)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def reads(size_mb: int, versions: int) -> None:
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    rows = size_mb * 10**6 // (4 * 2 * COLUMNS) // 2 * 2
    names = [f"w{i}" for i in range(4)]
    src = {n: TensorLayout.sharded((rows, COLUMNS), "bfloat16", {"tp": (2, 1)}, {0: "tp"}) for n in names}
    dst = {
        n: TensorLayout.sharded((rows, COLUMNS), "bfloat16", {"tp": (2, 1)}, {1: "tp"}, offset=2)
        for n in names
    }
    mine = {n: comm.empty(x.local_shape(comm.rank), BF16) for n, x in src.items() if comm.rank in x}
    out = {n: np.zeros(x.local_shape(comm.rank), BF16) for n, x in dst.items() if comm.rank in x}
    refit = Refit(build_reshard_plan(src, dst), comm, mine, out, version=0)
    said: dict[str, Any] = {}
    for array in mine.values():
        array.view(np.uint16)[...] = 1
    for version in (1, 2):  # compiles; warms up; without readers
        start_s = time.perf_counter()
        begun: Any = refit.push(version, wait=False) if mine else refit.pull(wait=False)
        begun.wait()
        said["alone_s"] = time.perf_counter() - start_s
        for array in mine.values():
            array.view(np.uint16)[...] = version + 1
        comm.barrier()
    readers = Readers(refit) if out else None
    pauses, spans = [], []
    for version in range(3, 3 + versions):
        start_s = time.perf_counter()
        begun = refit.push(version, wait=False) if mine else refit.pull(wait=False)
        begun.wait()
        spans.append(time.perf_counter() - start_s)
        pauses.append(refit.report()["pause_s"])
        if readers is not None:
            readers.next_look()
        for array in mine.values():
            array.view(np.uint16)[...] = version + 1
        comm.barrier()
    if readers is not None:
        readers.end()
        gaps = [
            readers.gaps_s[v] for v in range(3, 2 + versions)
        ]  # looks while version v was served, v+1 came
        said |= {
            "gaps_s": gaps, "looks": readers.looks, "scans": readers.scans, "wrong": readers.wrong[:3],
            "seen": len(readers.seen), "pauses_s": sorted(pauses), "spans_s": spans,
        }  # fmt: skip
    refit.close()
    rows_of = MPI.COMM_WORLD.gather(said)
    if comm.rank == 0:
        print(json.dumps(rows_of[2:]))
    comm.close()


def small(comm: Any) -> tuple[Refit, bool]:
    src = {"w": TensorLayout.sharded((8, 64), "float32", {"tp": (comm.size, 1)}, {0: "tp"})}
    dst = {"w": TensorLayout.sharded((8, 64), "float32", {"tp": (comm.size, 1)}, {1: "tp"})}
    mine, out = ({"w": np.ones(x["w"].local_shape(comm.rank), np.float32)} for x in (src, dst))
    return Refit(build_reshard_plan(src, dst), comm, mine, out, version=0), True


def interrupt(folder: Path, victim: int) -> None:
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    refit, _ = small(comm)
    with refit:
        if comm.rank == comm.size - 1:
            time.sleep(60)
        begun = refit.push(1, wait=False)
        if comm.rank == victim:
            (folder / "pid.draft").write_text(str(os.getpid()))
            (folder / "pid.draft").rename(folder / "pid")
        begun.wait()  # type: ignore[union-attr]


def leaves() -> None:
    comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
    refit, _ = small(comm)
    atexit.register(lambda: print(f"rank {comm.rank}: version {refit.version}", flush=True))
    if comm.rank == 1:
        time.sleep(0.5)
    refit.push(1, wait=False)


if __name__ == "__main__":
    if sys.argv[1] == "reads":
        reads(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "interrupt":
        interrupt(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        leaves()
