"""Gradients: their buffers, and their sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

from lowshard import dtypes
from lowshard.comm.work import Work
from lowshard.errors import NotJoined, OpenLimit, StepError
from lowshard.fsdp.groups import Groups
from lowshard.fsdp.opening import convert
from lowshard.fsdp.step_buffer import Pool, reduce_bytes
from lowshard.fsdp.step_report import Log
from lowshard.fsdp.tree_sum import TreeSum
from lowshard.fsdp.unit_layout import Shape, UnitPlan

Array = Any  # a NumPy or CuPy array; CuPy ships no types
Accumulate = Literal["local", "reduce"]


class State(Enum):
    """State of a unit's gradient; see `FSDP`."""

    EMPTY = "empty"
    LOCAL = "local"
    PARTIAL = "partial"
    REDUCING = "reducing"
    READY = "ready"


@dataclass
class Grad:
    """The gradient of one unit."""

    state: State = State.EMPTY
    slot: int | None = None  # which of the shared buffers it is written in
    written: bool = False  # its buffer holds a gradient of this micro-batch that is not reduced yet
    work: Work | None = None  # the reduction, until it was waited for
    reduced: bool = False  # in this step, or put to the sum
    early: bool = False  # put to the sum before reduce was called, because its buffer was wanted
    tree_sum: TreeSum | None = None  # partial sums of micro-batches


class Gradients:
    """Gradients of all units."""

    def __init__(
        self, shape: Shape, pool: Pool, groups: Groups, log: Log, accumulate: Accumulate, average: str | float
    ) -> None:  # fmt: skip
        self._shape, self._pool, self._groups, self._log = shape, pool, groups, log
        self._reduces_each, self._average = accumulate == "reduce", average
        self._units = {unit.name: unit for unit in shape.model.units}
        self._holders: list[str | None] = [None] * shape.grad_slots
        self.state = {name: Grad() for name in self._units}
        self._views: dict[tuple[str, int | None], Mapping[str, Array]] = {}
        self.micro_batches = 0
        self.last, self._gives = True, False  # whether this micro-batch gives any unit a gradient

    # ---- writing

    def views(self, name: str, zero: bool) -> Mapping[str, Array]:
        """Return this micro-batch's gradients of the trainable parameters as views, zeros at first."""
        unit = self._units[name]
        self._open(unit, zero)
        for other in unit.foreign:
            self._open(self._units[other], True)
        key = (name, self.state[name].slot)
        found = None if unit.foreign else self._views.get(key)
        if found is None:
            made = unit.grad_views(self._buffer(unit))
            for tied, other, target in unit.ties:
                owner = self._units[other]
                if other != name and owner.trained is not None and target in owner.trained.plan.by_name:
                    made[tied] = owner.grad_views(self._buffer(owner))[target]
            found = self._views[key] = MappingProxyType(made)
        return found

    def _open(self, unit: UnitPlan, zero: bool) -> None:
        grad = self.state[unit.name]
        if not grad.reduced:
            self._wait(unit.name)  # of the micro-batch before
        if grad.written and not grad.reduced:
            return
        if grad.reduced:
            raise StepError(
                f"unit {unit.name!r} was reduced in this step already: write all its gradients (also of what is tied "
                "to it), then reduce it once a step; other micro-batches are steps of their own, step(last=False)"
            )
        if grad.state in (State.READY, State.REDUCING):
            raise NotJoined(
                f"unit {unit.name!r} has the gradients of the step before, which no update has used; call join() and "
                "update(), or accumulate with step(last=False)"
            )
        if not unit.grad_elems:
            return
        if self._shared(unit) and grad.slot is None:
            grad.slot = self._slot(unit.name)
            self._holders[grad.slot] = unit.name
        grad.written = self._gives = True
        if grad.state is State.EMPTY:
            grad.state = State.LOCAL
        if zero:
            self._buffer(unit)[...] = 0
        else:
            self._clear_padding(unit)

    def _shared(self, unit: UnitPlan) -> bool:
        return self._shape.grad_slots > 0 and unit.name not in self._shape.model.shared

    def _slot(self, name: str) -> int:
        """Return a free buffer; if there is none, wait for the oldest reduction or add a gradient up."""
        for slot, holder in enumerate(self._holders):
            if holder is None:
                return slot
        for slot, holder in enumerate(self._holders):
            assert holder is not None
            grad = self.state[holder]
            if grad.work is not None:
                self._wait(holder)
            elif not self.last and not self._reduces_each and grad.written:
                self._fold(holder)
                grad.early = True
            else:
                continue
            return slot
        held = ", ".join(map(str, self._holders))
        raise OpenLimit(
            f"grad_limit={len(self._holders)} units hold gradients that are not reduced ({held}), so "
            f"{name!r} cannot have one: reduce one of them first, or make the model with a larger grad_limit"
        )

    def _buffer(self, unit: UnitPlan) -> Array:
        if self._shape.own_grad(unit):
            return self.result(unit)
        slot = self.state[unit.name].slot
        name = f"grads#{slot}" if self._shared(unit) else f"grads:{unit.name}"
        return self._pool.part(name, unit.formats.grad, unit.grad_elems)

    def result(self, unit: UnitPlan) -> Array:
        """Return this rank's part of the reduced gradient, 1-D, in the master dtype."""
        n = unit.grad_elems // self._shape.grid.shards
        return self._pool.part(f"grad:{unit.name}", unit.formats.master, n)

    def _clear_padding(self, unit: UnitPlan) -> None:
        assert unit.trained is not None
        buffer, at = self._buffer(unit), 0
        for entry in unit.trained.plan.entries:
            buffer[at : entry.offset] = 0
            at = entry.offset + entry.elems
        buffer[at:] = 0

    # ---- adding up

    def begin_step(self, last: bool) -> None:
        """Begin a micro-batch; a last one that gave no unit a gradient is not counted."""
        grads = self.state.values()
        if self.last and self.micro_batches and not self._gives:
            self.micro_batches -= 1
        if self.last and all(grad.state is State.EMPTY for grad in grads):
            self.micro_batches = 0
        self.last, self._gives = last, False
        self.micro_batches += 1
        for grad in self.state.values():
            grad.reduced = grad.early = False

    def end_step(self) -> None:
        """End a micro-batch: add up the gradients that are kept."""
        if not self.last:
            for name, grad in self.state.items():
                if grad.written and not grad.reduced:
                    self.reduce(name)

    def _tree_sum(self, unit: UnitPlan, elems: int, micro: int) -> TreeSum:
        """Return the sums of the micro-batches before this one; those without a gradient count as zeros."""
        grad = self.state[unit.name]
        if grad.tree_sum is None:
            grad.tree_sum = TreeSum(elems, dtypes.get(unit.formats.reduce).numpy, self._groups.xp)
        while grad.tree_sum.terms < micro - 1:
            grad.tree_sum.add(None)
        return grad.tree_sum

    def _fold(self, name: str) -> None:
        """Add this micro-batch's gradient to the sum on this rank, and free its buffer."""
        unit, grad = self._units[name], self.state[name]
        term = self._buffer(unit)
        if unit.formats.grad != unit.formats.reduce:
            # After the jobs that use this buffer; on a GPU the stream waits, and not the host.
            self._groups.reduce_queue.submit(lambda: None, f"what comes before {name!r}").wait()
            staged = self._operand(unit)
            convert(term, staged)
            term = staged
        self._tree_sum(unit, unit.grad_elems, self.micro_batches).add(term)
        grad.reduced = True
        self._free(name)

    def _free(self, name: str) -> None:
        grad = self.state[name]
        grad.written = False
        if grad.slot is not None:
            self._holders[grad.slot] = None
            grad.slot = None

    # ---- reducing

    def reduce(self, name: str) -> None:
        """Start the reduction of a unit, or add its gradient up if more micro-batches follow."""
        unit, grad = self._units[name], self.state[name]
        if not unit.grad_elems:
            return
        if grad.early:
            return
        if grad.reduced:
            raise StepError(
                f"reduce({name!r}): the unit was reduced in this step already; call it once a step"
            )
        if not grad.written:
            self._log.zero_reduces[name] += 1
            self._open(unit, True)
        if not self.last and not self._reduces_each:
            self._fold(name)
            return
        grad.reduced, grad.written = (
            True,
            False,
        )  # the next micro-batch writes it anew, or has no gradient of it
        grad.state = State.REDUCING if self.last else State.PARTIAL
        last, micro, divisor = self.last, self.micro_batches, self._divisor()
        buffer = self._buffer(unit)

        def job() -> None:
            self._log.note("reduce start", name)
            self._run(unit, buffer, last, micro, divisor)
            self._log.note("reduce end", name)

        grad.work = self._groups.reduce_queue.submit(job, f"the reduction of unit {name!r}")

    def _divisor(self) -> float:
        if self._average == "mean":
            return float(self._shape.grid.world * self.micro_batches)
        return 1.0 if self._average == "sum" else float(self._average)

    def _operand(self, unit: UnitPlan) -> Array:
        return self._pool.part("reduce", unit.formats.reduce, unit.grad_elems)

    def _run(self, unit: UnitPlan, buffer: Array, last: bool, micro: int, divisor: float) -> None:
        """Reduce one micro-batch: local sum, shard group, sum of the group's, replica group, division."""
        formats, grid, text = (
            unit.formats,
            self._shape.grid,
            f"the reduction of {unit.name!r} in micro-batch {micro}",
        )
        order = self._shape.order
        term = buffer
        if formats.grad != formats.reduce:
            term = self._operand(unit)
            convert(buffer, term)
            self._log.copied_bytes += term.nbytes
        if micro > 1 and not self._reduces_each:
            self._tree_sum(unit, unit.grad_elems, micro).finish(term)
        result = self.result(unit)
        out = self._out(unit, term, result)
        # A division belongs to the last sum, whichever that is; there the fold does it on the way.
        if self._groups.reduce is not None:
            fused = grid.replicas == 1 and divisor == grid.shards and not (self._reduces_each and micro > 1)
            op = "avg" if last and fused and divisor != 1 else "sum"
            self._groups.reduce.call(text, "reduce", "reduce_scatter", term, out, op, order)
            divisor = 1.0 if op == "avg" else divisor
        elif not self._shape.own_grad(unit) and formats.reduce == formats.master:
            out[...] = term
            self._log.copied_bytes += out.nbytes
        if self._reduces_each and not last:
            self._tree_sum(unit, out.size, micro).add(out)
            return
        if self._reduces_each and micro > 1:
            self._tree_sum(unit, out.size, micro).finish(out)
        if self._groups.replica is not None:
            op = "avg" if divisor == grid.replicas else "sum"
            self._groups.replica.call(text, "replica", "all_reduce", out, out, op, order)
            divisor = 1.0 if op == "avg" else divisor
        if divisor != 1:
            self._groups.xp.divide(out, out.dtype.type(divisor), out=out)
        if formats.reduce != formats.master:
            convert(out, result)
            self._log.copied_bytes += result.nbytes

    def _out(self, unit: UnitPlan, term: Array, result: Array) -> Array:
        """Return the output of the sums, in their dtype."""
        formats = unit.formats
        if formats.reduce == formats.master:
            return result
        if self._groups.reduce is None:
            return term
        skip = reduce_bytes(self._shape, unit) - result.size * formats.item("reduce")
        return self._pool.part("reduce", formats.reduce, result.size, skip)

    def _wait(self, name: str) -> None:
        grad = self.state[name]
        if grad.work is None:
            return
        work, grad.work = grad.work, None
        self._log.wait(work, name)
        if grad.state is State.REDUCING:
            grad.state = State.READY
        self._free(name)

    def join(self) -> None:
        """Wait for all reductions."""
        for name in self._units:
            self._wait(name)

    # ---- ends

    def unfinished(self) -> list[str]:
        """Return the units whose gradients are not ready for the optimizer."""
        return [
            name
            for name, grad in self.state.items()
            if grad.state in (State.LOCAL, State.PARTIAL, State.REDUCING)
        ]

    def ready(self) -> list[str]:
        """Return the units whose gradients are reduced."""
        return [name for name, grad in self.state.items() if grad.state is State.READY]

    def used(self) -> None:
        """Note that the optimizer has used the gradients."""
        self.micro_batches = 0
        for name, grad in self.state.items():
            self._free(name)
            grad.state, grad.reduced, grad.early = State.EMPTY, False, False
            if grad.tree_sum is not None:
                grad.tree_sum.clear()

    def reset(self) -> None:
        """Drop all gradients."""
        for grad in self.state.values():
            grad.work = None
        self.used()
        self.last = True

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of partial sums."""
        return sum(grad.tree_sum.bytes for grad in self.state.values() if grad.tree_sum is not None)
