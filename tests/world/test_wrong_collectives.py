"""Collectives with wrong arguments, on one rank or on all: every rank raises the same named error, or none does.

What users pass by mistake takes the place of each argument in turn; see tests/unit/test_wrong_calls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.wrong_values import WRONG

from lowshard import BufferPool, DeviceMesh, Layout, Replicated, Sharded, plan_redistribute, redistribute
from lowshard import execute as execute_plan
from lowshard import execute_all as execute_plans
from lowshard.checkpoint import write_checkpoint
from lowshard.comm import Communicator, agree, loopback, run_loopback
from lowshard.errors import LowshardError, PeerFailed, TimedOut
from lowshard.fsdp import FSDP, AdamW, Param, Precision, ShardingStrategy
from lowshard.op import compute, move_operands, run_action, run_graph
from lowshard.reshard import Refit, Reshard, ReshardTransform, build_reshard_plan, execute_reshard_plan
from lowshard.solver import Graph, pick, solve_graph
from lowshard.weights import load, nodes_of, plan_load, save

RANKS = 2
MESH = DeviceMesh((RANKS,), ("x",))
SRC = Layout(MESH, (8, 6), "float32", (Sharded(0),))
DST = Layout(MESH, (8, 6), "float32", (Replicated(),))
PLAN = plan_redistribute(SRC, DST)

MOVES = build_reshard_plan({"w": SRC}, {"w": DST})
PRODUCT = pick("matmul", [SRC, Layout(MESH, (6, 4), "float32", (Replicated(),))])


def graph_plan() -> Any:
    graph = Graph("g")
    x = graph.input("x", (8, 6), place="x=S0")
    graph.output(graph.matmul(x, graph.weight("w", (6, 4), place="R"), name="y"))
    return solve_graph(graph, MESH)


GRAPH_PLAN = graph_plan()
FOLDER, FILE, SAVED = Path("checkpoint"), Path("file.safetensors"), Path("saved")

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
            "stream": None,
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
            "stream": None,
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
            "stream": None,
            "out": zeros(8, 6),
            "cost": None,
            "pool": BufferPool(c),
        },
    ),
}


def pulled(comm: Communicator) -> Callable[..., object]:
    """Return a call in which rank 0 pushes what the others pull."""
    refit = Refit(MOVES, comm, {"w": zeros(4, 6)}, {"w": zeros(8, 6)})
    return refit.push if comm.rank == 0 else refit.pull


def model(comm: Communicator) -> FSDP:
    engine = FSDP({"l0": [Param("w", (4, 4))]}, comm)
    engine.fill(lambda name, box: 1.0)
    return engine


_STEP: dict[str, dict[str, Any]] = {
    "step": {"last": True},
    "open": {"unit": "l0", "phase": "forward"},
    "grads": {"unit": "l0", "zero": True},
    "add_grad": {"unit": "l0", "name": "w", "array": zeros(4, 4)},
    "reduce": {"unit": "l0"},
    "close": {"unit": "l0", "after": None},
}


def stepped(comm: Communicator, method: str = "", **given: Any) -> FSDP:
    """Return a model after a step, one call of which has other arguments."""
    engine, calls = model(comm), {**_STEP, method: given}
    with engine.step(**calls["step"]):
        for name in list(_STEP)[1:]:
            getattr(engine, name)(**calls[name])
    engine.join()
    return engine


def of_step(method: str) -> Callable[[Communicator], Prepared]:
    return lambda c: (lambda **given: stepped(c, method, **given), _STEP[method])


def updated(engine: FSDP, rule: Any) -> None:
    engine.update(rule)
    engine.full("l0.w")  # where the others hear of a wrong rule


def file_of(engine: FSDP) -> Path:
    engine.save(FILE)
    return FILE


CALLS |= {
    "agree": lambda c: (agree, {"comm": c, "digest": b"same", "error": None, "what": "this"}),
    "nodes_of": lambda c: (nodes_of, {"comm": c}),
    "write_checkpoint": lambda c: (
        write_checkpoint,
        {"path": FILE, "tensors": {"w": (SRC, zeros(4, 6))}, "comm": c, "metadata": {"a": "b"}},
    ),
    "save": lambda c: (
        save,
        {
            "path": FOLDER, "state": {"w": (SRC, zeros(4, 6))}, "comm": c, "merged": False,
            "strategies": {"w": "rows"}, "metadata": {"a": "b"},
        },
    ),
    "save merged": lambda c: (
        lambda **given: save(merged=True, **given),
        {"path": FILE, "state": {"w": (SRC, zeros(4, 6))}, "comm": c, "strategies": None, "metadata": {"a": "b"}},
    ),
    "save of an array": lambda c: (
        lambda layout, array: save(FOLDER, {"w": (layout, array)}, c), {"layout": SRC, "array": zeros(4, 6)},
    ),
    "load": lambda c: (
        load,
        {
            "files": SAVED, "plan": plan_load(SAVED, {"w": DST}, RANKS), "comm": c, "verify": True, "mapped": False,
            "progress": None, "reports": [],
        },
    ),
    "execute_reshard_plan": lambda c: (
        execute_reshard_plan,
        {
            "plan": MOVES, "src": {"w": zeros(4, 6)}, "dst": {"w": zeros(8, 6)}, "comm": c, "transform": None,
            "staging_bytes": 1 << 16, "checksums": True, "way": "messages",
        },
    ),
    "execute_reshard_plan of an array": lambda c: (
        lambda src, dst: execute_reshard_plan(MOVES, {"w": src}, {"w": dst}, c),
        {"src": zeros(4, 6), "dst": zeros(8, 6)},
    ),
    "Reshard": lambda c: (
        lambda **given: Reshard(**given).run(),
        {
            "plan": MOVES, "src": {"w": zeros(4, 6)}, "dst": {"w": zeros(8, 6)}, "comm": c,
            "transform": ReshardTransform(), "like": None, "staging_bytes": 1 << 16, "checksums": True,
            "way": "messages",
        },
    ),
    "Reshard.run": lambda c: (
        Reshard(MOVES, {"w": zeros(4, 6)}, {"w": zeros(8, 6)}, c).run, {"version": 3, "stream": None},
    ),
    "Refit": lambda c: (
        Refit,
        {
            "plan": MOVES, "comm": c, "src": {"w": zeros(4, 6)}, "dst": {"w": zeros(8, 6)}, "transform": None,
            "buffering": "in_place", "version": 1, "staging_bytes": 1 << 16, "checksums": True, "way": "messages",
        },
    ),
    "Refit.push": lambda c: (
        Refit(MOVES, c, {"w": zeros(4, 6)}, {"w": zeros(8, 6)}).push, {"version": 3, "stream": None},
    ),
    "Refit.pull": lambda c: (pulled(c), {"version": 3, "stream": None}),
    "run_action": lambda c: (
        run_action, {"action": PRODUCT, "operands": [zeros(4, 6), zeros(6, 4)], "comm": c, "stream": None},
    ),
    "run_action of an operand": lambda c: (
        lambda a: run_action(PRODUCT, [a, zeros(6, 4)], c), {"a": zeros(4, 6)},
    ),
    "move_operands": lambda c: (
        move_operands, {"action": PRODUCT, "operands": [zeros(4, 6), zeros(6, 4)], "comm": c},
    ),
    "compute": lambda c: (
        compute, {"action": PRODUCT, "operands": [zeros(4, 6), zeros(6, 4)], "comm": c},
    ),
    "run_graph": lambda c: (
        run_graph,
        {
            "plan": GRAPH_PLAN, "inputs": {"x": zeros(4, 6), "w": zeros(6, 4)}, "comm": c, "outputs": ["y"],
            "stream": None,
        },
    ),
    "run_graph of an array": lambda c: (
        lambda x: run_graph(GRAPH_PLAN, {"x": x, "w": zeros(6, 4)}, c), {"x": zeros(4, 6)},
    ),
    "FSDP": lambda c: (
        lambda **given: FSDP(**given).shut(),
        {
            "units": {"l0": [Param("w", (4, 4))]}, "comm": c, "strategy": ShardingStrategy.FullShard,
            "order": "rank", "precision": Precision(), "average": "sum", "open_limit": 3, "prefetch": 2,
            "grad_limit": 3, "accumulate": "reduce", "communicators": 2, "align": 16, "check": "poison",
        },
    ),
    "FSDP.fill": lambda c: (model(c).fill, {"function": lambda name, box: 1.0}),
    "FSDP.fill with a value": lambda c: (
        lambda value: model(c).fill(lambda name, box: value), {"value": 1.0},
    ),
    "FSDP.full": lambda c: (model(c).full, {"name": "l0.w"}),
    **{f"FSDP.{method}": of_step(method) for method in _STEP},
    "FSDP.norm": lambda c: (stepped(c).norm, {"p": 2.0}),
    "FSDP.clip": lambda c: (stepped(c).clip, {"max_norm": 1.0, "p": 2.0}),
    "FSDP.update": lambda c: (lambda rule: updated(stepped(c), rule), {"rule": AdamW(0.1)}),
    "FSDP.save": lambda c: (model(c).save, {"path": FILE}),
    "FSDP.load": lambda c: (model(c).load, {"path": file_of(model(c))}),
}  # fmt: skip


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
            found[comm.rank] = (
                f"LowshardError: {error}" if type(error) is LowshardError else type(error).__name__
            )
        except Exception as error:
            found[comm.rank] = f"plain {type(error).__name__}: {error}"

    threads = [threading.Thread(target=work, args=(comm,)) for comm in loopback(RANKS, timeout_s=5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def is_fine(found: list[str]) -> bool:
    """Say whether all ranks raised one named error, or none; the base class stands for one of Python's."""
    return len(set(found)) == 1 and not found[0].startswith(("plain", "waited", "LowshardError"))


UNCOMPARED = {"move_operands", "compute"}
"""Parts of a call that has been compared."""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(SAVED, {"w": (Layout(DeviceMesh((1,), ("x",)), (8, 6), "float32", (Replicated(),)), zeros(8, 6))})


@pytest.mark.parametrize("name", mode.sample([*CALLS], 25, "wrong collectives"))
def test_wrong_on_all_ranks_and_on_one(name: str) -> None:
    assert outcomes(CALLS[name], {}) == [""] * RANKS
    failed = []
    for argument in run_loopback(RANKS, lambda comm: list(CALLS[name](comm)[1]))[0]:
        for what, wrong in mode.sample(list(WRONG.items()), 8, f"{argument} of {name}"):
            alone = argument == "comm" or name in UNCOMPARED
            cases = [tuple(range(RANKS))] if alone else [tuple(range(RANKS)), (RANKS - 1,)]
            wrong = list(wrong) if isinstance(wrong, list) else wrong  # some calls append
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
