"""Whether the world that MPI made is the one that the launcher meant.

An mpiexec of another MPI than the library that Python loads, or a launcher that knows no MPI, starts n processes
each of which is a world of one rank: n times the same work, and no word about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["world_mismatch"]


@dataclass(frozen=True)
class _Launcher:
    """How a launcher is known.

    Attributes:
        name: what people call it.
        size: variables that hold the number of processes, the first that is set counts.
        needs: groups of variables; of each group at least one must be set.
        advice: what to do when MPI did not take part.
    """

    name: str
    size: tuple[str, ...]
    needs: tuple[tuple[str, ...], ...]
    advice: str


_SAME_MPI = "start the program with the mpiexec of the MPI that mpi4py loads: lowshard run finds it"

# The innermost launcher first: its variables are right where several are set.
_LAUNCHERS = (
    _Launcher("Open MPI's mpirun", ("OMPI_COMM_WORLD_SIZE",), (("OMPI_COMM_WORLD_RANK",),), _SAME_MPI),
    _Launcher("MVAPICH's launcher", ("MV2_COMM_WORLD_SIZE",), (("MV2_COMM_WORLD_RANK",),), _SAME_MPI),
    _Launcher("Hydra (mpiexec of MPICH or Intel MPI)", ("PMI_SIZE",), (("MPI_LOCALRANKID",),), _SAME_MPI),
    _Launcher(
        "jsrun",
        ("JSM_NAMESPACE_SIZE",),
        (("JSM_NAMESPACE_RANK",),),
        "load the MPI module that jsrun belongs to",
    ),
    _Launcher(
        "flux run",
        ("FLUX_JOB_SIZE",),
        (("FLUX_TASK_RANK",),),
        "try flux run -o pmi=pmix (Open MPI) or -o pmi=simple (MPICH)",
    ),
    _Launcher(
        "PALS",
        ("PALS_SIZE", "PMI_SIZE"),
        (("PALS_RANKID",),),
        "load the MPI module that the system's launcher starts",
    ),
    _Launcher(
        "srun",
        ("SLURM_STEP_NUM_TASKS",),
        (("SLURM_STEP_ID", "SLURM_STEPID"), ("SLURM_PROCID",)),
        "try srun --mpi=pmix (srun --mpi=list names what there is), or lowshard run inside the allocation",
    ),
    _Launcher("a launcher with PMI", ("PMI_SIZE",), (("PMI_RANK",),), _SAME_MPI),
    _Launcher(
        "torchrun",
        ("WORLD_SIZE",),
        (("LOCAL_RANK",), ("RANK",)),
        "torchrun starts no MPI: use lowshard run or mpirun, or build the communicator on NCCL with from_nccl",
    ),
)


def world_mismatch(environ: Mapping[str, str], world_size: int) -> str | None:
    """Returns what is wrong, and what to do, if the launcher started more processes than MPI's world has; else None.

    Only a world of one rank is ever wrong: a larger one is MPI's own doing. Local call, no MPI.

    Args:
        environ: the process's environment, usually `os.environ`.
        world_size: size of MPI's COMM_WORLD (not of a part of it).
    """
    if world_size != 1:
        return None
    for launcher in _LAUNCHERS:
        if not all(any(name in environ for name in group) for group in launcher.needs):
            continue
        for variable in launcher.size:
            text = environ.get(variable, "").strip()
            if not text.isdecimal():
                continue
            if int(text) <= 1:
                return None
            return (
                f"ranks must be in one MPI world, but {launcher.name} says that it started {text} processes "
                f"({variable}={text}) while this one is alone in its world of 1; {launcher.advice}; a program that is "
                f"meant to run alone unsets {variable}"
            )
    return None
