"""Runs tiny sweeps of every collective on MPI ranks; rank 0 prints a JSON report a line.

Also runs what mpi4py does by itself, and checks that this is right: a rival that computes something else would be no
measure.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from mpi4py import MPI
from support import mode

from lowshard.bench.bench_world import MpiHostComm, Rank
from lowshard.bench.collective import measure_collective
from lowshard.bench.collective_case import OPERATIONS, Case, Request, Settings
from lowshard.bench.rival_mpi import Rival
from lowshard.bench.rival_mpi import rival as call_of
from lowshard.bench.value_pattern import Pattern, spoil

SIZES = (96, 24576) if mode.full() else (96,)
FORMS: tuple[dict[str, Any], ...] = (
    *({"op": op, "compare_mpi": True, "root": OPERATIONS[op].rooted * 1} for op in OPERATIONS),
    {"op": "all_reduce", "dtypes": ("bfloat16", "int8"), "redops": ("sum", "avg"), "compare_mpi": True},
    {"op": "all_reduce", "window": True, "order": "tree"},
    {"op": "reduce_scatter", "window": True, "average": 1, "each": True},
)


def say(kind: str, data: Any) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps([kind, data]), flush=True)


def settings_of(form: dict[str, Any]) -> Settings:
    op = form["op"]
    sizes = (0,) if op == "barrier" else SIZES
    plain = {
        "sizes": sizes,
        "redops": ("sum",) if OPERATIONS[op].reduces else (),
        "rounds": 2,
        "warmups": 1,
        "calls": 1,
        "transport": "mpi",
    }
    return Settings(**{**plain, **form})


def check_rivals(rank: Rank) -> None:
    """Demand of mpi4py's calls, in both placements, what is demanded of the communicator's."""
    comm = rank.mpi_comm
    with rank.open("mpi") as measured:
        for op, operation in OPERATIONS.items():
            request = Request(
                op, 960, "int32", "sum" if operation.reduces else None, root=operation.rooted * 1
            )
            pattern = Pattern("int32", comm.size, request.redop)
            for placement in request.placements():
                rival = Rival(comm, request, placement)
                if rival.recv is not None:
                    spoil(rival.recv)
                if rival.send is not None and not (op == "broadcast" and comm.rank != request.root):
                    pattern.fill(rival.send, comm.rank)
                rival.run()
                wrong = 0
                if rival.recv is not None:
                    wrong = pattern.wrong(rival.recv, Case(measured, request, placement).segments())
                assert comm.allreduce(wrong) == 0, (op, placement)
    assert call_of(comm, Request("all_reduce", 64, "float32", "avg"), "out-of-place") is None
    assert call_of(comm, Request("all_reduce", 64, "bfloat16", "sum"), "out-of-place") is None
    assert call_of(comm, Request("all_gather", 64, "bfloat16"), "out-of-place") is not None


def main() -> None:
    warnings.simplefilter("error")
    rank = Rank(MpiHostComm(MPI.COMM_WORLD), MPI.COMM_WORLD)
    for form in FORMS:
        settings = settings_of(form)
        say("sweep", measure_collective(rank, {"settings": settings.to_json(), "table": False}))
    check_rivals(rank)
    say("rivals", "right")


if __name__ == "__main__":
    main()
