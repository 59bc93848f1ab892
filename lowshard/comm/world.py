"""The table of launchers, and whether the world that MPI made is the one that the launcher meant.

An mpiexec of another MPI than the library that Python loads, or a launcher that knows no MPI, starts n processes
each of which is a world of one rank: n times the same work, and no word about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LAUNCHERS", "LauncherRow", "count_in", "world_mismatch"]

Names = tuple[str, ...]
_MOST_DIGITS = 9  # of a number of ranks, hosts or slots


@dataclass(frozen=True)
class LauncherRow:
    """One launcher's variables; each field lists the names to try, in order."""

    key: str  # to report of a rank
    name: str  # what people call it
    rank: Names
    size: Names
    local_rank: Names  # on the node
    advice: str  # what to do when MPI did not take part
    needs: tuple[Names, ...] = ()  # of each group of names at least one must be set; else of the rank's
    mpi_needs: tuple[Names, ...] = ()  # groups that a rank of MPI has beside these
    mpi_size: Names = ()  # further names of a rank of MPI's number of ranks


_SAME_MPI = "start the program with the mpiexec of the MPI that mpi4py loads: lowshard run finds it"
_PMI_MARKS = ("PMI_RANK", "PMI_FD", "PMI_JOBID", "PMI2_FD", "PMIX_RANK", "PMIX_NAMESPACE")

LAUNCHERS = (
    LauncherRow(
        "openmpi", "Open MPI's mpirun",
        ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",), _SAME_MPI,
    ),
    LauncherRow(
        "mvapich", "MVAPICH's launcher",
        ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_LOCAL_RANK",), _SAME_MPI,
    ),
    # Hydra, the launcher of MPICH and of Intel MPI. MPI_LOCALRANKID is its mark: bare PMI_* variables also come
    # from srun, flux and PALS, whose own rows know the local rank.
    LauncherRow(
        "hydra", "Hydra (mpiexec of MPICH or Intel MPI)",
        ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), _SAME_MPI, needs=(("MPI_LOCALRANKID",),),
    ),
    LauncherRow(
        "jsm", "jsrun",
        ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),
        "load the MPI module that jsrun belongs to",
    ),
    LauncherRow(
        "flux", "flux run",
        ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",),
        "try flux run -o pmi=pmix (Open MPI) or -o pmi=simple (MPICH)", mpi_size=("PMI_SIZE",),
    ),
    LauncherRow(
        "pals", "PALS",
        ("PALS_RANKID",), ("PALS_SIZE", "PMI_SIZE"), ("PALS_LOCAL_RANKID",),
        "load the MPI module that the system's launcher starts",
    ),
    # A shell in an allocation has SLURM_PROCID=0 and SLURM_NTASKS too. Only a step has a step id, and only one
    # that srun started with an MPI plugin has PMI; without PMI each task would be an MPI world of its own.
    LauncherRow(
        "slurm", "srun",
        ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",),
        "try srun --mpi=pmix (srun --mpi=list names what there is), or lowshard run inside the allocation",
        needs=(("SLURM_STEP_ID", "SLURM_STEPID"), ("SLURM_PROCID",)),
        mpi_needs=(_PMI_MARKS,), mpi_size=("SLURM_NTASKS",),
    ),
    LauncherRow("pmi", "a launcher with PMI", ("PMI_RANK",), ("PMI_SIZE",), ("PMI_LOCAL_RANK",), _SAME_MPI),
    LauncherRow(
        "torchrun", "torchrun",
        ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",),
        "torchrun starts no MPI: use lowshard run or mpirun, or build the communicator on NCCL with from_nccl",
        needs=(("LOCAL_RANK",), ("RANK",)),
    ),
)  # fmt: skip
"""In order of trust, the innermost first: an MPI launcher's own variables win over those of the batch system that it
was started in, because both are there when `mpiexec` runs inside an allocation and then the batch system's describe
the shell, not the rank."""


def count_in(text: str) -> int | None:
    """Returns the number, 0 or more, that a text is; None where it is none, or too large to count anything."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def world_mismatch(environ: Mapping[str, str], world_size: int) -> str | None:
    """Returns what is wrong, and what to do, if the launcher started more processes than MPI's world has; else None.

    Only a world of one rank is ever wrong: a larger one is MPI's own doing. Local call, no MPI.
    """
    if world_size != 1:
        return None
    for launcher in LAUNCHERS:
        if not all(any(name in environ for name in group) for group in launcher.needs or (launcher.rank,)):
            continue
        for variable in launcher.size:
            text = environ.get(variable, "").strip()
            size = count_in(text)
            if size is None:
                continue
            if size <= 1:
                return None
            return (
                f"ranks must be in one MPI world, but {launcher.name} says that it started {text} processes "
                f"({variable}={text}) while this one is alone in its world of 1; {launcher.advice}; a program that is "
                f"meant to run alone unsets {variable}"
            )
    return None
