"""What stands in a traceback or a debugger for the long-lived objects, and where one is copied to another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard.errors import CommError
from lowshard.fsdp import FSDP, Param, ShardingStrategy
from lowshard.pool import BufferPool
from lowshard.reshard import Publisher, Refit, Reshard, Subscriber, TensorLayout, build_reshard_plan

ONE = {"w": TensorLayout.sharded((4,), "float32", {"x": (1, 1)})}


def test_a_refit_and_a_reshard_say_what_they_serve() -> None:
    plan = build_reshard_plan(ONE, ONE)
    src, dst = {"w": np.zeros(4, np.float32)}, {"w": np.zeros(4, np.float32)}

    def work(comm: lc.Communicator) -> None:
        with Refit(plan, comm, src, dst) as refit:
            assert repr(refit) == "<Refit: no version of 1 tensors, rank 0 of 1>"
            refit.push(7)
            assert repr(refit) == "<Refit: version 7 of 1 tensors, rank 0 of 1>"
        assert repr(refit) == "<Refit: version 7 of 1 tensors, rank 0 of 1, closed>"
        made = Reshard(plan, src, dst, comm)
        assert repr(made) == "<Reshard of 1 tensors, rank 0 of 1>"
        made.close()
        assert repr(made) == "<Reshard of 1 tensors, rank 0 of 1, closed>"

    lc.run_loopback(1, work, 10)


def test_a_publisher_and_a_subscriber_say_where_they_are(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/p"
    with Publisher(ONE, {"w": np.zeros(4, np.float32)}, address=address) as publisher:
        assert repr(publisher) == f"<Publisher at {address}: no version of 1 tensors>"
        publisher.publish(3)
        assert repr(publisher) == f"<Publisher at {address}: version 3 of 1 tensors>"
        with Subscriber(ONE, {"w": np.zeros(4, np.float32)}, address=address) as subscriber:
            assert repr(subscriber) == f"<Subscriber of {address}: no version of 1 tensors>"
            subscriber.pull()
            assert repr(subscriber) == f"<Subscriber of {address}: version 3 of 1 tensors>"
    assert repr(publisher).endswith(", closed>")
    assert repr(subscriber).endswith(", closed>")


def test_a_model_and_a_pool_say_what_they_hold() -> None:
    def work(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", (4,))]}, comm, ShardingStrategy.FullShard) as model:
            assert repr(model) == "<FSDP by ShardingStrategy.FullShard: 1 units, 0 updates, rank 0 of 1>"
        pool = BufferPool(comm, 1 << 20)
        assert repr(pool) == "<BufferPool: 0 bytes idle, at most 1,048,576>"
        pool.empty(1 << 18, "float32")
        assert repr(pool) == "<BufferPool: 1,048,576 bytes idle, at most 1,048,576>"

    lc.run_loopback(1, work, 10)


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
