"""Scales of quantised weights: which tensor has whose, and that they are sharded as their weight, block by block.

The one place that knows: name patterns, rule files and loads without either ask here, so no pattern file lists scales.
A tensor is the scales of a weight where its name is one of those that are known for it (`w_scale`, `x.scale` beside
`x.weight`, `x_scales` beside `x_blocks`, ...) and its shape has an entry for each block of the weight. One of another
name that has such a shape beside a weight is cut as patterns say, and refused where that is apart from the weight.
A block's extent is what the model's config says, where that gives as many entries; else it follows from both shapes:
the power of two that gives them (32 of MXFP8, 128 of DeepSeek's FP8), else what divides the weight evenly. Where none
does, that dim is not split: no split is known to lie between blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm, prod

from lowshard.box import Box, Interval, volume
from lowshard.checkpoint.header import FilePath, TensorEntry
from lowshard.checkpoint.reader import CheckpointReader
from lowshard.errors import CheckpointError, ShardingError
from lowshard.layout import Layout
from lowshard.tiling import Tiling
from lowshard.weights.head import GroupedQKV
from lowshard.weights.shard_rules import ExpertRange, Rule, Shape, merged
from lowshard.weights.sharding_strategy import ShardingStrategy

_SUFFIXES = ("_scale", "_scale_inv", "_scale_2", "_global_scale")
"""What the name of a weight's scales ends in; without it, it is the weight's name."""
_BESIDE = (
    (".scale", ".weight"),
    ("_scales", "_blocks"),
    (".input_scale", ".weight"),
    (".input_global_scale", ".weight"),
)
"""What the names of other scales end in, and those of their weights."""
_MX = ("float8_e8m0fnu", 32)
"""Scales of this dtype are of 32 values of the last dim. Source: OCP Microscaling Formats v1.0."""

_POWERS = tuple(1 << n for n in range(4, 11))  # blocks that scales of fused weights may be of

Blocks = tuple[int | None, ...]
"""For each dim of the scales, how many values of the weight share one; None: all do."""


class Unclear(int):
    """The least number of values that may share an entry; the shapes do not tell how many do."""


def _weight_names(name: str) -> list[str]:
    """Return the names that the weight may have whose scales a tensor is by its name."""
    beside = [name.removesuffix(end) + weight for end, weight in _BESIDE if name.endswith(end)]
    found = beside or [name.removesuffix(end) for end in _SUFFIXES if name.endswith(end) and name != end]
    return [*found, *(f"{weight}_packed" for weight in found)]


def weights_of_scales(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return, by the name of each tensor that is the scales of another one, the name of that weight."""
    found = {}
    for name, shape in shapes.items():
        for weight in _weight_names(name):
            if weight in shapes and blocks_of(shapes[weight], shape) is not None:
                found[name] = weight
                break
    return found


def all_scales(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return those of `weights_of_scales`, and tensors of other names with an entry for each block of a sibling."""
    named = weights_of_scales(shapes)
    scaled, found = set(named.values()), dict[str, str]()
    modules: dict[str, dict[Shape, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, shape in shapes.items():
        if len(shape) > 1 and 0 not in shape and name not in named:
            modules[name.rpartition(".")[0]][shape].append(name)
    for module, held in modules.items():
        for weight in sorted(held, key=lambda shape: prod(shape)):  # the largest one last
            for scales in held:  # half of a gate and up projection is no scales, but a down projection
                fits = len(scales) == len(weight) and prod(weight) >= 4 * prod(scales)
                if not fits or blocks_of(weight, scales) is None:
                    continue
                any_of = held[weight][0] if module else None  # all tensors without a module are no siblings
                for name in held[scales]:
                    of = next((w for w in held[weight] if name.startswith(w)), any_of)
                    if of is not None and name not in scaled:
                        found[name] = of
    return named | {name: weight for name, weight in found.items() if weight not in found}


def _weight_of(name: str, shapes: Mapping[str, Shape]) -> str | None:
    """Return the weight whose scales a tensor is by its name, if it is there."""
    return next((weight for weight in _weight_names(name) if weight in shapes), None)


def why_none(name: str, shapes: Mapping[str, Shape]) -> str:
    """Return why a tensor that reads as scales by its name is none, or nothing where its name is another one."""
    names, weight = _weight_names(name), _weight_of(name, shapes)
    if weight is None:
        is_one = names and not name.endswith(".scale")  # which is a norm's, too
        return f" (it reads as the scales of {names[0]}, which is not there)" if is_one else ""
    return f" (its shape {list(shapes[name])} has no entry for each block of {weight} {list(shapes[weight])})"


def blocks_of(weight: Shape, scales: Shape, dtype: str | None = None, size: Shape = ()) -> Blocks | None:
    """Return the blocks of a weight from the shapes of the weight and its scales; None where they do not fit."""
    if prod(scales) == 1 and (len(scales) != len(weight) or dtype != _MX[0]):
        return (None,) * len(scales)
    if len(scales) < len(weight):  # an entry a row
        return (1,) * len(scales) if scales == weight[: len(scales)] else None
    if len(scales) > len(weight):
        return None
    found: list[int | None] = []
    said = dict(enumerate(reversed(size), 1))
    for dim, (values, entries) in enumerate(zip(weight, scales, strict=True)):
        if dtype == _MX[0] and dim == len(weight) - 1 and -(-values // _MX[1]) == entries:
            found.append(_MX[1])
        elif values == entries:
            found.append(1)
        elif entries == 1:
            found.append(None)
        elif (block := _block(values, entries, said.get(len(weight) - dim))) is not None:
            found.append(block)
        else:
            return None
    return tuple(found)


def _block(values: int, entries: int, said: int | None) -> int | None:
    """Return how many values share an entry; the ones that give so many entries hold one power of two at most."""
    if not 1 < entries < values:
        return None
    least = -(-values // entries)
    power = 1 << (least - 1).bit_length()
    if said and -(-values // said) == entries:
        return said
    if -(-values // power) == entries and (said is None or power <= _MX[1]):
        return power
    if values % entries == 0 and said is None:
        return least
    return Unclear(least) if -(-values // least) == entries else None


def scales_box(box: Box, weight: Shape, blocks: Blocks, axis: int = 0, parts: Shape = ()) -> Box:
    """Return the box of the scales that a box of a weight has; blocks begin anew at each of the parts of an axis."""
    found: list[Interval] = []
    for dim, block in enumerate(blocks):
        if block is None:
            found.append((0, 1) if volume(box) else (0, 0))
            continue
        (start, stop), extent = box[dim], weight[dim]
        if isinstance(block, Unclear) and start < stop and (start, stop) != (0, extent):
            raise ShardingError(
                f"{start} to {stop} of dim {dim} of {list(weight)} is a cut among {-(-extent // block)} blocks of "
                "values that share a scale, whose size neither the shapes nor weight_block_size of config.json tell; "
                "cut another dim"
            )
        if isinstance(block, Unclear) or start == stop:
            found.append((0, -(-extent // block) if start < stop else 0))
            continue
        entries = [0, 0]
        for side, rest in enumerate((start, stop)):
            for part in parts if parts and dim == axis else (extent,):
                mine, rest = min(max(rest, 0), part), rest - part
                if mine % block and mine != part:
                    raise ShardingError(
                        f"{start} to {stop} of dim {dim} of {list(weight)} is a cut inside a block of {block} values "
                        "that share a scale; cut another dim, or into parts of whole blocks (there are "
                        f"{-(-extent // block)}): --align blocks, in a program strategies(..., align='blocks')"
                    )
                entries[side] += -(-mine // block)
        found.append((entries[0], entries[1]))
    return tuple(found)


@dataclass(frozen=True)
class ScalesOf(Rule):
    """Cuts scales where the blocks of their weight are."""

    weight: Rule
    weight_shape: Shape
    blocks: Blocks
    shape: Shape
    fused: Shape = ()
    """Parts of the axis that is cut, where blocks begin anew at each."""

    @property
    def axis(self) -> int | None:
        """The axis of the weight that is sharded, where its scales are sharded along it too."""
        axis = self.weight.axis
        axis = 0 if axis is None else axis % max(len(self.weight_shape), 1)
        return axis if axis < len(self.blocks) and self.blocks[axis] is not None else None

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the scales of the boxes that the device has of the weight."""
        if shape != self.shape:
            raise ShardingError(
                f"scales have an entry for each block of their weight {list(self.weight_shape)}, got {list(shape)}"
            )
        boxes = merged(self.weight.pieces(self.weight_shape, index, num_devices), self.weight.axis or 0)
        made = [scales_box(b, self.weight_shape, self.blocks, self.axis or 0, self.fused) for b in boxes]
        if self.axis is not None:
            return made
        return [next((box for box in made if volume(box)), made[0])]  # all pieces have the same ones

    def __str__(self) -> str:
        return f"scales, as their weight: {self.weight}"


def scales_strategy(
    strategy: ShardingStrategy, weight: Shape, scales: Shape, size: Shape = ()
) -> ShardingStrategy:
    """Return how the scales of a weight are cut that a strategy cuts; size: as for `blocks_of`."""
    blocks, rule = blocks_of(weight, scales, size=size), strategy.shard
    if blocks is None or not isinstance(rule, Rule):
        raise ShardingError(
            f"scales have an entry for each block of their weight {list(weight)}, which a rule cuts; got "
            f"{list(scales)} and {strategy}"
        )
    made = ScalesOf(rule, weight, blocks, scales)
    axis = None if rule.axis is None else made.axis
    if axis is not None and len(parts := rule.parts(weight[axis])) > 1:
        said, block = dict(enumerate(reversed(size), 1)).get(len(weight) - axis), blocks[axis] or 1
        is_plain = block in _POWERS and not any(part % block for part in parts)
        for block in (said,) if said else () if is_plain else _POWERS:
            if sum(-(-part // block) for part in parts) == scales[axis] != -(-weight[axis] // block):
                # Scales begin anew at each part. Without a config, it may as well be blocks of another size.
                found = block if said else Unclear(-(-weight[axis] // scales[axis]))
                made = replace(made, blocks=(*blocks[:axis], found, *blocks[axis + 1 :]), fused=parts)
                break
    return ShardingStrategy(strategy.num_devices, made)


def with_scales(
    made: Mapping[str, ShardingStrategy], shapes: Mapping[str, Shape], size: Shape = ()
) -> dict[str, ShardingStrategy]:
    """Return the strategy of every tensor, those of scales from their weights'; none is cut apart from its weight."""
    found, scales = dict(made), all_scales(shapes)
    for name, weight in scales.items():
        own, shape = made.get(name), shapes[name]
        if own is None:
            found[name] = scales_strategy(made[weight], shapes[weight], shape, size)
        elif not own.is_replicate and isinstance(own.shard, Rule) and isinstance(made[weight].shard, Rule):
            said = f"{name} {list(shape)} has an entry a block of {weight} {list(shapes[weight])}, as scales have"
            try:
                kept = scales_strategy(made[weight], shapes[weight], shape, size)
                is_apart = any(_held(own, shape, i) != _held(kept, shape, i) for i in range(own.num_devices))
            except ShardingError as error:
                raise ShardingError(f"{said}: {error}") from error
            if is_apart:
                raise ShardingError(f"{said}; {own} cuts it apart: replicate it, or call it {weight}_scale")
    for name in (name for name in shapes if name not in scales and found[name].num_devices > 1):
        is_cut = found[name].sharded_axis is not None and not isinstance(found[name].shard, ExpertRange)
        if is_cut and _weight_of(name, shapes) is not None:
            raise ShardingError(f"{name} is cut apart from its weight{why_none(name, shapes)}: replicate it")
    return {name: found[name] for name in shapes}


def _held(strategy: ShardingStrategy, shape: Shape, index: int) -> list[Box]:
    return [box for box in merged(strategy.pieces(shape, index), strategy.concat_axis) if volume(box)]


def aligned(
    made: Mapping[str, ShardingStrategy], shapes: Mapping[str, Shape], size: Shape = ()
) -> dict[str, ShardingStrategy]:
    """Return strategies that cut between blocks: what is cut along the same extent is cut alike, as all heads are."""
    units: dict[int, int] = {}
    heads, has_whole_blocks = 1, True
    for name, weight in all_scales(shapes).items():
        strategy = scales_strategy(made[weight], shapes[weight], shapes[name], size)
        scales = strategy.shard
        assert isinstance(scales, ScalesOf)
        rule, axis = scales.weight, scales.axis
        block = None if axis is None or rule.axis is None else scales.blocks[axis]
        if axis is None or block is None or isinstance(block, Unclear):
            continue
        if isinstance(rule, GroupedQKV):
            rows = rule.head_dim * (rule.num_heads // rule.num_kv_heads if rule.section == "q" else 1)
            heads = lcm(heads, block // gcd(block, rows))
            try:
                strategy.layout(shapes[name])
            except ShardingError:
                has_whole_blocks = False
            continue
        extent = shapes[weight][axis]
        for part in (parts := rule.parts(extent)):
            units[part] = lcm(units.get(part, 1), block // gcd(block, extent // sum(parts)))

    def cut(name: str, strategy: ShardingStrategy) -> ShardingStrategy:
        rule, shape = strategy.shard, shapes[name]
        if isinstance(rule, GroupedQKV):
            whole = rule if has_whole_blocks else replace(rule, few_kv="empty", unit=heads)
            return replace(strategy, shard=whole)
        if not isinstance(rule, Rule) or isinstance(rule, ExpertRange) or rule.axis is None:
            return strategy
        extent = sum(shape[rule.axis :][:1])  # none where it lacks the axis, which is refused later
        unit = lcm(*(units.get(part, 1) for part in rule.parts(extent)))
        return replace(strategy, shard=replace(rule, unit=unit))

    return {name: cut(name, strategy) for name, strategy in made.items()}


def scales_tiling(layout: Layout, shape: Shape, dtype: str, size: Shape = ()) -> Tiling:
    """Return the tiling of the scales of a weight that has a layout; size: as for `blocks_of`."""
    blocks = blocks_of(layout.shape, shape, dtype, size)
    if blocks is None:
        raise ShardingError(
            f"scales have an entry for each block of their weight {list(layout.shape)}, got {list(shape)}"
        )
    boxes = [[scales_box(layout.box(rank), layout.shape, blocks)] for rank in range(layout.mesh.size)]
    return Tiling.from_pieces(shape, dtype, boxes)


def whole_scales(
    name: str, files: Sequence[FilePath], whole_weight: Shape, held_weight: Shape, held: TensorEntry,
    size: Shape = (),
) -> Shape:  # fmt: skip
    """Return the shape of all scales of a weight that files of ranks hold in parts; size: as for `blocks_of`."""
    blocks = blocks_of(held_weight, held.shape, held.dtype, size)
    if blocks is None:
        raise CheckpointError(
            f"{files[0]}: tensor {name!r}: scales have an entry for each block of their weight, a rank holds "
            f"{list(held.shape)} for {list(held_weight)}"
        )
    if any(b is None and whole_weight[d] != held_weight[d] for d, b in enumerate(blocks[: len(held_weight)])):
        found = set()  # one for all of the weight, or one for the block that a rank has: their values tell
        for file in files:
            with CheckpointReader(file) as reader:
                if name in reader.header.tensors:
                    found.add(reader.read_box(name).tobytes())
        if len(found) > 1:
            raise CheckpointError(
                f"{files[0]}: tensor {name!r}: each rank holds {list(held.shape)} for its part {list(held_weight)} "
                "of the weight, with other values than other ranks: the blocks that share a scale cannot be told from "
                "one a rank. Write the files with an index, or whole"
            )
    return tuple(1 if block is None else -(-whole_weight[dim] // block) for dim, block in enumerate(blocks))
