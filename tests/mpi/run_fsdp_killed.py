"""Run by every rank of a job: rank 1 kills itself in a phase of a step; the others say how it ended, and how soon."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI
from support import fsdp_kit as kit

from lowshard import comm as lc
from lowshard.errors import CommError, PeerFailed
from lowshard.fsdp import FSDP

phase, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
comm = lc.from_mpi(MPI.COMM_WORLD, device="cpu")
engine = FSDP(kit.UNITS, comm, kit.STRATEGIES[name])
engine.fill(kit.filler)


def die() -> None:
    if comm.rank == 1:
        (folder / "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """The engine, whose calls may be the last."""

    def __init__(self) -> None:
        self.opens = 0

    def __getattr__(self, call: str) -> Any:
        real = getattr(engine, call)

        def run(*args: Any, **options: Any) -> Any:
            at = f"{call} {args[1]}" if call == "open" else call
            if step == 2 and at == phase and args and args[0] == "l1":
                die()
            return real(*args, **options)

        return run


step = 0
saved = folder / "saved"
try:
    for step in range(4):
        with engine.step():
            kit.Model(Killer()).run(*kit.batch(step, comm.rank))
        if step == 2 and phase == "join":
            die()
        engine.join()
        if step == 2 and phase == "clip":
            die()
        engine.clip(kit.CLIP)
        if step == 2 and phase == "update":
            die()
        engine.update(kit.optimizer())
        if step == 2 and phase == "resync":
            die()
        engine.broadcast_updated_params()
        if step == 2 and phase == "save":
            die()
        engine.save(saved)
    raise SystemExit("nobody died")
except (PeerFailed, CommError) as error:
    took_s = time.time() - float((folder / "died").read_text())
    (folder / f"told{comm.rank}").write_text(f"{type(error).__name__} {took_s:.2f}")
    raise
