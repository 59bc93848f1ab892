"""Run by both ranks of a job: `from_mpi` and `from_nccl` with wrong arguments on both ranks, and on the last one alone.

No GPU is needed: `from_nccl` refuses these, or says that CuPy is missing, before it asks for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from support import mode
from support.wrong_values import WRONG

from lowshard import __version__
from lowshard.comm import build, from_mpi, from_nccl
from lowshard.errors import LowshardError

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
FROM_MPI = {"mpi_comm": WORLD, "device": "cpu", "timeout_s": 20.0, "transport": "auto"}
FROM_NCCL = {"nccl_communicator": None, "rank": RANK, "size": 2, "control": WORLD, "timeout_s": 20.0}
MOST_COMMUNICATORS = 2500 if mode.full() else 100  # MPICH has fewer than 2500 at a time


def outcome(function: Callable[..., Any], given: dict[str, Any]) -> str:
    try:
        function(**given).close()
    except LowshardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"plain {type(error).__name__}: {error}"
    return ""


failed = []
for function, right in ((from_mpi, FROM_MPI), (from_nccl, FROM_NCCL)):
    for argument in right:
        if argument in ("nccl_communicator", "control"):  # None is right; the other needs a GPU
            continue
        drawn = mode.sample([*WRONG.items()], 10, f"{function.__name__} {argument}")
        for what, wrong in [*drawn, ("another's", 1 - RANK)]:
            # A rank that has no communicator can tell the others nothing.
            for ranks in [(0, 1)] if argument == "mpi_comm" else [(0, 1), (1,)]:
                given = {**right, argument: wrong} if RANK in ranks else right
                found = WORLD.allgather(outcome(function, given))
                if len({text.partition(":")[0] for text in found}) > 1 or "plain" in found[0]:
                    failed.append(f"{function.__name__} {argument}={what} on ranks {ranks}: {found}")
for setting, value in (("LOWSHARD_CHECK", "off"), ("LOWSHARD_TIMEOUT_S", "soon")):
    if RANK == 1:  # alone
        os.environ[setting] = value
    found = WORLD.allgather(outcome(from_mpi, {**FROM_MPI, "timeout_s": None}))
    if found[0] != found[1] or not found[0].startswith("CommError: ") or setting not in found[0]:
        failed.append(f"{setting}={value} on rank 1 alone: {found}")
    os.environ.pop(setting, None)
if RANK == 1:
    build.__version__ += ".post1"  # as where another version is installed
found = WORLD.allgather(outcome(from_mpi, FROM_MPI))
build.__version__ = __version__
if found[0] != found[1] or f"rank 1 lowshard {__version__}.post1," not in found[0]:
    failed.append(f"another version on rank 1: {found}")
os.environ["LOWSHARD_ON_FAILURE"] = "raise"
for _ in range(MOST_COMMUNICATORS):
    said = outcome(from_mpi, {**FROM_MPI, "device": "none of these"})
    if "device is" not in said:
        failed.append(f"a refusal leaves something behind: {said}")
        break
if RANK == 0:
    print("\n".join(failed) or "right")
