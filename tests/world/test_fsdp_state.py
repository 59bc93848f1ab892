"""Files of sharded models: what is under way when one is loaded, what does not fit, what has one name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowshard import comm as lc
from lowshard import errors
from lowshard.checkpoint import CheckpointReader
from lowshard.fsdp import FSDP, SGD, AdamW, Param, Precision, ShardingStrategy, Slot
from lowshard.layout import Layout
from lowshard.mesh import DeviceMesh
from lowshard.placement import Replicated
from lowshard.weights import save


def step(engine: FSDP, value: float = 1.0, last: bool = True) -> None:
    """A micro-batch whose gradients are all `value`."""
    with engine.step(last=last):
        for unit in engine.plan.by_name:
            engine.open(unit, "backward")
            for view in engine.grads(unit).values():
                view[...] = value
            engine.reduce(unit)
            engine.close(unit)


@pytest.mark.parametrize("communicators", [1, 2])
def test_a_load_waits_for_reductions_under_way(tmp_path: Path, communicators: int) -> None:
    """They ended in the sums of the micro-batches that came after it."""
    units = {f"u{i}": [Param("w", (40,))] for i in range(4)}

    def train(comm: lc.Communicator) -> list[float]:
        with FSDP(
            units, comm, accumulate="reduce", grad_limit=4, open_limit=4, communicators=communicators
        ) as engine:
            engine.fill(lambda name, box: 0.0)
            engine.save(tmp_path / "start")
            channel = engine._groups.reduce
            assert channel is not None
            call = channel.call

            def slow(purpose: str, name: str, *args: Any) -> None:
                time.sleep(0.05 * (name == "reduce_scatter"))
                call(purpose, name, *args)

            channel.call = slow  # type: ignore[method-assign]
            step(engine, 100.0, last=False)
            engine.load(tmp_path / "start")
            step(engine, last=False)
            step(engine)
            engine.join()
            engine.update(SGD(lr=1.0))
            return [float(value) for unit in units for value in set(engine.full(f"{unit}.w").tolist())]

    assert lc.run_loopback(2, train, 30) == [[-1.0] * 4] * 2


# ---- what does not fit


MODEL = {"u": [Param("w", (6,)), Param("fixed", (4,), ignored=True)]}


def saved(path: Path, units: Any = MODEL, rule: Callable[[Slot], None] | None = None, **options: Any) -> None:
    def save(comm: lc.Communicator) -> None:
        with FSDP(units, comm, **options) as engine:
            engine.fill(lambda name, box: 5.0)
            step(engine)
            engine.join()
            engine.update(AdamW(lr=0.0) if rule is None else rule)
            engine.save(path)

    lc.run_loopback(2, save, 20)


@pytest.mark.parametrize(
    ("other", "options", "says"),
    [
        ([Param("w", (6,)), Param("fixed", (1,), ignored=True)], {}, r"u\.fixed is float32\[1\]"),
        ([Param("w", (6,)), Param("fixed", (3,), ignored=True)], {}, r"u\.fixed is float32\[3\]"),
        ([Param("w", (6,)), Param("fixed", (2, 2), ignored=True)], {}, r"u\.fixed is float32\[2, 2\]"),
        ([Param("w", (6,))], {}, r"u\.fixed"),
        ([Param("w", (2, 3)), Param("fixed", (4,), ignored=True)], {}, r"u\.w is float32\[2, 3\]"),
        (MODEL["u"], {"precision": Precision(compute="bfloat16")}, r"u\.fixed is bfloat16\[4\]"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    tmp_path: Path, other: Any, options: Any, says: str
) -> None:
    saved(tmp_path / "m", {"u": other}, **options)

    def load(comm: lc.Communicator) -> list[float]:
        with FSDP(MODEL, comm) as engine:
            engine.fill(lambda name, box: 0.0)
            with pytest.raises(errors.CheckpointError, match=says):
                engine.load(tmp_path / "m")
            return [*engine.full("u.w").tolist(), *engine.full("u.fixed").tolist()]

    assert lc.run_loopback(2, load, 20) == [[0.0] * 10] * 2


def test_state_of_another_dtype_comes_back_as_it_was(tmp_path: Path) -> None:
    def rule(slot: Slot) -> None:
        if "count" not in slot.state:
            slot.state["count"] = np.zeros(slot.param.shape, np.int64)
            slot.state["sum"] = np.zeros(slot.param.shape, np.float64)
        slot.state["count"] += 1 + (1 << 40)
        slot.state["sum"] += 1 / 3

    saved(tmp_path / "m", rule=rule)

    def load(comm: lc.Communicator) -> None:
        with FSDP(MODEL, comm) as engine:  # of three ranks two hold no element
            engine.load(tmp_path / "m")
            state = next(engine.slots()).state
            assert (state["count"].dtype, state["sum"].dtype) == (np.int64, np.float64)
            for slot in engine.slots():
                for piece in slot.pieces:
                    held = slice(piece.shard_lo, piece.shard_hi)
                    assert set(state["count"][held]) == {1 + (1 << 40)}
                    assert set(state["sum"][held]) == {1 / 3}
            engine.save(tmp_path / "again")

    lc.run_loopback(3, load, 20)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


# ---- names


def test_state_that_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    def save(comm: lc.Communicator) -> None:
        def rule(slot: Slot) -> None:
            slot.state["what"] = {} if comm.rank == 1 else 1.0

        with FSDP(MODEL, comm) as engine:
            engine.fill(lambda name, box: 1.0)
            step(engine)
            engine.join()
            engine.update(rule)
            with pytest.raises(errors.CheckpointError, match="rank 1: save: state 'what' of unit 'u'"):
                engine.save(tmp_path / "m")

    lc.run_loopback(2, save, 20)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FullShard, ShardingStrategy.ShardGradOp, ShardingStrategy.NoShard]
)
def test_an_update_that_failed_on_one_rank_is_not_trained_on_until_a_load(
    tmp_path: Path, strategy: ShardingStrategy
) -> None:
    """Ranks went on with parameters of two versions, or waited for each other where one had to broadcast its own."""

    def rule(slot: Slot) -> None:
        raise ZeroDivisionError("in a rule")

    def train(comm: lc.Communicator) -> list[float]:
        with FSDP({"a": [Param("w", (40,))], "b": [Param("w", (33,))]}, comm, strategy) as engine:
            engine.fill(lambda name, box: 0.0)
            engine.save(tmp_path / "start")
            step(engine)
            engine.join()

            def end() -> None:
                engine.update(rule if comm.rank else SGD(lr=1.0))
                engine.broadcast_updated_params()
                engine.full("a.w")  # the call at which the other rank hears of it

            with pytest.raises((ZeroDivisionError, errors.CommError)):
                end()
            engine.reset()
            with pytest.raises(errors.StepError, match="of two versions; call load"):
                step(engine)
            engine.load(tmp_path / "start")
            step(engine)
            engine.join()
            engine.update(SGD(lr=1.0))
            engine.broadcast_updated_params()
            return [*np.unique(engine.full("a.w")), *(slot.step for slot in engine.slots()), engine.updates]

    assert lc.run_loopback(2, train, 10) == [[-1.0, 1, 1, 1]] * 2


def test_a_file_without_optimizer_state_says_how_to_begin_from_it(tmp_path: Path) -> None:
    """A file of another program, and a parameter that was not trainable when the model was saved."""

    frozen = {"u": [Param("w", (5,)), Param("frozen", (3,), trainable=False)]}
    with FSDP(frozen, lc.loopback(1)[0]) as engine:
        engine.fill(lambda name, box: 2.0)
        step(engine)
        engine.join()
        engine.update(AdamW(lr=1.0))
        engine.save(tmp_path / "frozen.safetensors")
        other = {name: engine.full(name) for name in ("u.w", "u.frozen")}
    layout = Layout(DeviceMesh((1,), ("x",)), (5,), "float32", (Replicated(),))
    layouts = {name: (layout.with_shape(value.shape), value) for name, value in other.items()}
    save(tmp_path / "plain.safetensors", layouts, merged=True)
    for name, units, said in (
        ("plain", frozen, "FSDP.save did not write this file"),
        (
            "frozen",
            {"u": [Param("w", (5,)), Param("frozen", (3,))]},
            "has no optimizer state of u.frozen: new, or not trainable when it was saved",
        ),
        (
            "frozen",
            {**frozen, "v": [Param("w", (5,))]},
            "has no optimizer state of the parameters of unit 'v'",
        ),
    ):
        path = tmp_path / f"{name}.safetensors"
        with FSDP(units, lc.loopback(1)[0]) as engine:
            with pytest.raises(errors.CheckpointError, match=f"{said}.*fill"):
                engine.load(path)
            if units.keys() == {"u"}:
                with CheckpointReader(path) as reader:
                    engine.fill(reader.read_box)
                assert {n: engine.full(n).tolist() for n in other} == {
                    n: v.tolist() for n, v in other.items()
                }


def test_a_rule_that_keeps_nothing_where_it_has_no_piece_is_saved(tmp_path: Path) -> None:
    def rule(slot: Slot) -> None:
        for piece in slot.pieces:
            slot.state["m"][piece.shard_lo : piece.shard_hi] = 2.0

    def train(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", (5,))]}, comm) as engine:
            engine.fill(lambda name, box: 0.0)
            step(engine)
            engine.join()
            engine.update(rule)
            engine.save(tmp_path / "m")
            (slot,) = engine.slots()
            if slot.pieces:
                del slot.state["m"]
            with pytest.raises(errors.CheckpointError, match="state 'm'"):
                engine.save(tmp_path / "m")

    lc.run_loopback(2, train, 10)
