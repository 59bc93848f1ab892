"""Builds a reshard plan from tables of layouts, or from Megatron's records of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowshard.argument import items, truth
from lowshard.errors import PlanError
from lowshard.layout import Layout
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.parameter_record import Held, ParameterMetadata, tensor_layouts, with_tied_output
from lowshard.reshard.partition import GridPartition
from lowshard.reshard.reshard_move import Entry
from lowshard.reshard.reshard_plan import ReshardPlan
from lowshard.reshard.tensor_layout import TensorLayout, as_tensor_layout
from lowshard.tiling import Tiling

Table = Mapping[str, TensorLayout | Layout | Tiling]
Side = Table | Iterable[ParameterMetadata] | Iterable[Iterable[ParameterMetadata]]


def build_reshard_plan(
    src: Side, dst: Side | Sequence[Table], *, node_size: int | None = None, multicast: bool = False
) -> ReshardPlan:
    """Return the plan that moves tensors from one table of layouts to another.

    Pure: every process gets the same plan from the same tables, and nothing is sent. Ranks are numbered jointly:
    those of both sides are ranks of the communicator that will run the plan.

    Args:
        src: what the ranks hold: a layout for each name (TensorLayout, Layout or Tiling), or the records of all ranks
            (ParameterMetadata, flat or a list a rank).
        dst: what they should hold, in the same forms; a list of tables is several destination pools, on ranks of their
            own.
        node_size: ranks a node (rank r is on node r // node_size): replicas on the own node are preferred as sources.
        multicast: one replica of each destination part fetches it and hands it on to the others along a binomial
            tree, so that sources send it once; for tensors whose source and destination ranks are apart.

    Raises:
        PlanError: a destination tensor without a source, or with another shape or dtype than its source; records that
            contradict each other or the parts that their sharding gives; node_size below 1; a rank in two pools.
        LayoutError: a layout that cannot be, or is partial.
    """
    multicast = truth(multicast, "multicast is True or False", PlanError)
    have = _table(src, "src")
    is_pools = isinstance(dst, Sequence) and bool(dst) and isinstance(dst[0], Mapping)
    from_records = not (isinstance(src, Mapping) or isinstance(dst, Mapping) or is_pools)
    pools = [_table(pool, "dst") for pool in dst] if is_pools else [_table(dst, "dst")]
    entries = []
    for wanted in pools:
        fed = with_tied_output(have, wanted)
        for name, to in wanted.items():
            held = have[fed[name]]
            pair = held.layout, to.layout
            if held.rows or to.rows:  # Megatron's planner for GTP takes each record for itself
                pair = held.layout.with_rows(dict(held.rows)), to.layout.with_rows(dict(to.rows))
            elif from_records:
                pair = _with_blocks(name, held, to)
            entry = Entry(name, fed[name], *pair, dict(held.names), dict(to.names))
            if from_records and entry.src.dtype != entry.dst.dtype:
                raise entry.dtype_error(
                    "records declare the dtype that is served; a CastTransform casts to it"
                )
            entries.append(entry)
    if not entries:
        raise PlanError("a reshard moves one tensor or more; the destination table is empty")
    if len(pools) > 1:
        _require_apart(pools)
    return ReshardPlan(tuple(entries), node_size, multicast)


def _table(side: Any, which: str) -> dict[str, Held]:
    if isinstance(side, Mapping):
        return {name: Held(as_tensor_layout(layout)) for name, layout in side.items()}
    records: list[Any] = []
    rule = f"{which} is a mapping of names to layouts, or ParameterMetadata of all ranks"
    for item in items(side, rule, PlanError):
        is_list = isinstance(item, Iterable) and not isinstance(item, (str, Mapping))
        records.extend(items(item, rule, PlanError) if is_list else [item])
    wrong = [record for record in records if not isinstance(record, ParameterMetadata)]
    if wrong:
        raise PlanError(f"{rule}; got {type(wrong[0]).__name__}")
    return tensor_layouts(records)


def _with_blocks(name: str, src: Held, dst: Held) -> tuple[TensorLayout, TensorLayout]:
    """Add one side's packed blocks to the other side, if that is sharded without any."""
    a, b = src.layout, dst.layout
    if a.shape != b.shape or not (
        isinstance(a.partition, GridPartition) and isinstance(b.partition, GridPartition)
    ):
        return a, b
    for dim, (s, d) in enumerate(zip(a.partition.shardings, b.partition.shardings, strict=True)):
        if s.blocks is not None and d.blocks is not None and s.blocks != d.blocks:
            raise PlanError(
                f"{name}: both sides pack the same blocks on a dim, but by partition_sizes dim {dim} is "
                f"{list(s.blocks)} at the source and {list(d.blocks)} at the destination, over all ranks"
            )
    return _blocks_of(name, b, a, "source"), _blocks_of(name, a, b, "destination")


def _blocks_of(name: str, giver: TensorLayout, taker: TensorLayout, which: str) -> TensorLayout:
    assert isinstance(giver.partition, GridPartition)
    assert isinstance(taker.partition, GridPartition)
    shardings = tuple(
        DimSharding(t.length, t.parts, blocks=g.blocks, split=t.split)
        if g.blocks is not None and t.parts > 1 and t.blocks is None
        else t
        for g, t in zip(giver.partition.shardings, taker.partition.shardings, strict=True)
    )
    if shardings == taker.partition.shardings:
        return taker
    found = TensorLayout(taker.dtype, GridPartition(shardings), taker.rank_map)
    for cell in range(taker.partition.cells):
        said, planned = taker.partition.local_shape(cell), found.partition.local_shape(cell)
        if said != planned:
            raise PlanError(
                f"{name}: one side packs the blocks {[list(c.blocks) for c in shardings if c.blocks is not None]} on a "
                f"dim, each sharded by itself: that gives rank {taker.rank_map.ranks(cell)[0]} of the {which} shape "
                f"{list(planned)}, but its record says {list(said)}; hold parts of that shape and name "
                "partition_sizes, or use a number of ranks that divides every block"
            )
    return found


def _require_apart(pools: Sequence[Mapping[str, Held]]) -> None:
    seen: dict[str, set[int]] = {}
    for pool in pools:
        for name, held in pool.items():
            rank_map = held.layout.rank_map
            mine = {r for cell in range(rank_map.cells) for r in rank_map.ranks(cell)}
            both = mine & seen.setdefault(name, set())
            if both:
                raise PlanError(f"{name}: rank {min(both)} is in two destination pools; a rank is in one")
            seen[name] |= mine
