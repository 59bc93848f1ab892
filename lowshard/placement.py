"""Placements: how one mesh axis treats an array. Values; they hold no rank and no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lowshard.box import Split, split_interval
from lowshard.errors import ShardingError

ReduceOp = Literal["sum", "avg", "min", "max", "prod"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
SPLITS: tuple[str, ...] = get_args(Split)


class Placement:
    """Base of the three placements; one stands for each mesh axis of a layout."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Replicated(Placement):
    """Every coordinate of the axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Sharded(Placement):
    """The axis cuts array dim `dim`.

    split: "balanced" (the first n % k shards hold one more) or "ceil" (as torch.chunk cuts).
    A negative dim counts from the end once a layout gives the number of dims.

    Raises:
        ShardingError: dim is no integer or split is unknown.
    """

    dim: int
    split: Split = "balanced"

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ShardingError(
                f"Sharded takes an array dim (an integer), got {self.dim!r}; write Sharded(0)"
            )
        if self.split not in SPLITS:
            raise ShardingError(f"a split is one of {', '.join(SPLITS)}, got {self.split!r}")

    def __str__(self) -> str:
        return f"S{self.dim}" if self.split == "balanced" else f"S{self.dim}:{self.split}"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Each coordinate of the axis holds a term; `op` over the axis gives the value.

    Raises:
        ShardingError: op is unknown.
    """

    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise ShardingError(f"a Partial's op is one of {', '.join(REDUCE_OPS)}, got {self.op!r}")

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P:{self.op}"


def mean_weight(extent: int, parts: int, index: int, split: Split = "balanced") -> float:
    """Return what the mean over one part of a split extent is multiplied by to be a term of `Partial("avg")`.

    The value of a Partial("avg") is the plain mean of its terms. So that it is the mean over the whole extent where
    the parts are not equally long, a part counts by its length: parts * length / extent. An empty part counts 0, and
    its term is 0, not the NaN that a mean over nothing gives.
    """
    start, stop = split_interval((0, extent), parts, index, split)
    return parts * (stop - start) / extent if extent else 0.0


def parse_placement(text: str) -> Placement:
    """Return the placement that `str()` wrote: R, S0, S1:ceil, P, P:max.

    Raises:
        ShardingError: the text is none of these.
    """
    head, _, tail = text.partition(":")
    if text == "R":
        return Replicated()
    if head == "P":
        return Partial(tail or "sum")  # type: ignore[arg-type]  # checked by Partial
    if head.startswith("S") and head[1:].isdecimal():
        return Sharded(int(head[1:]), tail or "balanced")  # type: ignore[arg-type]  # checked by Sharded
    raise ShardingError(f"placement {text!r} cannot be read; write R, S0, S1:ceil, P or P:max")
