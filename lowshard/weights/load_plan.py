"""LoadPlan: which rank reads which bytes of a checkpoint, and who gets them. Frozen data; no file is open.

own-slice: every rank reads what it holds; what several ranks of a node hold is read by one of them and sent to
the others, and where they hold columns of the same rows, each reads a part of the rows for all. node-leader: the
lowest rank of each node reads all that the node holds, and sends it. root-scatter: rank 0 reads everything and
sends it, for files that only its node sees. In all three no two ranks of a node read the same byte of a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, get_args

from lowshard.argument import instance, mapping, one_of, whole, wholes
from lowshard.box import Box, intersect, shape_of, volume
from lowshard.checkpoint.catalog import Catalog, Files
from lowshard.checkpoint.read_shares import Share, disjoint, shares, with_whole_rows
from lowshard.content_hash import text_digest
from lowshard.errors import CheckpointError, PlanError
from lowshard.layout import Layout
from lowshard.mesh import MOST_RANKS
from lowshard.tiling import Tiling

Strategy = Literal["own-slice", "node-leader", "root-scatter"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
CHUNK_BYTES = 4 << 20
"""Most bytes that one read for others holds; what a rank sends at a time is of this order."""


@dataclass(frozen=True, slots=True)
class Read:
    """A box of a tensor that one rank reads, and the ranks that take what they hold of it (the reader may be one)."""

    name: str
    reader: int
    box: Box
    takers: tuple[int, ...]


@dataclass(frozen=True)
class LoadPlan:
    """How ranks fill their tilings from a checkpoint. Equal on all ranks; its digest is compared first."""

    strategy: str
    source: str
    """Digest of the catalog it was made for."""
    nodes: tuple[int, ...]
    """The node of each rank."""
    tilings: tuple[tuple[str, Tiling], ...]
    reads: tuple[Read, ...]
    _rank_plans: dict[int, object] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What each rank makes of it, kept for the next time."""

    @cached_property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return len(self.nodes)

    @cached_property
    def by_name(self) -> dict[str, Tiling]:
        """The tilings by name."""
        return dict(self.tilings)

    def _rank(self, rank: int) -> int:
        most = self.num_ranks - 1
        return whole(rank, f"a rank of this plan is 0 to {most}", PlanError, 0, most)

    def _read_bytes(self, read: Read) -> int:
        return volume(read.box) * self.by_name[read.name].itemsize_bytes

    def read_bytes(self, rank: int) -> int:
        """Return the bytes a rank reads from files."""
        rank = self._rank(rank)
        return sum(self._read_bytes(r) for r in self.reads if r.reader == rank)

    def taken_bytes(self, read: Read, rank: int) -> int:
        """Return the bytes that a rank takes of a read: those that it holds."""
        tiling = self.by_name[read.name]
        common = (intersect(tile.box, read.box) for tile in tiling.tiles(rank) if rank in read.takers)
        return sum(volume(box) for box in common if box is not None) * tiling.itemsize_bytes

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes a rank sends to others."""
        rank = self._rank(rank)
        return sum(
            self.taken_bytes(r, t) for r in self.reads if r.reader == rank for t in r.takers if t != rank
        )

    def received_bytes(self, rank: int) -> int:
        """Return the bytes a rank gets from others."""
        rank = self._rank(rank)
        return sum(self.taken_bytes(r, rank) for r in self.reads if r.reader != rank)

    def held_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's arrays."""
        rank = self._rank(rank)
        return sum(t.local_bytes(rank) for _, t in self.tilings)

    def explain(self) -> str:
        """Return a table: bytes held, read, sent and received by each rank."""
        lines = [f"{self.strategy}: {len(self.tilings)} tensors over {self.num_ranks} ranks",
                 "rank  node      held MB      read MB      sent MB  received MB"]  # fmt: skip
        for rank, node in enumerate(self.nodes):
            figures = (self.held_bytes, self.read_bytes, self.sent_bytes, self.received_bytes)
            lines.append(f"{rank:4}  {node:4}" + "".join(f"{f(rank) / 1e6:13.3f}" for f in figures))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; what the digest is of."""
        return {
            "strategy": self.strategy,
            "source": self.source,
            "nodes": list(self.nodes),
            "tilings": [[name, tiling.to_json()] for name, tiling in self.tilings],
            "reads": [[r.name, r.reader, [list(i) for i in r.box], list(r.takers)] for r in self.reads],
        }

    def digest(self) -> str:
        """Return 32 hex digits that two plans share exactly when they are equal."""
        return self.digest_bytes.hex()

    @cached_property
    def digest_bytes(self) -> bytes:
        """The digest as 16 bytes."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return text_digest(text)


def plan_load(
    files: Files | Catalog,
    tilings: Mapping[str, Tiling | Layout],
    num_ranks: int | None = None,
    *,
    strategy: Strategy = "own-slice",
    nodes: Sequence[int] | None = None,
) -> LoadPlan:
    """Return how ranks read a checkpoint.

    Args:
        files: the checkpoint, as for `Catalog.open`.
        tilings: what each rank is to hold, by name; names that are not here are not read.
        num_ranks: ranks that take part; by default as many as the tilings speak of.
        strategy: "own-slice", "node-leader" or "root-scatter".
        nodes: the node of each rank; by default all are on one (`nodes_of(comm)` tells).

    Raises:
        CheckpointError: the checkpoint is damaged, lacks a tensor, or has it in another shape or dtype.
        PlanError: an unknown strategy, or numbers of ranks that do not fit.
    """
    catalog = files if isinstance(files, Catalog) else Catalog.open(files)
    one_of(strategy, STRATEGIES, "a load strategy", PlanError)
    rule = "tilings is a mapping of names to a Tiling or a Layout"
    made = {
        n: t if isinstance(t, Tiling) else Tiling.from_layout(instance(t, Layout, rule, PlanError))
        for n, t in mapping(tilings, rule, PlanError).items()
    }
    size = max((t.num_ranks for t in made.values()), default=1)
    if num_ranks is not None:
        size = whole(num_ranks, "num_ranks is 1 or more, or None", PlanError, 1, MOST_RANKS)
    rule = f"nodes names the node, 0 or more, of each of {size} ranks"
    places = (0,) * size if nodes is None else wholes(nodes, rule, PlanError, 0)
    if len(places) != size:
        raise PlanError(f"nodes names the node of each of {size} ranks, got {len(places)}")
    for name, tiling in made.items():
        if tiling.num_ranks > size:
            raise PlanError(f"tensor {name!r} is cut over {tiling.num_ranks} ranks, the job has {size}")
        stored = catalog.tensor(name)
        if (stored.dtype, stored.shape) != (tiling.dtype, tiling.shape):
            file = stored.parts[0].file if stored.parts else catalog.where
            is_dtype = stored.shape == tiling.shape
            advice = "load it as it is, then convert" if is_dtype else "give the shape that is stored"
            raise CheckpointError(
                f"{file}: tensor {name!r} is {stored.dtype}{list(stored.shape)}, it is to be loaded as "
                f"{tiling.dtype}{list(tiling.shape)}: {advice}"
            )
        made[name] = tiling.widened(size)
    reads = tuple(_reads(made, catalog, places, strategy))
    return LoadPlan(strategy, catalog.digest, places, tuple(made.items()), reads)


def _reads(
    tilings: Mapping[str, Tiling], catalog: Catalog, nodes: Sequence[int], strategy: str
) -> Iterable[Read]:
    ranks_of = {node: [r for r, place in enumerate(nodes) if place == node] for node in dict.fromkeys(nodes)}
    if strategy == "own-slice":
        for ranks in ranks_of.values():
            for share in with_whole_rows(shares(tilings, ranks), catalog.boxes):
                yield from _chunks(share, tilings)
        return
    groups = [list(range(len(nodes)))] if strategy == "root-scatter" else list(ranks_of.values())
    for ranks in groups:
        for name, tiling in tilings.items():
            boxes = [Share(name, ranks[0], box, holders) for box, holders in disjoint(tiling, ranks)]
            # A chunk for each in turn, so that all of them have something to take while the next one is read.
            lanes = [_chunks(share, tilings) for share in with_whole_rows(boxes, catalog.boxes)]
            for row in zip_longest(*lanes):
                yield from (read for read in row if read is not None)


def _chunks(share: Share, tilings: Mapping[str, Tiling]) -> Iterable[Read]:
    """Cut what is read for others into chunks; what a rank reads for itself goes into its place at once."""
    name, reader, takers = share.name, share.rank, share.holders
    if takers == (reader,):
        yield Read(name, reader, share.box, takers)
        return
    others = sum(t != reader for t in takers)
    limit = max(CHUNK_BYTES // max(others, 1), 1 << 16)
    stack = [share.box]
    while stack:
        part = stack.pop()
        extents = shape_of(part)
        if volume(part) * tilings[name].itemsize_bytes <= limit or volume(part) == 1:
            yield Read(name, reader, part, takers)
            continue
        dim = next(d for d, n in enumerate(extents) if n > 1)
        start, stop = part[dim]
        middle = (start + stop) // 2
        stack.append((*part[:dim], (middle, stop), *part[dim + 1 :]))
        stack.append((*part[:dim], (start, middle), *part[dim + 1 :]))
