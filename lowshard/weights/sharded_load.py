"""`load_sharded`: a checkpoint loaded by what its index says of ranks, without patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import numpy as np

from lowshard.argument import instance
from lowshard.argument import whole as check_whole
from lowshard.box import Box, full_box, shape_of, volume
from lowshard.checkpoint.catalog import Catalog, Files, StoredTensor
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import control_of
from lowshard.errors import CheckpointError
from lowshard.mesh import MOST_RANKS
from lowshard.tiling import Tile, Tiling
from lowshard.weights.load import Progress, load, nodes_of
from lowshard.weights.load_plan import plan_load
from lowshard.weights.name_pattern import Sizes
from lowshard.weights.scale_rules import Blocks, Unclear, all_scales, blocks_of, scales_box, weights_of_scales
from lowshard.weights.shard_rules import split_units


class ShardedWeights(dict[str, np.ndarray]):
    """A rank's arrays by name, and which rank holds what of each tensor."""

    tilings: Mapping[str, Tiling]
    """By name, of every tensor, those that this rank holds nothing of too."""

    digests: Mapping[str, str] | None
    """By name, what `lowshard.reshard.digest` said of each tensor when it was saved: `digest(state, comm)` is equal as
    long as nothing has changed. None where the checkpoint has none (a plain file)."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tilings: Mapping[str, Tiling],
        digests: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(arrays)
        self.tilings, self.digests = tilings, digests

    @property
    def state(self) -> dict[str, tuple[Tiling, np.ndarray | None]]:
        """What `save` takes: for each tensor its tiling and this rank's array."""
        return {name: (tiling, self.get(name)) for name, tiling in self.tilings.items()}


def load_sharded(
    path: Files | Catalog,
    comm: Communicator | None = None,
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> ShardedWeights:
    """Return this rank's arrays of a checkpoint, sharded as the checkpoint's index says; no patterns are needed.

    Collective: all ranks of the communicator call this. `saved_tilings` has the rule: as many ranks as saved the
    checkpoint get what each of them held; other numbers get balanced parts along the dim that was cut.

    Args:
        path: a sharded checkpoint, a plain file or a Hugging Face folder, as for `Catalog.open`.
        comm: a communicator of host arrays; None for one rank.
        verify: False skips the checksums.
        progress: as for `load`.

    Returns:
        A dict of arrays by name, with `tilings` (who holds what), `state` (what `save` takes) and `digests`. A rank
        that holds nothing of a tensor has no array of that name.

    Every rank raises the same error.

    Raises:
        CheckpointError: a file is missing or damaged; the text names it.
        MismatchError: the ranks loaded different checkpoints.
    """
    size = 1 if comm is None else control_of(comm).size
    nodes = [0] if comm is None else nodes_of(comm)
    with collective_step(comm, "load_sharded", path=path):
        catalog = path if isinstance(path, Catalog) else Catalog.open(path)
        plan = plan_load(catalog, saved_tilings(catalog, size), size, nodes=nodes)
    arrays = load(catalog, plan, comm, verify=verify, progress=progress)
    return ShardedWeights(arrays, plan.by_name, catalog.digests)


def saved_tilings(catalog: Catalog, num_ranks: int) -> dict[str, Tiling]:
    """Return which rank is to hold what of a checkpoint, from its index alone.

    - As many ranks as saved it: each holds what it held then, replicas too.
    - Another number: a tensor that was sharded is sharded along that dim (the first, of several), balanced; one that
      was whole on all ranks is so again; one that was whole on some of n ranks (an expert) goes to the ranks
      r * num_ranks // n.
    - A plain file, a Hugging Face folder, or what one rank saved, on more than one rank: every tensor is sharded along
      its first dim, balanced; one without dims is whole everywhere.

    Parts of a weight that has scales are of whole blocks, and its scales go with it.

    Raises:
        CheckpointError: catalog is not a Catalog, or num_ranks is not a number of ranks.
    """
    instance(catalog, Catalog, "catalog is a Catalog, from Catalog.open", CheckpointError)
    rule = f"num_ranks is a number of ranks, 1 to {MOST_RANKS}"
    num_ranks = check_whole(num_ranks, rule, CheckpointError, 1, MOST_RANKS)
    shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
    scales = all_scales(shapes)
    for name in scales.keys() - weights_of_scales(shapes).keys() if (catalog.num_ranks or 1) > 1 else ():
        held = catalog.tensors[name].tiling  # scales of another name that are whole on all ranks stay so
        if held is not None and all(held.local_elems(r) == held.size_elems for r in held.ranks):
            del scales[name]
    size = Sizes.beside(catalog.files[0]).weight_block if scales and catalog.files else ()
    blocks: dict[str, list[tuple[str, Blocks]]] = {}
    for name, weight in scales.items():
        given = catalog.tensors[name]
        found = blocks_of(shapes[weight], given.shape, given.dtype, size)
        assert found is not None  # that is what made it the scales
        blocks.setdefault(weight, []).append((name, found))
    tilings = {}
    for name, tensor in catalog.tensors.items():
        if tensor.tiling is not None and catalog.num_ranks == num_ranks:
            tilings[name] = tensor.tiling
        elif name not in scales:
            mine = blocks.get(name, [])
            boxes = _boxes(tensor, catalog.num_ranks or 1, num_ranks, [found for _, found in mine])
            tilings[name] = _tiling(tensor, boxes)
            for part, found in mine:
                cut = [None if box is None else scales_box(box, tensor.shape, found) for box in boxes]
                tilings[part] = _tiling(catalog.tensors[part], cut)
    return {name: tilings[name] for name in catalog.tensors}


def _boxes(tensor: StoredTensor, saved: int, num_ranks: int, blocks: Sequence[Blocks]) -> list[Box | None]:
    """Return the box of each rank, or None where it takes no part."""
    whole = full_box(tensor.shape)
    known = tensor.tiling if saved > 1 else None
    if not whole or num_ranks == 1:
        return [whole] * num_ranks
    if known is None:
        return _cut(whole, 0, num_ranks, blocks)
    holders = [rank for rank in known.ranks if known.local_elems(rank)]
    dims = [
        dim
        for dim, interval in enumerate(whole)
        if any(tile.box[dim] != interval for rank in holders for tile in known.tiles(rank))
    ]
    if dims:
        return _cut(whole, dims[0], num_ranks, blocks)
    if not holders:  # a tensor without elements
        return [whole] * num_ranks
    places = {rank * num_ranks // saved for rank in holders}
    if len(holders) == saved:
        places = set(range(num_ranks))
    return [whole if rank in places else None for rank in range(num_ranks)]


def _cut(whole: Box, dim: int, num_ranks: int, blocks: Sequence[Blocks]) -> list[Box | None]:
    """Return balanced parts along a dim, in whole blocks of all scales."""
    extent = whole[dim][1]
    sizes = [b[dim] or 1 for b in blocks if dim < len(b)]
    unit = lcm(*(extent if isinstance(size, Unclear) else size for size in sizes))
    parts = (split_units(extent, num_ranks, rank, unit) for rank in range(num_ranks))
    return [(*whole[:dim], part, *whole[dim + 1 :]) for part in parts]


def _tiling(tensor: StoredTensor, boxes: Sequence[Box | None]) -> Tiling:
    shapes = [None if box is None else shape_of(box) for box in boxes]
    tiles = [
        () if box is None or not volume(box) else (Tile(box, full_box(shape or ())),)
        for box, shape in zip(boxes, shapes, strict=True)
    ]
    return Tiling(tensor.shape, tensor.dtype, tuple(tiles), tuple(shapes))
