"""Starts ranks, watches them, and says what went wrong: `lowshard run` and `lowshard doctor`.

- `run_ranks` starts a command on n ranks with the mpiexec that fits mpi4py, and returns a `JobResult`; on this host, or
  on the hosts of a `Spread`.
- `find_rank` reads a process's rank from its environment before MPI is initialised.
- `find_mpi` says which MPI library and which mpiexec that will be.
"""

from __future__ import annotations

from lowshard.launch.environment import LaunchedRank, find_rank
from lowshard.launch.host import Host, Spread, parse_hosts, read_hostfile, spread_over
from lowshard.launch.job import JobResult, python_command, run_ranks
from lowshard.launch.mpiexec import MpiInstall, find_mpi

__all__ = [
    "Host",
    "JobResult",
    "LaunchedRank",
    "MpiInstall",
    "Spread",
    "find_mpi",
    "find_rank",
    "parse_hosts",
    "python_command",
    "read_hostfile",
    "run_ranks",
    "spread_over",
]


def __dir__() -> list[str]:
    return sorted(__all__)
