"""Collectives with wrong arguments: a rank that is wrong raises a named error; compound calls raise it on all ranks.

What users pass by mistake takes the place of each argument in turn; see tests/unit/test_wrong_calls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mode
from support.wrong_values import WRONG, Prepared, call, floats

from lowshard import BufferPool, DeviceMesh, Layout, Replicated, Sharded, plan_redistribute, redistribute
from lowshard import execute as execute_plan
from lowshard import execute_all as execute_plans
from lowshard.comm import Communicator, loopback, run_loopback
from lowshard.errors import LowshardError, PeerFailed, TimedOut
from lowshard.fsdp import FSDP, AdamW, Param, Precision, ShardingStrategy
from lowshard.op import run_action, run_graph
from lowshard.reshard import Refit, Reshard, ReshardTransform, build_reshard_plan, execute_reshard_plan
from lowshard.solver import Graph, pick, solve_graph
from lowshard.weights import load, plan_load, save

RANKS = 2
MESH = DeviceMesh((RANKS,), ("x",))
SRC = Layout(MESH, (8, 6), "float32", (Sharded(0),))
DST = Layout(MESH, (8, 6), "float32", (Replicated(),))
PLAN = plan_redistribute(SRC, DST)
MOVES = build_reshard_plan({"w": SRC}, {"w": DST})
PRODUCT = pick("matmul", [SRC, Layout(MESH, (6, 4), "float32", (Replicated(),))])
FOLDER, FILE, SAVED = Path("checkpoint"), Path("file.safetensors"), Path("saved")

Prepare = Callable[[Communicator], Prepared]


def graph_plan() -> Any:
    graph = Graph("g")
    x = graph.input("x", (8, 6), place="x=S0")
    graph.output(graph.matmul(x, graph.weight("w", (6, 4), place="R"), name="y"))
    return solve_graph(graph, MESH)


PLAIN: dict[str, Prepare] = {
    "all_gather": lambda c: call(c.all_gather, send=floats(4), recv=floats(4)),
    "all_gather_v": lambda c: call(
        c.all_gather_v, send=floats(4), recv=floats(4), recv_counts=[4], recv_displs=[0]
    ),
    "all_to_all": lambda c: call(c.all_to_all, send=floats(4), recv=floats(4)),
    "all_to_all_v": lambda c: call(
        c.all_to_all_v, send=floats(4), send_counts=[4], send_displs=[0], recv=floats(4), recv_counts=[4],
        recv_displs=[0],
    ),
    "broadcast": lambda c: call(c.broadcast, buf=floats(4), root=0),
    "gather": lambda c: call(c.gather, send=floats(4), recv=floats(4), root=0),
    "scatter": lambda c: call(c.scatter, send=floats(4), recv=floats(4), root=0),
    "all_reduce": lambda c: call(c.all_reduce, send=floats(4), recv=floats(4), op="max", order="tree"),
    "reduce_scatter": lambda c: call(c.reduce_scatter, send=floats(4), recv=floats(4), op="max", order="tree"),
    "reduce": lambda c: call(c.reduce, send=floats(4), recv=floats(4), op="max", root=0, order="tree"),
    "split": lambda c: call(c.split, color=0, key=0),
}  # fmt: skip


def pulled(comm: Communicator) -> Callable[..., object]:
    """Return a call in which rank 0 pushes what the others pull."""
    refit = Refit(MOVES, comm, {"w": floats(4, 6)}, {"w": floats(8, 6)})
    return refit.push if comm.rank == 0 else refit.pull


def model(comm: Communicator) -> FSDP:
    engine = FSDP({"l0": [Param("w", (4, 4))]}, comm)
    engine.fill(lambda name, box: 1.0)
    return engine


_STEP: dict[str, dict[str, Any]] = {
    "step": {"last": True},
    "open": {"unit": "l0", "phase": "forward"},
    "grads": {"unit": "l0", "zero": True},
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


def updated(engine: FSDP, rule: Any) -> None:
    engine.update(rule)
    engine.full("l0.w")  # where the others hear of a wrong rule


def file_of(engine: FSDP) -> Path:
    engine.save(FILE)
    return FILE


COMPOUND: dict[str, Prepare] = {
    "execute": lambda c: call(
        execute_plan, plan=PLAN, local=floats(4, 6), comm=c, out=floats(8, 6), pool=BufferPool(c), profile=False
    ),
    "execute_all": lambda c: call(
        execute_plans, plans={"w": PLAN}, local={"w": floats(4, 6)}, comm=c, out={"w": floats(8, 6)}, pool=BufferPool(c)
    ),
    "redistribute": lambda c: call(
        redistribute, local=floats(4, 6), src=SRC, dst=DST, comm=c, stream=None, out=floats(8, 6), cost=None
    ),
    "save": lambda c: call(
        save, path=FOLDER, state={"w": (SRC, floats(4, 6))}, comm=c, merged=False, strategies={"w": "rows"},
        metadata={"a": "b"},
    ),
    "save of an array": lambda c: call(
        lambda layout, array: save(FILE, {"w": (layout, array)}, c, merged=True), layout=SRC, array=floats(4, 6)
    ),
    "load": lambda c: call(
        load, files=SAVED, plan=plan_load(SAVED, {"w": DST}, RANKS), comm=c, verify=True, mapped=False, progress=None,
        reports=[],
    ),
    "execute_reshard_plan of an array": lambda c: call(
        lambda src, dst: execute_reshard_plan(MOVES, {"w": src}, {"w": dst}, c), src=floats(4, 6), dst=floats(8, 6)
    ),
    "Reshard": lambda c: call(
        lambda **given: Reshard(**given).run(), plan=MOVES, src={"w": floats(4, 6)}, dst={"w": floats(8, 6)}, comm=c,
        transform=ReshardTransform(), like=None, staging_bytes=1 << 16, checksums=True, way="messages",
    ),
    "Refit": lambda c: call(
        Refit, plan=MOVES, comm=c, src={"w": floats(4, 6)}, dst={"w": floats(8, 6)}, transform=None,
        buffering="in_place", version=1, staging_bytes=1 << 16, checksums=True, way="messages",
    ),
    "Refit.pull": lambda c: call(pulled(c), version=3, stream=None),
    "run_action": lambda c: call(
        run_action, action=PRODUCT, operands=[floats(4, 6), floats(6, 4)], comm=c, stream=None
    ),
    "run_graph": lambda c: call(
        run_graph, plan=graph_plan(), inputs={"x": floats(4, 6), "w": floats(6, 4)}, comm=c, outputs=["y"]
    ),
    "FSDP": lambda c: call(
        lambda **given: FSDP(**given).shut(), units={"l0": [Param("w", (4, 4))]}, comm=c,
        strategy=ShardingStrategy.FullShard, order="rank", precision=Precision(), average="sum", open_limit=3,
        prefetch=2, grad_limit=3, accumulate="reduce", communicators=2, align=16, check="poison",
    ),
    "FSDP.fill": lambda c: call(lambda value: model(c).fill(lambda name, box: value), value=1.0),
    "FSDP.full": lambda c: call(model(c).full, name="l0.w"),
    **{
        f"FSDP.{name}": lambda c, name=name: call(lambda **given: stepped(c, name, **given), **_STEP[name])
        for name in _STEP
    },
    "FSDP.clip": lambda c: call(stepped(c).clip, max_norm=1.0, p=2.0),
    "FSDP.update": lambda c: call(lambda rule: updated(stepped(c), rule), rule=AdamW(0.1)),
    "FSDP.save": lambda c: call(model(c).save, path=FILE),
    "FSDP.load": lambda c: call(model(c).load, path=file_of(model(c))),
}  # fmt: skip


def outcomes(prepare: Prepare, changed: dict[int, dict[str, Any]]) -> list[str]:
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


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(SAVED, {"w": (Layout(DeviceMesh((1,), ("x",)), (8, 6), "float32", (Replicated(),)), floats(8, 6))})


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_call_refuses_by_itself(name: str) -> None:
    failed = []
    for argument in PLAIN[name](loopback(1)[0])[1]:
        for what, wrong in {"right": ..., **WRONG}.items():
            function, right = PLAIN[name](loopback(1)[0])
            try:
                function(**(right if wrong is ... else {**right, argument: wrong}))
            except Exception as error:
                if wrong is ... or not isinstance(error, LowshardError):
                    failed.append(f"{argument}={what}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", mode.sample([*COMPOUND], 16, "wrong collectives"))
def test_wrong_on_all_ranks_and_on_one(name: str) -> None:
    prepare = COMPOUND[name]
    assert outcomes(prepare, {}) == [""] * RANKS
    failed = []
    for argument in run_loopback(RANKS, lambda comm: list(prepare(comm)[1]))[0]:
        for what, wrong in mode.sample(list(WRONG.items()), 8, f"{argument} of {name}"):
            alone = [] if argument == "comm" else [(RANKS - 1,)]
            wrong = list(wrong) if isinstance(wrong, list) else wrong  # some calls append
            for ranks in [tuple(range(RANKS)), *alone]:
                found = outcomes(prepare, {rank: {argument: wrong} for rank in ranks})
                if not is_fine(found):
                    failed.append(f"{argument}={what} on ranks {ranks}: {found}")
                    if any("waited" in text for text in found):  # each takes the whole deadline
                        pytest.fail("\n".join(failed))
    assert not failed, "\n".join(failed)


MESSAGES: dict[str, Prepare] = {
    "send": lambda c: call(c.send, buf=floats(4), dst=1),
    "recv": lambda c: call(c.recv, buf=floats(4), src=1),
    "send_recv": lambda c: call(c.send_recv, send=floats(4), dst=1, recv=floats(4), src=1),
    "empty": lambda c: call(c.empty, shape=(4,), dtype="bf16"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_calls_of_one_rank(name: str) -> None:
    failed = []
    for argument in MESSAGES[name](loopback(2)[0])[1]:
        for what, wrong in {"right": ..., **WRONG}.items():
            first, second = loopback(2, timeout_s=5.0)
            second.send(floats(4), 0)  # for those that receive
            function, right = MESSAGES[name](first)
            try:
                function(**(right if wrong is ... else {**right, argument: wrong}))
            except LowshardError as error:
                if wrong is ... or isinstance(error, (PeerFailed, TimedOut)):
                    failed.append(f"{argument}={what}: {error}")
            except Exception as error:
                failed.append(f"{argument}={what}: plain {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
