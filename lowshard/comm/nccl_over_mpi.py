"""GPUs over MPI: which rank takes which GPU, and whether NCCL or host memory carries the arrays."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lowshard import settings
from lowshard.comm.agreement import collective_step, share_text
from lowshard.comm.communicator import Communicator
from lowshard.comm.messages import Mailbox
from lowshard.comm.mpi import MPITransport, load_mpi
from lowshard.comm.nccl import NCCLTransport
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_wait import InThread, last_error, wait_for
from lowshard.comm.staged import staged_communicator
from lowshard.comm.wait_guard import Watching
from lowshard.content_hash import text_digest
from lowshard.errors import CommError, DependencyError

Transport = Literal["auto", "nccl", "staged"]
TRANSPORTS = ("auto", "nccl", "staged")

# From this release on several ranks may share a GPU, if the environment says so.
_SHARED_GPU_VERSION = 23003
_SHARED_GPU_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
_CONNECT_LATE = "NCCL_RUNTIME_CONNECT"


def why_unusable() -> str | None:
    """Return what keeps this process from using NCCL, or None when nothing does."""
    try:
        count = int(Binding.load().xp.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError) as error:  # CuPy raises RuntimeErrors for a missing driver or GPU
        return f"{type(error).__name__}: {error}"
    return None if count else "CuPy sees no CUDA device"


def usable_on_all(host: Communicator) -> bool:
    """Return whether every rank can import CuPy, sees a GPU and has an NCCL library.

    Collective: all ranks of the communicator call this.
    """
    return bool(host._transport.gather_facts(np.array([why_unusable() is None], np.uint8)).all())


@dataclass(frozen=True)
class _Found:
    binding: Binding
    device: int
    identity: str
    """The GPU's PCI address, or the name of the part of one (MIG) that this process sees."""
    version: int
    """NCCL's; 0 where it was not asked for or is not there."""
    without: str
    """Why there is no NCCL."""


def build_over_mpi(host: Communicator, mpi_comm: Any = None, transport: Transport = "auto") -> Communicator:
    """Return a communicator over GPU arrays for the ranks of `host`, which becomes its control communicator.

    Collective: all ranks of the communicator call this. A rank takes the GPU whose number is its rank
    on the node, modulo the number of GPUs that it sees, and makes it CuPy's current device. All ranks are connected
    to each other before this returns (`NCCLHandle.connect`); NCCL_RUNTIME_CONNECT is set to 0 where it is not set.
    """
    what = "a communicator over GPU arrays"
    if transport not in TRANSPORTS:
        raise CommError(f"transport is {', '.join(map(repr, TRANSPORTS))}, got {transport!r}")
    mailbox: Mailbox = host._transport.mailbox  # type: ignore[attr-defined]
    mpi_comm = mailbox.mpi_comm if mpi_comm is None else mpi_comm
    watch = mailbox.lookout.watch
    found: _Found | None = None
    error: Exception | None = None
    node_comm = mpi_comm.Split_type(load_mpi().COMM_TYPE_SHARED)
    with Communicator(MPITransport(node_comm, owned=True, timeout_s=host.timeout_s)) as node:
        try:
            found = _find_device(node.rank, with_nccl=transport != "staged")
        except (ImportError, RuntimeError) as caught:
            error = DependencyError(f"every rank needs CuPy and a GPU: {caught}")
        gpus = share_text(node, "" if found is None else found.identity)
    obstacle: CommError | DependencyError | None = None
    if found is not None and transport != "staged":
        missing = DependencyError(found.without) if found.without else None
        obstacle = missing or crowding(gpus, found.version, settings.environment())
    with collective_step(host, what, transport.encode()) as step:
        step.error = error or (obstacle if transport == "nccl" else None)
    assert found is not None
    found.binding.select(found.device)
    obstacles = [text for text in share_text(host, str(obstacle or "")) if text]
    if transport == "staged" or obstacles:
        if transport == "auto" and host.rank == 0:
            warnings.warn(
                f"GPU arrays go through host memory, which is slower than NCCL: {obstacles[0]}. "
                "transport='staged' asks for that without this warning",
                RuntimeWarning,
                stacklevel=3,
            )
        made = staged_communicator(host, found.binding, device=found.device, watch=watch)
        made._transport.why = "transport='staged' says so" if transport == "staged" else obstacles[0]
        return made
    reduce16 = settings.NCCL_REDUCE16
    loaded = f"{reduce16.name}={reduce16.text()}, NCCL {found.version}"
    with collective_step(host, what, text_digest(loaded), lambda: loaded):
        pass
    return _connect(host, mpi_comm, found, watch)


def _connect(host: Communicator, mpi_comm: Any, found: _Found, watch: Watching | None) -> Communicator:
    nccl = found.binding.nccl
    unique = np.zeros(128, np.uint8)
    with collective_step(host, "NCCL's unique id"):
        if host.rank == 0:
            try:
                unique[:] = np.frombuffer(nccl.get_unique_id(), np.uint8)
            except (nccl.NcclError, KeyError) as caught:
                raise CommError(f"NCCL makes no unique id ({caught}); NCCL_DEBUG=WARN prints why") from caught
    host._transport.broadcast(unique, 0)

    def connect() -> Any:
        found.binding.select(found.device)  # a new thread begins on device 0
        return nccl.NcclCommunicator(host.size, unique.tobytes(), host.rank)

    # Else NCCL connects each of its algorithms in the first call that takes it, which no deadline ends. NCCL reads it
    # once a process, and again in those that this one starts.
    if _CONNECT_LATE not in settings.environment():
        settings.change(_CONNECT_LATE, "0")
    # A connection that waits for a rank cannot be given up, so all ranks meet before it.
    barrier_within(mpi_comm, host.timeout_s, watch, "the barrier before NCCL connects")
    thread = InThread(connect, "lowshard NCCL connect")
    deadline = time.monotonic() + host.timeout_s
    wait_for(thread, deadline, watch, None, f"NCCL connecting rank {host.rank} of {host.size}")
    try:
        handle = thread.result()
    except (nccl.NcclError, KeyError) as failure:
        said = last_error()
        raise CommError(
            f"NCCL could not connect rank {host.rank} of {host.size} on GPU {found.device} ({failure}"
            f"{f'; {said}' if said else ''}); NCCL_DEBUG=WARN prints why"
        ) from failure
    made = NCCLTransport(handle, host.rank, host.size, host._transport, binding=found.binding, watch=watch)
    made.connect()
    return Communicator(made, host)


class _Request:
    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def done(self) -> bool:
        return bool(self._request.Test())


def barrier_within(
    mpi_comm: Any, timeout_s: float, watch: Watching | None = None, what: str = "a barrier"
) -> None:
    """Return once every rank has come.

    Collective: all ranks of the mpi4py communicator call this.
    """
    wait_for(_Request(mpi_comm.Ibarrier()), time.monotonic() + timeout_s, watch, None, what)


def crowding(gpus: Sequence[str], version: int, environ: Mapping[str, str]) -> CommError | None:
    """Return what is wrong with NCCL for the ranks of one node on these GPUs, or None."""
    used = [gpu for gpu in gpus if gpu]
    if len(set(used)) == len(used):
        return None
    if version >= _SHARED_GPU_VERSION and environ.get(_SHARED_GPU_SWITCH) == "1":
        return None
    return CommError(
        f"NCCL takes one rank a GPU, and {len(used)} ranks of this node have {len(set(used))} GPUs between them. "
        f"Start fewer ranks, or use device='cpu', or set {_SHARED_GPU_SWITCH}=1 with NCCL_MAX_CTAS=2 and "
        "NCCL_NVLS_ENABLE=0, which needs NCCL 2.30.3 or later (loaded: "
        f"{version // 10000}.{version // 100 % 100}.{version % 100})"
    )


def _find_device(local_rank: int, with_nccl: bool) -> _Found:
    binding, version, without = Binding.load(with_nccl=False), 0, ""
    if with_nccl:
        try:
            binding = Binding.load()
            version = int(binding.nccl.get_version())
        except DependencyError as error:
            without = str(error)
    runtime = binding.xp.cuda.runtime
    count = int(runtime.getDeviceCount())
    if count == 0:
        raise DependencyError("CuPy sees no CUDA device")
    device = local_rank % count
    # CuPy cuts the UUID at a zero byte, and a slice of a GPU has the whole one's address; its process sees no other.
    shown = settings.environment().get("CUDA_VISIBLE_DEVICES", "")
    identity = shown if shown.startswith("MIG-") else runtime.deviceGetPCIBusId(device)
    return _Found(binding, device, identity, version, without)
