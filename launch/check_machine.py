"""What the doctor says of the machine: cores, shared memory, GPUs, NCCL."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lowshard.launch.doctor_finding import Check, last_object, run_python
from lowshard.launch.mpiexec import available_cores

__all__ = ["check_cuda", "check_gpus", "check_machine", "nccl_advice"]

_SMALL_SHM_BYTES = 1_000_000_000
_MULTI_RANK_NCCL = 23003  # the first that allows several ranks on one GPU

_GPU_PROGRAM = """
import json
import cupy
from cupy.cuda import runtime
found = {"nccl": None, "nccl_error": "", "gpus": [], "gpu_error": ""}
try:
    from cupy.cuda import nccl
    if nccl.available:
        found["nccl"] = nccl.get_version()
    else:
        found["nccl_error"] = "CuPy finds no libnccl.so.2"
except Exception as error:
    found["nccl_error"] = f"{type(error).__name__}: {error}"
try:
    for index in range(runtime.getDeviceCount()):
        about = runtime.getDeviceProperties(index)
        found["gpus"].append([about["name"].decode(), about["totalGlobalMem"]])
    if found["gpus"]:
        assert int(cupy.arange(4).sum()) == 6
except Exception as error:
    found["gpu_error"] = f"{type(error).__name__}: {error}"
with open("/proc/self/maps") as maps:
    paths = {line.split(None, 5)[5].strip() for line in maps if "libnccl" in line}
found["paths"] = sorted(path for path in paths if path.rsplit("/", 1)[1].startswith("libnccl"))
print(json.dumps(found))
"""

_CUDA_PROGRAM = """
import ctypes, json
try:
    library = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"version": 0, "paths": [], "error": str(error)}))
else:
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split(None, 5)[5].strip() for line in maps if "libcuda.so" in line})
    print(json.dumps({"version": version.value, "paths": paths, "error": ""}))
"""


def check_machine() -> list[Check]:
    """Looks at cores and shared memory."""
    cores = available_cores()
    checks = [Check("cores", "ok", f"{cores} usable of {os.cpu_count()}")]
    if not Path("/dev/shm").is_dir():
        return [
            *checks,
            Check("/dev/shm", "missing", "not there", "MPI falls back to slower ways; mount a tmpfs"),
        ]
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
    small = usage.free < _SMALL_SHM_BYTES
    advice = "little for large arrays; in a container: docker run --shm-size=8g" if small else ""
    return [*checks, Check("/dev/shm", "ok", detail, advice)]


def check_cuda() -> Check:
    """Loads NVIDIA's driver library in a child."""
    status, text = run_python(_CUDA_PROGRAM, [])
    found = last_object(text)
    if found is None:
        return Check("libcuda", "broken", status, "NVIDIA's driver does not load: see nvidia-smi")
    if found["error"]:
        return Check("libcuda", "missing", found["error"], "for GPUs: install NVIDIA's driver")
    number = found["version"]  # 13000 is 13.0
    return Check("libcuda", "ok", f"CUDA {number // 1000}.{number % 1000 // 10}, {', '.join(found['paths'])}")


def check_gpus() -> list[Check]:
    """Asks CuPy for NCCL and the GPUs."""
    status, text = run_python(_GPU_PROGRAM, [])
    found = last_object(text)
    if found is None:
        advice = "try: python -c 'import cupy; cupy.show_config()'"
        return [Check("nccl", "broken", status, advice), Check("gpus", "broken", status, advice)]
    if found["nccl"]:
        number = found["nccl"]  # 23007 is 2.30.7
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        nccl = Check(
            "nccl", "ok", ", ".join((version, *found["paths"])), nccl_advice(number, len(found["gpus"]))
        )
    else:
        nccl = Check(
            "nccl",
            "missing",
            found["nccl_error"],
            "pip install 'lowshard[cuda13]', or 'lowshard[cuda12]' for CUDA 12",
        )
    if found["gpu_error"]:
        gpus = Check(
            "gpus", "broken", found["gpu_error"], "no GPU, or no driver that fits CuPy: see nvidia-smi"
        )
    elif not found["gpus"]:
        gpus = Check("gpus", "missing", "CuPy sees no GPU", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
    else:
        gpus = Check("gpus", "ok", ", ".join(f"{name} ({size / 1e9:.0f} GB)" for name, size in found["gpus"]))
    return [nccl, gpus]


def nccl_advice(version: int, gpus: int) -> str:
    """Returns what to know about more ranks than GPUs."""
    if gpus > 1 or not gpus:
        return ""
    if version >= _MULTI_RANK_NCCL:
        return "to try several ranks on this one GPU: NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2"
    return "one rank on this one GPU: several need NCCL 2.30.3 or newer"
