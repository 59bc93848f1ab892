"""The steps of the selftest, in the order they run in."""

from __future__ import annotations

from dataclasses import dataclass

from lowshard.selftest.step_setting import Device


@dataclass(frozen=True)
class Step:
    """One step: its module is `step_NAME`, and `needs` names findings of `facts` that must be ok."""

    name: str
    shows: str
    cpu_limit_s: float
    cuda_limit_s: float
    needs: tuple[str, ...] = ()

    def limit_s(self, device: Device) -> float:
        """Return the seconds it may take there."""
        return self.cuda_limit_s if device == "cuda" else self.cpu_limit_s


_MPI = ("mpi4py", "mpi")

STEPS = (
    Step("facts", "versions, driver, libraries, MPI, topology", 90, 40),
    Step("kernels", "every kernel against its plain twin", 300, 90),
    Step("fold", "every order, op and dtype of a reduction against plain NumPy", 120, 50),
    Step("threads", "collectives of ranks that are threads of one process", 120, 60),
    Step("collectives", "collectives of MPI ranks against NumPy", 240, 95, _MPI),
    Step("streams", "started calls, and what may run beside them", 60, 30),
    Step("redistribute", "transitions between layouts against slices of the whole array", 120, 40, _MPI),
    Step("refit", "new versions of weights, plain and as MXFP8", 180, 40, _MPI),
    Step("bandwidths", "shares of a copy of the same bytes", 180, 45, _MPI),
)
SUITE = Step("suite", "pytest tests/gpu of the checkout", 900, 900)

NAMES = tuple(step.name for step in STEPS)
