"""The whole model as data: units, their flat plans, ties and shards. No communication, no arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lowshard.content_hash import text_digest
from lowshard.errors import DTypeError, LayoutError
from lowshard.fsdp.flat_plan import FlatPlan
from lowshard.fsdp.fsdp_strategy import MXFP8, Formats, Grid, Precision, ShardingStrategy
from lowshard.fsdp.param import Param, Units, check_units, tie_target
from lowshard.kernels.reference import BLOCK_ELEMS

Array = Any  # a NumPy or CuPy array; CuPy ships no types


@dataclass(frozen=True)
class Segment:
    """The trainable or the frozen parameters of a unit: a part of its buffer that is sharded separately."""

    plan: FlatPlan
    start: int  # first element in the unit's buffer
    trainable: bool

    @property
    def stop(self) -> int:
        """The element of the unit's buffer after the last."""
        return self.start + self.plan.size


@dataclass(frozen=True)
class UnitPlan:
    """One unit."""

    name: str
    formats: Formats
    segments: tuple[Segment, ...]  # trainable parameters first, then frozen ones; either may be missing
    ties: tuple[
        tuple[str, str, str], ...
    ]  # names in this unit by what they stand for: (name, unit, parameter)
    ignored: tuple[Param, ...]  # every rank holds them whole

    @cached_property
    def elems(self) -> int:
        """Elements of the unit's buffer, padding included."""
        return sum(segment.plan.size for segment in self.segments)

    @cached_property
    def trained(self) -> Segment | None:
        """The trainable segment, or None."""
        return next((segment for segment in self.segments if segment.trainable), None)

    @cached_property
    def grad_elems(self) -> int:
        """Elements of a gradient of the unit, padding included."""
        return 0 if self.trained is None else self.trained.plan.size

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Other units whose storage this one shares."""
        return tuple(dict.fromkeys(unit for _, unit, _ in self.ties if unit != self.name))

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the unit's own parameters as views of its buffer, tied names within the unit included."""
        found: dict[str, Array] = {}
        for segment in self.segments:
            found |= segment.plan.views(flat[segment.start : segment.stop])
        found |= {name: found[target] for name, unit, target in self.ties if unit == self.name}
        return found

    def grad_views(self, flat: Array) -> dict[str, Array]:
        """Return the trainable parameters as views of a gradient's buffer."""
        found: dict[str, Array] = {} if self.trained is None else self.trained.plan.views(flat)
        found |= {
            name: found[target] for name, unit, target in self.ties if unit == self.name and target in found
        }
        return found


@dataclass(frozen=True)
class ModelPlan:
    """All units for a number of shards."""

    units: tuple[UnitPlan, ...]
    shards: int

    @classmethod
    def plan(cls, units: Units, shards: int, precision: Precision, align: int) -> ModelPlan:
        """Return the plan of a model."""
        check_units(units)
        made = []
        for name, params in units.items():
            held = [param for param in params if param.tie is None and not param.ignored]
            formats = precision.of(
                name, held or [p for p in params if p.tie is None] or [Param("none", (0,))]
            )
            if formats.wire == MXFP8 and align % BLOCK_ELEMS:
                raise LayoutError(
                    f"wire 'mxfp8' moves blocks of {BLOCK_ELEMS} elements, and a shard boundary would split one: align "
                    f"is a multiple of {BLOCK_ELEMS}, got {align}"
                )
            if formats.wire == MXFP8 and "float64" in (formats.compute, formats.master):
                raise DTypeError(
                    f"unit {name!r}: wire 'mxfp8' goes from and to floats of at most 32 bits, got compute "
                    f"{formats.compute} and master {formats.master}"
                )
            segments, start = [], 0
            for trainable in (True, False):
                chosen = [param for param in held if param.trainable == trainable]
                if chosen:
                    segments.append(Segment(FlatPlan.plan(chosen, shards, align=align), start, trainable))
                    start = segments[-1].stop
            ties = []
            for param in params:
                if param.tie is not None:
                    unit, _, target = tie_target(name, param, units).rpartition(".")
                    ties.append((param.name, unit, target))
            ignored = tuple(param for param in params if param.ignored)
            made.append(UnitPlan(name, formats, tuple(segments), tuple(ties), ignored))
        return cls(tuple(made), shards)

    @cached_property
    def by_name(self) -> Mapping[str, UnitPlan]:
        """The units by name."""
        return {unit.name: unit for unit in self.units}

    @cached_property
    def shared(self) -> frozenset[str]:
        """Units that parameters of other units are tied to."""
        return frozenset(name for unit in self.units for name in unit.foreign)

    @property
    def elems(self) -> int:
        """Elements of all parameters that are sharded, without padding."""
        return sum(segment.plan.elems for unit in self.units for segment in unit.segments)

    def digest(self, *settings: object) -> bytes:
        """Return a hash of the model and of all other settings that must be equal on all ranks."""
        text = json.dumps([[asdict(unit) for unit in self.units], self.shards, [repr(s) for s in settings]])
        return text_digest(text)


@dataclass(frozen=True)
class Part:
    """One part of the pool.

    Attributes:
        name: "open:l0" is of a unit, "open#0" is used by all units in turns.
        bytes: of it.
    """

    name: str
    bytes: int


@dataclass(frozen=True)
class PoolPlan:
    """The size of every buffer, the same on all ranks, known before anything is allocated.

    Parts, in bytes; an item is that of the dtype named, a unit counts with its padding:
    `master` (and `grad`): each unit's shard (of its trainable elements) in the master dtype; the whole unit where
    parameters rest whole. `open`: `open_limit` (or prefetch + 1) times the largest unit in the compute dtype, or each
    unit once where opened ones are kept. `grads`: `grad_limit` times the largest gradient. `wire` and `reduce`: one
    staging buffer where dtypes change on the way. `ignored`: unsharded parameters.
    """

    parts: tuple[Part, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(part.bytes for part in self.parts)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of all parts with this first word of their name."""
        return sum(part.bytes for part in self.parts if re.split("[:#]", part.name)[0] == name)


@dataclass(frozen=True)
class Shape:
    """The buffers and shortcuts that a strategy means for this model, decided once."""

    model: ModelPlan
    grid: Grid
    resident: bool  # parameters rest whole and are gathered after an update
    keeps: bool  # each unit has an open buffer of its own
    open_slots: int  # buffers shared by open units; 0 where each has its own
    grad_slots: int  # buffers shared by gradients; 0 where each unit has its own
    order: str

    @classmethod
    def of(
        cls, model: ModelPlan, strategy: ShardingStrategy, grid: Grid, open_slots: int, grad_slots: int, order: str
    ) -> Shape:  # fmt: skip
        """Return the shape of a strategy."""
        keeps = strategy.keeps_open or grid.shards == 1
        return cls(
            model, grid, strategy.resident, keeps, 0 if keeps else open_slots,
            0 if grid.shards == 1 else grad_slots, order,
        )  # fmt: skip

    def rests_whole(self, unit: UnitPlan) -> bool:
        """Whether the whole unit is in the master buffer, so that opening it moves nothing."""
        return unit.formats.direct and (self.resident or self.grid.shards == 1)

    def own_grad(self, unit: UnitPlan) -> bool:
        """Whether gradients are written where the optimizer reads them."""
        formats = unit.formats
        return self.grid.shards == 1 and formats.grad == formats.reduce == formats.master

    def full_shard_bits(self, accumulate: str) -> bool:
        """Whether gradients have the same bits as FullShard's with the same settings on as many ranks."""
        grid = self.grid
        if grid.replicas == 1:
            return True
        if self.order == "fast" or accumulate == "reduce":
            return False
        wide = all(unit.formats.item("reduce") >= 4 for unit in self.model.units if unit.trained is not None)
        return grid.shards == 1 or (self.order == "tree" and grid.follows_tree and wide)
