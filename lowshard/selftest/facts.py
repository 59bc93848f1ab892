"""The step `facts`: what is installed and what the machine is, as `lowshard doctor` finds it, and the GPUs."""

from __future__ import annotations

import importlib
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lowshard
from lowshard._version import __version__
from lowshard.bench.machine import cpu_model
from lowshard.launch.check_machine import check_cuda
from lowshard.launch.doctor_finding import run_python
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import MULTI_RANK_NCCL, Device, Setting

END = "end"
"""A key of the tally's data: nothing else can run, and why."""
_IMPORTED_BY_ALL = ("numpy", "ml_dtypes")
_NOT_ON_A_GPU = ("numba", "kernels")
"""What the CPU path needs and the GPU path does not."""

_DEVICE_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])  # where this lowshard lies, installed or not
from lowshard.selftest.facts import why_no_cuda
print("cpu" if why_no_cuda() else "cuda")
"""


def run(setting: Setting, tally: Tally) -> None:
    """Note what there is; what the steps cannot do without is a finding where it is missing."""
    python = platform.python_version()
    facts: dict[str, Any] = {"lowshard": __version__, "python": python}
    tally.data["facts"] = facts
    if setting.device == "cuda" and (why := why_no_cuda()):
        tally.data[END] = why
        tally.fail(why)
        return
    from lowshard.launch.doctor_command import examine

    checks = examine()
    for check in checks:
        print(f"{check.status:8} {check.name:14} {check.detail}  {check.advice}".rstrip(), flush=True)
        if not check.required or (setting.device == "cuda" and check.name in _NOT_ON_A_GPU):
            continue
        tally.true(check.name, check.status == "ok", f"{check.status}: {check.detail}; {check.advice}")
        if check.status != "ok" and check.name in _IMPORTED_BY_ALL:
            tally.data[END] = f"{check.name} is {check.status}: {check.advice}"
    tally.data["ok"] = [check.name for check in checks if check.status == "ok"]
    facts |= {"machine": platform.platform(), "processor": cpu_model(), "checks": [*map(asdict, checks)]}
    found = {check.name: check.detail.split(",")[0] for check in checks}
    tally.summary = (
        f"lowshard {__version__}, Python {python}, NumPy {found.get('numpy', '?')}, {found.get('mpi', 'no MPI')}, "
        f"{found.get('cores', '?')} cores"
    )
    if setting.device == "cuda":
        gpu = facts["cuda"] = _gpu_facts(setting, tally)
        names = ", ".join(one["name"] for one in gpu["gpus"])
        versions = f"CUDA {gpu['runtime']}, driver {gpu['driver']}, NCCL {gpu['nccl'] or 'none'}"
        tally.summary += f"; {names}, {versions}"


def why_no_cuda() -> str:
    """Return what keeps this process from using a GPU through CuPy, with the call that said so, or ""."""
    driver = check_cuda()
    said = f"libcuda.so.1: {driver.status}, {driver.detail}"
    try:
        count = int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except ImportError as error:
        return (
            f"no CUDA device can be used: CuPy cannot be imported ({error}); {said}; "
            "pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'"
        )
    except RuntimeError as error:  # CuPy's CUDARuntimeError
        return f"no CUDA device: cudaGetDeviceCount said {error}; {said}; see nvidia-smi"
    if not count:
        return f"no CUDA device: cudaGetDeviceCount found 0; {said}; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return ""


def find_device(choice: str) -> Device:
    """Return the device of `--device`: "auto" is a GPU where CuPy can use one, asked in a process of its own."""
    if choice == "auto":
        _, choice = run_python(_DEVICE_PROGRAM, [str(Path(lowshard.__file__).parents[1])])
    return "cuda" if choice.strip() == "cuda" else "cpu"


def _gpu_facts(setting: Setting, tally: Tally) -> dict[str, Any]:
    """Return versions, GPUs and their PCI ids."""
    import cupy

    runtime = cupy.cuda.runtime
    gpus = []
    for index in range(int(runtime.getDeviceCount())):
        about = runtime.getDeviceProperties(index)
        name, capability = about["name"].decode(), f"{about['major']}.{about['minor']}"
        memory, pci = int(about["totalGlobalMem"]), str(runtime.deviceGetPCIBusId(index))
        gpus.append({"name": name, "memory_bytes": memory, "compute_capability": capability, "pci_id": pci})
    nccl = 0
    try:
        nccl = int(importlib.import_module("cupy.cuda.nccl").get_version())
    except (ImportError, RuntimeError) as error:
        tally.fail(f"NCCL: missing: {error}; pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'")
    tally.true("cupy", int(cupy.arange(4).sum()) == 6, "0 + 1 + 2 + 3 is not 6 on the GPU")
    if nccl and len(gpus) < setting.ranks and nccl < MULTI_RANK_NCCL:
        print(f"NCCL {nccl}: {setting.ranks} ranks on {len(gpus)} GPU(s) need 2.30.3 or newer", flush=True)
    return {
        "cupy": cupy.__version__,
        "runtime": _version(int(runtime.runtimeGetVersion())),
        "driver": _version(int(runtime.driverGetVersion())),
        "nccl": f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "",
        "gpus": gpus,
    }


def _version(number: int) -> str:
    """Return CUDA's number of a version as text: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
