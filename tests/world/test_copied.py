"""What a communicator of one rank says of its ways; what belongs to a process is not copied to another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.errors import CommError
from lowshard.pool import BufferPool
from lowshard.reshard import Publisher, Refit, Subscriber, TensorLayout, build_reshard_plan


def test_a_communicator_of_one_rank_has_nobody_to_reach() -> None:
    (comm,) = lc.loopback(1)
    with comm:
        assert comm.explain(json=True)["pairs"] == []
        assert "no other rank" in comm.explain()


@pytest.mark.parametrize("to_another", [pickle.dumps, copy.deepcopy])
def test_what_belongs_to_a_process_says_so_where_it_is_copied(
    to_another: Callable[[object], object], tmp_path: Path
) -> None:
    one = {"w": TensorLayout.sharded((4,), "float32", {"x": (1, 1)})}
    given, address = {"w": np.zeros(4, np.float32)}, f"unix:{tmp_path}/p"
    (comm,) = lc.loopback(1)
    plan, out = build_reshard_plan(one, one), {"w": np.zeros(4, np.float32)}
    with (
        comm,
        Publisher(one, given, address=address) as publisher,
        Subscriber(one, given, address=address) as taker,
        Refit(plan, comm, given, out) as refit,
    ):
        for thing in (comm, BufferPool(comm), refit, publisher, taker):
            with pytest.raises(CommError, match="make one in each process"):
                to_another(thing)
