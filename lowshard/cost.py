"""The time model of collectives on a cluster, read from a file or a built-in default.

A collective over n ranks of S bytes (the larger of its two buffers) takes

    steps(n) * alpha + factor(n) * S * beta + sums(n) * S * gamma

seconds: alpha a message, beta a byte moved, gamma a byte summed. One such line is off by up to 70% across the edges
of caches and protocols, so a `Curve` has pieces, each for a range of sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lowshard.argument import brief, choice, instance, items, number, whole
from lowshard.argument import path as check_path
from lowshard.errors import ProfileError
from lowshard.reading import reader

__all__ = ["OPS", "SCHEMA", "ClusterProfile", "Curve", "Piece", "factor"]


def __dir__() -> list[str]:
    return sorted(__all__)


Level = Literal["node", "network"]

SCHEMA = "lowshard-profile-1"
LEVELS: tuple[Level, ...] = ("node", "network")

_MOST = 1e6
"""Largest plausible value in a profile, in seconds or seconds a byte."""


@dataclass(frozen=True)
class _Form:
    steps: Callable[[int], float]
    factor: Callable[[int], float]
    sums: Callable[[int], float]


def _rounds(n: int) -> float:
    return float(math.ceil(math.log2(n))) if n > 1 else 0.0


def _others(n: int) -> float:
    return float(n - 1)


def _part(n: int) -> float:
    return (n - 1) / n


def _whole(n: int) -> float:
    return 1.0 if n > 1 else 0.0


def _none(n: int) -> float:
    return 0.0


_FORMS: dict[str, _Form] = {
    "all_reduce": _Form(lambda n: 2.0 * (n - 1), lambda n: 2.0 * (n - 1) / n, _part),
    "all_gather": _Form(_others, _part, _none),
    "reduce_scatter": _Form(_others, _part, _part),
    "all_to_all": _Form(_others, _part, _none),
    "all_to_all_v": _Form(_others, _part, _none),
    "broadcast": _Form(_rounds, _whole, _none),
    "reduce": _Form(_rounds, _whole, _whole),
    "gather": _Form(_others, _part, _none),
    "scatter": _Form(_others, _part, _none),
    "send_recv": _Form(_whole, _whole, _none),
    "barrier": _Form(_rounds, _none, _none),
}
OPS = tuple(_FORMS)
"""The collectives that have a model."""

# Calls that are priced as another one when a profile has nothing on them.
_PRICED_AS = {
    "all_to_all_v": "all_to_all",
    "all_gather_v": "all_gather",
    "send": "send_recv",
    "recv": "send_recv",
}


def factor(op: str, ranks: int) -> float:
    """Return the bytes that cross a rank's link over the bytes of the larger buffer; also busbw over algbw."""
    return _form(op).factor(_count(ranks))


def _form(op: str) -> _Form:
    if not isinstance(op, str) or op not in _FORMS:
        raise ProfileError(f"the collectives that have a model are {', '.join(OPS)}; got {brief(op)}")
    return _FORMS[op]


def _count(ranks: int) -> int:
    return whole(ranks, "a collective runs over 1 rank or more", ProfileError, 1)


@dataclass(frozen=True)
class Piece:
    """The model over one range of sizes.

    Attributes:
        alpha_s: seconds a message.
        beta_s_per_byte: seconds a byte moved.
        gamma_s_per_byte: seconds a byte summed; 0 for moves.
        below_bytes: sizes below this belong to the piece; None for the last one.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    below_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            rule = f"{name} of a piece is a number of 0 or more, and at most {_MOST:g}"
            if number(getattr(self, name), rule, ProfileError, 0) > _MOST:
                raise ProfileError(f"{rule}, got {getattr(self, name)}")
        if self.below_bytes is not None:
            whole(
                self.below_bytes, "a piece ends at a number of bytes, or None for the last", ProfileError, 0
            )


@dataclass(frozen=True)
class Curve:
    """One collective at one level, over one number of ranks.

    Attributes:
        op: the collective, one of `OPS`.
        level: "node" (ranks of one host) or "network" (one rank a host).
        ranks: how many ranks took part.
        pieces: the lines, in order of size.
    """

    op: str
    level: Level
    ranks: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        _form(self.op)
        rule = "the pieces of a curve are of class Piece"
        for piece in items(self.pieces, rule, ProfileError):
            instance(piece, Piece, rule, ProfileError)
        edges = [piece.below_bytes for piece in self.pieces]
        inner = [edge for edge in edges[:-1] if edge is not None]
        if not edges or edges[-1] is not None or len(inner) != len(edges) - 1 or inner != sorted(set(inner)):
            raise ProfileError(
                f"the pieces of a curve end at growing sizes and the last one has no end; {self.op} has {edges}"
            )
        choice(self.level, LEVELS, f"a level is one of {', '.join(LEVELS)}; that of {self.op}", ProfileError)
        whole(self.ranks, f"a curve is over 1 rank or more; that of {self.op}", ProfileError, 1)

    def seconds(self, ranks: int, size_bytes: float) -> float:
        """Return the time of one call, by the formula for this many ranks."""
        ranks, size = _count(ranks), number(size_bytes, "a size is 0 bytes or more", ProfileError, 0)
        form = _form(self.op)
        piece = next(p for p in self.pieces if p.below_bytes is None or size < p.below_bytes)
        per_byte = form.factor(ranks) * piece.beta_s_per_byte + form.sums(ranks) * piece.gamma_s_per_byte
        return form.steps(ranks) * piece.alpha_s + per_byte * size


@dataclass(frozen=True)
class ClusterProfile:
    """The costs of collectives on a cluster: curves, and facts of the machine.

    `ClusterProfile.default().save("cluster.json")` writes a file whose numbers can be replaced by measured ones.

    Attributes:
        curves: one for each collective, level and number of ranks.
        machine: names and values, such as "flops_per_s" and "memory_bytes_per_s" of a device for `GraphSolver`.
        is_default: nothing was measured; the numbers are guesses.
    """

    curves: tuple[Curve, ...]
    machine: tuple[tuple[str, str], ...] = ()
    is_default: bool = False

    @classmethod
    def default(cls) -> ClusterProfile:
        """Return the built-in profile: orders of magnitude, right within 4 times or so. It ranks plans."""
        curves = []
        levels: tuple[tuple[Level, float, float], ...] = (("node", 3e-6, 2.5e-10), ("network", 3e-5, 1e-9))
        for level, alpha_s, beta in levels:
            for op, form in _FORMS.items():
                gamma = 1e-10 if form.sums(2) else 0.0
                curves.append(Curve(op, level, 2, (Piece(alpha_s, beta if form.factor(2) else 0.0, gamma),)))
        said = (("source", "built-in default, not measured on this machine"),)
        return cls(tuple(curves), said, is_default=True)

    def curves_of(self, op: str, level: str) -> list[Curve]:
        """Return the curves of a collective, by number of ranks.

        Raises:
            ProfileError: there are none.
        """
        instance(op, str, "a collective is named by text", ProfileError)
        instance(level, str, "a level is named by text", ProfileError)
        for name in (op, _PRICED_AS.get(op)):
            found = [c for c in self.curves if (c.op, c.level) == (name, level)]
            if found:
                return sorted(found, key=lambda curve: curve.ranks)
        has = ", ".join(sorted({f"{c.op} ({c.level})" for c in self.curves}))
        raise ProfileError(f"this profile has no {op} ({level}); it has {has or 'no curves'}")

    # ---- files

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {
            "schema": SCHEMA,
            "is_default": self.is_default,
            "machine": dict(self.machine),
            "curves": [asdict(curve) for curve in self.curves],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterProfile:
        """Return the profile that `to_json` wrote; invalid data raises ProfileError with its place."""
        return _read(data)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON.

        Raises:
            ProfileError: the file cannot be written.
        """
        file = check_path(path, "a profile is saved to the path of a file", ProfileError)
        try:
            file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ProfileError(f"the profile cannot be saved to {file}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> ClusterProfile:
        """Return the profile in a file.

        Raises:
            ProfileError: the file cannot be read, or holds no profile.
        """
        return _read.file(path)


@reader("cluster profile", ProfileError)
def _read(
    schema: str, curves: tuple[Curve, ...], machine: Mapping[str, str], is_default: bool = False
) -> ClusterProfile:
    if schema != SCHEMA:
        raise ProfileError(f"a profile has schema {SCHEMA!r}, got {brief(schema)}")
    return ClusterProfile(curves, tuple(machine.items()), is_default)


def neighbours(curves: list[Curve], ranks: int) -> list[Curve]:
    """Return the curve for a number of ranks, or the two around it, or the nearest one."""
    for curve in curves:
        if curve.ranks == ranks:
            return [curve]
    below = [curve for curve in curves if curve.ranks < ranks]
    above = [curve for curve in curves if curve.ranks > ranks]
    return [*below[-1:], *above[:1]]


def time_text(seconds: float) -> str:
    """Return seconds as text: s, ms or us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
