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
from support.comm_kit import CASES, CannotRun

from lowshard.comm import Communicator

__all__ = [
    "CASES",
    "CannotRun",
    "agreement_cases",
    "bit_cases",
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

# These ask that nothing moves where ranks differ, and go on afterwards. Late comparison gives the communicator up.
COMPARED_BEFORE = {
    "a_mismatch_in_a_group_concerns_nobody_else",
    "an_agreement_that_meets_a_call_is_a_mismatch",
    "calls_known_on_all_ranks_are_compared_all_the_same",
    "many_mismatches_in_a_row_cost_nothing_for_good",
    "mismatches_of_started_calls_are_told_by_each_wait",
    "of_two_ranks_that_are_wrong_the_lowest_is_told",
    "ranks_that_ask_for_different_things_are_all_told",
    "shared_calls_refuse_what_makes_no_sense",
    "what_is_wrong_on_one_rank_is_raised_on_all",
    "wrong_calls_are_refused_before_anything_moves",
}


def run_case(name: str, comm: Communicator) -> None:
    """Run one case on this rank.

    Collective: all ranks of the communicator call this. The generator is the same on all ranks.

    Raises:
        CannotRun: the case means nothing here; the text says why.
    """
    if name in COMPARED_BEFORE and getattr(comm, "_late", None) is not None:
        raise CannotRun("calls are compared after they were made here")
    CASES[name](comm, mode.rng(name))
