"""A mesh-and-rule file in place of name patterns: how it shards a checkpoint, and what files of ranks add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from lowshard.argument import brief
from lowshard.checkpoint.header import read_header
from lowshard.errors import CheckpointError, RulesError, ShardingError
from lowshard.mesh import DeviceMesh
from lowshard.rules import RuleSet, load_rules
from lowshard.rules.checkpoint_rules import checkpoint_layouts
from lowshard.tiling import Tiling
from lowshard.weights.checkpoint_grid import axis_sizes
from lowshard.weights.scale_rules import scales_tiling, weights_of_scales, whole_scales


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
