"""What every process of a selftest is told: the device, the ranks, the folder, the time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]

MULTI_RANK_NCCL = 23003
"""The first NCCL that allows several ranks on one GPU: 2.30.3."""


@dataclass(frozen=True)
class Setting:
    """What a step runs with."""

    device: Device
    ranks: int
    folder: str
    limit_s: float
    transport: Literal["auto", "nccl", "staged"] = "auto"

    def to_json(self) -> str:
        """Return the setting as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """Return the setting that `to_json` wrote."""
        return cls(**json.loads(text))


def result_of(result: Path, rank: int) -> Path:
    """Return the file of one rank's tally, beside the one named."""
    return result.with_suffix(f".{rank}.json")
