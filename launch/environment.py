"""Finds this process's rank from the variables that a launcher sets, before MPI is initialised.

The rank on the node is needed early: a process picks its GPU before MPI starts. Everything here is a function of
an environment mapping (and of a node file that it names). `lowshard.comm.world` has the table of launchers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import brief, mapping
from lowshard.comm.world import LAUNCHERS, count_in
from lowshard.errors import LaunchError

__all__ = ["LaunchedRank", "allocated_nodes", "find_rank", "passed_names", "without_rank"]


@dataclass(frozen=True)
class LaunchedRank:
    """What the launcher told this process about its place.

    Attributes:
        rank: rank in the world.
        size: number of ranks.
        local_rank: rank among those of this node; None where the launcher does not say.
        launcher: name of the row of the table that matched, e.g. "openmpi" or "slurm".
    """

    rank: int
    size: int
    local_rank: int | None
    launcher: str


# What a job started from inside a rank must not inherit, or its ranks take themselves for that rank.
_RANK_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "PMIX_",
    "PMI_",
    "PMI2_",
    "HYDI_",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "PALS_",
)
_KEPT_PREFIX = "PMIX_MCA_"  # settings, not identity

# What belongs to one host or one terminal, or what each host's daemon sets anew: ranks elsewhere do not get it.
_STAYS = re.compile(
    r"^(HOME|USER|LOGNAME|MAIL|SHELL|HOST|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM\w*|COLORTERM|COLUMNS|LINES|DISPLAY|"
    r"WINDOWID|LS_COLORS|PS\d|PROMPT_COMMAND|TMPDIR|TMP|TEMP|SSH_\w+|SUDO_\w+|DBUS_\w+|XAUTHORITY|"
    r"XDG_(?!CACHE_HOME|CONFIG_HOME|DATA_HOME)\w+|SLURM\w*_\w+|PBS_\w+|LSB_\w+|FLUX_\w+|PRTE_\w+|HYDRA_\w+)$"
)
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def find_rank(env: Mapping[str, str]) -> LaunchedRank | None:
    """Returns the rank that the environment describes, or None if no launcher's variables are there.

    Args:
        env: the process's environment, usually `os.environ`.

    Raises:
        LaunchError: the variables of the launcher that matched are not numbers, or contradict each other.
    """
    mapping(env, "an environment is a mapping of names to texts, usually os.environ", LaunchError)
    for launcher in LAUNCHERS:
        needs = launcher.needs + launcher.mpi_needs
        if not all(any(name in env for name in group) for group in needs):
            continue
        sizes = launcher.size + launcher.mpi_size
        rank, size = _number(env, launcher.rank), _number(env, sizes)
        if rank is None or size is None:
            continue
        local_rank = _number(env, launcher.local_rank)
        if rank >= size or (local_rank is not None and local_rank >= size):
            raise LaunchError(
                f"a rank must be below the number of ranks, but {launcher.key}'s variables say rank {rank}, "
                f"local rank {local_rank}, size {size}; unset the stale ones of "
                f"{', '.join(launcher.rank + sizes + launcher.local_rank)}"
            )
        return LaunchedRank(rank, size, local_rank, launcher.key)
    return None


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of the environment without the variables that make a process one rank of an MPI job."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_KEPT_PREFIX) or not name.startswith(_RANK_PREFIXES)
    }


def allocated_nodes(env: Mapping[str, str]) -> int:
    """Returns on how many hosts mpiexec puts ranks of itself, because a batch system gave it them; 1 for this one."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if env.get("SLURM_JOB_ID") and (nodes := count_in(env.get(name, ""))) is not None:
            return max(1, nodes)
    if env.get("LSB_JOBID"):
        return max(1, len(set(env.get("LSB_MCPU_HOSTS", "").split()[::2])))
    if env.get("PBS_NODEFILE"):
        try:
            lines = Path(env["PBS_NODEFILE"]).read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return 1
        return max(1, len(set(lines)))
    return 1


def passed_names(env: Mapping[str, str]) -> list[str]:
    """Returns the variables that ranks on other hosts are to get, sorted: all that are not about this host."""
    return sorted(name for name in env if _NAME.match(name) and not _STAYS.match(name))


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Returns the first of the named variables that is set, as a count."""
    for name in names:
        text = env.get(name)
        if text is None:
            continue
        count = count_in(text)
        if count is None:
            raise LaunchError(
                f"{name} must hold a number (0, 1, ...) because a launcher sets it so, but holds {brief(text)}; unset "
                f"it, or start the program with its launcher"
            )
        return count
    return None
