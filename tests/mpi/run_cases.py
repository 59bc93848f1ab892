"""Runs the case table on MPI ranks; rank 0 prints one JSON line a case: how it ended on every rank.

Usage: run_cases.py DEVICE [NAME ...], where DEVICE is "cpu" or "cuda"; without names, all cases.
Results travel by mpi4py's own gather, so that a broken collective of ours cannot hide them.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

from mpi4py import MPI
from support.comm_cases import CASES, CannotRun, run_case

from lowshard import comm as lc


def main(device: str, names: list[str]) -> None:
    world = MPI.COMM_WORLD
    warnings.simplefilter("error")
    for name in names or CASES:
        start = time.perf_counter()
        skip = error = ""
        # A communicator of its own for each case: what one leaves behind does not reach the next.
        comm = lc.from_mpi(world, device)  # type: ignore[arg-type]
        try:
            run_case(name, comm)
        except CannotRun as reason:
            skip = str(reason)
        except Exception:
            error = traceback.format_exc()
            # At once, for the other ranks may hang in the case and never come to the gather.
            print(f"rank {world.rank} of {world.size}, case {name}:\n{error}", file=sys.stderr, flush=True)
        ends = world.gather((skip, error), 0)
        comm.close()
        if ends is not None:
            line = {
                "case": name,
                "skip": ends[0][0],
                "errors": {rank: e for rank, (_, e) in enumerate(ends) if e},
                "seconds": round(time.perf_counter() - start, 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
