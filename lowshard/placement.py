"""Placements: how one mesh axis holds an array. Values, without ranks or memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lowshard.argument import brief, instance, whole
from lowshard.box import Split, split_interval
from lowshard.errors import ShardingError

ReduceOp = Literal["sum", "avg", "min", "max", "prod"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
SPLITS: tuple[str, ...] = get_args(Split)
MOST_DIGITS = 19
"""Most digits of a number in a text: those of int64."""


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
    """The axis shards array dim `dim`.

    split: "balanced" (the first n % k shards hold one more) or "ceil" (as torch.chunk).
    A negative dim counts from the end once a layout gives the number of dims.

    Raises:
        ShardingError: dim is not an integer or split is unknown.
    """

    dim: int
    split: Split = "balanced"

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            rule = "Sharded takes an array dim (an integer), as in Sharded(0)"
            object.__setattr__(self, "dim", whole(self.dim, rule, ShardingError))
        check_split(self.split)

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
        if not isinstance(self.op, str) or self.op not in REDUCE_OPS:
            raise ShardingError(f"a Partial's op is one of {', '.join(REDUCE_OPS)}, got {brief(self.op)}")

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P:{self.op}"


def check_split(split: object) -> None:
    """Raise ShardingError unless it is the name of a split rule."""
    if not isinstance(split, str) or split not in SPLITS:
        raise ShardingError(f"a split is one of {', '.join(SPLITS)}, got {brief(split)}")


def mean_weight(extent: int, parts: int, index: int, split: Split = "balanced") -> float:
    """Return the factor that makes the mean over one shard a term of `Partial("avg")` over all."""
    start, stop = split_interval((0, extent), parts, index, split)  # uneven parts count by their length
    return parts * (stop - start) / extent if extent else 0.0


def parse_placement(text: str) -> Placement:
    """Return the placement that `str()` wrote: R, S0, S-1, S1:ceil, P, P:max."""
    head, _, tail = instance(
        text, str, "a placement as text is R, S0, S1:ceil, P or P:max", ShardingError
    ).partition(":")
    if text == "R":
        return Replicated()
    if head == "P":
        return Partial(tail or "sum")  # type: ignore[arg-type]  # checked by Partial
    if head.startswith("S") and head[1:].removeprefix("-").isdecimal() and len(head) <= MOST_DIGITS:
        return Sharded(int(head[1:]), tail or "balanced")  # type: ignore[arg-type]  # checked by Sharded
    raise ShardingError(f"placement {brief(text)} cannot be read; write R, S0, S1:ceil, P or P:max")
