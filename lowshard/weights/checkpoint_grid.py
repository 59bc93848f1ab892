"""Grids of ranks on the command line, and the shapes that files of ranks without an index add up to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from lowshard.argument import brief, whole
from lowshard.checkpoint.header import read_header
from lowshard.errors import CheckpointError, RulesError, ShardingError
from lowshard.mesh import DeviceMesh
from lowshard.placement import MOST_DIGITS
from lowshard.rules import RuleSet, load_rules
from lowshard.rules.checkpoint_rules import checkpoint_layouts
from lowshard.tiling import Tiling
from lowshard.weights.module_weights import resolve_module
from lowshard.weights.name_pattern import Align, NamePatterns, NameRule, Sizes
from lowshard.weights.scale_rules import scales_tiling, weights_of_scales, whole_scales, why_none
from lowshard.weights.sharding_strategy import ShardingStrategy

AXES = ("tp", "ep", "dp")
_MARKERS = {
    "expert_parallel": ShardingStrategy.expert_parallel(1),
    "tensor_parallel": ShardingStrategy.tensor_parallel(1),
}
_SHARDED_AXES = {
    "rowwise": 0, "columnwise": 1, "stacked_qkv": 0, "head_aware_columnwise": 1, "grouped_qkv": 0, "heads": 0,
    "axiswise": 0, "gate_up": 2, "segmented": 0,
}  # fmt: skip
"""Which axis a strategy of a pattern shards where its arguments do not say."""


def axis_sizes(text: str) -> dict[str, int] | None:
    """Return sizes by axis of a text such as `tp=2,dp=2`, each axis once; None where it is no such text."""
    sizes: dict[str, int] = {}
    for token in text.split(","):
        name, _, size = token.strip().partition("=")
        is_size = size.isdecimal() and len(size) <= MOST_DIGITS and 1 <= int(size) < 2**31
        if not name or name in sizes or not is_size:
            return None
        sizes[name] = int(size)
    return sizes


@dataclass(frozen=True)
class Grid:
    """Ranks of a checkpoint: `tp` cuts weights, `ep` (if it is given) distributes experts, `dp` repeats."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Return the grid of a text such as `tp=2,dp=2`, outermost axis first."""
        axes = axis_sizes(text)
        if axes is None or set(axes) - set(AXES):
            raise ShardingError(
                f"a grid reads like 'tp=2,dp=2' (axes {', '.join(AXES)}, each once), got {brief(text)}"
            )
        return cls(tuple(axes.items()))

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return prod(size for _, size in self.axes)

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh."""
        return DeviceMesh(tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def tilings(
        self, shapes: Mapping[str, tuple[str, tuple[int, ...]]], patterns: NamePatterns, sizes: Sizes,
        align: Align = None,
    ) -> dict[str, tuple[Tiling, ShardingStrategy]]:  # fmt: skip
        """Return the tiling of each tensor (dtype and shape by name) over the grid's ranks, and its strategy."""
        held = dict(self.axes)
        mesh = self.mesh
        plain = {name: shape for name, (_, shape) in shapes.items()}
        made = patterns.strategies(plain, held.get("tp", 1), sizes, align)
        experts: set[str] = set()
        if "ep" in held:
            scales = weights_of_scales(plain)
            rules = patterns.match(plain).rules
            experts = {name for name in plain if rules[scales.get(name, name)].strategy == "expert_parallel"}
            over_ep = patterns.strategies(plain, held["ep"], sizes, align)
            made |= {name: over_ep[name] for name in experts}
        cuts: dict[tuple[ShardingStrategy, tuple[int, ...], str, str], Tiling] = {}  # layers are alike
        found = {}
        for name, (dtype, shape) in shapes.items():
            axis = "ep" if name in experts else "tp"
            key = made[name], shape, dtype, axis
            if key not in cuts:
                try:
                    cut = made[name].layout(shape, dtype)
                except ShardingError as error:
                    raise type(error)(f"{patterns.where}: {name} {list(shape)}: {error}") from error
                everywhere = Tiling.whole(shape, dtype, self.num_ranks)
                cuts[key] = cut.on_mesh(mesh, axis) if axis in held else everywhere
            found[name] = (cuts[key], made[name])
        return found


def rank_tilings(files: Sequence[Path], was: Grid, patterns: NamePatterns, sizes: Sizes) -> dict[str, Tiling]:
    """Return the tilings of one file a rank, from the shapes that the files hold."""
    headers = [read_header(f) for f in files]
    first: dict[str, tuple[str, tuple[int, ...]]] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            first.setdefault(name, (entry.dtype, entry.shape))
    held_shapes = {name: shape for name, (_, shape) in first.items()}
    scales = weights_of_scales(held_shapes)
    matching = patterns.match([name for name in first if name not in scales])
    matching.check(patterns.where, {name: why_none(name, held_shapes) for name in matching.unmatched})
    marked = {n: _MARKERS[r.strategy] for n, r in matching.rules.items() if r.strategy in _MARKERS}
    unmarked = resolve_module({name: (held_shapes[name], None) for name in marked}, marked)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    behind = sorted(first.items(), key=lambda item: item[0] in scales)  # scales behind their weights
    for name, (dtype, shape) in behind:
        if name in scales:
            of, size = scales[name], sizes.weight_block
            entry = next(h.tensors[name] for h in headers if name in h.tensors)
            shapes[name] = (dtype, whole_scales(name, files, shapes[of][1], held_shapes[of], entry, size))
            continue
        rule = matching.rules[name]
        axis = dict(rule.arguments).get("axis", _SHARDED_AXES.get(rule.strategy))
        if name in unmarked:
            axis = unmarked[name].sharded_axis
        along = "ep" if rule.strategy == "expert_parallel" and "ep" in dict(was.axes) else "tp"
        ranks = was.mesh.groups(along)[0] if along in dict(was.axes) else (0,)
        held = [headers[r].tensors[name].shape for r in ranks if name in headers[r].tensors]
        try:
            shapes[name] = (dtype, _whole_shape(rule, axis, shape, held, len(ranks), sizes))
        except ShardingError as error:
            raise CheckpointError(f"{files[0]}: tensor {name!r}: {error}") from error
    try:
        return {name: tiling for name, (tiling, _) in was.tilings(shapes, patterns, sizes).items()}
    except ShardingError as error:
        raise CheckpointError(f"{files[0]}: another strategy, or not cut as {was}? {error}") from error


def in_rank_order(files: Iterable[Path]) -> list[Path]:
    """Return files of ranks in the order of the numbers in their names: that of rank 10 behind that of rank 9."""

    def key(file: Path) -> tuple[list[str | int], str]:
        parts = re.split("([0-9]+)", file.name)
        return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.name

    return sorted(files, key=key)


def _whole_shape(
    rule: NameRule, axis: int | None, shape: tuple[int, ...], held: Sequence[tuple[int, ...]], count: int,
    sizes: Sizes,
) -> tuple[int, ...]:  # fmt: skip
    """Return the shape of a tensor of which `count` ranks hold parts of some shapes, sharded along an axis."""
    if axis is None:
        return shape
    axis = whole(axis, f"{rule.strategy}: axis is an integer", ShardingError)
    if not -len(shape) <= axis < len(shape) or any(len(s) != len(shape) for s in held):
        found = ", ".join(str(list(s)) for s in dict.fromkeys((shape, *held)))
        raise ShardingError(
            f"{rule.strategy} cuts axis {axis}, and the files hold parts of the shapes {found}"
        )
    axis %= len(shape)
    total = sum(s[axis] for s in held)
    if rule.strategy in ("grouped_qkv", "heads"):
        if sizes.num_heads is None:
            raise ShardingError(
                "cuts between heads need their number: pass --heads and --kv-heads, or a config.json"
            )
        arguments = dict(rule.arguments)
        heads, kv = sizes.num_heads, sizes.num_kv_heads or sizes.num_heads
        section = arguments.get("section", "q" if rule.strategy == "heads" else "qkv")
        few_kv = arguments.get("few_kv", "replicate")
        strategy = ShardingStrategy.grouped_qkv(count, heads, kv, 1, few_kv=few_kv, section=section)
        all_heads = {"q": heads, "kv": kv, "qkv": heads + 2 * kv}[section]
        cut = strategy.layout((all_heads,))  # key-value heads may be on several ranks: count them there
        total = all_heads * (total // max(1, sum(cut.local_elems(r) for r in range(count))))
    return (*shape[:axis], total, *shape[axis + 1 :])


# ---- a mesh-and-rule file in place of name patterns


@dataclass(frozen=True)
class RuledGrid:
    """Ranks of a checkpoint as the devices of a rule file's mesh."""

    rules: RuleSet
    mesh: DeviceMesh
    text: str

    @classmethod
    def parse(cls, rules: str, sizes: str) -> RuledGrid:
        """Return the grid of a rule file (a name or a path) and sizes such as `fsdp=4,expert=2`."""
        held = axis_sizes(sizes)
        if held is None:
            raise RulesError(
                f"sizes of mesh axes read like 'fsdp=4,expert=2', each axis once and 1 or more; got {brief(sizes)}"
            )
        bound, mesh = load_rules(rules).bind(prod(held.values()), held)
        return cls(bound, mesh, f"{rules} on {sizes}")

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    def __str__(self) -> str:
        return self.text

    def tilings(
        self, shapes: Mapping[str, tuple[str, tuple[int, ...]]], block: tuple[int, ...] = ()
    ) -> dict[str, tuple[Tiling, str]]:
        """Return the tiling of each tensor (dtype and shape by name), and its spec; block: `Sizes.weight_block`."""
        scales = weights_of_scales({name: shape for name, (_, shape) in shapes.items()})
        weights = {n: (shape, dtype) for n, (dtype, shape) in shapes.items() if n not in scales}
        layouts = checkpoint_layouts(self.rules, self.mesh, weights)
        cut = cache(Tiling.from_layout)  # layers are alike
        made = {name: (cut(layout), str(layout)) for name, layout in layouts.items()}
        for name, weight in scales.items():
            dtype, shape = shapes[name]
            try:
                made[name] = scales_tiling(layouts[weight], shape, dtype, block), f"scales of {weight}"
            except ShardingError as error:
                raise ShardingError(f"{self}: {name} {list(shape)}: {error}") from error
        return {name: made[name] for name in shapes}

    def rank_tilings(self, files: Sequence[Path], block: tuple[int, ...] = ()) -> dict[str, Tiling]:
        """Return the tilings of one file a rank, from the shapes that the files hold."""
        headers = [read_header(f).tensors for f in files]
        names = {name: entry for header in reversed(headers) for name, entry in header.items()}
        scales = weights_of_scales({name: entry.shape for name, entry in names.items()})
        ones = {name: (tuple(1 for _ in e.shape), e.dtype) for name, e in names.items()}
        # The axes of a dim do not depend on its extent.
        cuts = checkpoint_layouts(self.rules, self.mesh, ones)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, entry in sorted(names.items(), key=lambda item: item[0] in scales):  # behind their weights
            if name in scales:
                weight = scales[name]
                whole = whole_scales(name, files, shapes[weight][1], names[weight].shape, entry, block)
                shapes[name] = (entry.dtype, whole)
                continue
            extents = []
            for dim, axes in enumerate(cuts[name].spec):
                ranks = self.mesh.groups(() if axes is None else axes)[0]
                held = [headers[r][name].shape for r in ranks if name in headers[r]]
                if any(len(shape) != len(entry.shape) for shape in held):
                    raise CheckpointError(
                        f"{files[0]}: tensor {name!r} has another number of dims in other files"
                    )
                extents.append(sum(shape[dim] for shape in held))
            shapes[name] = (entry.dtype, tuple(extents))
        return {name: tiling for name, (tiling, _) in self.tilings(shapes, block).items()}
