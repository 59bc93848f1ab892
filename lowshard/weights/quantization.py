"""Quantised weights: how values lie in stored elements, which shards keep blocks whole, where scales go.

Sizes of the GGUF blocks: ggml's `ggml-common.h` (block_q4_0 and the rest), as the `gguf` package lists them.
MXFP8: OCP Microscaling Formats v1.0, one e8m0 scale for 32 values of the last axis. What MAX does with
scales is `scale_strategy`; what a `Weight` does is `Quantization.scale_box`, which follows the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, get_args

from lowshard.argument import MOST_DIMS, as_shape, brief, instance, items, one_of, whole, wholes
from lowshard.block_format import MXFP8, BlockFormat
from lowshard.box import Box, Interval
from lowshard.errors import ShardIndexError, ShardingError
from lowshard.weights.head import GroupedQKV, HeadAwareColumnwise, Segment, Segmented, StackedQKV
from lowshard.weights.shard_rules import Axiswise, Columnwise, Rowwise, merged
from lowshard.weights.sharding_strategy import ShardingStrategy

Granularity = Literal["none", "tensor", "row", "block"]
Shape = tuple[int, ...]

# ggml type -> values of a block, bytes of a block
_GGUF_BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """How a weight's values are stored, and what shares a scale. A value.

    Args:
        name: for messages.
        values: values of the last axis that one unit of storage holds; a unit is never cut.
        stored: stored elements of that unit.
        granularity: what a scale belongs to: "none" (no scale beside the weight), "tensor", "row", "block".
        block: values of a block along the last two axes, for "block".

    Raises:
        ShardingError: sizes below 1, a block without granularity "block", or that without a block.
    """

    name: str
    values: int = 1
    stored: int = 1
    granularity: Granularity = "none"
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        instance(self.name, str, "a quantisation's name is text", ShardingError)
        rule = "a quantisation has units and blocks of 1 or more elements"
        for name in ("values", "stored"):
            object.__setattr__(self, name, whole(getattr(self, name), f"{rule}: {name}", ShardingError, 1))
        if self.block is not None:
            object.__setattr__(self, "block", _block(self.block))
        _need_granularity(self.granularity)
        if (self.block is not None) != (self.granularity == "block"):
            raise ShardingError(
                f"granularity 'block' comes with a block (rows, columns), no other does; got {self.granularity!r} "
                f"and {self.block}"
            )

    @classmethod
    def packed(
        cls, bits: int, granularity: Granularity = "none", block: tuple[int, int] | None = None
    ) -> Quantization:
        """Return values of 4 bits (two a byte) or 6 bits (four in three bytes), packed along the last axis."""
        rule = "packed values have 4 or 6 bits"
        if whole(bits, rule, ShardingError) not in (4, 6):
            raise ShardingError(f"{rule}, got {bits}")
        unit = (2, 1) if bits == 4 else (4, 3)
        return cls(f"{bits}-bit", *unit, granularity, block)

    @classmethod
    def gguf(cls, kind: str) -> Quantization:
        """Return the byte blocks of a GGUF type (Q4_1, Q6_K, ...); their scales lie inside.

        Raises:
            ShardingError: a type without blocks, or one that is not known.
        """
        one_of(kind, _GGUF_BLOCKS, "a GGUF block type", ShardingError)
        return cls(f"GGUF {kind}", *_GGUF_BLOCKS[kind])

    @classmethod
    def scaled(cls, granularity: Granularity, block: tuple[int, int] | None = None) -> Quantization:
        """Return one stored element a value (fp8, int8) with scales by tensor, row or block."""
        return cls(f"{granularity}-scaled", 1, 1, granularity, block)

    @classmethod
    def of(cls, form: BlockFormat) -> Quantization:
        """Return how weights of a block format are cut."""
        instance(form, BlockFormat, "a block format is a BlockFormat", ShardingError)
        if len(form.block) > 2:
            raise ShardingError(f"weights have blocks of one axis or two, {form.name} has {form.block}")
        rows, columns = (1, *form.block)[-2:]
        return cls(form.name, *form.unit, "block", (rows, columns))

    @classmethod
    def mxfp8(cls) -> Quantization:
        """Return MXFP8: e8m0 scales of 32 values of the last axis."""
        return cls.of(MXFP8["e4m3"])

    # ---- shapes

    def value_shape(self, stored_shape: Shape) -> Shape:
        """Return the shape in values of a stored shape.

        Raises:
            ShardingError: the last axis holds no whole number of units.
        """
        stored_shape = _stored(stored_shape)
        if self.stored == self.values == 1:
            return stored_shape
        if not stored_shape or stored_shape[-1] % self.stored:
            raise ShardingError(
                f"{self.name} stores {self.values} values in {self.stored} elements, so the last axis of a weight "
                f"is a multiple of {self.stored}, got shape {stored_shape}"
            )
        return (*stored_shape[:-1], stored_shape[-1] // self.stored * self.values)

    def blocks(self, ndim: int) -> tuple[int | None, ...]:
        """Return, for each axis of a weight, the values that share a scale; None: all of them do.

        Raises:
            ShardingError: a number of axes that no weight has, or that has no rows or blocks.
        """
        ndim = whole(ndim, f"a weight has 0 to {MOST_DIMS} axes", ShardingError, 0, MOST_DIMS)
        if self.granularity in ("row", "block") and not ndim:
            raise ShardingError(f"{self.name}: a weight of 0 axes has no {self.granularity}s")
        if self.granularity == "row":
            return (*[1] * (ndim - 1), None)
        if self.granularity == "block":
            assert self.block is not None
            if ndim < 2 and self.block[0] != 1:
                raise ShardingError(f"{self.name} has blocks of two axes, a weight of {ndim} has not")
            return (*[1] * (ndim - 2), *self.block) if ndim > 1 else (self.block[1],)
        return (None,) * ndim

    def scale_shape(self, stored_shape: Shape) -> Shape:
        """Return the shape of the scales: `()` for a tensor's, `[..., 1]` for rows, one a block for blocks."""
        if self.granularity in ("none", "tensor"):
            return ()
        shape = self.value_shape(stored_shape)
        return tuple(
            1 if b is None else -(-n // b) for n, b in zip(shape, self.blocks(len(shape)), strict=True)
        )

    # ---- shards

    def pieces(self, strategy: ShardingStrategy, stored_shape: Shape, index: int) -> list[Box]:
        """Return the stored boxes of a device, each checked: no unit and no block is cut.

        Sharding by heads or segments of the last axis is meant in values, whatever their storage.

        Raises:
            ShardingError: a shard ends inside a unit or a block; the text names what to do instead.
            LowshardError: as `ShardingStrategy.pieces`.
        """
        instance(strategy, ShardingStrategy, _STRATEGY, ShardingError)
        stored_shape = _stored(stored_shape)
        found = merged(self._value_pieces(strategy, stored_shape, index), strategy.concat_axis)
        wrong = self._first_wrong(found, stored_shape)
        if wrong is not None:
            axis, at, unit = wrong
            what = "packed element" if unit == self.values and self.stored == 1 else "block"
            raise ShardingError(
                f"{strategy}: device {index} would be cut at value {at} of axis {axis}, inside a {what} of {unit} "
                f"values ({self.name}): {self._alternative(strategy, stored_shape, unit)}"
            )
        return [self._to_stored(box) for box in found]

    def scale_box(self, box: Box, stored_shape: Shape) -> Box:
        """Return the scales of a stored box whose cuts are whole; none along an axis of which it holds nothing."""
        if self.granularity in ("none", "tensor"):
            return ()
        stored_shape = _stored(stored_shape)
        rule = f"a box of a weight {stored_shape} has an interval 0 <= start <= stop for each axis"
        box = tuple(_pair(part, rule) for part in items(box, rule, ShardingError))
        if len(box) != len(stored_shape) or any(b > n for (_, b), n in zip(box, stored_shape, strict=True)):
            raise ShardingError(f"{rule}, got {brief(box)}")
        found: list[Interval] = []
        values = self._to_values(box)
        for (start, stop), block in zip(values, self.blocks(len(stored_shape)), strict=True):
            if block is None:
                found.append((0, 1))
            else:
                found.append((start // block, -(-stop // block) if start < stop else start // block))
        return tuple(found)

    def _value_pieces(self, strategy: ShardingStrategy, stored_shape: Shape, index: int) -> list[Box]:
        ndim, axis = len(stored_shape), strategy.sharded_axis
        in_values = isinstance(strategy.shard, (HeadAwareColumnwise, Segmented, GroupedQKV))
        if in_values and axis is not None and axis % max(ndim, 1) == ndim - 1:
            return strategy.pieces(self.value_shape(stored_shape), index)
        self.value_shape(stored_shape)
        return [self._to_values(box) for box in strategy.pieces(stored_shape, index)]

    def _first_wrong(self, boxes: list[Box], stored_shape: Shape) -> tuple[int, int, int] | None:
        shape = self.value_shape(stored_shape)
        blocks = self.blocks(len(shape))
        for box in boxes:
            for axis, (start, stop) in enumerate(box):
                units = [b for b in (blocks[axis], self.values if axis == len(shape) - 1 else 1) if b]
                unit = lcm(*units) if units else 1
                if start < stop:
                    for at in (start, stop):
                        if at % unit and at != shape[axis]:
                            return axis, at, unit
        return None

    def _alternative(self, strategy: ShardingStrategy, stored_shape: Shape, unit: int) -> str:
        """Return what to do instead: whole blocks over as many devices where they divide the axis, else replicate."""
        axis, count, rule = strategy.sharded_axis, strategy.num_devices, strategy.shard
        assert axis is not None
        shape = self.value_shape(stored_shape)
        extent = shape[axis % len(shape)]
        whole = lcm(unit, rule.head_dim) if isinstance(rule, HeadAwareColumnwise) else unit
        is_even = isinstance(rule, (Rowwise, Columnwise, Axiswise, HeadAwareColumnwise))
        if is_even and whole and extent and extent % whole == 0:
            return (
                f"cut at multiples of {unit}, with ShardingStrategy.segmented({count}, {axis % len(shape)}, "
                f"[Segment({extent}, num_heads={extent // whole})])"
            )
        return f"use fewer devices, or replicate it: replicate({count})"

    def _to_values(self, box: Box) -> Box:
        if not box or self.stored == self.values:
            return box

        # A stored position inside a unit has no whole value; the floor lies inside the unit too, unless it is
        # its first value: then the value behind it does.
        def value(at: int) -> int:
            units, rest = divmod(at, self.stored)
            return units * self.values + (max(1, rest * self.values // self.stored) if rest else 0)

        start, stop = box[-1]
        return (*box[:-1], (value(start), value(stop)))

    def _to_stored(self, box: Box) -> Box:
        if not box or self.stored == self.values:
            return box
        start, stop = box[-1]
        return (*box[:-1], (start // self.values * self.stored, stop // self.values * self.stored))


# ---- what MAX does with scales


def scale_strategy(
    strategy: ShardingStrategy,
    granularity: Granularity,
    weight_shape: Shape,
    block: tuple[int, int] | None = None,
) -> ShardingStrategy:
    """Return the strategy that MAX's Linear layer gives a weight's scales.

    Its divisibility tests say nothing of alignment (320 rows in blocks of 128 over 3 devices pass, and rows 107
    to 127 get a wrong scale), so a `Weight` shards scales by their blocks instead. Where both are defined and no
    block is split they agree.

    Raises:
        ShardingError: scales do not divide over the devices, or segments do not over the blocks; no scales, or an
            axis that the weight lacks.
    """
    instance(strategy, ShardingStrategy, _STRATEGY, ShardingError)
    _need_granularity(granularity)
    weight_shape = as_shape(
        weight_shape, "the shape of a weight is its extents, each 0 or more", ShardingError
    )
    block = None if block is None else _block(block)
    k, rule = strategy.num_devices, strategy.shard
    if strategy.is_replicate or granularity == "tensor":
        return ShardingStrategy.replicate(k)
    if granularity == "none":
        raise ShardingError("granularity 'none' has no scales to cut")
    ndim = len(weight_shape)
    if isinstance(rule, Segmented) and not -ndim <= rule.at < ndim:
        raise ShardIndexError(f"{rule} cuts axis {rule.at}, a weight of shape {weight_shape} has {ndim}")
    columns = isinstance(rule, (Columnwise, HeadAwareColumnwise)) or (
        isinstance(rule, Segmented) and rule.at % ndim == ndim - 1 > 0
    )
    if granularity == "row":
        return ShardingStrategy.replicate(k) if columns else strategy
    if block is None:
        raise ShardingError("granularity 'block' comes with a block (rows, columns)")
    if len(weight_shape) < 2:
        raise ShardingError(f"blocks have two axes, and so has a weight or more, got shape {weight_shape}")
    rows_columns = tuple(-(-n // b) for n, b in zip(weight_shape[-2:], block, strict=True))
    if isinstance(rule, Segmented):
        place = rule.at % ndim - (ndim - 2)  # blocks lie along the last two axes
        return _segmented_scales(strategy, rule, block[place] if place >= 0 else 1)
    dim = 1 if columns else 0
    if isinstance(rule, (Rowwise, Columnwise, HeadAwareColumnwise)) and rows_columns[dim] % k:
        raise ShardingError(f"scale dim {dim} of {rows_columns} does not divide over {k} devices")
    if isinstance(rule, HeadAwareColumnwise):
        if rule.head_dim % block[1] == 0:
            return ShardingStrategy.head_aware_columnwise(k, rule.num_heads, rule.head_dim // block[1])
        return ShardingStrategy.columnwise(k)
    if isinstance(rule, StackedQKV):
        if rule.head_dim % block[0]:
            raise ShardingError(f"heads of {rule.head_dim} rows are not a multiple of blocks of {block[0]}")
        return ShardingStrategy.stacked_qkv(k, rule.num_heads, rule.head_dim // block[0])
    return strategy


_STRATEGY = "a weight is cut by a ShardingStrategy"


def _stored(shape: Shape) -> Shape:
    return as_shape(shape, "the stored shape of a weight is its extents, each 0 or more", ShardingError)


def _block(block: object) -> tuple[int, int]:
    rule = "a block is (rows, columns), each 1 or more"
    found = wholes(block, rule, ShardingError, 1)
    if len(found) != 2:
        raise ShardingError(f"{rule}, got {brief(block)}")
    return found[0], found[1]


def _pair(part: object, rule: str) -> tuple[int, int]:
    found = wholes(part, rule, ShardingError, 0)
    if len(found) != 2 or found[0] > found[1]:
        raise ShardingError(f"{rule}, got {brief(part)}")
    return found[0], found[1]


def _need_granularity(given: object) -> None:
    names = get_args(Granularity)
    one_of(given, names, "a granularity", ShardingError)


def _segmented_scales(strategy: ShardingStrategy, rule: Segmented, size: int) -> ShardingStrategy:
    found = []
    for segment in rule.segments:
        head_dim = segment.size // segment.num_heads if segment.num_heads else segment.size
        if segment.size % size or head_dim % size:
            raise ShardingError(
                f"segment {segment} is not a multiple of blocks of {size} (its heads neither, if it has any)"
            )
        found.append(Segment(segment.size // size, segment.num_heads))
    return ShardingStrategy.segmented(strategy.num_devices, rule.at, found)


@dataclass(frozen=True)
class ExpertScales:
    """The block scales that one device of a stacked gate-up and down projection keeps."""

    weight_half: Interval
    """Rows of each half of the gate-up weight (columns of the down weight)."""
    gate: Interval
    up: Interval
    down: Interval
    phase: int
    """Rows of the up half's first block that lie before its first row: 0 where blocks and cuts agree."""


def expert_scales(moe_dim: int, block: int, num_devices: int, index: int) -> ExpertScales:
    """Return which block scales MAX's mixture-of-experts layer keeps on a device.

    It takes every block that a range touches, so neighbours may hold the same block, and a shard may start
    inside one: a kernel must then know `phase`.

    Raises:
        ShardingError: a size that is not a number of 1 or more, or no such device.
    """
    block = whole(block, "a block has 1 row or more", ShardingError, 1)
    moe_dim = whole(moe_dim, "moe_dim is a number of rows, 0 or more", ShardingError, 0)
    ((start, stop),) = ShardingStrategy.rowwise(num_devices).pieces((moe_dim,), index)[0]

    def touched(a: int, b: int) -> Interval:
        return a // block, -(-b // block)

    return ExpertScales(
        (start, stop),
        touched(start, stop),
        touched(moe_dim + start, moe_dim + stop),
        touched(start, stop),
        (moe_dim + start) % block,
    )
