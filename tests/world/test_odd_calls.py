"""Odd calls over threads; over MPI ranks: tests/mpi."""

from __future__ import annotations

import pytest
from support.odd_calls import ODD_CALLS

from lowshard import comm as lc


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_calls_are_right_or_refused_on_all_ranks(name: str, ranks: int) -> None:
    lc.run_loopback(ranks, ODD_CALLS[name], timeout_s=20)


def test_a_communicator_of_one_rank_has_nobody_to_reach() -> None:
    (comm,) = lc.loopback(1)
    with comm:
        assert comm.explain(json=True)["pairs"] == []
        assert "no other rank" in comm.explain()
