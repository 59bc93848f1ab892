"""A communicator is for one thread at a time, whatever it goes over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.thread_cases import in_thread

from lowshard import BufferPool, DeviceMesh, Layout, Partial, Replicated, execute, plan_redistribute
from lowshard.comm import Communicator, run_loopback
from lowshard.errors import CommError


class _CallsMeanwhile(BufferPool):
    """Has another thread call the communicator when `execute` takes an array for a step."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.comm = comm
        self.raised: list[BaseException | None] = []

    def empty(self, *args: Any, **kwargs: Any) -> Any:
        self.raised.append(in_thread(self.comm.barrier))
        return super().empty(*args, **kwargs)


@pytest.mark.time_limit(60)
def test_another_thread_cannot_call_between_the_steps_of_execute() -> None:
    mesh = DeviceMesh((2,), ("dp",))
    terms = Layout(mesh, (8,), "float64", (Partial(),))
    plan = plan_redistribute(terms, terms.with_placements((Replicated(),)))

    def work(comm: Communicator) -> None:
        pool = _CallsMeanwhile(comm) if comm.rank == 0 else None
        out = execute(plan, np.full(8, comm.rank + 1.0), comm, pool=pool)
        assert out is not None
        assert (out == 3).all()
        if pool is not None:
            assert pool.raised
            assert all(isinstance(error, CommError) and "one thread" in str(error) for error in pool.raised)

    run_loopback(2, work, 5)
