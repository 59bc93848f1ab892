"""The steps of the selftest, in the order they run in, and what every process of one is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]

MULTI_RANK_NCCL = 23003
"""The first NCCL that allows several ranks on one GPU: 2.30.3."""


@dataclass(frozen=True)
class Step:
    """One step: `run` is "module:function" of this package, `needs` names findings of `facts` that must be ok."""

    name: str
    run: str
    shows: str
    cpu_limit_s: float
    cuda_limit_s: float
    needs: tuple[str, ...] = ()

    def limit_s(self, device: Device) -> float:
        """Return the seconds it may take there."""
        return self.cuda_limit_s if device == "cuda" else self.cpu_limit_s


_MPI = ("mpi4py", "mpi")

# The steps that may be the first to need a kernel have time to compile it, on either device.
STEPS = (
    Step("facts", "facts:run", "versions, driver, libraries, MPI, topology", 90, 40),
    Step("kernels", "kernel_cases:run", "every kernel against its plain twin", 300, 180),
    Step("fold", "fold_cases:run", "every order, op and dtype of a reduction against plain NumPy", 120, 120),
    Step("threads", "collective_step:run_threads", "collectives of ranks that are threads of one process", 120, 60),
    Step("collectives", "collective_step:run", "collectives of MPI ranks against NumPy", 240, 120, _MPI),
    Step("streams", "stream_step:run", "started calls, and what may run beside them", 60, 40),
    Step("redistribute", "redistribute_step:run", "transitions between layouts against slices of the whole array",
         120, 60, _MPI),
    Step("refit", "refit_step:run", "new versions of weights, plain and as MXFP8", 180, 90, _MPI),
    Step("fsdp", "fsdp_step:run", "sharded training against the same on NumPy arrays", 120, 60, _MPI),
    Step("bandwidths", "bandwidth_step:run", "shares of a copy of the same bytes", 180, 60, _MPI),
)  # fmt: skip

NAMES = tuple(step.name for step in STEPS)


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
