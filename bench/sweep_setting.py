"""What a sweep over a collective is asked to do: a frozen value, sizes as nccl-tests writes them, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from lowshard.argument import brief
from lowshard.bench.operation import ALL_REDOPS, OPERATIONS
from lowshard.errors import LowshardError

Placement = Literal["out", "in"]

DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"
)  # fmt: skip
"""What `-d all` goes through, in nccl-tests' order."""
MORE_DTYPES = ("int16", "uint16")
"""What can be asked for by name beside them; NCCL knows them as bytes only."""

TRANSPORTS = ("auto", "mpi", "loopback", "nccl", "staged")
MOST_SIZES = 10_000
AVERAGES = ("rank 0", "average", "fastest", "slowest")
"""Whose time counts, by the number of `-a`."""


@dataclass(frozen=True)
class Settings:
    """One sweep."""

    op: str
    sizes: tuple[int, ...]  # bytes of the larger of a rank's two buffers; (0,) for a barrier
    dtypes: tuple[str, ...] = ("float32",)
    redops: tuple[str, ...] = ()
    root: int = 0
    rounds: int = 20
    warmups: int = 5
    calls: int = 0  # in a timed batch; 0: as many as last two milliseconds
    checks: int = 1
    average: int = 3  # whose time counts: of `AVERAGES`
    cycles: int = 1
    each: bool = False
    transport: str = "auto"
    shared: bool = False
    window: bool = False
    order: str = "fast"
    compare_mpi: bool = False

    def __post_init__(self) -> None:
        operation = OPERATIONS.get(self.op)
        if operation is None:
            raise LowshardError(f"a sweep is over one of {', '.join(OPERATIONS)}, got {brief(self.op)}")
        if self.shared and not operation.shared:
            can = ", ".join(name for name, one in OPERATIONS.items() if one.shared)
            raise LowshardError(
                f"--shared is for {can}, whose result is the same on all ranks; got {self.op}"
            )
        if self.compare_mpi and self.transport not in ("auto", "mpi"):
            raise LowshardError(
                f"--compare-mpi times mpi4py on host memory beside --transport mpi; got {self.transport}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings that `to_json` wrote, after a way through JSON."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
        return cls(**fields)


def size_list(begin: int, end: int, factor: float | None, step: int | None) -> tuple[int, ...]:
    """Return the sizes from one to another, by a factor or by a step."""
    if end < begin:
        raise LowshardError(f"-e is at least -b, got -b {begin} -e {end}")
    if step is None and (factor is None or not 1 < factor < inf):
        raise LowshardError(f"-f is a factor above 1, got {factor:g}" if factor else "-f or -i is needed")
    sizes: dict[int, None] = {}
    size: float = begin
    for _ in range(MOST_SIZES):
        if size > end:
            return tuple(sizes)
        sizes[int(size)] = None  # a small factor comes to some sizes again
        size = size * (factor or 1) if step is None else size + step
    raise LowshardError(
        f"a sweep has less than {MOST_SIZES:,} sizes, from -b {begin} to -e {end} there are more: pass a larger "
        + ("-f" if step is None else "-i")
    )


def redop_list(op: str, choice: str | None) -> tuple[str, ...]:
    """Return the reductions of `-o`: one, or "all"; none for a collective that reduces nothing."""
    if not OPERATIONS[op].reduces:
        return ()
    return ALL_REDOPS if choice == "all" else (choice or "sum",)


def dtype_list(choice: str) -> tuple[str, ...]:
    """Return the element types of `-d`: one, or "all"."""
    return DTYPES if choice == "all" else (choice,)
