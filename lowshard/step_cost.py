"""Seconds of one call by a cluster profile, quick enough to be asked thousands of times."""

from __future__ import annotations

from functools import cache
from itertools import count
from math import exp, log

from lowshard.bounded import BoundedCache
from lowshard.cost import ClusterProfile, Curve, Level, neighbours
from lowshard.errors import ProfileError

LOCAL_ALPHA_S = 1e-7
"""A step in which nothing moves; not nothing, so that a plan without it is preferred."""
LOCAL_BETA_S_PER_BYTE = 1e-10
"""Bytes that a rank writes in its own memory: 10 GB/s, the order of a copy on one core."""

SECONDS_BYTES = 1 << 20
"""What the prices of a profile keep of what they were asked, at most."""
_ENTRY_BYTES = 320
_SERIALS = count()


class Prices:
    """A profile's times by collective, ranks, bytes and level."""

    def __init__(self, profile: ClusterProfile | None = None) -> None:
        self.profile = ClusterProfile.default() if profile is None else profile
        self.serial = 1 + next(_SERIALS)
        """A number of its own, by which what was made of these prices is kept."""
        self._curves: dict[tuple[str, int, Level], tuple[list[Curve], float]] = {}
        self._seconds = BoundedCache[tuple[str, int, int, Level], float](
            None, SECONDS_BYTES, lambda key, seconds: _ENTRY_BYTES
        )

    def seconds(self, op: str, ranks: int, size_bytes: int, level: Level = "node") -> float:
        """Return the seconds of one call; the size is that of the larger of a rank's two buffers."""
        if ranks <= 1:
            return 0.0
        key = (op, ranks, size_bytes, level)
        found = self._seconds.get(key)
        if found is None:
            curves, share = self._lines(op, ranks, level)
            logs = [log(max(curve.seconds(ranks, size_bytes), 1e-12)) for curve in curves]
            found = exp(logs[0] + share * (logs[-1] - logs[0]))
            self._seconds.put(key, found)
        return found

    def exchange(self, partners: int, received_bytes: float, level: Level = "node") -> float:
        """Return what it takes a rank to get so many bytes from so many others, each its part."""
        if partners <= 0:
            return LOCAL_ALPHA_S
        ranks = partners + 1
        return self.seconds("all_to_all_v", ranks, round(received_bytes * ranks / partners), level)

    def local(self, written_bytes: float = 0.0) -> float:
        """Return what a step takes in which a rank only writes in its own memory."""
        return LOCAL_ALPHA_S + written_bytes * LOCAL_BETA_S_PER_BYTE

    def _lines(self, op: str, ranks: int, level: Level) -> tuple[list[Curve], float]:
        found = self._curves.get((op, ranks, level))
        if found is None:
            other: Level = "network" if level == "node" else "node"
            near: list[Curve] = []
            for profile, where in (
                (self.profile, level),
                (self.profile, other),
                (ClusterProfile.default(), level),
            ):
                try:
                    near = neighbours(profile.curves_of(op, where), ranks)
                    break
                except ProfileError:
                    continue
            share = 0.0
            if len(near) == 2:
                share = log(ranks / near[0].ranks) / log(near[1].ranks / near[0].ranks)
            found = self._curves[op, ranks, level] = (near, share)
        return found


_PROFILES_KEPT = 16
_PRICES: dict[int, Prices] = {}


@cache
def default_prices() -> Prices:
    """Return those of the built-in profile."""
    return Prices()


def prices_of(profile: ClusterProfile | None) -> Prices:
    """Return the prices of a profile, made once while it is among the last sixteen used."""
    if profile is None:
        return default_prices()
    found = _PRICES.get(id(profile))
    if found is None:  # it keeps the profile alive, so the number stays its own
        if len(_PRICES) >= _PROFILES_KEPT:
            _PRICES.pop(next(iter(_PRICES)))
        found = _PRICES[id(profile)] = Prices(profile)
    return found
