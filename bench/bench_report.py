"""What a benchmark found: frozen rows, the figures that follow from their times, JSON both ways, and limits.

A row is one work: its bytes, the times of every round, and the times of what took turns with it, a memcpy or a rival.
A ratio is the median over the rounds of time over time, with quartiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from lowshard.bench.turn_timing import Timing

FORMAT = "lowshard-bench-1"
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds: smallest, lower quartile, median, upper quartile, largest."""

    least: float
    low: float
    median: float
    high: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value a round; quartiles are interpolated linearly."""
        return cls(*(float(q) for q in np.quantile(values, (0.0, 0.25, 0.5, 0.75, 1.0))))

    def __str__(self) -> str:
        return f"{self.low:.2f} - {self.high:.2f}"


@dataclass(frozen=True)
class Limit:
    """A promised figure: what was measured, and what it may be at most or must be at least."""

    figure: str
    measured: float
    bound: float
    at_least: bool = False
    is_judged: bool = True
    """False where the machine was too busy to say that the limit is missed."""

    @property
    def ok(self) -> bool | None:
        """Whether the limit is kept; None where that cannot be said."""
        kept = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return kept or (False if self.is_judged else None)

    @property
    def excess(self) -> float:
        """How many times too large (or small) the figure is; 1 and less where the limit is kept."""
        ratio = self.measured / self.bound if self.bound else float("inf")
        return 1 / ratio if self.at_least and ratio else ratio

    @property
    def verdict(self) -> str:
        """The outcome in a word."""
        return {True: "ok", False: "MISSED", None: "not judged, the machine was busy"}[self.ok]

    def __str__(self) -> str:
        """Say which figure was measured and what it may be."""
        word = "at least" if self.at_least else "limit"
        return f"{self.figure} {self.measured:.4g}, {word} {self.bound:.4g}: {self.verdict}"


@dataclass(frozen=True)
class Beside:
    """What took turns with a work, and what its ratios are multiplied by: bytes over bytes where they differ."""

    timing: Timing
    scale: float = 1.0


@dataclass(frozen=True)
class Row:
    """One work, measured."""

    name: str
    moved_bytes: int
    """Bytes that one call moves, as the command counts them."""
    timing: Timing
    beside: Mapping[str, Beside] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else was found: plain data."""
    group: str = ""
    """Rows of one group stand under it as a title."""

    @property
    def median_s(self) -> float:
        """Median time of a call."""
        return self.timing.median_s

    @property
    def gb_per_s(self) -> float:
        """Bytes over the median time, in 10^9 bytes a second."""
        return self.moved_bytes / self.median_s / 1e9

    def ratio(self, name: str) -> Spread:
        """Return the time as a multiple of that of what took turns with it."""
        other = self.beside[name]
        return Spread.of(self.timing.over(other.timing, other.scale))

    def x(self, name: str) -> float | None:
        """Return the median of a ratio; None where nothing of that name took turns."""
        return self.ratio(name).median if name in self.beside else None

    def limited(self, name: str, bound: float | None, **more: Any) -> Row:
        """Return the row with a limit for a ratio; as it is where there is none."""
        if bound is None:
            return self
        limit = Limit(f"x {name}", self.ratio(name).median, bound, **more)
        return replace(self, limits=(*self.limits, limit))

    @property
    def excess(self) -> float:
        """How far the row is above its limits, at the worst."""
        return max((limit.excess for limit in self.limits), default=0.0)

    @property
    def is_missed(self) -> bool:
        """Whether a limit is missed."""
        return any(limit.ok is False for limit in self.limits)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the times of every round, and the figures that follow from them."""
        found = asdict(self) | {"median_s": self.median_s, "gb_per_s": self.gb_per_s}
        for name in self.beside:
            found["beside"][name]["ratio"] = asdict(self.ratio(name))
        for limit, data in zip(self.limits, found["limits"], strict=True):
            data["ok"] = limit.ok
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote; what follows from the times is worked out again."""
        beside = {n: Beside(_timing(b["timing"]), b["scale"]) for n, b in data["beside"].items()}
        limits = tuple(_own(Limit, limit) for limit in data["limits"])
        made: Row = _own(cls, {**data, "timing": _timing(data["timing"]), "beside": beside, "limits": limits})
        return made


@dataclass(frozen=True)
class Report:
    """Everything that one run of a benchmark found."""

    bench: str
    machine: Facts
    """What ran where: names and values."""
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    limits: tuple[Limit, ...] = ()
    """Limits that the user has set; they are judged without `--check`, too."""
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        """Elements, or bytes, that are not what they must be, over all rows."""
        return sum(int(row.facts.get("wrong") or 0) for row in self.rows)

    def missed(self, promised: bool = True) -> Iterator[str]:
        """Yield each figure that misses its limit, in words; without `promised` those that the user has set alone."""
        for row in self.rows if promised else ():
            yield from (f"{row.name}: {limit}" for limit in row.limits if limit.ok is False)
        yield from (str(limit) for limit in self.limits if limit.ok is False)

    @property
    def every_limit(self) -> tuple[Limit, ...]:
        """The limits of all rows and of the whole."""
        return (*(limit for row in self.rows for limit in row.limits), *self.limits)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        limits = [asdict(limit) | {"ok": limit.ok} for limit in self.limits]
        return {
            "format": FORMAT, "bench": self.bench, "ok": not self.wrong and not any(self.missed()),
            "machine": dict(self.machine), "settings": dict(self.settings), "wrong": self.wrong,
            "rows": [row.to_json() for row in self.rows], "limits": limits, "notes": list(self.notes),
            "facts": dict(self.facts),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that `to_json` wrote."""
        return cls(
            data["bench"],
            tuple(data["machine"].items()),
            data["settings"],
            tuple(Row.from_json(row) for row in data["rows"]),
            tuple(_own(Limit, limit) for limit in data["limits"]),
            tuple(data["notes"]),
            data["facts"],
        )

    def dump(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False)


def better(first: Row, again: Row | None) -> Row:
    """Return that of two measurements of a row which is farther below its limits."""
    return first if again is None else min(first, again, key=lambda row: row.excess)


def _own(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Return a record of its own fields among some data."""
    return kind(**{one.name: data[one.name] for one in fields(kind)})


def _timing(data: Mapping[str, Any]) -> Timing:
    made: Timing = _own(Timing, {**data, "seconds": tuple(data["seconds"]), "shares": tuple(data["shares"])})
    return made
