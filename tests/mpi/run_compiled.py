"""Run by every rank of a job: compiles a function or finds it on disk; the job's first rank says which."""

from __future__ import annotations

import os

from mpi4py import MPI

from lowshard.compiled import INT, Signature, load_compiled, origins


def plus_one(x: int) -> int:
    """Return the next number."""
    return x + 1


assert load_compiled("plus_one", lambda: plus_one, Signature((INT,)))(41) == 42
found = MPI.COMM_WORLD.gather((origins["plus_one"], os.environ.get("NUMBA_NUM_THREADS")), 0)
if found is not None:
    print(sorted(origin for origin, _ in found), {threads for _, threads in found}, flush=True)
