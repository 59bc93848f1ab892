"""Comparisons of a step: how many were made, and what the wrong ones show."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.foreign_array import host_of

_MOST_FINDINGS = 20


@dataclass
class Tally:
    """What a step has compared so far."""

    checks: int = 0
    wrong: int = 0
    findings: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    summary: str = ""

    def same(
        self, what: str, got: Any, expected: np.ndarray, *, any_nan: bool = False, within: float = 0.0
    ) -> None:
        """Compare two arrays bit for bit."""
        self.checks += 1
        found = host_of(got)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            self.fail(
                f"{what}: expected {expected.dtype} {list(expected.shape)}, got {found.dtype} {list(found.shape)}"
            )
            return
        differs = bits(found) != bits(expected)
        if any_nan:
            differs &= ~(_is_nan(found) & _is_nan(expected))
        if within:
            differs &= ~np.isclose(found, expected, rtol=within, atol=0.0)
        if differs.any():
            index = tuple(int(i) for i in np.argwhere(differs)[0])
            width = 2 * found.itemsize
            self.fail(
                f"{what}: element {list(index)} of {list(found.shape)}: expected "
                f"0x{int(bits(expected)[index]):0{width}x} ({expected[index]}), got "
                f"0x{int(bits(found)[index]):0{width}x} ({found[index]}); {int(differs.sum())} of {found.size} differ"
            )

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


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bit patterns of an array as unsigned integers of its width."""
    return np.ascontiguousarray(array).view(np.dtype(f"u{array.itemsize}")).reshape(array.shape)


def _is_nan(array: np.ndarray) -> np.ndarray:
    if dtypes.get(array.dtype).kind != "float":
        return np.zeros(array.shape, bool)
    nan: np.ndarray = np.isnan(array)
    return nan
