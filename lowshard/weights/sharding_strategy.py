"""Strategies: which slices of a weight each device holds. MAX's ten, and `grouped_qkv`.

The slices are those of `max.graph.ShardingStrategy` (modular/modular, `max/graph/weight.py`): n over k devices
is sharded with `base, rem = divmod(n, k)`, the first `rem` devices hold one more, and empty shards are legal. What
that code lets pass `pieces` lets pass too (a head split inside a packed byte, say); `layout`, `Weight.shard` and
`shard_module` check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowshard.argument import as_shape, brief, items, truth, whole, wholes
from lowshard.box import Box
from lowshard.errors import LayoutError, ShardIndexError, ShardingError
from lowshard.mesh import MOST_RANKS
from lowshard.tiling import Tiling
from lowshard.weights.head import GroupedQKV, HeadAwareColumnwise, Segment, Segmented, StackedQKV
from lowshard.weights.shard_rules import (
    Axiswise,
    Columnwise,
    ExpertParallel,
    GateUp,
    Replicate,
    Rowwise,
    Rule,
    TensorParallel,
)

_SHAPE = "the shape of a weight is a sequence of extents >= 0"
ShardFunction = Callable[[Any, int, int], Any]


def _made_by(constructor: str, kind: type[Rule]) -> property:
    """Return a property that says whether a strategy is of a kind."""
    return property(lambda self: isinstance(self.shard, kind), doc=f"Whether it was made by `{constructor}`.")


@dataclass(frozen=True)
class ShardingStrategy:
    """How a weight is sharded over devices. A value: strategies of equal rules are equal.

    Make one with a class method. A function of your own, `shard(weight, index, num_devices)`, works too: it is
    called with what the strategy is called with and returns the device's part. Give it a method
    `pieces(shape, index, num_devices)` if `layout` is to work.

    Args:
        num_devices: devices the weight is sharded over.
        shard: the rule.

    Raises:
        ShardingError: fewer than one device, or a rule that cannot be called. No constructor looks at a shape.
    """

    num_devices: int
    shard: ShardFunction

    def __post_init__(self) -> None:
        rule = "a strategy is over 1 or more devices: num_devices"
        object.__setattr__(self, "num_devices", whole(self.num_devices, rule, ShardingError, 1, MOST_RANKS))
        if not callable(self.shard):
            raise ShardingError(
                f"shard is a function of (weight, index, num_devices), got {type(self.shard).__name__}: write "
                "ShardingStrategy.rowwise(4), or pass a function"
            )

    # ---- the constructors

    @classmethod
    def rowwise(cls, num_devices: int) -> ShardingStrategy:
        """Cut axis 0: the output features of a weight `[out, in]`."""
        return cls(num_devices, Rowwise())

    @classmethod
    def columnwise(cls, num_devices: int) -> ShardingStrategy:
        """Cut axis 1: the input features of a weight `[out, in]`."""
        return cls(num_devices, Columnwise())

    @classmethod
    def axiswise(cls, axis: int, num_devices: int) -> ShardingStrategy:
        """Cut any axis; a negative one counts from the end."""
        return cls(num_devices, Axiswise(axis))

    @classmethod
    def replicate(cls, num_devices: int) -> ShardingStrategy:
        """Give every device the whole weight."""
        return cls(num_devices, Replicate())

    @classmethod
    def head_aware_columnwise(cls, num_devices: int, num_heads: int, head_dim: int) -> ShardingStrategy:
        """Cut axis 1 between heads, for an output projection `[out, num_heads * head_dim]`.

        A width of half (three quarters) of that is taken for values of 4 (6) bits, packed in bytes.
        """
        return cls(num_devices, HeadAwareColumnwise(num_heads, head_dim))

    @classmethod
    def stacked_qkv(cls, num_devices: int, num_heads: int, head_dim: int) -> ShardingStrategy:
        """Cut each of three equal sections of axis 0 between heads: query, key and value, stacked."""
        return cls(num_devices, StackedQKV(num_heads, head_dim))

    @classmethod
    def gate_up(cls, num_devices: int, axis: int = 2, *, interleaved: bool = False) -> ShardingStrategy:
        """Cut each half of an axis: a gate projection and an up projection, stacked.

        interleaved: gate and up alternate along the axis (g0, u0, g1, u1, ..., as in gpt-oss), and pairs stay whole.
        """
        return cls(
            num_devices, GateUp(axis, truth(interleaved, "interleaved is True or False", ShardingError))
        )

    @classmethod
    def segmented(
        cls, num_devices: int, axis: int, segments: Sequence[Segment | Mapping[str, Any]]
    ) -> ShardingStrategy:
        """Cut each of several sections of an axis on its own; those with heads between heads.

        Args:
            num_devices: how many parts.
            axis: which axis; it may count from the end.
            segments: a Segment(size, num_heads=None) for each section in order, or such a mapping.

        Raises:
            ShardingError: an argument that is none of these. No shape is looked at here.
        """
        listed = items(segments, "segments are a sequence of Segment(size, num_heads=None)", ShardingError)
        return cls(num_devices, Segmented(axis, tuple(map(Segment.of, listed))))

    @classmethod
    def expert_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Mark a module whose whole experts are distributed; for `shard_module`."""
        return cls(num_devices, ExpertParallel())

    @classmethod
    def tensor_parallel(cls, num_devices: int) -> ShardingStrategy:
        """Mark a module each of whose weights is sharded as its name says; for `shard_module`."""
        return cls(num_devices, TensorParallel())

    @classmethod
    def grouped_qkv(
        cls,
        num_devices: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        few_kv: Literal["replicate", "empty", "refuse"] = "replicate",
        section: Literal["qkv", "q", "kv"] = "qkv",
        axis: int = 0,
    ) -> ShardingStrategy:
        """Cut grouped-query attention so that a key-value head is always where its queries are.

        Key-value heads are sharded balanced, and the queries of each go with it. With fewer key-value heads than
        devices, "replicate" gives several devices one key-value head each and shards its queries between them,
        "empty" leaves devices without any head, "refuse" raises.

        Args:
            num_devices: devices the weight is sharded over.
            num_heads: query heads, a multiple of num_kv_heads.
            num_kv_heads: key-value heads.
            head_dim: elements of a head.
            few_kv: what to do with fewer key-value heads than devices.
            section: what the axis holds: "qkv" queries, keys and values stacked; "q" queries alone (also the
                input of an output projection, with axis 1); "kv" keys or values alone.
            axis: the axis that is cut.

        Raises:
            ShardingError: the counts do not fit one another, or few_kv is "refuse" and heads are too few.
        """
        rule = GroupedQKV(num_heads, num_kv_heads, head_dim, few_kv, section, axis)
        made = cls(num_devices, rule)
        rule.check_devices(made.num_devices)
        return made

    # ---- what it is

    is_rowwise = _made_by("rowwise", Rowwise)
    is_colwise = _made_by("columnwise", Columnwise)
    is_axiswise = _made_by("axiswise", Axiswise)
    is_replicate = _made_by("replicate", Replicate)
    is_head_aware_colwise = _made_by("head_aware_columnwise", HeadAwareColumnwise)
    is_stacked_qkv = _made_by("stacked_qkv", StackedQKV)
    is_gate_up = _made_by("gate_up", GateUp)
    is_segmented = _made_by("segmented", Segmented)
    is_expert_parallel = _made_by("expert_parallel", ExpertParallel)
    is_tensor_parallel = _made_by("tensor_parallel", TensorParallel)
    is_grouped_qkv = _made_by("grouped_qkv", GroupedQKV)

    @property
    def sharded_axis(self) -> int | None:
        """The axis that is sharded, as it was given; None where there is none (replicate, markers, functions)."""
        return self.shard.axis if isinstance(self.shard, Rule) else None

    @property
    def concat_axis(self) -> int:
        """The axis along which `pieces` are joined; 0 where only one piece comes."""
        return self.sharded_axis or 0

    # ---- what each device holds

    def pieces(self, shape: Sequence[int], index: int) -> list[Box]:
        """Return the boxes of device `index`, to be joined along `concat_axis`.

        Nothing is checked that MAX does not check, so boxes may leave out columns or split a packed byte.

        Raises:
            ShardIndexError: the shape lacks the axis (an IndexError), or index is not below num_devices.
            ShardingError: the shape does not fit the rule (a ValueError), or the rule is a function without
                pieces, or one whose pieces are no boxes.
            MarkerError: tensor_parallel or expert_parallel (a NotImplementedError).
        """
        index = self._checked_index(index)
        extents = as_shape(shape, _SHAPE, ShardingError)
        found = getattr(self.shard, "pieces", None)
        if found is None:
            raise ShardingError(
                f"the function {self.shard!r} does not say which boxes it takes: give it a method "
                "pieces(shape, index, num_devices), or use a strategy that lowshard knows"
            )
        boxes = found(extents, index, self.num_devices)
        return list(boxes) if isinstance(self.shard, Rule) else _own_boxes(boxes, len(extents), self.shard)

    def __call__(self, weight: Any, index: int) -> Any:
        """Return the part of a weight (an array or a `Weight`) that device `index` holds; a copy if in pieces.

        Raises:
            As `pieces`.
        """
        index = self._checked_index(index)
        part = getattr(weight, "part", None)  # a Weight knows its blocks
        if part is not None:
            return part(self, index)
        return self.shard(weight, index, self.num_devices)

    def layout(self, shape: Sequence[int], dtype: object = "float32") -> Tiling:
        """Return which boxes every device holds and where they lie in its array: what a plan moves.

        Raises:
            LayoutError: the rule does not fit the shape, so that elements are on no device.
            LowshardError: as `pieces`.
        """
        shape = as_shape(shape, _SHAPE, ShardingError)
        return self.tiling_of([self.pieces(shape, index) for index in range(self.num_devices)], shape, dtype)

    def tiling_of(self, pieces: Sequence[Sequence[Box]], shape: Sequence[int], dtype: object) -> Tiling:
        """Return the tiling of each device's boxes of a weight.

        Raises:
            LayoutError: a box is not within the weight, or elements are on no device.
        """
        for boxes in pieces:
            for box in boxes:
                if any(stop > extent for (_, stop), extent in zip(box, shape, strict=True)):
                    raise LayoutError(
                        f"{self} takes {box} of a weight of shape {tuple(shape)}: {self._fit()}"
                    )
        tiling = Tiling.from_pieces(tuple(shape), dtype, pieces, self.concat_axis)
        if not tiling.is_cover:
            raise LayoutError(f"{self} leaves elements of shape {tuple(shape)} on no device: {self._fit()}")
        return tiling

    def __str__(self) -> str:
        unit = getattr(self.shard, "unit", 1)
        return f"{self.shard}{f' in units of {unit}' if unit > 1 else ''} over {self.num_devices} devices"

    def _fit(self) -> str:
        rule = self.shard
        if isinstance(rule, HeadAwareColumnwise):
            whole = rule.num_heads * rule.head_dim
            return (
                f"{rule.num_heads} heads of {rule.head_dim} are {whole} columns ({whole / 2:g} packed in 4 bits, "
                f"{whole * 3 / 4:g} in 6)"
            )
        return "the strategy is for another shape"

    def _checked_index(self, index: int) -> int:
        index = whole(index, "index is the number of a device", ShardingError)
        if not 0 <= index < self.num_devices:
            raise ShardIndexError(f"{self}: index is 0 to {self.num_devices - 1}, got {index}")
        return index


def _own_boxes(boxes: object, ndim: int, function: object) -> list[Box]:
    """Return the boxes that a function of the user's own says, checked."""
    rule = (
        f"pieces of {brief(function)} returns one box or more, each an interval 0 <= start <= stop for each of "
        f"{ndim} dims"
    )
    found: list[Box] = []
    for box in items(boxes, rule, ShardingError):
        intervals = [wholes(part, rule, ShardingError, 0) for part in items(box, rule, ShardingError)]
        if len(intervals) != ndim or any(len(i) != 2 or i[0] > i[1] for i in intervals):
            raise ShardingError(f"{rule}, got {brief(box)}")
        found.append(tuple((start, stop) for start, stop in intervals))
    if not found:
        raise ShardingError(f"{rule}, got none")
    return found
