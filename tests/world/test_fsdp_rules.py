"""What sharded training promises beside its values: bytes, memory, views, order of events, errors on all ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fsdp_kit as kit
from support import mode
from support.fsdp_kit import STRATEGIES, UNITS, filler, fits

from lowshard import comm as lc
from lowshard import errors
from lowshard.argument import brief
from lowshard.errors import LowshardError
from lowshard.fsdp import FSDP, SGD, AdamW, Param, Precision, ShardingStrategy
from lowshard.fsdp.links import Channel
from lowshard.fsdp.step_buffer import Pool
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8

# ---- bytes


def padded(elems: list[int], shards: int) -> int:
    """Elements of a segment: parameters at multiples of 32, shards of equal multiples of 32."""
    packed = sum(-(-n // 32) * 32 for n in elems)
    return shards * max(32, math.ceil(packed / shards / 32) * 32)


def segments(shards: int) -> dict[str, tuple[int, int]]:
    """By unit: padded elements of what is trainable, and of what is frozen."""
    found = {}
    for unit, params in UNITS.items():
        held = [p for p in params if p.tie is None and not p.ignored]
        sizes = []
        for trainable in (True, False):
            chosen = [p.elems for p in held if p.trainable == trainable]
            sizes.append(padded(chosen, shards) if chosen else 0)
        found[unit] = sizes[0], sizes[1]
    return found


@pytest.mark.parametrize(
    ("world", "name", "accumulate"),
    mode.sample(
        [(w, n, a) for w in (1, 2, 3, 4, 8) for n in STRATEGIES if fits(n, w) for a in ("local", "reduce")],
        10, "fsdp bytes",
    ),
)  # fmt: skip
def test_wire_bytes_are_the_formula(world: int, name: str, accumulate: Any) -> None:
    """Rajbhandari et al., arXiv 1910.02054, section 7: (n - 1) / n a gather or reduce-scatter, twice an all-reduce."""
    micro, steps = 2, 3

    def train(comm: lc.Communicator) -> tuple[dict[str, int], int, int]:
        with FSDP(UNITS, comm, STRATEGIES[name], accumulate=accumulate) as engine:
            engine.fill(filler)
            before = engine.report().wire_bytes
            for step in range(steps):
                kit.run_step(engine, comm, step, micro)
                engine.join()
                engine.update(AdamW(lr=1e-3))
                engine.broadcast_updated_params()
            after = engine.report()
            counted = sum(channel.comm.traffic.sent_bytes for channel, _ in engine._links.channels)
            assert counted == sum(after.wire_bytes.values())
            assert after.unused_gathers == 0
            spent = {
                key: after.wire_bytes.get(key, 0) - before.get(key, 0)
                for key in ("gather", "reduce", "replica")
            }
            return spent, engine.grid.shards, engine.grid.replicas

    for spent, shards, replicas in lc.run_loopback(world, train, 30):
        by_unit = segments(shards)
        # The head has no storage of its own: opening it gathers the embedding, and it reduces nothing.
        opened = [*UNITS, "emb"]
        whole = sum(4 * sum(by_unit[unit]) for unit in opened if unit != "head")
        stored = sum(4 * sum(by_unit[unit]) for unit in UNITS if unit != "head")
        trained = sum(4 * by_unit[unit][0] for unit in UNITS if unit != "head")
        trainable_units = sum(4 * sum(by_unit[unit]) for unit in UNITS if by_unit[unit][0])
        if name in ("full", "hybrid1", "hybrid2", "hybrid4") and shards > 1:
            gathers = 2 * micro * steps * whole
        elif name == "sgo":
            gathers = steps * trainable_units
        else:
            gathers = steps * stored
        assert spent["gather"] == gathers * (shards - 1) // shards
        reduced = steps * trained * (micro if accumulate == "reduce" else 1)
        assert spent["reduce"] == reduced * (shards - 1) // shards
        split = 0
        for unit in UNITS:
            n = by_unit[unit][0] // shards
            split += 0 if unit == "head" else n
        # Balanced parts of each unit's shard: rank 0 has the largest.
        if replicas > 1:
            lowest = sum(
                _all_reduce(by_unit[u][0] // shards, replicas, replicas - 1) for u in UNITS if u != "head"
            )
            highest = sum(_all_reduce(by_unit[u][0] // shards, replicas, 0) for u in UNITS if u != "head")
            low, high = sorted((lowest, highest))
            assert steps * low <= spent["replica"] <= steps * high
            assert abs(
                spent["replica"] - steps * 2 * 4 * split * (replicas - 1) / replicas
            ) <= steps * 8 * replicas * len(UNITS)
        else:
            assert spent["replica"] == 0


def _all_reduce(n: int, ranks: int, rank: int) -> int:
    own = n // ranks + (rank < n % ranks)
    return 4 * ((n - own) + own * (ranks - 1))


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


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["full", "sgo", "none", "hybrid2"])
def test_a_quantised_gather_is_a_gather_then_quantised(
    compute: str, name: str, rng: np.random.Generator
) -> None:
    shape = (17, 96)
    value = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * 4)).astype(np.float32)
    wanted = dequantize_mxfp8(quantize_mxfp8(value), compute)

    def look(comm: lc.Communicator) -> np.ndarray:
        precision = Precision(compute=compute, wire="mxfp8")
        with FSDP(
            {"u": [Param("a", (7,)), Param("w", shape)]}, comm, STRATEGIES[name], precision=precision
        ) as engine:
            engine.fill(lambda n, box: value[tuple(slice(*s) for s in box)] if n == "u.w" else 0.0)
            found = engine.open("u")["w"].copy()
            engine.close("u")
            return np.asarray(found)

    for world in (2, 4):
        for found in lc.run_loopback(world, look, 20):
            assert found.tobytes() == wanted.tobytes()


# ---- memory


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_the_pool_is_the_formula_and_every_view_lies_in_it(world: int, name: str) -> None:
    if not fits(name, world):
        return
    strategy = STRATEGIES[name]

    def look(comm: lc.Communicator) -> tuple[int, int]:
        with FSDP(UNITS, comm, strategy) as engine:
            engine.fill(filler)
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
            return engine.pool.nbytes, engine.grid.shards

    for pool_bytes, shards in lc.run_loopback(world, look, 30):
        by_unit = {unit: sizes for unit, sizes in segments(shards).items() if unit != "head"}
        whole, trained = sum(sum(s) for s in by_unit.values()), sum(s[0] for s in by_unit.values())
        largest, largest_grad = max(sum(s) for s in by_unit.values()), max(s[0] for s in by_unit.values())
        wanted = 4 * trained // shards  # the gradient's shard
        if shards == 1 or strategy.resident:
            wanted += 4 * whole
        else:
            wanted += 4 * whole // shards + (4 * whole if strategy.keeps_open else 2 * 4 * largest)
        if shards > 1:
            # Two gradients by turns; the embedding, which the head is tied to, has one of its own.
            wanted += 2 * 4 * largest_grad + 4 * by_unit["emb"][0]
        assert pool_bytes == wanted + 64  # the mask of 5 elements, which nobody shares


def test_no_memory_is_taken_after_the_first_step() -> None:
    """Of NumPy's memory: a hundred steps leave nothing behind, and hold no more than one at any time."""
    units = {f"u{i}": [Param("w", (64, 64)), Param("b", (64,))] for i in range(3)}

    def train(comm: lc.Communicator) -> int:
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: 0.5)
            rule = AdamW(lr=1e-3)

            def step(last: bool) -> None:
                with engine.step(last=last):
                    for unit in reversed(units):
                        engine.open(unit, "backward")
                        engine.grads(unit)["w"][...] = comm.rank
                        engine.reduce(unit)
                        engine.close(unit)
                if last:
                    engine.join()
                    engine.update(rule)

            for _ in range(3):
                step(False)
                step(True)
            before = engine.report().peak_bytes
            comm.barrier()
            if comm.rank == 0:
                tracemalloc.start()
                begun = tracemalloc.get_traced_memory()[0]
            comm.barrier()
            for _ in range(50):
                step(False)
                step(True)
            comm.barrier()
            assert engine.report().peak_bytes == before
            if comm.rank == 0:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                return peak - begun
            return 0

    grown = lc.run_loopback(2, train, 60)[0]
    # One gradient of a unit takes 16 KiB; the log of events may grow to its limit.
    assert grown < 2_000_000


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


def test_a_gather_runs_while_the_caller_computes() -> None:
    """With the gather of the next unit held back, this one can still be read, and closed."""
    import threading

    gate = threading.Event()

    def train(comm: lc.Communicator) -> None:
        units = {f"u{i}": [Param("w", (50,))] for i in range(3)}
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: float(name[1]))
            channel = engine._links.shard
            assert channel is not None
            call, held = channel.call, []

            def slow(purpose: str, name: str, *args: Any) -> None:
                if name == "all_gather" and held:
                    assert gate.wait(10)
                held.append(name)
                call(purpose, name, *args)

            channel.call = slow  # type: ignore[method-assign]
            p = engine.open("u0")
            assert (p["w"] == 0).all()  # while the gather of u1 waits at the gate
            comm.barrier()
            events = [(event.what, event.unit) for event in engine.report().events]
            assert ("gather end", "u1") not in events
            comm.barrier()  # both have looked
            gate.set()
            engine.close("u0")
            assert (engine.open("u1")["w"] == 1).all()
            engine.close("u1")

    lc.run_loopback(2, train, 20)


# ---- errors


def _skip(engine: FSDP, comm: lc.Communicator) -> None:
    pass


def normal(engine: FSDP, comm: lc.Communicator) -> None:
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(1.0)
    engine.update(kit.optimizer())
    engine.broadcast_updated_params()


def _open_stale(engine: FSDP, comm: lc.Communicator) -> None:
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(1.0)
    engine.update(kit.optimizer())
    engine.open("l0")


def _update_twice(engine: FSDP, comm: lc.Communicator) -> None:
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(1.0)
    engine.update(kit.optimizer())
    engine.update(kit.optimizer())


def _grads_unopened(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.grads("l0")


def _reduce_closed(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("emb")
        engine.close("emb")
        engine.reduce("emb")


def _clip_unjoined(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("emb")
        engine.grads("emb")
        engine.clip(1.0)


def _too_many(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        for unit in ("emb", "l0", "l1"):
            engine.open(unit)


def _other_order(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("l1")


def _bad_grad(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("emb")
        engine.add_grad("emb", "e", np.zeros((5, 7), np.float32))


def _bad_dtype(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("emb")
        engine.add_grad("emb", "e", np.zeros((7, 5), np.float64))


def _step_in_a_step(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step(), engine.step():
        pass


def _no_such_unit(engine: FSDP, comm: lc.Communicator) -> None:
    engine.open("l9")


def _own_failure(engine: FSDP, comm: lc.Communicator) -> None:
    with engine.step():
        engine.open("emb")
        raise KeyError("of the user's own")


def _bad_rule(engine: FSDP, comm: lc.Communicator) -> None:
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(1.0)

    def rule(slot: Any) -> None:
        raise ZeroDivisionError("in a rule")

    engine.update(rule)


def _with(what: str, *args: Any) -> Callable[..., None]:
    """Return a step in which one call gets arguments that it does not take."""

    def step(engine: FSDP, comm: lc.Communicator) -> None:
        if what in ("open", "close", "grads", "reduce", "step", "full"):
            call = getattr(engine, what)(*args)
            if what == "step":
                with call:
                    pass
            return
        kit.run_step(engine, comm, 0, 1)
        engine.join()
        if what != "update":
            getattr(engine, what)(*args)
        engine.clip(1.0)
        engine.update(*args) if what == "update" else engine.update(kit.optimizer())

    step.__name__ = f"{what}({', '.join(map(brief, args))})"
    return step


def _another_clip(engine: FSDP, comm: lc.Communicator) -> None:
    """What `normal` does, but for a number that is compared at the next join."""
    kit.run_step(engine, comm, 0, 1)
    engine.join()
    engine.clip(2.0)
    engine.update(kit.optimizer())
    engine.broadcast_updated_params()


def _another_full(engine: FSDP, comm: lc.Communicator) -> None:
    """Parameters of one shape, so that counts and dtypes agree."""
    engine.full("l1.b" if comm.rank == 1 else "l1.f")


BAD_ARGUMENTS = [
    ("clip", (None,)), ("clip", ("1",)), ("clip", (float("nan"),)), ("clip", (-1.0,)), ("clip", (True,)),
    ("clip", (1.0, None)), ("clip", (1.0, 0)), ("clip", (1.0, -2)), ("clip", ([1],)), ("norm", ("2",)),
    ("norm", (float("nan"),)), ("norm", (None,)), ("norm", (np.zeros(2),)), ("update", ("adam",)), ("update", (None,)),
    ("step", (None,)), ("step", (1,)), ("clip", (10**400,)), ("clip", (10**9000,)), ("clip", (1.0, 10**400)),
    ("norm", (10**400,)),
]  # fmt: skip
BAD_NAMES = [("full", errors.LayoutError), ("open", errors.NotOpen), ("close", errors.NotOpen),
             ("grads", errors.NotOpen), ("reduce", errors.NotOpen)]  # fmt: skip

WRONG: list[tuple[Callable[..., None], str, type[Exception]]] = [
    (_open_stale, "sgo", errors.StaleParams),
    (_update_twice, "full", errors.StaleParams),
    (_update_twice, "sgo", errors.StaleParams),
    (_grads_unopened, "full", errors.NotOpen),
    (_grads_unopened, "none", errors.NotOpen),
    (_reduce_closed, "full", errors.NotOpen),
    (_reduce_closed, "hybrid2", errors.NotOpen),
    (_clip_unjoined, "full", errors.NotJoined),
    (_clip_unjoined, "hybrid2", errors.NotJoined),
    (_too_many, "full", errors.OpenLimit),
    (_too_many, "hybrid2", errors.OpenLimit),
    (_other_order, "full", errors.MismatchError),
    (_bad_grad, "full", errors.BadGrad),
    (_bad_dtype, "none", errors.BadGrad),
    (_no_such_unit, "full", errors.NotOpen),
    (_step_in_a_step, "full", errors.StepError),
    (_step_in_a_step, "hybrid2", errors.StepError),
    (_own_failure, "full", KeyError),
    (_own_failure, "hybrid2", KeyError),
    (_bad_rule, "full", ZeroDivisionError),
    (_another_clip, "full", errors.Disagree),
    (_another_clip, "none", errors.Disagree),
    (_another_full, "full", errors.MismatchError),
    (_another_full, "hybrid2", errors.MismatchError),
    *((_with(*call), name, errors.StepError) for call in [(w, *a) for w, a in BAD_ARGUMENTS]
      for name in ("full", "none", "hybrid2")),
    *((_with(what, bad), name, error) for what, error in BAD_NAMES for bad in ("nosuch", "l9.w", None, [], 3)
      for name in ("full", "sgo")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "name", "error", "who", "communicators"),
    mode.sample([(*w, who, n) for w in WRONG for who in ("all", "one") for n in (1, 2)], 6, "fsdp wrong"),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_wrong_call_raises_on_every_rank_and_reset_mends_it(
    wrong: Callable[..., None],
    name: str,
    error: type[Exception],
    who: str,
    communicators: int,
    tmp_path: Path,
) -> None:
    """On the ranks that make it, and on the others at their next call; training goes on as if nothing had been."""
    if wrong in (_other_order, _another_clip) and who == "all":
        return
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


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize(
    ("wrong", "name", "error"),
    [
        (_step_in_a_step, "full", errors.StepError),
        (_with("clip", 10**9000), "full", errors.StepError),
        (_with("norm", 10**400), "none", errors.StepError),
    ],
    ids=["step", "clip", "norm"],
)
def test_steps_within_steps_and_numbers_beyond_floats_raise_on_every_rank(
    wrong: Any, name: str, error: Any, who: str, tmp_path: Path
) -> None:
    test_a_wrong_call_raises_on_every_rank_and_reset_mends_it(wrong, name, error, who, 1, tmp_path)


def test_refusals_that_begin_late_are_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that counted only those that had begun was always one behind, or ahead, of the others."""
    begin, delays = Channel._refuse, itertools.cycle([0.03, 0.0, 0.01])

    def late(channel: Channel, *args: Any) -> None:
        time.sleep(next(delays))
        begin(channel, *args)

    monkeypatch.setattr(Channel, "_refuse", late)
    test_a_wrong_call_raises_on_every_rank_and_reset_mends_it(
        _clip_unjoined, "hybrid2", errors.NotJoined, "one", 2, tmp_path
    )


@pytest.mark.parametrize(
    "other",
    [
        {"order": "rank"}, {"prefetch": 2}, {"average": "sum"}, {"accumulate": "reduce"}, {"communicators": 2},
        {"precision": Precision(compute="bfloat16")}, {"strategy": ShardingStrategy.NoShard},
    ],
)  # fmt: skip
def test_ranks_that_make_different_models_are_told_at_once(other: dict[str, Any]) -> None:
    """The message names what differs, though the first parameters do not."""
    ((name, value),) = other.items()
    said = f"{name} {value}," if isinstance(value, (str, int)) else getattr(value, "compute", str(value))

    def make(comm: lc.Communicator) -> None:
        with pytest.raises(errors.MismatchError) as raised:
            FSDP(UNITS, comm, **(other if comm.rank == 1 else {}))
        first, second = str(raised.value).split("; ")
        assert said in second
        assert said not in first

    lc.run_loopback(3, make, 10)


def test_a_step_that_others_do_not_make_is_named_and_reset_forgets_it() -> None:
    """Ranks gathered ahead by what each had opened last, so that the step after a reset failed as well."""
    units = {f"u{i}": [Param("w", (40,))] for i in range(4)}

    def forward(engine: FSDP) -> None:
        for unit in units:
            engine.open(unit)
            engine.close(unit)

    def train(comm: lc.Communicator) -> str:
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: 0.0)

            def step() -> None:
                with engine.step():
                    forward(engine)
                    for unit in reversed(units):
                        engine.open(unit, "backward")
                        engine.reduce(unit)
                        engine.close(unit)
                engine.join()
                engine.update(SGD(lr=1.0))

            def go_apart() -> None:
                if comm.rank == 0:
                    forward(engine)
                step()

            step()
            with pytest.raises(errors.MismatchError) as raised:
                go_apart()
            engine.reset()
            step()
            return str(raised.value)

    said, other = lc.run_loopback(2, train, 10)
    place = r"at test_fsdp_rules\.py:\d+ \(the (gather|reduction) of unit 'u\d'\)"
    assert said == other
    assert re.search(f"rank 0 asked for .* {place}; rank 1 asked for .* {place}$", said), said


@pytest.mark.parametrize("strategy", [ShardingStrategy.FullShard, ShardingStrategy.NoShard])
@pytest.mark.parametrize("what", ["save", "load", "fill"])
def test_what_one_rank_does_alone_is_told_at_once(
    what: str, strategy: ShardingStrategy, tmp_path: Path
) -> None:
    """The others were in a step, over other communicators, and all waited until the deadline."""

    def train(comm: lc.Communicator) -> float:
        with FSDP({"u": [Param("w", (40,))]}, comm, strategy) as engine:
            engine.fill(lambda name, box: 0.0)
            engine.save(tmp_path / "m")

            def go(alone: bool) -> None:
                if alone:
                    getattr(engine, what)(filler if what == "fill" else tmp_path / "m")
                with engine.step():
                    engine.open("u")
                    engine.grads("u")["w"][...] = 1.0
                    engine.reduce("u")
                    engine.close("u")
                engine.join()
                engine.update(SGD(lr=1.0))

            with pytest.raises(errors.MismatchError, match=f"rank 0 asked for .*{what}"):
                go(alone=comm.rank == 0)
            engine.reset()
            go(alone=False)
            return float(engine.full("u.w")[0])

    assert lc.run_loopback(2, train, 3) == [-1.0] * 2


@pytest.mark.parametrize("communicators", [1, 2])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FullShard, ShardingStrategy.NoShard])
def test_a_reset_after_a_failure_outside_of_a_step_ends_the_step_of_the_others(
    strategy: ShardingStrategy, communicators: int
) -> None:
    """They waited for the rank until the deadline, and that rank for them."""

    def train(comm: lc.Communicator) -> float:
        with FSDP({"u": [Param("w", (40,))]}, comm, strategy, communicators=communicators) as engine:
            engine.fill(lambda name, box: 0.0)

            def go(fails: bool) -> None:
                if fails:
                    raise ZeroDivisionError("in a program's own work between steps")
                with engine.step():
                    engine.open("u")
                    engine.grads("u")["w"][...] = 1.0
                    engine.reduce("u")
                    engine.close("u")
                engine.join()
                engine.update(SGD(lr=1.0))

            with pytest.raises(LowshardError if comm.rank else ZeroDivisionError, match=r"rank 0|own work"):
                go(fails=comm.rank == 0)
            for _ in range(2):  # the second time nothing has failed
                engine.reset()
            go(fails=False)
            return float(engine.full("u.w")[0])

    assert lc.run_loopback(2, train, 3) == [-1.0] * 2


def test_a_reduction_at_the_end_of_a_block_has_the_line_of_the_block() -> None:
    """It had one of Python's `contextlib.py`."""

    def train(comm: lc.Communicator) -> str:
        with FSDP({"u": [Param("w", (40,))]}, comm, accumulate="reduce") as engine:
            engine.fill(lambda name, box: 0.0)

            def step() -> None:
                with engine.step(last=False):
                    engine.open("u")
                    if comm.rank == 0:
                        engine.grads("u")
                    engine.close("u")
                engine.join()

            with pytest.raises(errors.MismatchError) as raised:
                step()
            engine.reset()
            return str(raised.value)

    for said in lc.run_loopback(2, train, 10):
        assert re.search(
            r"reduce_scatter .* at test_fsdp_rules\.py:\d+ \(the reduction of unit 'u'\)", said
        ), said


def test_a_model_that_was_shut_says_so_also_on_one_rank() -> None:
    def use(comm: lc.Communicator) -> None:
        with FSDP(UNITS, comm) as engine:
            engine.fill(filler)
        engine.shut()
        for call in (lambda: engine.open("emb"), lambda: engine.full("l0.w"), engine.join, engine.reset):
            with pytest.raises(errors.StepError, match="was shut"):
                call()

    for world in (1, 2):
        lc.run_loopback(world, use, 10)


@pytest.mark.parametrize(
    ("raised", "cure"),
    [(errors.TimedOut("late"), "start the job again"), (ValueError("mine"), "; call reset() on all ranks")],
)
def test_what_can_be_done_after_a_step_that_failed_depends_on_why(raised: Exception, cure: str) -> None:
    with FSDP(UNITS, lc.loopback(1)[0]) as engine:
        with pytest.raises(type(raised)), engine.step():
            raise raised
        with pytest.raises(errors.StepError) as said:
            engine.open("emb")
        assert cure in str(said.value)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("q", np.ones(5, np.float32), "unit 'emb' has no trainable parameter 'q'; it has e"),
        ("e", [[1.0]], r"the gradient of emb\.e is an array of float32\[7, 5\], got \[list of 1\]"),
    ],
)
def test_a_gradient_that_does_not_fit_is_named(name: str, array: Any, said: str) -> None:
    with FSDP(UNITS, lc.loopback(1)[0]) as engine:
        engine.open("emb")
        with pytest.raises(errors.BadGrad, match=said):
            engine.add_grad("emb", name, array)


def test_units_of_one_size_in_another_order_are_noticed_before_the_update() -> None:
    units = {f"u{i}": [Param("w", (40,))] for i in range(3)}

    def train(comm: lc.Communicator) -> None:
        with FSDP(units, comm, prefetch=0) as engine:
            engine.fill(lambda name, box: float(name[1]))
            with engine.step():
                for unit in ("u0", "u1") if comm.rank else ("u1", "u0"):
                    engine.open(unit)
                    engine.close(unit)
            with pytest.raises(errors.Disagree, match="open u"):
                engine.join()
            engine.reset()

    lc.run_loopback(2, train, 10)


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


@pytest.mark.parametrize(
    "make", [lambda: Param("\ud800", (4,)), lambda: FSDP({"\ud800": []}, lc.loopback(1)[0])]
)
def test_names_that_no_file_can_hold_are_refused_at_once(make: Any) -> None:
    """They were refused when the trained model was saved."""
    with pytest.raises(errors.LayoutError, match="UTF-8"):
        make()


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

    assert (
        lc.run_loopback(2, train, 10) == [[-8.0, -3.0]] * 2
    )  # of 4 x 2 micro-batches 8 and 3 have a gradient


@pytest.mark.parametrize("accumulate", ["local", "reduce"])
def test_a_forward_pass_alone_is_no_micro_batch(accumulate: Any) -> None:
    def train(comm: lc.Communicator) -> list[float]:
        with FSDP({"u": [Param("w", (4,))]}, comm, accumulate=accumulate) as engine:
            engine.fill(lambda name, box: 0.0)
            found = []

            def step(last: bool = True, backward: bool = True) -> None:
                with engine.step(last):
                    engine.open("u")
                    if backward:
                        engine.grads("u")["w"][...] = 6.0
                        engine.reduce("u")
                    engine.close("u")

            def update() -> None:
                engine.join()
                found.append(float(next(engine.slots()).grad[0]) if comm.rank == 0 else 6.0)
                engine.update(SGD(lr=1.0))

            for forward in range(3):
                for _ in range(forward):
                    step(backward=False)
                step()
                update()
            step(backward=False)
            step(last=False)
            step(last=False)
            step()
            update()
            step(last=False, backward=False)  # counts: a micro-batch whose gradients are zeros
            step()
            update()
            step(last=False)  # what was given before stays, and a pass alone in between is no micro-batch
            step(backward=False)
            step()
            update()
            return found

    assert lc.run_loopback(2, train, 20)[0] == [6.0, 6.0, 6.0, 6.0, 3.0, 6.0]


def test_ranks_that_count_other_micro_batches_are_noticed() -> None:
    def train(comm: lc.Communicator) -> None:
        with FSDP({"u": [Param("w", (4,))]}, comm) as engine:
            engine.fill(lambda name, box: 0.0)
            with engine.step():
                engine.open("u")
                if comm.rank:
                    engine.grads("u")  # and no reduce
                engine.close("u")
            for last in (False, True):
                with engine.step(last):
                    engine.open("u")
                    engine.reduce("u")
                    engine.close("u")
            with pytest.raises(errors.Disagree, match="reduce u of micro-batch"):
                engine.join()
            engine.reset()

    lc.run_loopback(2, train, 10)


# ---- names


@pytest.mark.parametrize("names", [("layers.0", "head"), ("#0", "#1"), (":#0", "a:b.c#1"), ("0", "..")])
@pytest.mark.parametrize("name", ["full", "sgo", "none"])
def test_any_unit_name_goes_with_ties(names: tuple[str, str], name: str, tmp_path: Path) -> None:
    first, second = names
    units = {
        first: [Param("w", (3,)), Param("v", (3,), tie="w")],
        "mid": [Param("x", (5,))],
        second: [Param("h", (3,), tie=f"{first}.w"), Param("x", (7,))],
    }

    def train(comm: lc.Communicator) -> list[list[float]]:
        with FSDP(units, comm, STRATEGIES[name], grad_limit=2, open_limit=3) as engine:
            engine.fill(lambda full, box: {"w": 1.0, "x": 2.0}[full[-1]])
            with engine.step():
                for unit in (second, "mid", first):
                    p = engine.open(unit, "backward")
                    assert {key: set(view.tolist()) for key, view in p.items()} == {
                        param.name: {2.0 if param.name == "x" else 1.0} for param in units[unit]
                    }
                    for view in engine.grads(unit).values():
                        view[...] += 1.0
                    if unit == first:
                        engine.reduce(second)
                        engine.reduce("mid")
                        engine.reduce(first)
                        for done in units:
                            engine.close(done)
            engine.join()
            engine.update(SGD(lr=1.0))
            engine.broadcast_updated_params()
            engine.save(tmp_path / "m")
            engine.load(tmp_path / "m")
            return [engine.full(n).tolist() for n in (f"{first}.v", "mid.x", f"{second}.h", f"{second}.x")]

    assert lc.run_loopback(2, train, 20) == [[[-2.0] * 3, [1.0] * 5, [-2.0] * 3, [1.0] * 7]] * 2


# ---- models that there is no room for


def test_a_unit_is_tied_to_one_that_is_tied_itself() -> None:
    """Opening it asked for the third unit as well, which is not open: a KeyError of this package's own."""
    units = {
        "a": [Param("w", (3,))],
        "b": [Param("v", (2,)), Param("w", (3,), tie="a.w")],
        "c": [Param("v", (2,), tie="b.v"), Param("x", (2,))],
    }
    start = {"a.w": 1.0, "b.v": 2.0, "c.x": 3.0}

    def train(comm: lc.Communicator) -> list[float]:
        with FSDP(units, comm) as engine:
            engine.fill(lambda name, box: start[name])
            with engine.step():
                for unit in ("c", "b", "a"):  # the gradient of each use is the parameter
                    opened = engine.open(unit, "backward")
                    for name, grad in engine.grads(unit).items():
                        grad += opened[name]
                    engine.reduce(unit)
                    engine.close(unit)
            engine.join()
            engine.update(SGD(lr=1.0))
            return [float(engine.full(name)[0]) for name in start]

    assert lc.run_loopback(2, train, 10) == [[1.0 - 2 * 1.0, 2.0 - 2 * 2.0, 0.0]] * 2


def test_a_tied_unit_that_could_never_be_opened_is_refused_at_once() -> None:
    units = {
        "a": [Param("w", (3,))],
        "b": [Param("w", (3,))],
        "h": [Param("x", (3,), tie="a.w"), Param("y", (3,), tie="b.w")],
    }

    def make(comm: lc.Communicator) -> None:
        for options in ({"open_limit": 2}, {"open_limit": 1, "prefetch": 0}):
            with pytest.raises(
                errors.ShardingError, match=r"'h' is open together with a, b, .* takes open_limit=3"
            ):
                FSDP(units, comm, **options)  # type: ignore[arg-type]
            FSDP(units, comm, ShardingStrategy.NoShard, **options).shut()  # type: ignore[arg-type]
        with FSDP(units, comm, open_limit=3) as engine:
            engine.fill(lambda name, box: 1.0)
            assert set(engine.open("h")) == {"x", "y"}
            engine.close("h")

    lc.run_loopback(2, make, 10)


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("error", [MemoryError, OSError])
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


def test_a_parameter_that_no_memory_holds_is_an_error() -> None:
    def make(comm: lc.Communicator) -> None:
        with pytest.raises(LowshardError, match=r"no memory|extents"):
            FSDP({"u": [Param("w", (1 << 50,))]}, comm)
        with pytest.raises(LowshardError, match=r"no memory|extents"):
            FSDP({f"u{i}": [Param("w", (1 << 58,))] for i in range(8)}, comm, ShardingStrategy.NoShard)

    lc.run_loopback(2, make, 10)


def test_no_memory_for_a_whole_parameter_is_an_error_on_every_rank() -> None:
    def look(comm: lc.Communicator) -> None:
        with FSDP(UNITS, comm) as engine:
            engine.fill(filler)
            if comm.rank == 1:
                engine._links.xp = _NoMemory()
            with pytest.raises(errors.CommError, match=r"no memory for the whole of 'l1\.w'"):
                engine.full("l1.w")
            engine._links.xp = np
            engine.reset()
            assert engine.full("l1.w").shape == (37, 53)

    lc.run_loopback(3, look, 10)


class _NoMemory:
    """NumPy without memory for one parameter."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any) -> Any:
        if shape == 37 * 53:
            raise MemoryError("none left")
        return np.empty(shape, dtype)
