"""What is sharded over which ranks, and in which dtype: frozen values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lowshard import dtypes
from lowshard.argument import choice, instance, items, one_of, whole
from lowshard.errors import BadGrid, DTypeError, ShardingError
from lowshard.fsdp.param import Param

Kind = Literal["FullShard", "ShardGradOp", "NoShard", "HybridShard"]
Rest = Literal["sharded", "replicated"]

MXFP8 = "mxfp8"


@dataclass(frozen=True)
class ShardingStrategy:
    """How parameters, gradients and optimizer state lie over the ranks.

    `FullShard`: all three sharded over all ranks, parameters gathered before each use (ZeRO-3).
    `ShardGradOp`: gradients and state sharded. Parameters rest whole on every rank, and each update is followed by
    `broadcast_updated_params()`; with `rest="sharded"` they rest sharded and are gathered once between two updates.
    `NoShard`: every rank has everything, gradients are summed over all (data parallel).
    `HybridShard(intra_node_size)`: FullShard within contiguous groups of so many ranks, replicas across them.

    With the same settings and ranks all four give the same bits with order="tree", HybridShard where there are 1, 2, 4,
    8, ... groups (or groups of one rank) and gradients are reduced in 32 bits or more: of 12 ranks in groups of 4 the
    three groups' sums are no part of the tree over 12, and 16-bit sums are rounded once in the group and once more
    across. `Report.full_shard_bits` says which it is.

    The names are the values: `ShardingStrategy.ShardGradOp`, `ShardingStrategy.ShardGradOp(rest="sharded")`.
    """

    kind: Kind
    intra_node_size: int = 0
    rest: Rest = "sharded"

    def __post_init__(self) -> None:
        one_of(self.kind, get_args(Kind), "kind", ShardingError)
        one_of(self.rest, get_args(Rest), "rest", ShardingError)
        whole(self.intra_node_size, "intra_node_size is a number of ranks", ShardingError)

    FullShard: ClassVar[ShardingStrategy]
    ShardGradOp: ClassVar[ShardingStrategy]
    NoShard: ClassVar[ShardingStrategy]
    HybridShard: ClassVar[Callable[..., ShardingStrategy]]

    def __call__(self, rest: Rest | None = None) -> ShardingStrategy:
        """Return the same kind with other settings.

        Raises:
            ShardingError: rest for another kind than ShardGradOp, or another text than the two.
        """
        if rest is None:
            return self
        rule = f"{self.kind}: rest is for ShardGradOp, 'sharded' or 'replicated'"
        choice(rest, ("sharded", "replicated") if self.kind == "ShardGradOp" else (), rule, ShardingError)
        return ShardingStrategy("ShardGradOp", 0, rest)

    def __repr__(self) -> str:
        if self.kind == "HybridShard":
            return f"ShardingStrategy.HybridShard(intra_node_size={self.intra_node_size})"
        if self.kind == "ShardGradOp":
            return f"ShardingStrategy.ShardGradOp(rest={self.rest!r})"
        return f"ShardingStrategy.{self.kind}"

    @property
    def resident(self) -> bool:
        """Whether every rank holds whole parameters at rest and gathers them after an update."""
        return self.kind == "ShardGradOp" and self.rest == "replicated"

    @property
    def keeps_open(self) -> bool:
        """Whether a unit's parameters, once gathered, stay until the next update."""
        return self.kind in ("ShardGradOp", "NoShard")

    def grid(self, world: int, rank: int) -> Grid:
        """Return this rank's place in shard and replica groups.

        Raises:
            BadGrid: the world is not a multiple of intra_node_size.
        """
        world = whole(world, "a world has 1 rank or more", BadGrid, 1)
        rank = whole(rank, f"a rank is 0 to {world - 1}", BadGrid, 0, world - 1)
        size = {"NoShard": 1, "HybridShard": self.intra_node_size}.get(self.kind, world)
        if size < 1 or world % size:
            raise BadGrid(
                f"HybridShard splits the world into groups of intra_node_size ranks: a world of {world} ranks is no "
                f"multiple of {size}; take a divisor of {world}"
            )
        return Grid(world, rank, size)


def _hybrid(intra_node_size: int) -> ShardingStrategy:
    """Return HybridShard; the world is checked against the size where the model is made."""
    size = whole(intra_node_size, "intra_node_size is a number of ranks", ShardingError)
    return ShardingStrategy("HybridShard", size)


ShardingStrategy.FullShard = ShardingStrategy("FullShard")
ShardingStrategy.ShardGradOp = ShardingStrategy("ShardGradOp", 0, "replicated")
ShardingStrategy.NoShard = ShardingStrategy("NoShard")
ShardingStrategy.HybridShard = staticmethod(_hybrid)


@dataclass(frozen=True)
class Grid:
    """A rank's position: shard groups are contiguous blocks of ranks, replica groups are strided across them."""

    world: int
    rank: int
    shards: int

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.world // self.shards

    @property
    def follows_tree(self) -> bool:
        """Whether sums over shard groups, then over replicas, are the balanced tree over all ranks."""
        # Groups of one rank, one group of all, and any size of which there are 1, 2, 4, 8, ... groups.
        return self.shards == 1 or self.replicas & (self.replicas - 1) == 0

    @property
    def shard_rank(self) -> int:
        """This rank's position in its shard group."""
        return self.rank % self.shards

    @property
    def replica_rank(self) -> int:
        """This rank's position in its replica group; equal for all of a shard group."""
        return self.rank // self.shards


@dataclass(frozen=True)
class Precision:
    """Dtypes of storage, computation, communication and reduction.

    Attributes:
        compute: of the arrays that `open` gives; None is each unit's own.
        wire: of gathers: a float dtype, or "mxfp8" for quantised shards with their scales. None is `compute`. Where
            it is narrower than `compute`, every strategy computes with the rounded values.
        reduce: of sums of gradients over ranks and micro-batches; None is `master`.
        grad: of the arrays that `grads` gives; None is `compute`.
        master: of the shards at rest, of `Slot.param` and `Slot.grad`.

    Raises:
        DTypeError: no float dtype of 16 bits or more.
    """

    compute: str | None = None
    wire: str | None = None
    reduce: str | None = None
    grad: str | None = None
    master: str = "float32"

    def __post_init__(self) -> None:
        for field in ("compute", "wire", "reduce", "grad", "master"):
            value = getattr(self, field)
            if value is None or (field == "wire" and isinstance(value, str) and value == MXFP8):
                continue
            rule = f"Precision.{field} is a float dtype of 16 bits or more{' or mxfp8' if field == 'wire' else ''}"
            try:
                row = dtypes.get(value)
            except DTypeError as error:
                raise DTypeError(f"{rule}: {error}") from None
            if row.kind != "float" or row.bits < 16:
                raise DTypeError(f"{rule}, got {row.name}")
            object.__setattr__(self, field, row.name)

    def of(self, unit: str, params: list[Param]) -> Formats:
        """Return the dtypes of a unit.

        Raises:
            DTypeError: parameters of several dtypes without `compute`, or a float64 in a narrower master.
        """
        rule = "a unit is made of Param values, one or more"
        params = [instance(param, Param, rule, DTypeError) for param in items(params, rule, DTypeError)]
        found = sorted({param.dtype for param in params})
        if not found:
            raise DTypeError(f"{rule}, got none for unit {unit!r}")
        if self.compute is None and len(found) > 1:
            raise DTypeError(
                f"unit {unit!r} is one buffer, so its parameters have one dtype, got {', '.join(found)}; put them "
                "into several units, or set Precision.compute"
            )
        compute = self.compute or found[0]
        grad = self.grad or compute
        reduce = self.reduce or self.master
        for name, dtype in (("compute", compute), ("grad", grad)):
            if dtype == "float64" != self.master:
                raise DTypeError(
                    f"unit {unit!r}: {name} float64 beside a {self.master} master loses what it computes; set "
                    "Precision.master to float64"
                )
        return Formats(compute, self.wire or compute, reduce, grad, self.master)


@dataclass(frozen=True)
class Formats:
    """The dtypes of a unit, with all defaults filled in; see `Precision`."""

    compute: str
    wire: str
    reduce: str
    grad: str
    master: str

    @property
    def direct(self) -> bool:
        """Whether parameters are gathered in the dtype in which they rest."""
        return self.compute == self.wire == self.master

    def item(self, field: Literal["compute", "reduce", "grad", "master"]) -> int:
        """Return the bytes of an element."""
        return dtypes.get(getattr(self, field)).itemsize_bytes
