"""Collectives with wrong arguments, on one rank or on all: every rank raises the same named error, or none does.

What users pass by mistake takes the place of each argument in turn; see tests/unit/test_wrong_calls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.wrong_values import WRONG

from lowshard import BufferPool, DeviceMesh, Layout, Replicated, Sharded, plan_redistribute, redistribute
from lowshard import execute as execute_plan
from lowshard import execute_all as execute_plans
from lowshard.comm import Communicator, loopback
from lowshard.errors import LowshardError, PeerFailed, TimedOut

RANKS = 2
MESH = DeviceMesh((RANKS,), ("x",))
SRC = Layout(MESH, (8, 6), "float32", (Sharded(0),))
DST = Layout(MESH, (8, 6), "float32", (Replicated(),))
PLAN = plan_redistribute(SRC, DST)

Prepared = tuple[Callable[..., object], dict[str, Any]]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


CALLS: dict[str, Callable[[Communicator], Prepared]] = {
    "all_gather": lambda c: (c.all_gather, {"send": zeros(4), "recv": zeros(8), "shared": False}),
    "all_gather shared": lambda c: (c.all_gather, {"send": zeros(4), "recv": None, "shared": True}),
    "all_gather_v": lambda c: (
        c.all_gather_v,
        {"send": zeros(4), "recv": zeros(8), "recv_counts": [4, 4], "recv_displs": [0, 4]},
    ),
    "all_to_all": lambda c: (c.all_to_all, {"send": zeros(4), "recv": zeros(4)}),
    "all_to_all_v": lambda c: (
        c.all_to_all_v,
        {
            "send": zeros(4),
            "send_counts": [2, 2],
            "send_displs": [0, 2],
            "recv": zeros(4),
            "recv_counts": [2, 2],
            "recv_displs": [0, 2],
        },
    ),
    "broadcast": lambda c: (c.broadcast, {"buf": zeros(4), "root": 0, "shared": False}),
    "broadcast shared": lambda c: (c.broadcast, {"buf": zeros(4), "root": 0, "shared": True}),
    "gather": lambda c: (c.gather, {"send": zeros(4), "recv": zeros(8), "root": 0}),
    "scatter": lambda c: (c.scatter, {"send": zeros(8), "recv": zeros(4), "root": 0}),
    "all_reduce": lambda c: (
        c.all_reduce,
        {"send": zeros(4), "recv": zeros(4), "op": "max", "order": "tree", "shared": False},
    ),
    "all_reduce shared": lambda c: (
        c.all_reduce,
        {"send": zeros(4), "recv": None, "op": "max", "order": "tree", "shared": True},
    ),
    "reduce_scatter": lambda c: (
        c.reduce_scatter,
        {"send": zeros(8), "recv": zeros(4), "op": "max", "order": "tree"},
    ),
    "reduce": lambda c: (
        c.reduce,
        {"send": zeros(4), "recv": zeros(4), "op": "max", "root": 0, "order": "tree"},
    ),
    "split": lambda c: (c.split, {"color": 0, "key": 0}),
    "execute": lambda c: (
        execute_plan,
        {
            "plan": PLAN,
            "local": zeros(4, 6),
            "comm": c,
            "out": zeros(8, 6),
            "pool": BufferPool(c),
            "profile": False,
        },
    ),
    "execute_all": lambda c: (
        execute_plans,
        {
            "plans": {"w": PLAN},
            "local": {"w": zeros(4, 6)},
            "comm": c,
            "out": {"w": zeros(8, 6)},
            "pool": BufferPool(c),
        },
    ),
    "redistribute": lambda c: (
        redistribute,
        {
            "local": zeros(4, 6),
            "src": SRC,
            "dst": DST,
            "comm": c,
            "out": zeros(8, 6),
            "cost": None,
            "pool": BufferPool(c),
        },
    ),
}


def outcomes(prepare: Callable[[Communicator], Prepared], changed: dict[int, dict[str, Any]]) -> list[str]:
    """Return what each rank's call raised, "" for nothing, with each rank's arguments changed as told."""
    found = [""] * RANKS

    def work(comm: Communicator) -> None:
        function, right = prepare(comm)
        try:
            function(**{**right, **changed.get(comm.rank, {})})
        except (PeerFailed, TimedOut) as error:
            found[comm.rank] = f"waited in vain: {error}"
        except LowshardError as error:
            found[comm.rank] = type(error).__name__
        except Exception as error:
            found[comm.rank] = f"plain {type(error).__name__}: {error}"

    threads = [threading.Thread(target=work, args=(comm,)) for comm in loopback(RANKS, timeout_s=5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def is_fine(found: list[str]) -> bool:
    return len(set(found)) == 1 and not found[0].startswith(("plain", "waited"))


@pytest.mark.parametrize("name", CALLS)
def test_wrong_on_all_ranks_and_on_one(name: str) -> None:
    assert outcomes(CALLS[name], {}) == [""] * RANKS
    failed = []
    for argument in CALLS[name](loopback(1)[0])[1]:
        for what, wrong in WRONG.items():
            cases = [tuple(range(RANKS))] if argument == "comm" else [tuple(range(RANKS)), (RANKS - 1,)]
            for ranks in cases:
                found = outcomes(CALLS[name], {rank: {argument: wrong} for rank in ranks})
                if not is_fine(found):
                    failed.append(f"{argument}={what} on ranks {ranks}: {found}")
                    if any(
                        "waited" in text for text in found
                    ):  # each takes the whole deadline: one is enough
                        pytest.fail("\n".join(failed))
    assert not failed, "\n".join(failed)


MESSAGES: dict[str, Callable[[Communicator], Prepared]] = {
    "send": lambda c: (c.send, {"buf": zeros(4), "dst": 1}),
    "recv": lambda c: (c.recv, {"buf": zeros(4), "src": 1}),
    "send_recv": lambda c: (c.send_recv, {"send": zeros(4), "dst": 1, "recv": zeros(4), "src": 1}),
    "empty": lambda c: (c.empty, {"shape": (4,), "dtype": "bf16"}),
    "BufferPool.empty": lambda c: (BufferPool(c).empty, {"shape": (4,), "dtype": "bf16"}),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_calls_of_one_rank(name: str) -> None:
    failed = []
    for argument in MESSAGES[name](loopback(2)[0])[1]:
        for what, wrong in {"right": ..., **WRONG}.items():
            first, second = loopback(2, timeout_s=5.0)
            second.send(zeros(4), 0)  # for those that receive
            function, right = MESSAGES[name](first)
            try:
                function(**(right if wrong is ... else {**right, argument: wrong}))
            except (PeerFailed, TimedOut) as error:
                failed.append(f"{argument}={what}: waited in vain: {error}")
            except LowshardError as error:
                if wrong is ...:
                    failed.append(f"right arguments: {error}")
            except Exception as error:
                failed.append(f"{argument}={what}: plain {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
