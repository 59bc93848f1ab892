"""Comparisons of a step: how many were made, and what the wrong ones show."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.foreign_array import host_of
from lowshard.selftest.arrays import bits

_MOST_FINDINGS = 20


def difference(got: Any, expected: np.ndarray, *, any_nan: bool = False, within: float = 0.0) -> str:
    """Return how an array differs from the expected one in dtype, shape or any bit, or "".

    any_nan: a NaN is as good as any other. within: a relative difference that does not count.
    """
    found = host_of(got)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"expected {expected.dtype} {list(expected.shape)}, got {found.dtype} {list(found.shape)}"
    differs = bits(found) != bits(expected)
    if any_nan and dtypes.get(found.dtype).kind == "float":
        with np.errstate(invalid="ignore"):  # fp8's signalling NaN
            differs &= ~(np.isnan(found) & np.isnan(expected))
    if within:
        differs &= ~np.isclose(found, expected, rtol=within, atol=0.0)
    if not differs.any():
        return ""
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    width = 2 * found.itemsize
    return (
        f"element {list(index)} of {list(found.shape)}: expected 0x{int(bits(expected)[index]):0{width}x} "
        f"({expected[index]}), got 0x{int(bits(found)[index]):0{width}x} ({found[index]}); "
        f"{int(differs.sum())} of {found.size} differ"
    )


@dataclass
class Tally:
    """What a step has compared so far."""

    checks: int = 0
    wrong: int = 0
    findings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    summary: str = ""

    def same(self, what: str, got: Any, expected: np.ndarray, **options: Any) -> None:
        """Compare two arrays as `difference` does."""
        self.true(what, not (how := difference(got, expected, **options)), how)

    def true(self, what: str, holds: bool, otherwise: str) -> None:
        """Check that something holds; else the finding says `otherwise`."""
        self.checks += 1
        if not holds:
            self.fail(f"{what}: {otherwise}")

    def fail(self, text: str) -> None:
        """Note a finding."""
        self.wrong += 1
        print(f"WRONG {text}", flush=True)
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(text)

    def add(self, other: Tally, who: str = "") -> None:
        """Take over what another one has found, with a name in front of each line."""
        self.checks += other.checks
        self.wrong += other.wrong
        self.findings = [*self.findings, *(f"{who}{line}" for line in other.findings)][:_MOST_FINDINGS]
        self.data.update(other.data)

    def to_json(self) -> str:
        """Return all of it as text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))
