"""The one table of cases of the communicator contract.

The table runs on threads and on MPI ranks (tests/comm), over a stand-in for NCCL (tests/gpu) and,
where there are GPUs, on NCCL (tests/gpu).
"""

from __future__ import annotations

from support import (
    bit_cases,
    check_cases,
    group_cases,
    memory_cases,
    message_cases,
    move_cases,
    reduction_cases,
    repeat_cases,
    start_cases,
)
from support.comm_kit import CASES, Way, cases_for, run_case

__all__ = [
    "CASES",
    "Way",
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
    "start_cases",
]
