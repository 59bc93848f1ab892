"""What a collective takes: a time model with error bars, fitted to a machine or, without that, a stated default.

A collective over n ranks of S bytes (the larger of its two buffers) takes

    steps(n) * alpha + factor(n) * S * beta + sums(n) * S * gamma

seconds: alpha a message, beta a byte moved, gamma a byte summed. One such line is off by up to 70% across the edges
of caches and protocols, so a `Curve` is made of up to three, each for a range of sizes. `lowshard bench profile`
measures and fits; nothing here touches an array or a network.
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

__all__ = ["OPS", "SCHEMA", "ClusterProfile", "Curve", "Estimate", "Piece", "factor", "steps", "sums"]


def __dir__() -> list[str]:
    return sorted(__all__)


Level = Literal["node", "network"]

SCHEMA = "lowshard-profile-1"
LEVELS: tuple[Level, ...] = ("node", "network")

# By how much the logarithm of an error bar grows for each factor of e that an estimate lies outside what was
# measured: sizes beyond the range follow the line of the last piece, rank counts rest on the formula alone.
_WIDER_BY_SIZE = 0.25
_WIDER_BY_RANKS = 0.5
_DEFAULT_ERROR = math.log(4.0)

_MOST = 1e6
"""Seconds, seconds a byte, and the logarithm of an error in a profile, at most: no machine comes near."""


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


def steps(op: str, ranks: int) -> float:
    """Return how many messages one after the other a collective takes over so many ranks."""
    return _form(op).steps(_count(ranks))


def factor(op: str, ranks: int) -> float:
    """Return the bytes that cross a rank's link over the bytes of the larger buffer; also busbw over algbw."""
    return _form(op).factor(_count(ranks))


def sums(op: str, ranks: int) -> float:
    """Return the bytes that a rank adds up over the bytes of the larger buffer; 0 for a move."""
    return _form(op).sums(_count(ranks))


def _form(op: str) -> _Form:
    if not isinstance(op, str) or op not in _FORMS:
        raise ProfileError(f"the collectives that have a model are {', '.join(OPS)}; got {brief(op)}")
    return _FORMS[op]


def _size(size_bytes: float) -> float:
    return number(size_bytes, "a size is 0 bytes or more", ProfileError, 0)


def _count(ranks: int) -> int:
    return whole(ranks, "a collective runs over 1 rank or more", ProfileError, 1)


@dataclass(frozen=True)
class Estimate:
    """A time with its error bar.

    Attributes:
        seconds: the expected time of one call.
        low: lower end of the bar.
        high: upper end of the bar.
        extrapolated: the size or the number of ranks lies outside what was measured; the bar is wider for it.
        is_default: the profile was not measured at all.
    """

    seconds: float
    low: float
    high: float
    extrapolated: bool = False
    is_default: bool = False

    def __str__(self) -> str:
        """Return the time, the bar and what it rests on, for people."""
        notes = [note for note, said in (("not measured here", self.is_default),
                                         ("extrapolated", self.extrapolated)) if said]  # fmt: skip
        bar = f"{time_text(self.seconds)} ({time_text(self.low)} to {time_text(self.high)})"
        return f"{bar}, {', '.join(notes)}" if notes else bar


@dataclass(frozen=True)
class Piece:
    """The model over one range of sizes.

    Attributes:
        alpha_s: seconds a message.
        beta_s_per_byte: seconds a byte moved.
        gamma_s_per_byte: seconds a byte summed; 0 for moves.
        below_bytes: sizes below this belong to the piece; None for the last one.
        log_error: the largest distance of a measured time from the fit, in natural logarithms.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    below_bytes: int | None = None
    log_error: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte", "log_error"):
            rule = f"{name} of a piece is a number of 0 or more, and at most {_MOST:g}"
            if number(getattr(self, name), rule, ProfileError, 0) > _MOST:
                raise ProfileError(f"{rule}, got {getattr(self, name)}")
        if self.below_bytes is not None:
            whole(
                self.below_bytes, "a piece ends at a number of bytes, or None for the last", ProfileError, 0
            )

    def seconds(self, op: str, ranks: int, size_bytes: float) -> float:
        """Return the time of one call by this piece's line, wherever the size lies."""
        form, ranks, size_bytes = _form(op), _count(ranks), _size(size_bytes)
        per_byte = form.factor(ranks) * self.beta_s_per_byte + form.sums(ranks) * self.gamma_s_per_byte
        return form.steps(ranks) * self.alpha_s + per_byte * size_bytes


@dataclass(frozen=True)
class Curve:
    """One collective on one transport, at one level, over one number of ranks.

    Attributes:
        op: the collective, one of `OPS`.
        transport: name of the transport, as a communicator gives it.
        level: "node" (ranks of one host) or "network" (one rank a host).
        ranks: how many ranks took part.
        least_bytes: smallest size that was measured.
        most_bytes: largest size that was measured.
        pieces: the lines, in order of size.
    """

    op: str
    transport: str
    level: Level
    ranks: int
    least_bytes: int
    most_bytes: int
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
        instance(self.transport, str, f"a transport is a name; that of {self.op}", ProfileError)
        whole(self.ranks, f"a curve is over 1 rank or more; that of {self.op}", ProfileError, 1)
        rule = f"a curve has a range of sizes of 0 bytes or more, in order; that of {self.op}"
        whole(self.most_bytes, rule, ProfileError, whole(self.least_bytes, rule, ProfileError, 0))

    def piece(self, size_bytes: float) -> Piece:
        """Return the piece that a size belongs to."""
        size_bytes = _size(size_bytes)
        return next(p for p in self.pieces if p.below_bytes is None or size_bytes < p.below_bytes)

    def seconds(self, ranks: int, size_bytes: float) -> float:
        """Return the time of one call, by the formula for this many ranks, without an error bar."""
        return self.piece(size_bytes).seconds(self.op, ranks, size_bytes)

    def distance(self, size_bytes: float) -> float:
        """Return how far a size lies outside what was measured, in natural logarithms; 0 inside."""
        size_bytes = _size(size_bytes)
        if self.least_bytes <= size_bytes <= self.most_bytes or self.most_bytes == 0:
            return 0.0
        edge = self.least_bytes if size_bytes < self.least_bytes else self.most_bytes
        return abs(math.log(max(size_bytes, 1.0) / max(edge, 1)))


@dataclass(frozen=True)
class ClusterProfile:
    """What collectives take on a machine: curves, and the facts of the machine they were measured on.

    Attributes:
        curves: one for each collective, transport, level and number of ranks.
        machine: names and values that say where it was measured.
        is_default: nothing was measured; the numbers are guesses with wide bars.
    """

    curves: tuple[Curve, ...]
    machine: tuple[tuple[str, str], ...] = ()
    is_default: bool = False

    @classmethod
    def default(cls) -> ClusterProfile:
        """Return the built-in profile for when none was measured: orders of magnitude, right within 4 times or so.

        It ranks plans where they differ by a lot. `lowshard bench profile` measures a profile of the machine.
        """
        curves = []
        for level, alpha_s, beta in (("node", 3e-6, 2.5e-10), ("network", 3e-5, 1e-9)):
            for op in OPS:
                gamma = 1e-10 if _FORMS[op].sums(2) else 0.0
                piece = Piece(alpha_s, beta if _FORMS[op].factor(2) else 0.0, gamma, None, _DEFAULT_ERROR)
                curves.append(Curve(op, "any", level, 2, 0, 1 << 40, (piece,)))  # type: ignore[arg-type]
        said = (("source", "built-in default, not measured on this machine; run lowshard bench profile"),)
        return cls(tuple(curves), said, is_default=True)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that there are curves of, in order."""
        return tuple(dict.fromkeys(curve.transport for curve in self.curves))

    def seconds(
        self, op: str, ranks: int, size_bytes: float, level: Level = "node", transport: str | None = None
    ) -> Estimate:
        """Return what one call takes, with its error bar.

        Between two measured numbers of ranks both count, and the bar spans both. Outside the measured sizes or
        numbers of ranks the nearest curve is followed, the bar grows with the distance, and the estimate says
        `extrapolated`.

        Args:
            op: the collective, one of `OPS`.
            ranks: how many ranks take part; over one rank nothing moves and nothing is taken.
            size_bytes: bytes of the larger of a rank's two buffers.
            level: "node" within a host, "network" with one rank a host.
            transport: whose curves; by default the profile's first.

        Raises:
            ProfileError: the profile has no such curve, or an argument is out of range.
        """
        _count(ranks)
        size_bytes = _size(size_bytes)
        curves = self.curves_of(op, level, transport)
        if ranks == 1:
            return Estimate(0.0, 0.0, 0.0, False, self.is_default)
        near = neighbours(curves, ranks)
        outside = min(abs(math.log(ranks / curve.ranks)) for curve in near) if len(near) == 1 else 0.0
        logs, lows, highs, weights = [], [], [], []
        far = False
        for curve in near:
            piece, distance = curve.piece(size_bytes), curve.distance(size_bytes)
            far = far or distance > 0
            middle = math.log(max(piece.seconds(curve.op, ranks, size_bytes), 1e-12))
            # The default's formula is all there is, for any number of ranks: its bar has that in it.
            beyond = 0.0 if self.is_default else _WIDER_BY_RANKS * outside
            error = piece.log_error + _WIDER_BY_SIZE * distance + beyond
            logs.append(middle)
            lows.append(middle - error)
            highs.append(middle + error)
            weights.append(1.0)
        if len(near) == 2:
            share = math.log(ranks / near[0].ranks) / math.log(near[1].ranks / near[0].ranks)
            weights = [1.0 - share, share]
        middle = sum(weight * log for weight, log in zip(weights, logs, strict=True))
        beyond_ranks = outside > 0 and not self.is_default
        return Estimate(
            math.exp(middle), math.exp(min(lows)), math.exp(max(highs)), far or beyond_ranks, self.is_default
        )

    def curves_of(self, op: str, level: str, transport: str | None = None) -> list[Curve]:
        """Return the curves of a collective, by number of ranks."""
        instance(op, str, "a collective is named by text", ProfileError)
        instance(level, str, "a level is named by text", ProfileError)
        if transport is not None:
            instance(transport, str, "a transport is named by text, or None", ProfileError)
        if not self.curves:
            raise ProfileError("this profile has no curves; run lowshard bench profile")
        wanted = self.transports[0] if transport is None or self.is_default else transport
        for name in (op, _PRICED_AS.get(op)):
            found = [c for c in self.curves if (c.op, c.level, c.transport) == (name, level, wanted)]
            if found:
                return sorted(found, key=lambda curve: curve.ranks)
        has = sorted({f"{c.op} on {c.transport} ({c.level})" for c in self.curves})
        raise ProfileError(
            f"this profile has no {op} on {wanted} ({level}); it has {', '.join(has)}. Measure it with lowshard "
            "bench profile, or use ClusterProfile.default()"
        )

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
        """Return the profile that `to_json` wrote; what is wrong raises ProfileError with its place."""
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
        try:
            return _read.file(path)
        except ProfileError as error:
            raise ProfileError(f"{error}; `lowshard bench profile -o FILE` writes one") from None


@reader("cluster profile", ProfileError)
def _read(
    schema: str, curves: tuple[Curve, ...], machine: Mapping[str, str], is_default: bool
) -> ClusterProfile:
    if schema != SCHEMA:
        raise ProfileError(
            f"a profile has schema {SCHEMA!r}, got {brief(schema)}; measure it anew with lowshard bench profile"
        )
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
