"""Scales of quantised weights: which tensor has whose, and that they are sharded as their weight, block by block.

The one place that knows: name patterns, rule files and loads without either ask here, so no pattern file lists scales.
A tensor is the scales of a weight where its name is one of those that are known for it (`w_scale`, `x.scale` beside
`x.weight`, `x_scales` beside `x_blocks`, ...) and its shape has an entry for each block of the weight. A block's extent
follows from both shapes: it is the power of two that gives as many entries (32 of MXFP8, 128 of DeepSeek's FP8), else
what divides the weight evenly. Where neither does, that dim is not split: no split is known to lie between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lowshard.box import Box, Interval, volume
from lowshard.checkpoint.header import FilePath, TensorEntry
from lowshard.checkpoint.reader import CheckpointReader
from lowshard.errors import CheckpointError, ShardingError
from lowshard.layout import Layout
from lowshard.tiling import Tiling
from lowshard.weights.shard_rules import Rule, Shape
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


def why_none(name: str, shapes: Mapping[str, Shape]) -> str:
    """Return why a tensor that reads as scales by its name is none, or nothing where its name is another one."""
    names = _weight_names(name)
    weight = next((weight for weight in names if weight in shapes), None)
    if weight is None:
        is_one = names and not name.endswith(".scale")  # which is a norm's, too
        return f" (it reads as the scales of {names[0]}, which is not there)" if is_one else ""
    return f" (its shape {list(shapes[name])} has no entry for each block of {weight} {list(shapes[weight])})"


def blocks_of(weight: Shape, scales: Shape, dtype: str | None = None) -> Blocks | None:
    """Return the blocks of a weight from the shapes of the weight and its scales; None where they do not fit."""
    if prod(scales) == 1 and (len(scales) != len(weight) or dtype != _MX[0]):
        return (None,) * len(scales)
    if len(scales) < len(weight):  # an entry a row
        return (1,) * len(scales) if scales == weight[: len(scales)] else None
    if len(scales) > len(weight):
        return None
    found: list[int | None] = []
    for dim, (values, entries) in enumerate(zip(weight, scales, strict=True)):
        if dtype == _MX[0] and dim == len(weight) - 1 and -(-values // _MX[1]) == entries:
            found.append(_MX[1])
        elif values == entries:
            found.append(1)
        elif entries == 1:
            found.append(None)
        elif (block := _block(values, entries)) is not None:
            found.append(block)
        else:
            return None
    return tuple(found)


def _block(values: int, entries: int) -> int | None:
    """Return how many values share an entry; the ones that give so many entries hold one power of two at most."""
    if not 1 < entries < values:
        return None
    least = -(-values // entries)
    power = 1 << (least - 1).bit_length()
    if -(-values // power) == entries:
        return power
    if values % entries == 0:
        return least
    return Unclear(least) if -(-values // least) == entries else None


def scales_shape(weight: Shape, blocks: Blocks) -> Shape:
    """Return the shape of the scales of a weight."""
    return tuple(
        1 if block is None else -(-weight[dim] // block) for dim, block in enumerate(blocks)
    )  # fmt: skip


def scales_box(box: Box, weight: Shape, blocks: Blocks) -> Box:
    """Return the box of the scales that a box of a weight has."""
    found: list[Interval] = []
    for dim, block in enumerate(blocks):
        if block is None:
            found.append((0, 1) if volume(box) else (0, 0))
            continue
        (start, stop), extent = box[dim], weight[dim]
        if isinstance(block, Unclear) and start < stop and (start, stop) != (0, extent):
            raise ShardingError(
                f"{start} to {stop} of dim {dim} of {list(weight)} is a cut among {-(-extent // block)} blocks of "
                "values that share a scale, whose size the shapes do not tell; cut another dim"
            )
        if start < stop and (start % block or (stop % block and stop != extent)):
            raise ShardingError(
                f"{start} to {stop} of dim {dim} of {list(weight)} is a cut inside a block of {block} values that "
                f"share a scale; cut another dim, or into parts of whole blocks (there are {-(-extent // block)})"
            )
        found.append((start // block, -(-stop // block) if start < stop else start // block))
    return tuple(found)


@dataclass(frozen=True)
class ScalesOf(Rule):
    """Cuts scales where the blocks of their weight are."""

    weight: Rule
    weight_shape: Shape
    blocks: Blocks

    @property
    def axis(self) -> int | None:
        """The axis of the weight that is sharded, where its scales are sharded along it too."""
        axis = self.weight.axis
        axis = 0 if axis is None else axis % max(len(self.weight_shape), 1)
        return axis if axis < len(self.blocks) and self.blocks[axis] is not None else None

    def pieces(self, shape: Shape, index: int, num_devices: int) -> list[Box]:
        """Return the scales of the boxes that the device has of the weight."""
        if shape != scales_shape(self.weight_shape, self.blocks):
            raise ShardingError(
                f"scales have an entry for each block of their weight {list(self.weight_shape)}, got {list(shape)}"
            )
        boxes = self.weight.pieces(self.weight_shape, index, num_devices)
        made = [scales_box(box, self.weight_shape, self.blocks) for box in boxes]
        if self.axis is not None:
            return made
        return [next((box for box in made if volume(box)), made[0])]  # all pieces have the same ones

    def __str__(self) -> str:
        return f"scales, as their weight: {self.weight}"


def scales_strategy(strategy: ShardingStrategy, weight: Shape, scales: Shape) -> ShardingStrategy:
    """Return how the scales of a weight are cut that a strategy cuts."""
    blocks, rule = blocks_of(weight, scales), strategy.shard
    if blocks is None or not isinstance(rule, Rule):
        raise ShardingError(
            f"scales have an entry for each block of their weight {list(weight)}, which a rule cuts; got "
            f"{list(scales)} and {strategy}"
        )
    return ShardingStrategy(strategy.num_devices, ScalesOf(rule, weight, blocks))


def scales_tiling(layout: Layout, shape: Shape, dtype: str) -> Tiling:
    """Return the tiling of the scales of a weight that has a layout."""
    blocks = blocks_of(layout.shape, shape, dtype)
    if blocks is None:
        raise ShardingError(
            f"scales have an entry for each block of their weight {list(layout.shape)}, got {list(shape)}"
        )
    boxes = [[scales_box(layout.box(rank), layout.shape, blocks)] for rank in range(layout.mesh.size)]
    return Tiling.from_pieces(shape, dtype, boxes)


def whole_scales(
    name: str, files: Sequence[FilePath], whole_weight: Shape, held_weight: Shape, held: TensorEntry
) -> Shape:
    """Return the shape of all scales of a weight that files of ranks hold in parts."""
    blocks = blocks_of(held_weight, held.shape, held.dtype)
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
    return scales_shape(whole_weight, blocks)
