"""From what users say of both sides to a plan: tables of layouts, or Megatron's records of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowshard.errors import PlanError
from lowshard.layout import Layout
from lowshard.reshard.cut import Cut
from lowshard.reshard.layout import TensorLayout, as_tensor_layout
from lowshard.reshard.move import Entry
from lowshard.reshard.parameter import Held, ParameterMetadata, tensor_layouts, with_tied_output
from lowshard.reshard.partition import Cuts
from lowshard.reshard.plan import ENTRIES, ReshardPlan
from lowshard.tiling import Tiling

Table = Mapping[str, TensorLayout | Layout | Tiling]
Side = Table | Iterable[ParameterMetadata] | Iterable[Iterable[ParameterMetadata]]


def build_reshard_plan(
    src: Side,
    dst: Side | Sequence[Table],
    *,
    node_size: int | None = None,
    multicast: bool = False,
) -> ReshardPlan:
    """Return the plan that moves tensors from one table of layouts to another.

    Pure: every process gets the same plan from the same tables, and nothing is sent. Ranks are numbered jointly:
    those of both sides are ranks of the communicator that will run the plan.

    Args:
        src: what the ranks hold: a layout for each name (TensorLayout, Layout or Tiling), or the records of all ranks
            (ParameterMetadata, flat or a list a rank).
        dst: what they shall hold, likewise; a list of tables is several destination pools, on ranks of their own.
        node_size: ranks a node (rank r is on node r // node_size): replicas on the own node are preferred as sources.
        multicast: one replica of each destination part fetches it and hands it on to the others along a binomial
            tree, so that sources send it once; for tensors whose source and destination ranks are apart.

    Raises:
        PlanError: a destination tensor without a source, or with another shape or dtype than its source; node_size
            below 1; a rank in two pools.
        LayoutError: a layout that cannot be, or is partial.
    """
    if node_size is not None and node_size < 1:
        raise PlanError(f"node_size is a number of ranks >= 1, got {node_size}")
    have = _table(src, "src")
    from_records = not isinstance(src, Mapping)
    is_pools = isinstance(dst, Sequence) and bool(dst) and isinstance(dst[0], Mapping)
    pools = [_table(pool, "dst") for pool in dst] if is_pools else [_table(dst, "dst")]
    entries = []
    for wanted in pools:
        fed = with_tied_output(have, wanted)
        for name, to in wanted.items():
            entries.append(_entry(name, fed[name], have[fed[name]], to, from_records))
    if not entries:
        raise PlanError("a reshard moves one tensor or more; the destination table is empty")
    if len(pools) > 1:
        _require_apart(pools)
    if len(entries) > ENTRIES:
        raise PlanError(f"a plan has up to {ENTRIES} tensors, got {len(entries)}; make several plans")
    return ReshardPlan(tuple(entries), node_size, multicast)


def _table(side: Any, which: str) -> dict[str, Held]:
    if isinstance(side, Mapping):
        return {name: Held(as_tensor_layout(layout)) for name, layout in side.items()}
    records: list[Any] = []
    for item in side:
        records.extend([item] if isinstance(item, ParameterMetadata) else item)
    if not all(isinstance(record, ParameterMetadata) for record in records):
        raise PlanError(
            f"{which} is a mapping of names to layouts, or ParameterMetadata of all ranks; got "
            f"{type(next(r for r in records if not isinstance(r, ParameterMetadata))).__name__}"
        )
    return tensor_layouts(records)


def _entry(name: str, src_name: str, src: Held, dst: Held, from_records: bool) -> Entry:
    a, b = src.layout, dst.layout
    if from_records:
        a, b = _with_blocks(a, b)
    if a.shape != b.shape:
        raise PlanError(
            f"{name}: source and destination are one tensor, but the source has shape {list(a.shape)} and the "
            f"destination {list(b.shape)} over all ranks (local shapes times the ranks they are dealt to); a tensor "
            "that is marked as cut but held whole, or the other way round, looks like this"
        )
    if a.dtype != b.dtype:
        raise PlanError(
            f"{name}: the source has dtype {a.dtype}, the destination {b.dtype}; declare one dtype on both sides and "
            "convert before or after, or let a transform convert"
        )
    return Entry(name, src_name, a, b, dict(src.names), dict(dst.names))


def _with_blocks(src: TensorLayout, dst: TensorLayout) -> tuple[TensorLayout, TensorLayout]:
    """Give packed blocks that one side's records name to the other side, if that is cut plainly."""
    if not (isinstance(src.partition, Cuts) and isinstance(dst.partition, Cuts)):
        return src, dst
    return _blocks_of(dst, src), _blocks_of(src, dst)


def _blocks_of(giver: TensorLayout, taker: TensorLayout) -> TensorLayout:
    assert isinstance(giver.partition, Cuts)
    assert isinstance(taker.partition, Cuts)
    if len(giver.partition.cuts) != len(taker.partition.cuts):
        return taker
    cuts = tuple(
        Cut(t.length, t.parts, blocks=g.blocks, split=t.split)
        if g.blocks is not None
        and t.parts > 1
        and t.blocks is None
        and t.points is None
        and g.length == t.length
        else t
        for g, t in zip(giver.partition.cuts, taker.partition.cuts, strict=True)
    )
    return taker if cuts == taker.partition.cuts else TensorLayout(taker.dtype, Cuts(cuts), taker.seats)


def _require_apart(pools: Sequence[Mapping[str, Held]]) -> None:
    seen: dict[str, set[int]] = {}
    for pool in pools:
        for name, held in pool.items():
            seats = held.layout.seats
            mine = {r for cell in range(seats.cells) for r in seats.ranks(cell)}
            both = mine & seen.setdefault(name, set())
            if both:
                raise PlanError(f"{name}: rank {min(both)} is in two destination pools; a rank is in one")
            seen[name] |= mine
