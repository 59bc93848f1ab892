"""A launcher that started n processes while MPI made n worlds of one rank: found for each launcher."""

from __future__ import annotations

import pytest

from lowshard.comm.world import world_mismatch

OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (OPENMPI, ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=4", "lowshard run")),
        (HYDRA, ("Hydra", "PMI_SIZE=4", "mpiexec of the MPI that mpi4py loads")),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, ("MVAPICH", "2 processes")),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, ("jsrun",)),
        (SRUN, ("srun", "SLURM_STEP_NUM_TASKS=4", "--mpi=pmix")),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, ("srun", "--mpi=pmix")),
        (FLUX, ("flux run", "-o pmi=pmix")),
        ({"PALS_RANKID": "0", "PMI_SIZE": "2"}, ("PALS", "PMI_SIZE=2")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("PMI", "PMI_SIZE=2")),
        (TORCHRUN, ("torchrun starts no MPI", "from_nccl")),
        ({**BATCH, **OPENMPI}, ("Open MPI's mpirun",)),
        ({**SRUN, **HYDRA, "PMI_SIZE": "3"}, ("Hydra", "3 processes")),
    ],
)
def test_a_lonely_rank_of_many_is_told_what_to_do(environ: dict[str, str], told: tuple[str, ...]) -> None:
    text = world_mismatch(environ, 1)
    assert text is not None
    for part in told:
        assert part in text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        BATCH,  # a shell in an allocation
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty python
        {**SRUN, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun -n 1 in a step of 4
        {**TORCHRUN, **HYDRA, "PMI_SIZE": "1"},
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "x"},
        {"RANK": "0", "WORLD_SIZE": "4"},  # a cluster's own, without torchrun's LOCAL_RANK
        {"OMPI_COMM_WORLD_SIZE": "4"},  # half of it
    ],
)
def test_one_rank_alone_is_in_order(environ: dict[str, str]) -> None:
    assert world_mismatch(environ, 1) is None


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, SRUN, FLUX, TORCHRUN])
def test_a_world_of_several_is_never_questioned(environ: dict[str, str]) -> None:
    assert world_mismatch(environ, 2) is None
    assert world_mismatch(environ, 4) is None
