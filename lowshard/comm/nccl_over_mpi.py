"""NCCL over MPI: which rank takes which GPU, and whether NCCL can be used at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowshard.comm.agreement import agree, share_text
from lowshard.comm.mpi import MPICommunicator, load_mpi
from lowshard.comm.nccl import Binding, NCCLCommunicator
from lowshard.errors import CommError, DependencyError

# From this release on several ranks may share a GPU, if the environment says so.
_SHARED_GPU_VERSION = 23003
_SHARED_GPU_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


def why_unusable() -> str | None:
    """Return what keeps this process from using NCCL through CuPy, or None when nothing does."""
    try:
        count = int(Binding.load().xp.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError) as error:  # CuPy raises RuntimeErrors for a missing driver or GPU
        return f"{type(error).__name__}: {error}"
    return None if count else "CuPy sees no CUDA device"


def usable_on_all(host: MPICommunicator) -> bool:
    """Return whether every rank can import CuPy, sees a GPU and has an NCCL library.

    Collective: all ranks of the communicator call this.
    """
    mine = np.array([why_unusable() is None], np.uint8)
    host.all_reduce(mine, mine, op="min")
    host.traffic.clear()
    return bool(mine[0])


@dataclass(frozen=True)
class _Found:
    binding: Binding
    device: int
    bus_id: str
    version: int


def build_over_mpi(host: MPICommunicator) -> NCCLCommunicator:
    """Return an NCCL communicator over the ranks of `host`, which becomes its control communicator.

    Collective: all ranks of the communicator call this. A rank takes the GPU whose number is its rank
    on the node, modulo the number of GPUs that it sees, and makes it CuPy's current device.

    Raises:
        CommError: ranks of a node share a GPU, and NCCL is not told to allow it or is too old.
        DependencyError: a rank has no CuPy, NCCL or GPU.
        MismatchError: ranks loaded different versions of NCCL.
    """
    what = "an NCCL communicator over MPI"
    found: _Found | None = None
    error: Exception | None = None
    unique = np.zeros(128, np.uint8)
    with MPICommunicator(host.mpi_comm.Split_type(load_mpi().COMM_TYPE_SHARED), owned=True) as node:
        try:
            found = _find_device(node.rank)
            if host.rank == 0:
                unique[:] = np.frombuffer(found.binding.nccl.get_unique_id(), np.uint8)
        except (ImportError, RuntimeError) as caught:
            error = DependencyError(f"every rank needs CuPy, NCCL and a GPU: {caught}")
        bus_ids = share_text(node, "" if found is None else found.bus_id)
    if found is not None and error is None:
        error = crowding(bus_ids, found.version, os.environ)
    agree(host, b"", error, what)
    assert found is not None
    # Decimal digits, so that the message shows the version: 00023007 is 2.30.7.
    agree(host, bytes.fromhex(f"{found.version:08d}"), None, f"{what} (loaded version of NCCL)")
    host.broadcast(unique)
    host.traffic.clear()

    nccl = found.binding.nccl
    found.binding.xp.cuda.Device(found.device).use()
    try:
        handle = nccl.NcclCommunicator(host.size, unique.tobytes(), host.rank)
    except (nccl.NcclError, KeyError) as failure:
        raise CommError(
            f"NCCL could not connect rank {host.rank} of {host.size} on GPU {found.device} ({failure}); "
            "NCCL_DEBUG=WARN prints why"
        ) from failure
    return NCCLCommunicator(handle, host.rank, host.size, host, binding=found.binding)


def crowding(bus_ids: Sequence[str], version: int, environ: Mapping[str, str]) -> CommError | None:
    """Return what is wrong with the ranks of one node using GPUs of these PCI addresses, or None.

    Args:
        bus_ids: one address a rank; empty where a rank has found no GPU.
        version: NCCL's, as it writes it: 23007 is 2.30.7.
        environ: the process's environment.
    """
    used = [bus_id for bus_id in bus_ids if bus_id]
    if len(set(used)) == len(used):
        return None
    if version >= _SHARED_GPU_VERSION and environ.get(_SHARED_GPU_SWITCH) == "1":
        return None
    return CommError(
        f"one rank a GPU: {len(used)} ranks of this node have {len(set(used))} GPUs between them. Start fewer "
        f"ranks, or use device='cpu', or set {_SHARED_GPU_SWITCH}=1, which needs NCCL 2.30.3 or later (loaded: "
        f"{version // 10000}.{version // 100 % 100}.{version % 100})"
    )


def _find_device(local_rank: int) -> _Found:
    binding = Binding.load()
    runtime = binding.xp.cuda.runtime
    count = int(runtime.getDeviceCount())
    if count == 0:
        raise DependencyError("CuPy sees no CUDA device")
    device = local_rank % count
    bus_id = str(runtime.deviceGetPCIBusId(device))
    return _Found(binding, device, bus_id, int(binding.nccl.get_version()))
