"""What a figure was measured on: engine, processor or GPU, library versions. Nothing here changes anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowshard._version import __version__
from lowshard.bench.bench_device import Device
from lowshard.kernels.engine import host_engine
from lowshard.launch.mpiexec import available_cores

_HOST_LIBRARIES = ("numpy", "ml_dtypes", "numba", "llvmlite")


def facts(device: Device) -> tuple[tuple[str, str], ...]:
    """Return names and values that say what runs and where, for a table's head and for JSON."""
    found = {"lowshard": __version__, "device": device.kind}
    found |= _host_kernels() if device.kind == "cpu" else _gpu()
    cores = available_cores()
    found["cpu"] = f"{cpu_model()}, {cores} core{'s' * (cores != 1)} usable"
    # A figure taken while others kept the machine busy is worth less: say so beside it.
    found["load"] = f"{os.getloadavg()[0]:.2f} processes running on average in the minute before"
    found["system"] = f"Linux {platform.release()}, {' '.join(platform.libc_ver())}".rstrip()
    found["versions"] = f"python {platform.python_version()}, {versions(_HOST_LIBRARIES)}"
    return tuple(found.items())


def versions(names: Iterable[str]) -> str:
    """Return "name version, name version" of installed packages, without importing them."""
    return ", ".join(f"{name} {version(name) or 'not installed'}" for name in names)


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


def vector_width(engine: str) -> str:
    """Return the vector width that the host kernels are compiled for, in words."""
    if engine != "numba":
        return "as NumPy chooses"
    from lowshard.kernels.cpu.cpu_engine import vector_bits

    return f"{vector_bits()} bits"


def _host_kernels() -> dict[str, str]:
    engine = host_engine().name
    return {"engine": engine, "vectors": vector_width(engine), "threads": "1"}


def _gpu() -> dict[str, str]:
    import cupy

    from lowshard.kernels.cuda.cuda_engine import device_engine

    runtime = cupy.cuda.runtime
    index = int(runtime.getDevice())
    about: dict[str, Any] = runtime.getDeviceProperties(index)
    name = about["name"].decode() if isinstance(about["name"], bytes) else str(about["name"])
    return {
        "engine": device_engine(index).name,
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
