"""A collective in one record works on every transport: checked, compared, counted, started, on groups, and by a plan of
a transport's own. On GPU arrays: tests/gpu/test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest
from support import mode
from support.case_table import LIMIT_S
from support.starting import start_ranks
from support.toy_collective import every_promise, shift_plan

from lowshard import comm as lc
from lowshard.comm.call import Call
from lowshard.comm.loopback import LoopbackTransport
from lowshard.comm.transport import Run, Transport


@pytest.mark.parametrize("size", [1, 2, 3, 8] if mode.full() else [3])
def test_one_record_is_a_collective_of_a_transport(size: int) -> None:
    lc.run_loopback(size, every_promise)


@pytest.mark.mpi
@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.parametrize(
    ("path", "node_size"),
    mode.sample([("auto", ""), ("mpi", ""), ("auto", "2"), ("mpi", "2")], 1, "toy ways"),
)
def test_one_record_is_a_collective_of_processes(path: str, node_size: str) -> None:
    env = {"LOWSHARD_CPU_PATH": path, "LOWSHARD_NODE_SIZE": node_size}
    start_ranks(__file__, 4 if node_size else 3, timeout_s=60, env=env).ok()


def test_a_transport_may_have_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def plan(t: Transport, call: Call, dtype: Any, elems: int, by: int) -> Run:
        made.append(by)
        return shift_plan(t, call, dtype, elems, by)

    monkeypatch.setattr(LoopbackTransport, "plans", {**LoopbackTransport.plans, "shift": plan})
    lc.run_loopback(2, every_promise)
    assert set(made) == {1, 0, -1, 4}


if __name__ == "__main__":
    from mpi4py import MPI

    every_promise(lc.from_mpi(MPI.COMM_WORLD, "cpu"))
