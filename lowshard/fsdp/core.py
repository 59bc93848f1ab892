"""Internals of `FSDP`: its parts, and how an error on one rank is raised on all."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from lowshard import dtypes
from lowshard.argument import MOST_ELEMS, brief, choice, in_words, instance, real, whole
from lowshard.box import Box, full_box, shape_of
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import control_of
from lowshard.errors import (
    BufferMismatchError,
    CommError,
    LayoutError,
    LowshardError,
    NotJoined,
    NotOpen,
    PeerFailed,
    ShardingError,
    StepError,
    TimedOut,
)
from lowshard.foreign_array import host_of, view_in_call
from lowshard.fsdp.flat_plan import ALIGN_ELEMS, Piece, flat_boxes
from lowshard.fsdp.fsdp_strategy import Precision, ShardingStrategy
from lowshard.fsdp.gradient import Accumulate, Gradients
from lowshard.fsdp.groups import Groups
from lowshard.fsdp.norm import power_sum, value_of
from lowshard.fsdp.opening import Opener
from lowshard.fsdp.param import Param, Units
from lowshard.fsdp.slot import Slot
from lowshard.fsdp.step_buffer import Pool, plan_pool
from lowshard.fsdp.step_report import Log
from lowshard.fsdp.unit_layout import ModelPlan, Segment, Shape, UnitPlan

Array = Any  # a NumPy or CuPy array; CuPy ships no types
T = TypeVar("T")
_MOST_UNITS = 1 << 20
Order = Literal["fast", "tree", "rank"]


class Core:
    """The parts of `FSDP`; its docstring has the arguments."""

    def __init__(
        self,
        units: Units,
        comm: Communicator,
        strategy: ShardingStrategy = ShardingStrategy.FullShard,
        *,
        order: Order = "tree",
        precision: Precision | None = None,
        average: Literal["mean", "sum"] | float = "mean",
        open_limit: int = 2,
        prefetch: int = 1,
        grad_limit: int = 2,
        accumulate: Accumulate = "local",
        communicators: int = 1,
        align: int = ALIGN_ELEMS,
        check: Literal["off", "digest", "poison"] = "digest",
    ) -> None:
        self.strategy, self.precision = strategy, Precision() if precision is None else precision
        self._check, self._world = check, comm
        control_of(comm)
        with collective_step(comm, "FSDP") as step:
            settings = (order, average, open_limit, prefetch, grad_limit, accumulate, communicators, check)
            _check_settings(strategy, *settings)
            instance(self.precision, Precision, "FSDP: precision is a Precision or None", ShardingError)
            align = whole(align, "FSDP: align is a number of elements, 1 or more", LayoutError, 1, MOST_ELEMS)
            self.grid = strategy.grid(comm.size, comm.rank)
            self.plan = ModelPlan.plan(units, self.grid.shards, self.precision, align)
            slots = max(open_limit, prefetch + 1)
            self._shape = Shape.of(self.plan, strategy, self.grid, slots, grad_limit, order)
            _check_open_limit(self._shape, open_limit, prefetch)
            step.digest = self.plan.digest(strategy, self.precision, settings)
            step.said = lambda: _model_words(strategy, self.precision, units, settings, align)
        self._groups = Groups(comm, self.grid, communicators)
        self._pool = self._make_pool()
        self.pool = self._pool.array
        self._log = Log()
        self._opener = Opener(
            self._shape, self._pool, self._groups, self._log, open_limit, prefetch, check == "poison"
        )  # fmt: skip
        self._grads = Gradients(self._shape, self._pool, self._groups, self._log, accumulate, average)
        self._full_shard_bits = self._shape.full_shard_bits(accumulate)
        self._slots = {unit.name: self._slot_of(unit) for unit in self.plan.units if unit.trained is not None}
        self._broken: BaseException | None = None
        self._is_mixed = False  # an update ran on some ranks and not on others
        self._in_step = self._is_shut = False
        self._calls: list[str] = []
        self.updates = 0

    def _make_pool(self) -> Pool:
        """Return the pool; if a rank has no memory for it, all ranks raise and the groups are closed."""
        plan, home = plan_pool(self._shape), self._groups.shard
        try:
            with collective_step(self._world, "FSDP"):
                try:
                    return Pool(plan, self._world if home is None else home.comm)
                except (MemoryError, OSError) as error:
                    raise _no_memory(f"the model's buffer of {plan.total_bytes:,} bytes", error) from error
        except (PeerFailed, TimedOut):
            raise
        except LowshardError:
            self._groups.close()
            raise

    def _slot_of(self, unit: UnitPlan) -> Slot:
        assert unit.trained is not None
        pieces = unit.trained.plan.pieces(self.grid.shard_rank)
        shard = self._opener.shard(unit.name, unit.trained)
        return Slot(unit.name, shard, self._grads.result(unit), pieces, self._groups.xp)

    def _held(self) -> Iterator[tuple[str, UnitPlan, Segment, Piece, Array]]:
        """Iterate over this rank's pieces: full name, unit, segment, piece, 1-D view."""
        for unit in self.plan.units:
            for segment in unit.segments:
                shard = self._opener.shard(unit.name, segment)
                for piece in segment.plan.pieces(self.grid.shard_rank):
                    yield (
                        f"{unit.name}.{piece.name}",
                        unit,
                        segment,
                        piece,
                        shard[piece.shard_lo : piece.shard_hi],
                    )

    def _fill_unit(self, unit: UnitPlan, function: Callable[[str, Box], Any]) -> None:
        for name, held, segment, piece, view in self._held():
            if held is not unit:
                continue
            shape = segment.plan.by_name[piece.name].shape
            for box, lo, hi in flat_boxes(shape, piece.param_lo, piece.param_hi):
                part = view[lo - piece.param_lo : hi - piece.param_lo]
                _put(self._groups.xp, part, function(name, box), box, name)
        for param in unit.ignored:
            box = full_box(param.shape)
            name = f"{unit.name}.{param.name}"
            whole_view = self._opener.ignored(unit, param.name).reshape(-1)
            _put(self._groups.xp, whole_view, function(name, box), box, name)

    def _parameters_changed(self) -> None:
        """Note that all parameters are new."""
        self._opener.updated([unit.name for unit in self.plan.units])
        if self._shape.resident:
            self._guarded(self._opener.gather_stale)

    def _find(self, name: str) -> tuple[UnitPlan, Segment | None, str]:
        unit_name, _, param = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        unit = self.plan.by_name.get(unit_name)
        if unit is not None:
            for tied, other, target in unit.ties:
                if tied == param:
                    return self._find(f"{other}.{target}")
            for segment in unit.segments:
                if param in segment.plan.by_name:
                    return unit, segment, param
            if any(p.name == param for p in unit.ignored):
                return unit, None, param
        raise LayoutError(f"the model has no parameter {name!r}; full names are 'unit.param'")

    def _empty(self, elems: int, dtype: str, what: str) -> Array:
        """Return an uninitialised array; if there is no memory, raise here and on the other ranks' next call."""
        try:
            return self._groups.xp.empty(elems, dtypes.get(dtype).numpy)
        except MemoryError as error:
            self._fail(_no_memory(what, error))

    def _over_shards(self, values: np.ndarray, op: str) -> np.ndarray:
        channel, xp = self._groups.shard, self._groups.xp
        if channel is None:
            return values
        send = xp.asarray(values)
        recv = xp.empty_like(send)
        self._in_queue(lambda: channel.call("norm", "control", "all_reduce", send, recv, op, "tree"), "norm")
        return host_of(recv)

    def _peak(self, grads: list[Array]) -> float:
        """Return the largest magnitude in all shards, or NaN if any is NaN."""
        with np.errstate(invalid="ignore"):  # a NaN is the result
            peaks = [0.0, *(float(self._groups.xp.abs(grad).max()) for grad in grads if grad.size)]
        return float(self._over_shards(np.max(peaks, keepdims=True), "max")[0])

    def _power_sum(self, grads: list[Array], p: float, scale: float = 1.0) -> float:
        """Return the sum of |x / scale|^p over all shards."""
        xp = self._groups.xp
        words = sum((power_sum(grad, p, xp, scale) for grad in grads), power_sum(xp.zeros(0), p, xp))
        return value_of(self._over_shards(words, "sum"))

    def _in_queue(self, job: Callable[[], None], text: str) -> None:
        """Run a call in order with the gathers, and wait for it."""
        self._guarded(lambda: self._groups.gather_queue.submit(job, text).wait())

    def _guarded(self, call: Callable[[], T]) -> T:
        """Run a part of a step; all ranks raise its error."""
        try:
            return call()
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Make no call until `reset`: this rank has an error, which the others raise at their next call."""
        self._broken = self._broken or error
        self._groups.fail(error)

    def _fail(self, error: LowshardError) -> NoReturn:
        """Raise an error of this call here, and on the other ranks at their next."""
        self._break(error)
        raise error

    def _enter(self, what: str) -> None:
        """Return when all ranks have come to this call, with the same numbers in those before it."""
        calls, self._calls = [*self._calls, what], []
        self._guarded(lambda: self._groups.enter("; ".join(calls)))

    def _check_usable(self) -> None:
        if self._is_shut:
            raise StepError("the model was shut, and its groups were given back; make it anew")
        if self._broken is not None:
            cure = "call reset() on all ranks, then run the step again"
            if isinstance(self._broken, PeerFailed | TimedOut):
                cure = f"where ranks are gone, start the job again from what save() wrote; else {cure}"
            raise StepError(
                f"an earlier step failed ({type(self._broken).__name__}: {self._broken}); {cure}"
            ) from self._broken
        if self._is_mixed:
            raise StepError(
                "update ran on some ranks and not on others, so that parameters and optimizer state are of two "
                "versions; call load() on all ranks with what save() wrote, or make the model anew"
            )

    def _check_unit(self, name: str) -> None:
        self._check_usable()
        if not isinstance(name, str) or name not in self.plan.by_name:
            self._fail(NotOpen(f"the model has no unit {name!r}; it has {', '.join(self.plan.by_name)}"))

    def _checked_number(self, what: str, rule: str, value: object, low: float) -> float:
        """Return a number from `low` on, or infinity, as a float; raise for anything else."""
        found = math.nan
        if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer beyond float64
                found = float(value)
        if not found >= low:
            self._fail(StepError(f"{what} is {rule}, got {brief(value)}"))
        return found

    def _ensure_step(self) -> None:
        """Start an implicit last step outside of step()."""
        if not self._grads.micro_batches:
            self._grads.begin_step(True)

    def _check_joined(self, what: str) -> None:
        self._check_usable()
        unfinished = self._grads.unfinished()
        if unfinished:
            self._fail(NotJoined(
                f"{what}: the gradients of {', '.join(unfinished)} are not reduced yet; call reduce() for each unit in "
                "the last micro-batch, then join()"
            ))  # fmt: skip


_SETTINGS = (
    "order",
    "average",
    "open_limit",
    "prefetch",
    "grad_limit",
    "accumulate",
    "communicators",
    "check",
)


def _model_words(
    strategy: ShardingStrategy, precision: Precision, units: Units, settings: tuple[object, ...], align: int
) -> str:
    """Return all that must be equal on all ranks, as text for a message."""
    dtypes_set = {name: value for name, value in vars(precision).items() if value is not None}
    given = {**dict(zip(_SETTINGS, settings, strict=True)), "align": align, **dtypes_set}
    params = {f"{unit}.{param.name}": _param_words(param) for unit, of in units.items() for param in of}
    return f"{strategy}, {', '.join(f'{name} {value}' for name, value in given.items())}, {in_words(params)}"


def _param_words(param: Param) -> str:
    flags = {
        "not trainable": not param.trainable,
        "ignored": param.ignored,
        f"tied to {param.tie}": param.tie,
    }
    flags[f"keep {param.keep}"] = param.keep != 1
    return " ".join([f"{param.dtype}{list(param.shape)}", *(word for word, said in flags.items() if said)])


def _check_settings(
    strategy: object, order: str, average: object, open_limit: int, prefetch: int, grad_limit: int, accumulate: str,
    communicators: int, check: str,
) -> None:  # fmt: skip
    rule = "FSDP: strategy is a ShardingStrategy, such as .FullShard"
    instance(strategy, ShardingStrategy, rule, ShardingError)
    choice(order, ("tree", "rank", "fast"), "FSDP: order is 'tree', 'rank' or 'fast'", ShardingError)
    rule = "FSDP: average is 'mean', 'sum' or a number to divide by"
    if isinstance(average, str):
        choice(average, ("mean", "sum"), rule, ShardingError)
    else:
        real(average, rule, ShardingError)
    for name, value, least in (
        ("open_limit", open_limit, 1),
        ("grad_limit", grad_limit, 1),
        ("prefetch", prefetch, 0),
    ):
        rule = f"FSDP: {name} is a number of units from {least} to {_MOST_UNITS}"
        whole(value, rule, ShardingError, least, _MOST_UNITS)
    choice(accumulate, ("local", "reduce"), "FSDP: accumulate is 'local' or 'reduce'", ShardingError)
    whole(communicators, "FSDP: communicators is 1 or 2", ShardingError, 1, 2)
    choice(check, ("off", "digest", "poison"), "FSDP: check is 'off', 'digest' or 'poison'", ShardingError)


def _check_open_limit(shape: Shape, open_limit: int, prefetch: int) -> None:
    """Raise unless a unit and those it is tied to may be open together."""
    for unit in () if shape.keeps else shape.model.units:
        needed = 1 + len(unit.foreign)
        if needed > shape.open_slots:
            raise ShardingError(
                f"FSDP: unit {unit.name!r} is open together with {', '.join(unit.foreign)}, which it is tied to; that "
                f"takes open_limit={needed}, got open_limit={open_limit} and prefetch={prefetch}"
            )


def _no_memory(what: str, error: BaseException) -> CommError:
    return CommError(
        f"FSDP: there is no memory for {what} ({error}); take more ranks, smaller units or a narrower Precision"
    )


def _put(xp: Any, view: Array, value: Any, box: Box, name: str) -> None:
    shape = shape_of(box)
    rule = f"fill: {name} {box} is an array {list(shape)} or a number"
    value = view_in_call(value, f"fill: {name}")
    given = getattr(value, "shape", ())
    if isinstance(value, np.ndarray | np.generic):
        dtypes.get(value.dtype)
    elif not given and not isinstance(value, numbers.Real):  # NumPy takes None for NaN, and "3" for 3
        raise BufferMismatchError(f"{rule}, got {brief(value)}")
    if given not in (shape, ()):
        raise BufferMismatchError(f"{rule}, got {brief(given)}")
    try:
        if xp is not np and isinstance(value, np.ndarray | np.generic):  # CuPy assigns no array of the host
            value = xp.asarray(np.asarray(value).astype(view.dtype, copy=False))
        view[...] = value.reshape(-1) if given else value
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise BufferMismatchError(f"{rule}, got {brief(value)}") from None
