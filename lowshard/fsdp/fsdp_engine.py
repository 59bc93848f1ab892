"""`FSDP`: fully sharded data parallelism over raw buffers."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

from lowshard.argument import brief
from lowshard.box import Box
from lowshard.comm import collective_step, share_text
from lowshard.comm.work import Work
from lowshard.errors import BadGrad, LayoutError, MismatchError, NotJoined, NotOpen, StaleParams, StepError
from lowshard.foreign_array import host_of
from lowshard.fsdp import model_state as saved
from lowshard.fsdp.core import Core
from lowshard.fsdp.norm import SMALLEST_SUM
from lowshard.fsdp.opening import Phase
from lowshard.fsdp.slot import Rule, Slot
from lowshard.fsdp.step_report import Report

Array = Any  # a NumPy or CuPy array; CuPy ships no types

_EPS = 1e-6
"""Added to the norm when gradients are clipped, as torch.nn.utils.clip_grad_norm_ does."""


class FSDP(Core):
    """A model whose parameters, gradients and optimizer state are sharded over ranks, without a framework.

    Parameters are views of flat buffers: `open` gathers a unit and gives them, `grads` gives views to write gradients
    into, `reduce` starts their sum over ranks, `update` runs an optimizer on this rank's part.

    With order="tree" and accumulate="local" FullShard, ShardGradOp and NoShard give the same bits on any number of
    ranks, in every precision; HybridShard gives them where its groups are parts of the tree, see `ShardingStrategy`,
    and `report().full_shard_bits` says whether it does. Where gradients are reduced in 32 bits or more, the bits at
    powers of two do not depend on the number of ranks either, nor on whether micro-batches lie on several ranks or
    follow each other on one, rank by rank.

    A unit's parameters go SHARDED -> open -> OPEN -> close -> SHARDED; where they rest whole, update makes them STALE
    and broadcast_updated_params OPEN. Its gradient goes EMPTY -> grads -> LOCAL -> reduce -> REDUCING -> join -> READY
    -> update -> EMPTY; in step(last=False) it stays LOCAL (or PARTIAL: accumulate="reduce").

    Every rank makes the same calls in the same order. A call that fails on a rank, a wrong one too, raises there, and
    on the other ranks at their next call that meets others; then all ranks call `reset`.

    Collective: all ranks of the communicator make it.

    Args:
        units: parameters by unit, in the order of the forward pass.
        comm: the world. The model splits groups of its own from it.
        strategy: what is sharded over whom.
        order: of sums: "tree" (see above), "rank", or "fast", the library's own, which promises no bits.
        precision: dtypes.
        average: "mean" divides a gradient by the number of all micro-batches on all ranks, once, after all sums; "sum"
            does not; a number divides by that.
        open_limit: units that may be open at a time, where opening gathers.
        prefetch: units that are gathered ahead.
        grad_limit: units that may have gradients which are written or being reduced.
        accumulate: what reduce does in step(last=False): "local" adds up whole gradients on the rank, "reduce" sums
            over the shard group at once and adds up shards.
        communicators: 2 lets reductions and gathers overlap each other. Ranks that make other calls then the others may
            wait in both, until the deadline.
        align: elements that parameters and shards begin at multiples of.
        check: "digest" compares what ranks are filled with; "poison" also fills what is closed with NaN; "off".

    Raises:
        LayoutError: invalid names, ties or keep blocks. DTypeError: dtypes that do not go together.
        BadGrid: the world is not a multiple of intra_node_size.
        ShardingError: a setting that is not one of the values listed, or an open_limit below what tied units need.
        CommError: a rank has no memory for the pool.
        MismatchError: the ranks give different models.

    Attributes:
        pool: the one buffer `[bytes]` uint8 that all parameters and gradients lie in; it never grows.
        plan: units and shards, as data.
        updates: how often the model was updated.
    """

    def __repr__(self) -> str:
        units, world = len(self.plan.units), self._world
        seat = f"rank {world.rank} of {world.size}"
        return f"<FSDP by {self.strategy}: {units} units, {self.updates} updates, {seat}>"

    # ---- values

    def fill(self, function: Callable[[str, Box], Any]) -> None:
        """Set parameters from a function of a full name and a box `((start, stop), ...)` of that parameter.

        Collective: all ranks of the communicator call this. The function is called for disjoint boxes that cover what
        this rank holds, and returns an array of the box's shape, or a number; it is cast to the master dtype.

        Raises:
            StepError: no function, or a step has failed and `reset` was not called.
            BufferMismatchError: an array of another shape.
            MismatchError: ranks that hold the same elements were given different ones.
            LowshardError: what the function raised on some rank.
        """
        if self._broken is not None or self._is_shut:
            self._check_usable()
        self._enter("fill")
        with collective_step(self._world, "fill"):
            if not callable(function):
                raise StepError(
                    f"fill takes a function of a parameter's name and a box, got {brief(function)}"
                )
            for unit in self.plan.units:
                self._fill_unit(unit, function)
        if self._check != "off":
            self.check_equal_start()
        self._parameters_changed()

    def check_equal_start(self) -> None:
        """Compare what replicas hold, bit for bit, and the ignored parameters of all ranks.

        Collective: all ranks of the communicator call this.

        Raises:
            MismatchError: two ranks that should hold the same elements hold different ones.
        """
        held, ignored = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        for unit in self.plan.units:
            for segment in unit.segments if self.grid.replicas > 1 else ():
                held.update(host_of(self._opener.shard(unit.name, segment)).view(np.uint8).data)
            for param in unit.ignored:
                array = host_of(self._opener.ignored(unit, param.name)).reshape(-1)
                ignored.update(array.view(np.uint8).data)
        rows = [text.split() for text in share_text(self._world, f"{held.hexdigest()} {ignored.hexdigest()}")]
        if any(
            row[0] != rows[rank % self.grid.shards][0]
            for rank, row in enumerate(rows)
            if self.grid.replicas > 1
        ):
            raise MismatchError(
                "all replicas start from the same parameters, but what they were filled with differs"
            )
        if any(row[1] != rows[0][1] for row in rows):
            raise MismatchError(
                "every rank holds ignored parameters whole, but what ranks were filled with differs"
            )

    def full(self, name: str) -> Array:
        """Return a whole parameter, a new array in the master dtype, on every rank.

        Collective: all ranks of the communicator call this.

        Raises:
            LayoutError: no such parameter. MismatchError: the ranks name different ones. CommError: there is no memory.
        """
        self._check_usable()
        try:
            unit, segment, param = self._find(name)
        except LayoutError as error:
            self._fail(error)
        self._enter(f"full {name}")
        if segment is None:
            return self._opener.ignored(unit, param).copy()
        entry = segment.plan.by_name[param]
        whole = self._empty(entry.elems, unit.formats.master, f"the whole of {name!r}")
        saved.gather_param(
            self._groups, self._in_queue, segment.plan, entry, self._opener.shard(unit.name, segment), whole
        )
        return whole.reshape(entry.shape)

    # ---- a step

    @contextmanager
    def step(self, last: bool = True) -> Iterator[FSDP]:
        """A micro-batch: forward and backward. With last=False gradients are kept for the next one.

        A last micro-batch that gives no unit a gradient is not counted for the mean: a forward pass alone. Steps do not
        lie within each other.

        Where the block raises, the step has failed on all ranks: they raise at their next call, and `reset` makes the
        model usable again. An error between steps reaches the others by `reset`.
        """
        self._check_usable()
        if not isinstance(last, (bool, np.bool_)):
            self._fail(StepError(f"step: last is True or False, got {brief(last)}"))
        if self._in_step:
            self._fail(
                StepError(
                    "step: micro-batches follow each other, and this step begins within another; let the `with` block "
                    "of that one end first"
                )
            )
        self._opener.begin_step()
        self._grads.begin_step(bool(last))
        self._in_step = True
        try:
            yield self
            self._grads.end_step()
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._in_step = False

    def open(self, unit: str, phase: Phase = "forward") -> Mapping[str, Array]:
        """Return a unit's parameters by name, whole, as views of the pool; starts to gather what comes next.

        Collective: all ranks of the communicator call this. Views are good until the unit is closed.

        Args:
            unit: its name.
            phase: "forward" or "backward": which units come next.

        Raises:
            StaleParams: parameters rest whole and were updated; call broadcast_updated_params first.
            OpenLimit: open_limit units are open.
        """
        self._check_unit(unit)
        if not isinstance(phase, str) or phase not in ("forward", "backward"):
            self._fail(StepError(f"phase is 'forward' or 'backward', got {phase!r}"))
        return self._guarded(lambda: self._opener.open(unit, phase))

    def close(self, unit: str, after: Any = None) -> None:
        """Close a unit: the memory of its parameters is reused.

        Args:
            unit: its name.
            after: on a GPU, CuPy's event or stream whose work still reads them; else the current stream's. The
                current stream waits for it, the host does not.

        Raises:
            NotOpen: the unit is not open.
        """
        self._check_unit(unit)
        if after is not None:
            self._groups.follow(after)
        self._guarded(lambda: self._opener.close(unit))

    def grads(self, unit: str, zero: bool = True) -> Mapping[str, Array]:
        """Return a unit's gradients of this micro-batch by name, as views to write or add into; zeros at first.

        Args:
            unit: its name; it is open.
            zero: False: the caller writes every element, so nothing is cleared first.

        Raises:
            NotOpen: the unit is not open. OpenLimit: too many units have gradients that were not reduced.
            NotJoined: the gradients of the step before were not used. StepError: reduced already in this step.
        """
        self._check_unit(unit)
        if not self._opener.is_open(unit):
            self._fail(NotOpen(f"grads({unit!r}): open the unit first, and close it after reduce"))
        if not isinstance(zero, (bool, np.bool_)):
            self._fail(StepError(f"grads: zero is True or False, got {brief(zero)}"))
        self._ensure_step()
        return self._guarded(lambda: self._grads.views(unit, bool(zero)))

    def add_grad(self, unit: str, name: str, array: Array) -> None:
        """Add an array to a parameter's gradient: for frameworks that return new arrays.

        Raises:
            BadGrad: another shape or dtype than the gradient's, or no such trainable parameter; else as `grads`.
        """
        views = self.grads(unit)
        view = views.get(name) if isinstance(name, str) else None
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        if view is None:
            self._fail(BadGrad(
                f"unit {unit!r} has no trainable parameter {brief(name)}; it has {', '.join(views) or 'none'}"
            ))  # fmt: skip
        if shape != view.shape or dtype != view.dtype:
            found = brief(array) if shape is None or dtype is None else f"an array of {dtype}{list(shape)}"
            self._fail(BadGrad(
                f"the gradient of {unit}.{name} is an array of {view.dtype}{list(view.shape)}, got {found}"
            ))  # fmt: skip
        view += array

    def reduce(self, unit: str) -> None:
        """Start the sum of a unit's gradients over ranks; the unit may be closed at once. No gradient counts as zeros.

        Collective: all ranks of the communicator call this.

        Raises:
            NotOpen: the unit is not open. StepError: it was reduced in this step already.
        """
        self._check_unit(unit)
        if not self._opener.is_open(unit):
            self._fail(NotOpen(f"reduce({unit!r}): reduce a unit before it is closed"))
        self._ensure_step()
        self._guarded(lambda: self._grads.reduce(unit))

    def join(self) -> None:
        """Wait for all reductions.

        Collective: all ranks of the communicator call this.

        Raises:
            MismatchError: ranks make another call, or clipped by another number.
        """
        self._check_usable()
        self._enter("join")
        self._guarded(self._grads.join)

    # ---- this rank's part

    def slots(self) -> Iterator[Slot]:
        """Iterate over this rank's parts of the units that have trainable parameters."""
        return iter(list(self._slots.values()))

    def norm(self, p: float = 2.0) -> float:
        """Return the p-norm of all gradients, over all shards; the same bits however they are sharded.

        NaN where any gradient is NaN, else Inf where one is Inf or the norm is beyond float64.

        Collective: all ranks of the communicator call this, with one p, which the next `join` compares.

        Raises:
            NotJoined: a gradient is not reduced. StepError: p is not a number above 0.
        """
        self._check_joined("norm")
        p = self._checked_number("p of a norm", "a number above 0, or inf", p, math.ulp(0.0))
        self._calls.append(f"norm {p}")
        ready = [self._slots[name].grad for name in self._grads.ready()]
        if p == math.inf:
            return self._peak(ready)
        total, scale = self._power_sum(ready, p), 1.0
        if total == math.inf or total < SMALLEST_SUM:  # on all ranks alike: powers may be beyond float64
            scale = self._peak(ready)
            if not 0 < scale < math.inf:
                return scale
            total = self._power_sum(ready, p, scale)
        with np.errstate(over="ignore"):
            return scale * (math.sqrt(total) if p == 2 else float(np.float64(total) ** (1 / p)))

    def clip(self, max_norm: float, p: float = 2.0) -> float:
        """Scale all gradients by min(1, max_norm / (norm + 1e-6)) and return their norm before it.

        Where the norm is Inf that leaves zeros, and NaN in place of Inf; where it is NaN all gradients become NaN. With
        max_norm=inf all gradients stay as they are.

        Collective: all ranks of the communicator call this, with one max_norm and p, which the next `join` compares.

        Raises:
            NotJoined: a gradient is not reduced. StepError: max_norm is below 0 or p not above 0, or not a number.
        """
        self._check_joined("clip")
        max_norm = self._checked_number("max_norm", "a number of 0 or more, or inf", max_norm, 0)
        norm = self.norm(p)
        self._calls.append(f"clip {max_norm}")
        factor = max_norm / (norm + _EPS)
        if max_norm != math.inf and not factor >= 1:  # also for NaN, which the gradients then show
            for name in self._grads.ready():
                grad = self._slots[name].grad
                with np.errstate(invalid="ignore"):  # Inf times 0 is NaN, as said
                    self._groups.xp.multiply(grad, grad.dtype.type(factor), out=grad)
        return norm

    def update(self, rule: Rule) -> None:
        """Run an optimizer on every slot whose gradient is reduced.

        Args:
            rule: a function of a `Slot`, such as `AdamW(lr=1e-3)`. It runs on this rank's part alone.

        Raises:
            NotJoined: a gradient is not reduced, or there is none. StepError: rule is not a function.
            StaleParams: the gradients were used already, or the last update was not yet broadcast.
        """
        self._check_joined("update")
        if not callable(rule):
            self._fail(StepError(f"update runs a function of a Slot, such as AdamW(lr=1e-3), got {rule!r}"))
        stale = [name for name, state in self._opener.state.items() if state.stale]
        ready = self._grads.ready()
        if stale:
            self._fail(StaleParams(
                f"update: {', '.join(stale)} were updated already; call broadcast_updated_params() after each update"
            ))  # fmt: skip
        if not ready and self.updates:
            self._fail(StaleParams("update: no gradient was reduced since the last update; run a step first"))
        if not ready:
            self._fail(
                NotJoined("update: no gradient was reduced yet; run a step with reduce() and join() first")
            )

        def run() -> None:
            for name in ready:
                slot = self._slots[name]
                slot.step += 1
                try:
                    rule(slot)
                except BaseException:
                    slot.step -= 1
                    self._opener.mark_updated(ready)
                    raise
            self.updates += 1
            self._grads.used()
            self._opener.updated(ready)

        self._guarded(run)

    def broadcast_updated_params(self) -> None:
        """Give every rank the parameters that the others updated: after update(), where parameters rest whole.

        Collective: all ranks of the communicator call this. With every other strategy it does nothing.
        """
        self._check_usable()
        self._guarded(self._opener.gather_stale)

    # ---- files, state, ends

    def state(self) -> saved.ShardState:
        """Return what this rank holds, by parameter: views, not copies."""
        return saved.shard_state(self)

    @overload
    def save(self, path: Any, *, wait: Literal[True] = True) -> None: ...

    @overload
    def save(self, path: Any, *, wait: Literal[False]) -> Work: ...

    def save(self, path: Any, *, wait: bool = True) -> Work | None:
        """Write parameters and optimizer state to one safetensors file, in their own shapes.

        Collective: all ranks of the communicator call this. The file says nothing of ranks or strategy. It is complete
        and synced when this returns; whatever fails, the old file or the new one is in place, whole.

        Args:
            path: the file.
            wait: False returns a `Work` when parameters and state have been copied, and writes in the background: the
                next step may begin. What holds for `lowshard.weights.save` holds here.

        Raises:
            NotJoined: a gradient is not reduced. Reduced ones may be there, and are no part of the file.
            CheckpointError: a state that is neither an array like the parameters nor a number, or two tensors of one
                name. CheckpointError, NotDurable, PeerFailed, TimedOut: as `lowshard.weights.save`.
        """
        self._check_joined("save")
        self._enter("save")  # fails at once on a rank that saves while others are in a step
        return saved.save(self, path, wait)

    def load(self, path: Any) -> None:
        """Read what `save` wrote, with any number of ranks and any strategy. The next step has the same bits.

        Collective: all ranks of the communicator call this; each reads its own part.

        Raises:
            CheckpointError: no such file, or it lacks a parameter, or has it in another shape or dtype.
        """
        if self._broken is not None or self._is_shut:
            self._check_usable()
        self._enter("load")
        saved.load(self, path)

    def reset(self) -> None:
        """Give up a step that failed: gradients are dropped, units closed, parameters stay as they are.

        Where an update ran on some ranks and failed on others, these are of two versions: all calls raise StepError
        until all ranks have called `load`. Where it failed at one unit on all ranks, the units before are updated and
        stay so; call `load` to undo that.

        Collective: all ranks of the communicator call this. Not after PeerFailed or TimedOut, when ranks are gone.
        """
        if self._is_shut:
            self._check_usable()
        self._groups.mend()
        self._opener.reset()
        self._grads.reset()
        self._calls, self._broken = [], None
        steps = [slot.step for slot in self._slots.values()]
        is_stale = any(state.stale for state in self._opener.state.values())
        *most, any_stale = self._groups.max_over_ranks([*steps, *(-step for step in steps), is_stale])
        n = len(steps)
        self._is_mixed = any(high != -low for high, low in zip(most[:n], most[n:], strict=True))
        if any_stale:  # a broadcast may have ended on some ranks alone
            self._opener.mark_updated(list(self._opener.state))

    def report(self) -> Report:
        """Return what this rank has done so far."""
        wire: Counter[str] = Counter()
        for channel in self._groups.channels:
            wire += channel.sent_bytes
        state_bytes = sum(
            getattr(value, "nbytes", 0) for slot in self._slots.values() for value in slot.state.values()
        )
        log = self._log
        return Report(
            dict(wire), dict(log.gathers), log.unused_gathers, dict(log.zero_reduces), dict(log.wait_s),
            log.copied_bytes, self._pool.plan, self._grads.accumulator_bytes, state_bytes, self._full_shard_bits,
            tuple(log.events),
        )  # fmt: skip

    def shut(self) -> None:
        """Close the model's groups. The `with` statement does so too.

        Collective: all ranks of the communicator call this.
        """
        if self._broken is None and not self._is_shut:
            self._groups.close()
            self._is_shut = True

    def __enter__(self) -> FSDP:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shut()
