"""The one table of cases of the communicator contract, and how one of them is run.

The table runs on threads (tests/world), on MPI ranks (tests/mpi), over a stand-in for NCCL (tests/unit) and,
where there are GPUs, on NCCL (tests/gpu).
"""

from __future__ import annotations

from support import (
    agreement_cases,
    bit_cases,
    check_cases,
    group_cases,
    memory_cases,
    message_cases,
    mode,
    move_cases,
    reduction_cases,
    repeat_cases,
    shared_cases,
    start_cases,
)
from support.comm_kit import CASES, Way, cases_for

from lowshard.comm import Communicator

__all__ = [
    "CASES",
    "Way",
    "agreement_cases",
    "bit_cases",
    "cases_for",
    "check_cases",
    "group_cases",
    "memory_cases",
    "message_cases",
    "move_cases",
    "reduction_cases",
    "repeat_cases",
    "run_case",
    "shared_cases",
    "start_cases",
]


def run_case(name: str, comm: Communicator) -> None:
    """Run one case on this rank.

    Collective: all ranks of the communicator call this. The generator is the same on all ranks.
    """
    CASES[name](comm, mode.rng(name))
