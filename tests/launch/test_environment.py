"""The table of launchers: which variables make a process a rank, and which win."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowshard.errors import LaunchError
from lowshard.launch.environment import LaunchedRank, allocated_nodes, find_rank, passed_names, without_rank

OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {
    **SALLOC,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "6",
    "FLUX_TASK_LOCAL_ID": "2",
    "PMI_RANK": "5",
    "PMI_SIZE": "6",
}
PALS = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}

CASES = {
    "openmpi": (OPENMPI, LaunchedRank(3, 8, 1, "openmpi")),
    "hydra": (HYDRA, LaunchedRank(2, 4, 0, "hydra")),
    "mvapich": (
        {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
        LaunchedRank(1, 2, 1, "mvapich"),
    ),
    "jsm": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"},
        LaunchedRank(1, 2, 0, "jsm"),
    ),
    "flux": (FLUX, LaunchedRank(5, 6, 2, "flux")),
    "pals": (PALS, LaunchedRank(1, 2, 1, "pals")),
    "srun with PMI-2": (
        {**SRUN, "PMI_FD": "9", "PMI_RANK": "3", "PMI_SIZE": "4"},
        LaunchedRank(3, 4, 1, "slurm"),
    ),
    "srun with PMIx": ({**SRUN, "PMIX_RANK": "3"}, LaunchedRank(3, 4, 1, "slurm")),
    "old srun, no step size": (
        {k: v for k, v in {**SRUN, "PMIX_RANK": "3"}.items() if k != "SLURM_STEP_NUM_TASKS"},
        LaunchedRank(3, 16, 1, "slurm"),
    ),
    "bare PMI": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchedRank(1, 2, None, "pmi")),
    "torchrun": (TORCHRUN, LaunchedRank(1, 2, 1, "torchrun")),
    "Open MPI inside salloc": ({**SALLOC, **OPENMPI}, LaunchedRank(3, 8, 1, "openmpi")),
    "Open MPI inside srun": ({**SRUN, "PMIX_RANK": "3", **OPENMPI}, LaunchedRank(3, 8, 1, "openmpi")),
    "hydra started by srun": ({**SRUN, "PMI_FD": "9", **HYDRA}, LaunchedRank(2, 4, 0, "hydra")),
    "hydra inside flux": ({**FLUX, **HYDRA}, LaunchedRank(2, 4, 0, "hydra")),
    "Open MPI under torch's variables": ({**TORCHRUN, **OPENMPI}, LaunchedRank(3, 8, 1, "openmpi")),
    "no local rank": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        LaunchedRank(0, 1, None, "openmpi"),
    ),
    "nothing": ({"PATH": "/bin", "HOME": "/"}, None),
    "a shell in an allocation": (SALLOC, None),
    "a shell in an allocation, with PMI settings": ({**SALLOC, "PMI_RANK_ORDER": "x"}, None),
    "srun without an MPI plugin": (SRUN, None),
    "a cluster's RANK without torchrun's LOCAL_RANK": ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    "half of Open MPI's": ({"OMPI_COMM_WORLD_RANK": "0"}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_launcher_that_started_the_rank_is_found(name: str) -> None:
    env, expected = CASES[name]
    assert find_rank(env) == expected


@pytest.mark.parametrize("text", ["x", "-1", "9" * 5000])
def test_a_variable_that_is_no_rank_is_named(text: str) -> None:
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_RANK"):
        find_rank({**OPENMPI, "OMPI_COMM_WORLD_RANK": text})


@pytest.mark.parametrize("change", [{"PMI_RANK": "4"}, {"MPI_LOCALRANKID": "4"}])
def test_a_rank_beyond_the_size_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="hydra's variables say"):
        find_rank({**HYDRA, **change})


@pytest.mark.parametrize("env", [OPENMPI, HYDRA, {**SALLOC, "PMIX_RANK": "0"}])
def test_a_job_inside_a_rank_does_not_inherit_the_rank(env: dict[str, str]) -> None:
    left = without_rank({**env, "PMIX_MCA_gds": "hash", "PATH": "/bin"})
    assert find_rank(left) is None
    assert left["PMIX_MCA_gds"] == "hash"
    assert left["PATH"] == "/bin"
    assert left.get("SLURM_JOB_ID") == env.get("SLURM_JOB_ID")


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, 4),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, 2),
        ({"SLURM_JOB_NUM_NODES": "4"}, 1),
        ({"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "a 4 b 4 a 2"}, 2),
        ({"LSB_JOBID": "3"}, 1),
        ({"PBS_NODEFILE": "/no/such/file"}, 1),
    ],
)
def test_the_nodes_of_a_batch_job_are_counted(env: dict[str, str], nodes: int) -> None:
    assert allocated_nodes(env) == nodes


def test_a_pbs_node_file_counts_each_node_once(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_bytes(b"a\na\nb\xff\nb\xff\n")
    assert allocated_nodes({"PBS_NODEFILE": str(path)}) == 2


def test_what_is_about_this_host_stays_here_and_the_rest_is_passed() -> None:
    passed = [
        "LOWSHARD_LINK",
        "MY_SETTING",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "XDG_CACHE_HOME",
    ]
    stay = ["HOME", "HOSTNAME", "PWD", "TMPDIR", "SSH_CLIENT", "SLURM_PROCID", "SLURM_JOB_ID", "DISPLAY", "_"]
    stay += ["XDG_RUNTIME_DIR", "PRTE_MCA_plm", "BASH_FUNC_x%%", "TERM", "with space"]
    assert passed_names(dict.fromkeys([*stay, *passed], "1")) == passed
