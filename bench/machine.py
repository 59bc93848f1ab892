"""What a figure was measured on: engine, processor or GPU, hosts, library versions, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from pathlib import Path
from typing import Any

from lowshard._version import __version__
from lowshard.bench.bench_report import Facts
from lowshard.bench.turn_timing import HostComm
from lowshard.kernels.engine import host_engine
from lowshard.launch.mpiexec import available_cores
from lowshard.settings import CHECK, CPU_PATH, environment

_LIBRARIES = ("numpy", "ml_dtypes", "numba", "llvmlite", "mpi4py")
# Settings of MPI libraries and NCCL that change figures, without what launchers set for themselves.
_SETTINGS = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "NCCL_", "FI_")
_NO_SETTINGS = (
    "PREFIXES", "initial_wdir", "num_procs", "cpu_type", "_ess", "_pmix", "_prte", "_orte", "KEY", "TOKEN",
)  # fmt: skip


def facts(kind: str = "cpu") -> Facts:
    """Return names and values that say what runs in this process, and where."""
    found = {"lowshard": __version__, "device": kind}
    found |= _host_kernels() if kind == "cpu" else {"engine": _device_engine(), **_gpu()}
    cores = available_cores()
    found["cpu"] = f"{cpu_model()}, {cores} core{'s' * (cores != 1)} usable"
    return tuple((found | _system()).items())


def rank_facts(host: HostComm, comm: Any, mpi_comm: Any) -> Facts:
    """Return names and values that say what runs on ranks. Collective: all ranks call this."""
    counts = host.exchange(len(os.sched_getaffinity(0)))
    hosts = host.exchange(socket.gethostname())
    found = {"lowshard": __version__, "transport": str(comm.transport)}
    if mpi_comm is not None:
        found["mpi"] = mpi_name()
    ranks = {name: hosts.count(name) for name in hosts}
    found["hosts"] = ", ".join(f"{n} rank{'s' * (n != 1)} on {name}" for name, n in ranks.items())
    found["cpu"] = f"{cpu_model()}, {' or '.join(map(str, sorted(set(counts))))} cores usable a rank"
    if comm.xp.__name__ != "numpy":
        from cupy.cuda import nccl

        found |= _gpu() | {"nccl": str(nccl.get_version()) if nccl.available else "none"}
    found |= _system() | {"check": CHECK.text(), "path": CPU_PATH.text()}
    settings = {k: v for k, v in sorted(environment().items()) if k.startswith(_SETTINGS)}
    kept = [f"{k}={v}" for k, v in settings.items() if not any(part in k for part in _NO_SETTINGS)]
    if kept:
        found["settings"] = " ".join(kept)
    return tuple(found.items())


def mpi_name() -> str:
    """Return the MPI library's name and version: "Open MPI 5.0.11"."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name as Linux gives it."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _system() -> dict[str, str]:
    versions = ", ".join(f"{name} {version(name) or 'not installed'}" for name in _LIBRARIES)
    return {
        # A figure taken while others kept the machine busy is worth less: say so beside it.
        "load": f"{os.getloadavg()[0]:.2f} processes running on average in the minute before",
        "system": f"Linux {platform.release()}, {' '.join(platform.libc_ver())}".rstrip(),
        "versions": f"python {platform.python_version()}, {versions}",
    }


def _host_kernels() -> dict[str, str]:
    engine, vectors = host_engine().name, "as NumPy chooses"
    if engine == "numba":
        from lowshard.kernels.cpu.cpu_engine import vector_bits

        vectors = f"{vector_bits()} bits"
    return {"engine": engine, "vectors": vectors, "threads": "1"}


def _device_engine() -> str:
    import cupy

    from lowshard.kernels.cuda.cuda_engine import device_engine

    return device_engine(int(cupy.cuda.runtime.getDevice())).name


def _gpu() -> dict[str, str]:
    import cupy

    runtime = cupy.cuda.runtime
    index = int(runtime.getDevice())
    about: dict[str, Any] = runtime.getDeviceProperties(index)
    name = about["name"].decode() if isinstance(about["name"], bytes) else str(about["name"])
    return {
        "gpu": f"{name}, sm_{about['major']}{about['minor']}, {about['multiProcessorCount']} SMs, "
        f"{about['totalGlobalMem'] / 1e9:.0f} GB, L2 {about['l2CacheSize'] / 1e6:.0f} MB",
        "driver": f"{_kernel_driver()}CUDA {_cuda_version(runtime.driverGetVersion())}, "
        f"runtime {_cuda_version(runtime.runtimeGetVersion())}, cupy {cupy.__version__}",
    }


def _kernel_driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return ""
    words = path.read_text(encoding="utf-8", errors="replace").split()
    numbers = [word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()]
    return f"{numbers[0]}, " if numbers else ""


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
