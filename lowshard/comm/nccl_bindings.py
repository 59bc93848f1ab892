"""The bindings that GPU communicators stand on: CuPy's arrays and streams, and NCCL by CuPy or by nccl4py.

`LOWSHARD_NCCL=cupy` (the default) or `nccl4py` chooses who calls NCCL; the arrays are CuPy's either way.
Both call the one NCCL library that the process has loaded, so either can drive a communicator that the
other has made. Checked against the real packages without a GPU (names, arguments, and that NCCL refuses a
null communicator by its own words).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from lowshard.comm.nccl_memory import NCCLMemory
from lowshard.errors import CommError, DependencyError
from lowshard.gpu_stream import on_stream
from lowshard.settings import NCCL

Array = Any

_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR
_DONE, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_CAPTURE_FORBIDS = range(900, 909)
"""cudaErrorStreamCapture...: a capture, on this stream or another, forbids to ask."""
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NEEDS_CUPY = "pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'"
_NEEDS_NCCL4PY = "pip install 'lowshard[cuda12-nccl4py]' or 'lowshard[cuda13-nccl4py]'"


@dataclass(frozen=True)
class Binding:
    """What the communicators need of CuPy and NCCL: the one place to put others."""

    nccl: Any
    """The module `cupy.cuda.nccl`, or one with its names and signatures; None where nothing asks for NCCL."""
    xp: ModuleType
    """The array module of the buffers."""
    stream: Callable[..., Any]
    """Returns this thread's current stream of a device, by default of the current one: `.ptr`, `.wait_event(event)`;
    `with stream:` makes it current."""
    on_stream: Callable[[Any, int], AbstractContextManager[Any]]
    """Makes a context in which a stream that a caller names is the current one of a device; see `gpu_stream`."""
    new_stream: Callable[[], Any]
    """Makes a stream that is not ordered with the default one. `.done` raises CommError for a CUDA error."""
    new_event: Callable[[], Any]
    """Makes an event: `.record(stream)`, `.done`, which raises CommError for a CUDA error."""
    check: Callable[[Any], None]
    """Raises CommError for a CUDA error that has come to a stream; does not wait."""
    capturing: Callable[[Any], bool]
    """Says whether a CUDA graph records a stream."""
    keep_memory: Callable[[list[Any]], AbstractContextManager[Any]]
    """Makes a context that adds to a list the memory of every array made in it, so that it is not used for others."""
    cuda_error: type[Exception]
    """What CuPy raises where CUDA refuses a call."""
    pointer: Callable[[Array], int]
    """Returns the address of an array's first element."""
    device: Callable[[Array], int]
    """Returns the number of the device an array lies on."""
    current: Callable[[], int]
    """Returns the number of the calling thread's current device."""
    select: Callable[[int], None]
    """Makes a device the calling thread's current one."""
    synchronize: Callable[[], None]
    """Waits for all work on the current device."""
    lock: Callable[[np.ndarray], Callable[[], None]]
    """Page-locks the memory of an array, so that the device copies it by itself; returns what undoes that."""
    fetch: Callable[[int, int, int, int], None]
    """Queues a copy to the host: (host address, device address, bytes, stream)."""
    store: Callable[[int, int, int, int], None]
    """Queues a copy to the device: (device address, host address, bytes, stream)."""
    copy: Callable[[int, int, int, int], None]
    """Queues a copy on the device: (address written, address read, bytes, stream)."""

    def of_device(self, device: int) -> Binding:
        """Return this binding with the streams of one device, whichever device a thread has made current."""
        return replace(self, stream=partial(self.stream, device_id=device))

    def on_device(self, device: int) -> OnDevice:
        """Return a context in which a device is the current one: kernels, events and new streams are that device's."""
        return OnDevice(self, device)

    @classmethod
    def load(cls, handle: Any = None, *, with_nccl: bool = True) -> Binding:
        """Return the installed libraries' binding.

        Args:
            handle: an NCCL communicator that will be used; one of nccl4py's needs nccl4py.
            with_nccl: whether NCCL must be there.

        Raises:
            CommError: LOWSHARD_NCCL is neither "cupy" nor "nccl4py".
            DependencyError: CuPy, NCCL or (where it is asked for) nccl4py is missing.
        """
        chosen = NCCL.choice()
        if type(handle).__module__.partition(".")[0] == "nccl":
            chosen = "nccl4py"
        cupy = _load_cupy()
        nccl: Any = None
        if with_nccl:
            nccl = NCCL4Py() if chosen == "nccl4py" else _load_cupys_nccl()
        runtime, (new_stream, new_event, check) = cupy.cuda.runtime, _makers(cupy)
        return cls(
            nccl=nccl,
            xp=cupy,
            stream=cupy.cuda.get_current_stream,
            on_stream=on_stream,
            new_stream=new_stream,
            new_event=new_event,
            check=check,
            capturing=lambda stream: bool(runtime.streamIsCapturing(stream.ptr)),
            keep_memory=lambda kept: _keep_memory(cupy, kept),
            cuda_error=runtime.CUDARuntimeError,
            pointer=lambda array: int(array.data.ptr),
            device=lambda array: int(array.device.id),
            current=runtime.getDevice,
            select=runtime.setDevice,
            synchronize=runtime.deviceSynchronize,
            lock=lambda array: _lock(runtime, array),
            fetch=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _TO_HOST, stream),
            store=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _TO_DEVICE, stream),
            copy=lambda to, at, n, stream: runtime.memcpyAsync(to, at, n, _ON_DEVICE, stream),
        )


class OnDevice:
    """Makes a device the thread's current one, and puts the one before back."""

    __slots__ = ("_before", "_binding", "_device")

    def __init__(self, binding: Binding, device: int) -> None:
        self._binding, self._device, self._before = binding, device, device

    def __enter__(self) -> None:
        self._before = self._binding.current()
        if self._before != self._device:
            self._binding.select(self._device)

    def __exit__(self, *exc: object) -> None:
        if self._before != self._device:
            self._binding.select(self._before)


def _load_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DependencyError(f"GPU communicators need CuPy ({error}): {_NEEDS_CUPY}") from error
    return cupy


def _makers(cupy: Any) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    """Return what makes streams and events whose `done` tells an error from "not yet", and what checks any stream.

    CuPy's own `done` is False for both, since `eventQuery` and `streamQuery` return their status and raise nothing.
    """
    runtime = cupy.cuda.runtime

    def ended(status: int) -> bool:
        if status in (_DONE, _NOT_READY) or status in _CAPTURE_FORBIDS:
            return status == _DONE
        error = runtime.CUDARuntimeError(status)
        raise CommError(
            f"the GPU reports {error}; no CUDA call of this process can succeed any more, so end it, and run it with "
            "CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to see which kernel it was"
        ) from error

    class Stream(cupy.cuda.Stream):  # type: ignore[misc]
        @property
        def done(self) -> bool:
            return ended(runtime.streamQuery(self.ptr))

    class Event(cupy.cuda.Event):  # type: ignore[misc]
        @property
        def done(self) -> bool:
            return ended(runtime.eventQuery(self.ptr))

    def check(stream: Any) -> None:
        ended(runtime.streamQuery(stream.ptr))

    return lambda: Stream(non_blocking=True), lambda: Event(disable_timing=True), check


def _keep_memory(cupy: Any, kept: list[Any]) -> AbstractContextManager[Any]:
    allocate = cupy.cuda.get_allocator()

    def allocate_and_keep(n_bytes: int) -> Any:
        kept.append(allocate(n_bytes))
        return kept[-1]

    return cupy.cuda.using_allocator(allocate_and_keep)  # type: ignore[no-any-return]


def _lock(runtime: Any, array: np.ndarray) -> Callable[[], None]:
    at = int(array.ctypes.data)
    try:
        runtime.hostRegister(at, array.nbytes, 0)
    except RuntimeError:  # CUDA's; without the lock the driver copies by way of its own buffers
        return lambda: None
    return lambda: runtime.hostUnregister(at)


def _load_cupys_nccl() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing library is a warning there, an error here
            from cupy.cuda import nccl
    except ImportError as error:
        raise DependencyError(f"NCCL communicators need CuPy ({error}): {_NEEDS_CUPY}") from error
    if not nccl.available:
        raise DependencyError(f"CuPy finds no NCCL library: {_NEEDS_CUPY} brings one")
    return nccl


class NCCL4Py:
    """nccl4py under the names and signatures of the module `cupy.cuda.nccl`."""

    available = True

    def __init__(self) -> None:
        """Load nccl4py.

        Raises:
            DependencyError: it is missing, or what it needs is (cuda-bindings, or an NCCL library).
        """
        try:
            from nccl import core
            from nccl.bindings import nccl as low
        except ImportError as error:
            raise DependencyError(f"{NCCL.name}=nccl4py needs nccl4py ({error}): {_NEEDS_NCCL4PY}") from error
        self.core, self.low = core, low
        self.NcclError = low.NCCLError
        try:
            self.get_version()
        except Exception as error:  # its loader's own classes, of which it exports none
            raise DependencyError(
                f"nccl4py finds no NCCL library ({error}): {_NEEDS_CUPY} brings one"
            ) from error

    def get_version(self) -> int:
        """Return the loaded NCCL's version: 23007 is 2.30.7."""
        return int(self.low.get_version())

    def get_unique_id(self) -> bytes:
        """Return 128 bytes that all ranks of a new communicator are given."""
        return bytes(self.core.get_unique_id())

    def groupStart(self) -> None:
        """Collect the calls of this thread."""
        self.low.group_start()

    def groupEnd(self) -> None:
        """Start what was collected."""
        self.low.group_end()

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> NCCL4PyHandle:
        """Connect this rank; all ranks of the communicator call this."""
        unique_id = self.core.UniqueId.from_bytes(commId)
        return NCCL4PyHandle(self, self.core.Communicator.init(ndev, rank, unique_id))

    def adopt(self, handle: Any) -> NCCL4PyHandle:
        """Return a handle on a communicator that nccl4py, CuPy or somebody else has made.

        Args:
            handle: nccl4py's Communicator, CuPy's NcclCommunicator, or the address of an ncclComm_t.
        """
        if isinstance(handle, NCCL4PyHandle):
            return handle
        if isinstance(handle, self.core.Communicator):
            return NCCL4PyHandle(self, handle)
        pointer = int(handle if isinstance(handle, int) else handle.comm)
        return NCCL4PyHandle(self, self.core.Communicator(pointer), keeps=handle)


class NCCL4PyHandle:
    """nccl4py's Communicator under the names and signatures of `cupy.cuda.nccl.NcclCommunicator`.

    Transfers go to the package's lower layer, which takes addresses as they are; the upper one would ask
    an array for its address, its dtype and its device on every call.
    """

    def __init__(self, nccl: NCCL4Py, communicator: Any, keeps: Any = None) -> None:
        self.communicator = communicator
        """nccl4py's own object, for what it can do beyond CuPy's."""
        self._nccl, self._low = nccl, nccl.low
        self._at = self._low.Comm(communicator.ptr)
        self._keeps = keeps  # CuPy's object would end the communicator when it goes

    @property
    def comm(self) -> int:
        """Address of the ncclComm_t."""
        return int(self.communicator.ptr)

    def rank_id(self) -> int:
        """Return this rank."""
        return int(self._low.comm_user_rank(self._at))

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._low.comm_count(self._at))

    def device_id(self) -> int:
        """Return the number of the communicator's device."""
        return int(self._low.comm_cu_device(self._at))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """As CuPy's."""
        self._low.all_reduce(sendbuf, recvbuf, count, datatype, op, self._at, stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        """As CuPy's."""
        self._low.reduce_scatter(sendbuf, recvbuf, recvcount, datatype, op, self._at, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """As CuPy's."""
        self._low.all_gather(sendbuf, recvbuf, count, datatype, self._at, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        """As CuPy's."""
        self._low.broadcast(sendbuff, recvbuff, count, datatype, root, self._at, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """As CuPy's."""
        self._low.send(sendbuf, count, datatype, peer, self._at, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """As CuPy's."""
        self._low.recv(recvbuf, count, datatype, peer, self._at, stream)

    def commSplit(self, color: int, key: int) -> NCCL4PyHandle | None:
        """As CuPy's; colour -1 takes no part and gets None."""
        part = self.communicator.split(None if color == _NO_COLOR else color, key)
        return NCCL4PyHandle(self._nccl, part) if part.ptr else None

    def memory(self, cupy: Any) -> NCCLMemory:
        """Return what allocates memory that this communicator knows."""
        return NCCLMemory(self._low, self._at, cupy)

    def check_async_error(self) -> None:
        """Raise what has gone wrong since the last call, if anything."""
        self._low.check_status(self._low.comm_get_async_error(self._at))

    def abort(self) -> None:
        """End the communicator and what it is still doing."""
        self._at = self._low.Comm(0)
        self.communicator.abort()

    def destroy(self) -> None:
        """End the communicator."""
        self._at = self._low.Comm(0)
        self.communicator.destroy()
