"""Megatron's metadata: one record for each parameter of each rank, and the layout tables made from them.

The fields are those of `megatron/core/resharding/utils.py` (Megatron-LM 039030c9). What its planner refuses is
taken here where the records say enough: see `tensor_layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any

from lowshard import dtypes
from lowshard.argument import brief, instance, mapping, truth, whole, wholes
from lowshard.box import Interval, split_interval
from lowshard.errors import PlanError
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.partition import GridPartition
from lowshard.reshard.rank_grid import Roster
from lowshard.reshard.tensor_layout import TensorLayout

_EXPERT_KEY = re.compile(r"^(weight|bias)(\d+)$")
_OUTPUT_LAYER = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"
_GTP = "gtp_remat"
_Rows = tuple[tuple[int, Interval], ...]


@dataclass(frozen=True)
class ParameterMetadata:
    """What one rank holds of one parameter.

    Args:
        name: the parameter's name on this rank.
        shape: local shape.
        dtype: any name of the dtype table, or a NumPy dtype.
        element_size: bytes of an element; by default the dtype's.
        is_tp: whether the ranks of the tensor-parallel group hold different parts along `partition_dim`.
        partition_dim: the dim that is sharded.
        partition_stride: equal chunks of the dim, each sharded over the group separately (2 for the gate and up
            halves of a gated MLP). Where a chunk does not divide by the group its first ranks hold one more.
        partition_sizes: widths, on this rank, of blocks packed on the dim that are each sharded separately (Mamba's
            in_proj, say); they come without a stride.
        is_gtp: whether dim 0 of what the other groups leave a rank is sharded once more, into contiguous pieces of one
            length; this rank holds one of them, of shape `shape`.
        gtp_remat_group_ranks: the ranks that hold the pieces, in order.
        gtp_pad_length: rows at the end of the last pieces that belong to no tensor; a piece may be padding alone. They
            are neither read nor written, and arrays come with or without them.
        is_ep: whether expert-parallel ranks hold different experts; where not, `weightK` and `biasK` are plain names.
        num_experts: experts of the layer over all ranks.
        owner_rank: the rank this record speaks of.
        tensor_parallel_group_ranks: the ranks that the dim is sharded over, in the order of parts.
        expert_parallel_group_ranks: the ranks that experts are distributed over, in order.
        data_parallel_group_ranks: the ranks that hold the same.
        pipeline_parallel_group_ranks: one rank of each stage; for the record only, names say what is where.
        resolved_name: name that is equal wherever the parameter is the same one; by default `name`.
        global_expert_index: the expert, over all ranks.
        partition_copies: neighbours in the tensor-parallel group that hold the same part (more ranks than KV heads).
        expert_dim: the dim that stacked experts lie on, for tensors that hold several; they are distributed over the
            expert-parallel ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any = "bfloat16"
    element_size: int | None = None
    is_tp: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: tuple[int, ...] | None = None
    is_gtp: bool = False
    gtp_remat_group_ranks: tuple[int, ...] | None = None
    gtp_pad_length: int = 0
    is_ep: bool = False
    num_experts: int | None = None
    owner_rank: int = 0
    tensor_parallel_group_ranks: tuple[int, ...] | None = None
    expert_parallel_group_ranks: tuple[int, ...] | None = None
    data_parallel_group_ranks: tuple[int, ...] | None = None
    pipeline_parallel_group_ranks: tuple[int, ...] | None = None
    resolved_name: str | None = None
    global_expert_index: int | None = None
    partition_copies: int = 1
    expert_dim: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        rule = f"{brief(self.name)}: a parameter's name is a text, and resolved_name another or None"
        instance(self.name, str, rule, PlanError)
        if self.resolved_name is not None:
            instance(self.resolved_name, str, rule, PlanError)
        put(self, "shape", self._integers("shape"))
        for field in ("partition_dim", "partition_stride", "owner_rank"):
            put(self, field, whole(getattr(self, field), f"{self.name}: {field} is an integer", PlanError))
        for field, least in (("partition_copies", 1), ("gtp_pad_length", 0)):
            rule = f"{self.name}: {field} is {least} or more"
            put(self, field, whole(getattr(self, field), rule, PlanError, least))
        for field in ("element_size", "num_experts", "global_expert_index", "expert_dim"):
            if getattr(self, field) is not None:
                rule = f"{self.name}: {field} is an integer or None"
                put(self, field, whole(getattr(self, field), rule, PlanError))
        if self.expert_dim is not None and not -len(self.shape) <= self.expert_dim < len(self.shape):
            raise PlanError(
                f"{self.name}: expert_dim is a dim of shape {self.shape}, got {brief(self.expert_dim)}"
            )
        for field in ("is_tp", "is_ep", "is_gtp"):
            put(self, field, truth(getattr(self, field), f"{self.name}: {field} is True or False", PlanError))
        row = dtypes.get(self.dtype)
        put(self, "dtype", row.name)
        if self.element_size is None:
            put(self, "element_size", row.itemsize_bytes)
        elif self.element_size != row.itemsize_bytes:
            raise PlanError(
                f"{self.name}: an element of {row.name} has {row.itemsize_bytes} bytes, element_size says "
                f"{self.element_size}"
            )
        put(self, "partition_stride", max(1, self.partition_stride))
        if self.partition_sizes is not None:
            put(self, "partition_sizes", self._integers("partition_sizes"))
        for field in ("tensor_parallel", "expert_parallel", "data_parallel", "pipeline_parallel", _GTP):
            key = f"{field}_group_ranks"
            if getattr(self, key) is not None:
                put(self, key, self._integers(key))
        if (
            self.expert_dim is None
            and self.is_ep
            and self.num_experts
            and self.expert_parallel_group_ranks
            and len(self.shape) > 2
            and "local_experts" not in self.name.split(".")
            and not any(map(_EXPERT_KEY.match, self.name.split(".")))
        ):
            put(self, "expert_dim", 0)

    def _integers(self, field: str) -> tuple[int, ...]:
        try:  # groups may name thousands of ranks
            return tuple(map(index, getattr(self, field)))
        except TypeError:
            got = brief(getattr(self, field))
            raise PlanError(f"{self.name}: {field} is a sequence of integers, got {got}") from None

    @property
    def key(self) -> str:
        """The name that is equal on all ranks for the same parameter."""
        return self.name if self.resolved_name is None else self.resolved_name

    def resolved(self, layer_prefixes: Mapping[str, str] | None = None) -> ParameterMetadata:
        """Return the record with its name resolved by `resolve_name`."""
        name, expert = resolve_name(
            self.name,
            expert_ranks=self.expert_parallel_group_ranks if self.is_ep else None,
            rank=self.owner_rank,
            num_experts=self.num_experts,
            layer_prefixes=layer_prefixes,
        )
        return replace(self, resolved_name=name, global_expert_index=expert)


def resolve_name(
    name: str,
    *,
    expert_ranks: Sequence[int] | None = None,
    rank: int = 0,
    num_experts: int | None = None,
    layer_prefixes: Mapping[str, str] | None = None,
) -> tuple[str, int | None]:
    """Return a parameter's name over all ranks, and its expert over all ranks (None where it is of no expert).

    A local expert K (`weightK`, `biasK`, or `local_experts.K`) becomes its number over all ranks: experts are
    distributed over expert-parallel ranks by the balanced rule, so a count that does not divide loses none. A prefix
    of `layer_prefixes` is replaced by whole path components, the longest first.

    Raises:
        PlanError: a local expert that the rank does not have.
    """
    expert: int | None = None
    parts = instance(name, str, "a parameter's name is text", PlanError).split(".")
    rank = whole(rank, "a rank is an integer", PlanError)
    if expert_ranks is not None:
        expert_ranks = wholes(expert_ranks, "expert_ranks is a sequence of ranks, or None", PlanError, 0)
    if num_experts is not None:
        num_experts = whole(num_experts, "num_experts is a number of 0 or more, or None", PlanError, 0)
    rule = "layer_prefixes is a mapping of prefix to prefix, both text, or None"
    prefixes = {} if layer_prefixes is None else mapping(layer_prefixes, rule, PlanError)
    if expert_ranks is not None and num_experts is not None and rank in expert_ranks:
        index = expert_ranks.index(rank)
        first, stop = split_interval((0, num_experts), len(expert_ranks), index)
        for i, part in enumerate(parts):
            match = _EXPERT_KEY.match(part)
            in_list = part.isdecimal() and i > 0 and parts[i - 1] == "local_experts"
            if match is None and not in_list:
                continue
            local = int(part) if match is None else int(match[2])
            if first + local >= stop:
                raise PlanError(
                    f"{name}: rank {rank} is number {index} of {len(expert_ranks)} expert-parallel ranks and holds "
                    f"experts {first} to {stop - 1} of {num_experts}, which is {stop - first}; it has no local "
                    f"expert {local}"
                )
            expert = first + local
            parts[i] = str(expert) if match is None else f"{match[1]}{expert}"
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        found = prefixes.get(prefix)
        if found is not None:
            parts[:length] = instance(found, str, rule, PlanError).split(".")
            break
    return ".".join(parts), expert


@dataclass(frozen=True)
class Held:
    """One side of one parameter: its layout, and its name on each rank where that differs."""

    layout: TensorLayout
    names: tuple[tuple[int, str], ...] = ()
    rows: _Rows = ()
    """Under GTP, the rows of its array in `layout` that each rank holds, padding included."""


def tensor_layouts(records: Iterable[ParameterMetadata]) -> dict[str, Held]:
    """Return a table of layouts from the records of all ranks, in order of first appearance."""
    groups: dict[str, list[ParameterMetadata]] = {}
    for record in _resolve_experts(list(records)):
        groups.setdefault(record.key, []).append(record)
    return {key: _held(key, found) for key, found in groups.items()}


def _resolve_experts(records: list[ParameterMetadata]) -> list[ParameterMetadata]:
    """Resolve names of experts that still carry their local number."""
    counted: dict[tuple[int, str], set[int]] = {}
    for record in records:
        at = _in_list(record.name)
        if at is not None:
            parts = record.name.split(".")
            counted.setdefault((record.owner_rank, ".".join(parts[:at])), set()).add(int(parts[at]))
    found = []
    for record in records:
        ranks = record.expert_parallel_group_ranks
        open_name = record.resolved_name is None or record.resolved_name == record.name
        at = _in_list(record.name)
        if not open_name or ranks is None or record.owner_rank not in ranks or record.expert_dim is not None:
            found.append(record)
        elif record.is_ep and record.num_experts is not None:
            found.append(record.resolved())
        elif at is not None and len(ranks) > 1:
            parts = record.name.split(".")
            prefix = ".".join(parts[:at])
            before = ranks[: ranks.index(record.owner_rank)]
            expert = int(parts[at]) + sum(len(counted.get((r, prefix), ())) for r in before)
            parts[at] = str(expert)
            found.append(replace(record, resolved_name=".".join(parts), global_expert_index=expert))
        else:
            found.append(record)
    return found


def _in_list(name: str) -> int | None:
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 1):
        if part.isdecimal() and parts[i - 1] == "local_experts":
            return i
    return None


def _before_gtp(key: str, records: Sequence[ParameterMetadata]) -> tuple[list[ParameterMetadata], _Rows]:
    """Return records of the arrays that GTP shards, and the rows of them that each rank holds, padding included."""
    found, held = [], []
    speak = {record.owner_rank for record in records}
    for record in records:
        if not record.is_gtp:
            found.append(record)
            continue
        group, rows = record.gtp_remat_group_ranks or (), record.shape[0] if record.shape else 0
        length = rows * len(group) - record.gtp_pad_length
        empty = record.gtp_pad_length > 0 and length < 1
        if not record.shape or group.count(record.owner_rank) != 1 or empty:
            raise PlanError(
                f"{key}: under GTP a rank holds a piece of dim 0, its group names it once, and not all rows of the "
                f"group are padding; rank {record.owner_rank} says shape {list(record.shape)}, "
                f"gtp_remat_group_ranks {group} and gtp_pad_length {record.gtp_pad_length}"
            )
        whole = replace(record, shape=(length, *record.shape[1:]))
        for place, rank in enumerate(group):
            if rank == record.owner_rank or rank not in speak:  # without a record: what the others leave
                speak.add(rank)
                found.append(replace(whole, owner_rank=rank))
                held.append((rank, (place * rows, (place + 1) * rows)))
    return found, tuple(held)


def _held(key: str, records: Sequence[ParameterMetadata]) -> Held:
    records, rows = _before_gtp(key, records)
    first = records[0]
    parts: dict[tuple[int, ...], list[int]] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    ndim = len(first.shape)
    counts = [1] * ndim
    names = []
    for record in records:
        if len(record.shape) != ndim or record.dtype != first.dtype:
            raise PlanError(
                f"{key}: all ranks hold one tensor: rank {first.owner_rank} has {first.dtype}{list(first.shape)}, rank "
                f"{record.owner_rank} {record.dtype}{list(record.shape)}"
            )
        if _dealing(record) != _dealing(first):
            raise PlanError(
                f"{key}: all ranks deal a tensor alike: rank {first.owner_rank} says is_tp, partition_dim, "
                f"partition_stride and partition_sizes {_dealing(first)}, rank {record.owner_rank} {_dealing(record)}"
            )
        place = [0] * ndim
        for dim, group, copies in _sharded_dims(record):
            size = len(group) // copies
            if counts[dim] not in (1, size):
                raise PlanError(f"{key}: dim {dim} is sharded into {counts[dim]} parts and into {size}")
            counts[dim] = size
            place[dim] = group.index(record.owner_rank) // copies
        at = tuple(place)
        if shapes.setdefault(at, record.shape) != record.shape:
            raise PlanError(
                f"{key}: ranks {parts[at][0]} and {record.owner_rank} hold the same part, of shapes "
                f"{list(shapes[at])} and {list(record.shape)}"
            )
        if record.owner_rank not in parts.setdefault(at, []):
            parts[at].append(record.owner_rank)
        if record.name != key:
            names.append((record.owner_rank, record.name))
    _fill_in(key, records, parts, shapes, counts)
    shardings = [_sharding(key, dim, counts[dim], first, shapes) for dim in range(ndim)]
    partition = GridPartition(tuple(shardings))
    for at, shape in shapes.items():
        expected = partition.local_shape(partition.cell(at))
        if expected != shape:
            raise PlanError(
                f"{key}: part {at} of {partition.shape} sharded into {tuple(counts)} parts has shape {list(expected)}, "
                f"rank {parts[at][0]} holds {list(shape)}; give a record for every rank of uneven parts"
            )
    holders = tuple(tuple(parts[partition.parts(cell)]) for cell in range(partition.cells))
    return Held(TensorLayout(str(first.dtype), partition, Roster(holders)), tuple(sorted(set(names))), rows)


def _dealing(record: ParameterMetadata) -> tuple[bool, int, int, tuple[int, ...] | None]:
    """Return how a record's tensor is sharded; partition sizes come without a stride."""
    if not record.is_tp or not record.shape:
        return False, 0, 1, None
    stride = record.partition_stride if record.partition_sizes is None else 1
    return True, record.partition_dim % len(record.shape), stride, record.partition_sizes


def _sharded_dims(record: ParameterMetadata) -> list[tuple[int, tuple[int, ...], int]]:
    """Return the sharded dims of a record's tensor: dim, ranks in order of parts, replicas of each."""
    found = []
    dims = len(record.shape)
    if record.is_tp and dims:
        group, copies = record.tensor_parallel_group_ranks, record.partition_copies
        if group is None or record.owner_rank not in group or len(group) % copies:
            raise PlanError(
                f"{record.key}: a tensor-parallel parameter of rank {record.owner_rank} names the group it is in, a "
                f"multiple of its {copies} copies, got {group}"
            )
        if not -dims <= record.partition_dim < dims:
            raise PlanError(
                f"{record.key}: partition_dim is a dim of shape {list(record.shape)}, got {record.partition_dim}"
            )
        found.append((record.partition_dim % dims, group, copies))
    if record.expert_dim is not None:
        experts = record.expert_parallel_group_ranks
        if (
            experts is None
            or record.owner_rank not in experts
            or (found and found[0][0] == record.expert_dim)
        ):
            raise PlanError(
                f"{record.key}: stacked experts are distributed over expert-parallel ranks along their own dim, got "
                f"expert_dim {record.expert_dim} and ranks {experts}"
            )
        found.append((record.expert_dim, experts, 1))
    return found


def _fill_in(
    key: str,
    records: Sequence[ParameterMetadata],
    parts: dict[tuple[int, ...], list[int]],
    shapes: dict[tuple[int, ...], tuple[int, ...]],
    counts: Sequence[int],
) -> None:
    """Give ranks of a group that have no record the equal parts that the other records imply."""
    speak = {record.owner_rank for record in records}
    for record in records:
        cutting = _sharded_dims(record)
        if len(cutting) != 1:
            continue
        dim, group, copies = cutting[0]
        for place, rank in enumerate(group):
            at = tuple(place // copies if d == dim else 0 for d in range(len(counts)))
            if rank not in speak:
                if record.is_gtp:
                    raise PlanError(
                        f"{key}: under GTP every rank of a group has a record; rank {rank} has none"
                    )
                shapes.setdefault(at, record.shape)
                parts.setdefault(at, []).append(rank)
                speak.add(rank)
    absent = prod(counts) - len(parts)
    if absent:
        raise PlanError(
            f"{key}: {absent} of {prod(counts)} parts are on no rank: the records give parts {sorted(parts)}"
        )


def _sharding(
    key: str,
    dim: int,
    count: int,
    record: ParameterMetadata,
    shapes: Mapping[tuple[int, ...], tuple[int, ...]],
) -> DimSharding:
    widths = [0] * count
    for at, shape in shapes.items():
        place = at[dim] if count > 1 else 0
        if widths[place] not in (0, shape[dim]):
            raise PlanError(f"{key}: part {place} of dim {dim} is {widths[place]} and {shape[dim]} wide")
        widths[place] = shape[dim]
    length = sum(widths)
    if count == 1:
        return DimSharding.whole(length)
    is_tp_dim = record.is_tp and record.partition_dim % len(record.shape) == dim
    if is_tp_dim and record.partition_sizes is not None:
        if sum(record.partition_sizes) != record.shape[dim] or len(set(widths)) > 1:
            raise PlanError(
                f"{key}: partition_sizes {record.partition_sizes} add up to a rank's extent in dim {dim}, the same on "
                f"all, got {sorted(set(widths))}"
            )
        return DimSharding(length, count, blocks=tuple(n * count for n in record.partition_sizes))
    if is_tp_dim and record.partition_stride > 1:
        return DimSharding(length, count, chunks=record.partition_stride)
    return DimSharding(length, count) if len(set(widths)) == 1 else DimSharding.sizes(widths)


def with_tied_output(src: Mapping[str, Held], dst: Iterable[str]) -> dict[str, str]:
    """Return for each destination name the source name it is filled from."""
    found = {}
    lacking = []
    for name in dst:
        if name in src:
            found[name] = name
        elif name.endswith(_OUTPUT_LAYER) and (tied := name.removesuffix(_OUTPUT_LAYER) + _EMBEDDING) in src:
            found[name] = tied
        elif name.endswith(_OUTPUT_LAYER) and (others := [n for n in src if n.endswith(_EMBEDDING)]):
            found[name] = others[0]
        else:
            lacking.append(name)
    if lacking:
        raise PlanError(
            f"every destination tensor has a source of its name: {len(lacking)} have none, such as {lacking[:3]}; the "
            f"source has {list(src)[:3]}"
        )
    return found


def may_be_tied(name: str, other: str) -> bool:
    """Return whether some source could fill both names."""
    return name.endswith(_OUTPUT_LAYER) or other.endswith(_OUTPUT_LAYER)
