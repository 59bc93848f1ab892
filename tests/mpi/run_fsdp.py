"""Run by every rank of a job: sharded training with uneven shapes, saved and compared with plain NumPy by rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpi4py import MPI
from support import fsdp_kit as kit

from lowshard import comm as lc

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    micro = 8 if comm.size != 3 else 3
    plain, norms = kit.plain_run(steps, micro)
    done = 0
    for name, strategy in kit.STRATEGIES.items():
        if not kit.fits(name, comm.size):
            continue
        for options in ({}, {"communicators": 2, "prefetch": 2, "accumulate": "reduce"}):
            path = folder / f"{name}{len(options)}"
            found = kit.train(comm, strategy, range(steps), micro, path, **options)  # type: ignore[arg-type]
            assert found.norms == norms, (name, options)
            if comm.rank == 0:
                kit.check_file(path, plain)
            comm.barrier()
            done += 1
    half = steps // 2
    kit.train(comm, kit.STRATEGIES["full"], range(half), micro, folder / "half")
    kit.train(comm, kit.STRATEGIES["none"], range(half, steps), micro, folder / "end", folder / "half")
    if comm.rank == 0:
        kit.check_file(folder / "end", plain)
        print(f"{done} trainings right on {comm.size} ranks")
