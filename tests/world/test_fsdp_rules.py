"""What sharded training promises beside its values: bytes, memory, views, order of events, errors on all ranks."""

from __future__ import annotations

import contextlib
import math
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fsdp_kit as kit
from support import mode
from support.fsdp_kit import STRATEGIES, UNITS, filler

from lowshard import comm as lc
from lowshard import errors
from lowshard.errors import LowshardError
from lowshard.fsdp import FSDP, SGD, AdamW, Param, Precision, ShardingStrategy
from lowshard.fsdp.step_buffer import Pool

ONE = {"u": [Param("w", (40,))]}
FULL_AND_NONE = pytest.mark.parametrize("strategy", [ShardingStrategy.FullShard, ShardingStrategy.NoShard])


def pass_of(engine: FSDP, units: Any, value: float | None = 1.0, last: bool = True) -> None:
    """One micro-batch with a gradient of one value, or with none."""
    with engine.step(last):
        for unit in reversed(units):
            engine.open(unit, "backward")
            if value is not None:
                engine.grads(unit)["w"][...] = value
            engine.reduce(unit)
            engine.close(unit)


def step_of(engine: FSDP, units: Any = ONE) -> None:
    """One micro-batch and an update."""
    pass_of(engine, units)
    engine.join()
    engine.update(SGD(lr=1.0))


# ---- bytes and memory


def padded(elems: list[int], shards: int) -> int:
    """Elements of a segment: parameters at multiples of 32, shards of equal multiples of 32."""
    packed = sum(-(-n // 32) * 32 for n in elems)
    return shards * max(32, math.ceil(packed / shards / 32) * 32) if elems else 0


def segments(shards: int) -> dict[str, tuple[int, int]]:
    """By unit: padded elements of what is trainable, and of what is frozen; the head has no storage of its own."""
    held = {u: [p for p in ps if p.tie is None and not p.ignored] for u, ps in UNITS.items() if u != "head"}
    return {
        unit: (padded([p.elems for p in params if p.trainable], shards),
               padded([p.elems for p in params if not p.trainable], shards))
        for unit, params in held.items()
    }  # fmt: skip


def all_reduce_bytes(n: int, ranks: int, rank: int) -> int:
    own = n // ranks + (rank < n % ranks)
    return 4 * ((n - own) + own * (ranks - 1))


@pytest.mark.parametrize(
    ("world", "name", "accumulate"),
    [
        (1, "full", "reduce"), (2, "full", "reduce"), (3, "full", "local"), (8, "full", "local"), (3, "sgo", "reduce"),
        (4, "sgo", "local"), (2, "sgo-sharded", "local"), (4, "sgo-sharded", "reduce"), (4, "none", "local"),
        (2, "hybrid1", "reduce"), (4, "hybrid2", "local"), (8, "hybrid2", "reduce"), (8, "hybrid4", "local"),
    ],
)  # fmt: skip
def test_bytes_and_memory_are_the_formulas(world: int, name: str, accumulate: Any) -> None:
    """Rajbhandari et al., arXiv 1910.02054, section 7: (n - 1) / n a gather or reduce-scatter, twice an all-reduce."""
    micro, steps, strategy = 2, 3, STRATEGIES[name]

    def train(comm: lc.Communicator) -> tuple[dict[str, int], int, int, int]:
        with FSDP(UNITS, comm, strategy, accumulate=accumulate) as engine:
            engine.fill(filler)
            before = engine.report().wire_bytes
            for step in range(steps):
                kit.run_step(engine, comm, step, micro)
                engine.join()
                engine.update(AdamW(lr=1e-3))
                engine.broadcast_updated_params()
            after = engine.report()
            counted = sum(channel.comm.traffic.sent_bytes for channel in engine._groups.channels)
            assert counted == sum(after.wire_bytes.values())
            assert after.unused_gathers == 0
            spent = {key: after.wire_bytes.get(key, 0) - before.get(key, 0) for key in after.wire_bytes}
            with engine.step():
                for unit in reversed(UNITS):
                    for view in engine.open(unit, "backward").values():
                        assert np.shares_memory(view, engine.pool) or not view.size
                    for view in engine.grads(unit).values():
                        assert np.shares_memory(view, engine.pool)
                        assert view.ctypes.data % 64 == 0
                    engine.reduce(unit)
                    engine.close(unit)
            engine.join()
            for slot in engine.slots():
                assert np.shares_memory(slot.param, engine.pool)
                assert np.shares_memory(slot.grad, engine.pool)
            assert engine.report().pool.total_bytes == engine.pool.nbytes
            return spent, engine.pool.nbytes, engine.grid.shards, engine.grid.replicas

    for spent, pool_bytes, shards, replicas in lc.run_loopback(world, train, 30):
        by_unit = segments(shards)
        whole, trained = (
            4 * sum(n) for n in ([sum(s) for s in by_unit.values()], [s[0] for s in by_unit.values()])
        )
        gathered = steps * whole
        if name in ("full", "hybrid1", "hybrid2", "hybrid4"):
            # Opening the head gathers the embedding, which it is tied to.
            gathered *= 2 * micro
            gathered += steps * 2 * micro * 4 * sum(by_unit["emb"])
        assert spent.get("gather", 0) == gathered * (shards - 1) // shards
        reduced = steps * trained * (micro if accumulate == "reduce" else 1)
        assert spent.get("reduce", 0) == reduced * (shards - 1) // shards
        # Balanced parts of each unit's shard: rank 0 has the largest.
        parts = [s[0] // shards for s in by_unit.values()]
        ends = [steps * sum(all_reduce_bytes(n, replicas, r) for n in parts) for r in (0, replicas - 1)]
        assert min(ends) <= spent.get("replica", 0) <= max(ends)

        wanted = trained // shards
        if shards == 1 or strategy.resident:
            wanted += whole
        else:
            wanted += whole // shards + (
                whole if strategy.keeps_open else 2 * 4 * max(map(sum, by_unit.values()))
            )
        if shards > 1:  # two gradients by turns; the embedding, which the head is tied to, has one of its own
            wanted += 2 * 4 * max(s[0] for s in by_unit.values()) + 4 * by_unit["emb"][0]
        assert pool_bytes == wanted + 64  # the mask of 5 elements, which nobody shares


def test_quantised_gathers_take_33_bytes_for_32_elements() -> None:
    units = {"u": [Param("w", (64, 96)), Param("b", (128,))]}

    def spend(comm: lc.Communicator, wire: str) -> int:
        with FSDP(units, comm, precision=Precision(compute="bfloat16", wire=wire)) as engine:
            engine.fill(lambda name, box: 1.0)
            engine.open("u")
            engine.close("u")
            return engine.report().wire_bytes["gather"]

    bf16, quantised = (set(lc.run_loopback(4, lambda c, w=w: spend(c, w), 20)) for w in ("bfloat16", "mxfp8"))
    assert bf16 == {(64 * 96 + 128) * 2 * 3 // 4}
    assert quantised == {(64 * 96 + 128) * 33 // 32 * 3 // 4}
    assert round(quantised.pop() / bf16.pop(), 2) == 0.52


def test_no_memory_is_taken_after_the_first_step() -> None:
    """Of NumPy's memory: fifty steps leave nothing behind, and hold no more than one at any time."""
    units = {f"u{i}": [Param("w", (64, 64)), Param("b", (64,))] for i in range(3)}

    def train(comm: lc.Communicator) -> int:
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: 0.5)

            def steps(count: int) -> None:
                for _ in range(count):
                    pass_of(engine, units, last=False)
                    step_of(engine, units)
                comm.barrier()

            steps(3)
            before, begun = engine.report().peak_bytes, 0
            if comm.rank == 0:
                tracemalloc.start()
                begun = tracemalloc.get_traced_memory()[0]
            comm.barrier()
            steps(50)
            assert engine.report().peak_bytes == before
            if comm.rank:
                return 0
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return peak - begun

    # One gradient of a unit takes 16 KiB; the log of events may grow to its limit.
    assert lc.run_loopback(2, train, 60)[0] < 2_000_000


# ---- order of events


@pytest.mark.parametrize("name", ["full", "sgo-sharded", "hybrid2"])
def test_the_next_gather_starts_before_this_computation_ends(name: str) -> None:
    names = [f"u{i}" for i in range(4)]

    def train(comm: lc.Communicator) -> None:
        with FSDP({unit: [Param("w", (100,))] for unit in names}, comm, STRATEGIES[name]) as engine:
            engine.fill(lambda unit, box: 0.0)
            with engine.step():
                for phase, order in (("forward", names), ("backward", names[::-1])):
                    for this, after in zip(order, [*order[1:], None], strict=True):
                        engine.open(this, phase)  # type: ignore[arg-type]
                        if after is not None and not (phase == "backward" and name == "sgo-sharded"):
                            computing_until(lambda: begun(engine, after, phase))  # noqa: B023
                        if phase == "backward":
                            engine.reduce(this)
                        engine.close(this)
            engine.join()

    def begun(engine: FSDP, unit: str | None, phase: str) -> bool:
        starts = [event for event in engine.report().events if event.what == "gather start"]
        return sum(event.unit == unit for event in starts) == (1 if phase == "forward" else 2)

    def computing_until(seen: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 10
        while not seen():
            assert time.monotonic() < end_s, "the gather did not start while the unit before was open"
            time.sleep(0.001)

    lc.run_loopback(2, train, 30)


# ---- errors


def updated(engine: FSDP, comm: lc.Communicator, clip: float = 1.0) -> None:
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(clip)
    engine.update(kit.optimizer())


def normal(engine: FSDP, comm: lc.Communicator, clip: float = 1.0) -> None:
    updated(engine, comm, clip)
    engine.broadcast_updated_params()


def fail(*args: Any) -> None:
    raise ZeroDivisionError("of the user's own")


def joined(call: Callable[[FSDP], Any]) -> Callable[..., None]:
    """Return a step whose gradients are reduced when the call is made."""

    def step(engine: FSDP, comm: lc.Communicator) -> None:
        kit.run_step(engine, comm, 0, 1)
        engine.join()
        call(engine)

    return step


def within(*calls: Callable[[FSDP], Any]) -> Callable[..., None]:
    """Return a step of these calls."""

    def step(engine: FSDP, comm: lc.Communicator) -> None:
        with engine.step():
            for call in calls:
                call(engine)

    return step


def stepped(engine: FSDP, last: Any = True) -> None:
    with engine.step(last):
        pass


def opened(unit: str) -> Callable[[FSDP], Any]:
    return lambda e: e.open(unit)


def closed(unit: str) -> Callable[[FSDP], Any]:
    return lambda e: e.close(unit)


WRONG: dict[str, tuple[Callable[..., Any], str, type[Exception]]] = {
    "open what is stale": (lambda e, c: (updated(e, c), e.open("l0")), "sgo", errors.StaleParams),
    "update what is stale": (lambda e, c: (updated(e, c), updated(e, c)), "sgo", errors.StaleParams),
    "reduce of a closed unit": (
        within(opened("emb"), lambda e: e.close("emb"), lambda e: e.reduce("emb")), "hybrid2", errors.NotOpen),
    "clip before join": (
        within(opened("emb"), lambda e: e.grads("emb"), lambda e: e.clip(1.0)), "hybrid2", errors.NotJoined),
    "too many open": (within(opened("emb"), opened("l0"), opened("l1")), "full", errors.OpenLimit),
    "a shape": (
        within(opened("emb"), lambda e: e.add_grad("emb", "e", np.zeros((5, 7), "f4"))), "full", errors.BadGrad),
    "a dtype": (
        within(opened("emb"), lambda e: e.add_grad("emb", "e", np.zeros((7, 5)))), "none", errors.BadGrad),
    "a step in a step": (within(stepped), "hybrid2", errors.StepError),
    "a failure of one's own": (within(opened("emb"), fail), "hybrid2", ZeroDivisionError),
    "a rule that fails": (joined(lambda e: e.update(fail)), "full", ZeroDivisionError),
    "clip to nothing": (joined(lambda e: e.clip(None)), "hybrid2", errors.StepError),
    "a norm of NaN": (joined(lambda e: e.norm(math.nan)), "full", errors.StepError),
    "a step that is no bool": (lambda e, c: stepped(e, None), "full", errors.StepError),
    "no such parameter": (lambda e, c: e.full("l9.w"), "full", errors.LayoutError),
    **{f"{what} of no unit": (lambda e, c, what=what: getattr(e, what)("l9"), "full", errors.NotOpen)
       for what in ("open", "close", "grads", "reduce")},
}  # fmt: skip
# What is wrong only beside other ranks: parameters of one shape, so that counts and dtypes agree.
APART: dict[str, tuple[Callable[..., Any], str, type[Exception]]] = {
    "another unit": (within(opened("l1")), "full", errors.MismatchError),
    "another number": (lambda e, c: normal(e, c, 2.0), "none", errors.MismatchError),
    "another count of micro-batches": (
        within(opened("emb"), lambda e: e.grads("emb"), closed("emb")), "full", errors.MismatchError),
    "another parameter": (lambda e, c: e.full("l1.b" if c.rank == 1 else "l1.f"), "hybrid2", errors.MismatchError),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "who", "communicators"),
    mode.sample(
        [(w, who, n) for who in ("all", "one") for w in (WRONG if who == "all" else WRONG | APART) for n in (1, 2)],
        6, "fsdp wrong",
    ),
)  # fmt: skip
def test_a_wrong_call_raises_on_every_rank_and_reset_mends_it(
    what: str, who: str, communicators: int, tmp_path: Path
) -> None:
    """On the ranks that make it, and on the others at their next call; training goes on as if nothing had been."""
    wrong, name, error = (WRONG | APART)[what]
    reached = {}

    def run(comm: lc.Communicator) -> bytes:
        with FSDP(UNITS, comm, STRATEGIES[name], communicators=communicators) as engine:
            engine.fill(filler)
            start = tmp_path / "start"
            engine.save(start)
            mine = wrong if who == "all" or comm.rank == 1 else normal
            raised: BaseException | None = None
            try:
                for _ in range(3):  # the others notice at their next call
                    mine(engine, comm)
                    mine = normal
            except Exception as caught:
                raised = caught
            reached[comm.rank] = raised
            with contextlib.suppress(LowshardError):
                engine.join()  # a broken engine refuses; nothing hangs
            engine.reset()
            engine.load(start)
            for step in range(2):
                kit.run_step(engine, comm, step, 1)
                engine.join()
                engine.clip(kit.CLIP)
                engine.update(kit.optimizer())
                engine.broadcast_updated_params()
            engine.save(tmp_path / "end")
        return (tmp_path / "end").read_bytes()

    ends = lc.run_loopback(4, run, 10)
    assert all(raised is not None for raised in reached.values()), reached
    for rank, raised in reached.items():
        if who == "all" or rank == 1:
            assert isinstance(raised, error), (rank, raised)
        elif issubclass(error, LowshardError):
            assert isinstance(raised, (error, errors.MismatchError)), (rank, raised)
        else:
            assert isinstance(raised, errors.CommError), (rank, raised)
    clean = lc.run_loopback(4, lambda c: kit.train(c, STRATEGIES[name], range(2), 4, tmp_path / "clean"), 30)
    assert ends[0] == clean[0].file


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"order": "rank"}, "order rank"), ({"communicators": 2}, "communicators 2"),
        ({"precision": Precision(compute="bfloat16")}, "compute bfloat16"),
        ({"strategy": ShardingStrategy.NoShard}, "NoShard"),
    ],
)  # fmt: skip
def test_ranks_that_make_different_models_are_told_at_once(other: dict[str, Any], said: str) -> None:
    """The message names what differs, though the first parameters do not."""

    def make(comm: lc.Communicator) -> None:
        with pytest.raises(errors.MismatchError) as raised:
            FSDP(UNITS, comm, **(other if comm.rank == 1 else {}))
        first, second = str(raised.value).split("; ")
        assert said in second
        assert said not in first

    lc.run_loopback(3, make, 10)


@FULL_AND_NONE
@pytest.mark.parametrize("what", ["save", "load", "fill"])
def test_what_one_rank_does_alone_is_told_at_once(
    what: str, strategy: ShardingStrategy, tmp_path: Path
) -> None:
    """The others were in a step, over other communicators, and all waited until the deadline."""

    def train(comm: lc.Communicator) -> float:
        with FSDP(ONE, comm, strategy) as engine:
            engine.fill(lambda name, box: 0.0)
            engine.save(tmp_path / "m")

            def go_apart() -> None:
                if comm.rank == 0:
                    getattr(engine, what)(filler if what == "fill" else tmp_path / "m")
                step_of(engine)

            with pytest.raises(errors.MismatchError, match=rf"ranks \[0\] have {what}"):
                go_apart()
            engine.reset()
            step_of(engine)
            return float(engine.full("u.w")[0])

    assert lc.run_loopback(2, train, 3) == [-1.0] * 2


def test_replicas_that_start_apart_are_noticed() -> None:
    def fill(comm: lc.Communicator) -> None:
        for strategy in (ShardingStrategy.NoShard, ShardingStrategy.HybridShard(intra_node_size=2)):
            engine = FSDP(UNITS, comm, strategy)
            with pytest.raises(errors.MismatchError, match="replicas"):
                engine.fill(lambda name, box: float(comm.rank // 2))
            engine.fill(lambda name, box: 1.0)
        for strategy in (ShardingStrategy.FullShard, ShardingStrategy.HybridShard(intra_node_size=2)):
            engine = FSDP(UNITS, comm, strategy)
            with pytest.raises(errors.MismatchError, match="ignored parameters whole"):
                engine.fill(lambda name, box: float(comm.rank) if name == "emb.mask" else 1.0)

    lc.run_loopback(4, fill, 10)


def test_a_fill_that_fails_on_one_rank_fails_on_all() -> None:
    def fill(comm: lc.Communicator) -> None:
        def wrong(name: str, box: Any) -> Any:
            return np.zeros(1000) if comm.rank == 2 else 0.0

        with pytest.raises(errors.BufferMismatchError, match="rank 2"):
            FSDP(UNITS, comm).fill(wrong)

    lc.run_loopback(3, fill, 10)


def test_poison_shows_a_view_that_is_used_after_close() -> None:
    def look(comm: lc.Communicator) -> None:
        with FSDP(UNITS, comm, check="poison", prefetch=0) as engine:
            engine.fill(filler)
            view = engine.open("l1")["w"]
            assert np.isfinite(view).all()
            engine.close("l1")
            assert np.isnan(view).all()

    lc.run_loopback(2, look, 10)


def test_a_unit_that_one_rank_does_not_use_takes_zeros() -> None:
    def train(comm: lc.Communicator) -> float:
        with FSDP({"u": [Param("w", (3,))]}, comm) as engine:
            engine.fill(lambda name, box: 0.0)
            with engine.step():
                engine.open("u", "backward")
                if comm.rank == 0:
                    engine.grads("u")["w"][...] = 3
                engine.reduce("u")
                engine.close("u")
            engine.join()
            assert engine.report().zero_reduces == ({} if comm.rank == 0 else {"u": 1})
            return engine.norm(float("inf"))

    assert lc.run_loopback(3, train, 10) == [1.0] * 3


# ---- micro-batches that count


@pytest.mark.parametrize("strategy", [ShardingStrategy.FullShard, ShardingStrategy.NoShard])
@pytest.mark.parametrize("accumulate", ["local", "reduce"])
def test_a_gradient_counts_in_its_own_micro_batch_alone(accumulate: Any, strategy: ShardingStrategy) -> None:
    """A unit without a gradient in a later micro-batch was given that of the one before, where each is reduced."""

    def train(comm: lc.Communicator) -> list[float]:
        units = {"all": [Param("w", (4,))], "some": [Param("w", (4,))]}
        with FSDP(units, comm, strategy, accumulate=accumulate) as engine:
            engine.fill(lambda name, box: 0.0)
            for micro in range(4):
                with engine.step(last=micro == 3):
                    for unit in units:
                        engine.open(unit)
                        if unit == "all" or micro == 0 or (micro == 1 and comm.rank == 0):
                            engine.grads(unit)["w"][...] = 8.0
                        if unit == "all" or micro != 2:
                            engine.reduce(unit)
                        engine.close(unit)
            engine.join()
            engine.update(SGD(lr=1.0))
            return [float(engine.full(f"{unit}.w")[0]) for unit in units]

    # Of 4 x 2 micro-batches 8 and 3 have a gradient.
    assert lc.run_loopback(2, train, 10) == [[-8.0, -3.0]] * 2


@pytest.mark.parametrize("accumulate", ["local", "reduce"])
def test_a_forward_pass_alone_is_no_micro_batch(accumulate: Any) -> None:
    # "b" has a backward pass, "f" a forward pass alone; "+" says that it is not the last of its step.
    steps = {"b": 6.0, "f b": 6.0, "f f b": 6.0, "f b+ b+ b": 6.0, "f+ b": 3.0, "b+ f b": 6.0}

    def train(comm: lc.Communicator) -> list[float]:
        found = []
        with FSDP(ONE, comm, accumulate=accumulate) as engine:
            engine.fill(lambda name, box: 0.0)
            for step in steps:
                for kind, *more in step.split():
                    if kind == "b":
                        pass_of(engine, ONE, 6.0, last=not more)
                        continue
                    with engine.step(not more):
                        engine.open("u")
                        engine.close("u")
                engine.join()
                found.append(float(next(engine.slots()).grad[0]))
                engine.update(SGD(lr=1.0))
        return found

    assert lc.run_loopback(2, train, 20)[0] == list(steps.values())


def test_units_of_one_size_in_another_order_are_noticed_before_the_update() -> None:
    units = {f"u{i}": [Param("w", (40,))] for i in range(3)}

    def train(comm: lc.Communicator) -> None:
        with FSDP(units, comm, prefetch=0) as engine:
            engine.fill(lambda name, box: float(name[1]))
            with engine.step(), pytest.raises(errors.MismatchError, match="u0"):
                engine.open("u0" if comm.rank else "u1")
            engine.reset()

    lc.run_loopback(2, train, 10)


@pytest.mark.parametrize(("who", "error"), [("all", MemoryError), ("one", OSError)])
def test_no_memory_for_a_model_is_an_error_on_every_rank(
    who: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Pool.__init__

    def none(self: Pool, plan: Any, comm: lc.Communicator) -> None:
        if who == "all" or comm.rank == 1:
            raise error("none left")
        made(self, plan, comm)

    def make(comm: lc.Communicator) -> None:
        with pytest.raises(
            errors.CommError, match=r"no memory for the model's buffer of [\d,]+ bytes \(none left\)"
        ):
            FSDP(UNITS, comm)
        comm.barrier()  # the world is as before

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "__init__", none)
        lc.run_loopback(3, make, 10)
