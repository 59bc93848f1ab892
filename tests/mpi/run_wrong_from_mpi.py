"""Run by both ranks of a job: `from_mpi` with wrong arguments on both ranks, and on the last one alone."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from support.wrong_values import WRONG

from lowshard.comm import from_mpi
from lowshard.errors import LowshardError

WORLD = MPI.COMM_WORLD
RIGHT = {"mpi_comm": WORLD, "device": "cpu", "timeout_s": 20.0, "transport": "auto"}


def outcome(given: dict[str, Any]) -> str:
    try:
        from_mpi(**given).close()
    except LowshardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"plain {type(error).__name__}: {error}"
    return ""


failed = []
for argument in RIGHT:
    for what, wrong in WRONG.items():
        # A rank that has no communicator can tell the others nothing.
        for ranks in [(0, 1)] if argument == "mpi_comm" else [(0, 1), (1,)]:
            found = WORLD.allgather(
                outcome({**RIGHT, argument: wrong} if WORLD.Get_rank() in ranks else RIGHT)
            )
            if len({text.partition(":")[0] for text in found}) > 1 or "plain" in found[0]:
                failed.append(f"{argument}={what} on ranks {ranks}: {found}")
if WORLD.Get_rank() == 0:
    print("\n".join(failed) or "right")
