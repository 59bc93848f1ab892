"""NCCL: the communicator over CuPy buffers, by the binding that CuPy brings.

Everything is put on CuPy's current stream and nothing here waits for the device, but for three rare
calls: `split`, `close`, and `barrier` where there is no control communicator.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm.protocol import Communicator
from lowshard.errors import BufferMismatchError, CommError, DependencyError

Array = Any

_UINT8 = 1  # ncclUint8
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}  # ncclRedOp_t
_INVALID_ARGUMENT = 4  # the one ncclResult_t error that leaves a communicator usable

# NCCL reduces these as the contract asks. It takes fp16 and bf16 too, but promises no float32
# accumulator for them, so these go through the exchange of Communicator.
_NATIVE = frozenset(("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"))


@dataclass(frozen=True)
class Binding:
    """What the communicator needs of CuPy: the one place to put another NCCL or another array module."""

    nccl: Any
    """The module `cupy.cuda.nccl`, or one with its names and signatures."""
    xp: ModuleType
    """The array module of the buffers."""
    stream: Callable[[], Any]
    """Returns the current stream, which has `.ptr` and `.synchronize()`."""
    pointer: Callable[[Array], int]
    """Returns the address of an array's first element."""
    device: Callable[[Array], int]
    """Returns the number of the device an array lies on."""
    synchronize: Callable[[], None]
    """Waits for all work on the current device."""

    @classmethod
    def load(cls) -> Binding:
        """Return CuPy's.

        Raises:
            DependencyError: CuPy is missing, or it finds no NCCL library.
        """
        try:
            import cupy

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a missing library is a warning there, an error here
                from cupy.cuda import nccl
        except ImportError as error:
            raise DependencyError(
                f"NCCL communicators need CuPy ({error}): pip install 'lowshard[cuda12]' or 'lowshard[cuda13]'"
            ) from error
        if not nccl.available:
            raise DependencyError(
                "CuPy finds no NCCL library: pip install 'lowshard[cuda12]' or 'lowshard[cuda13]' brings one"
            )
        return cls(
            nccl=nccl,
            xp=cupy,
            stream=cupy.cuda.get_current_stream,
            pointer=lambda array: int(array.data.ptr),
            device=lambda array: int(array.device.id),
            synchronize=cupy.cuda.runtime.deviceSynchronize,
        )


class NCCLCommunicator(Communicator):
    """A `cupy.cuda.nccl.NcclCommunicator` and, if there is one, a communicator of the host beside it."""

    def __init__(
        self,
        handle: Any,
        rank: int,
        size: int,
        host: Communicator | None = None,
        *,
        owned: bool = True,
        binding: Binding | None = None,
    ) -> None:
        """Wrap an NCCL communicator.

        Args:
            handle: the NCCL communicator.
            rank: this rank in it.
            size: its number of ranks.
            host: a communicator over the same ranks for checks on the host; `close` closes it.
            owned: whether `close` ends the NCCL communicator too.
            binding: by default CuPy's.

        Raises:
            CommError: rank and size are not those of the NCCL communicator.
            DependencyError: CuPy or NCCL is missing.
        """
        super().__init__(rank, size)
        self._binding = Binding.load() if binding is None else binding
        self._handle, self._host, self._owned = handle, host, owned
        has = (int(self._call(handle.rank_id)), int(self._call(handle.size)))
        if has != (rank, size):
            raise CommError(
                f"this NCCL communicator is rank {has[0]} of {has[1]}, but it was given as rank {rank} of {size}"
            )
        self._device = int(self._call(handle.device_id))
        if os.environ.get("NCCL_COMM_BLOCKING") == "0":
            warnings.warn(
                "NCCL_COMM_BLOCKING=0 makes NCCL answer before it is done, which CuPy's binding does not "
                "understand; unset it",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def transport(self) -> str:
        """The transport's name."""
        return "nccl"

    @property
    def xp(self) -> ModuleType:
        """The array module of the buffers: cupy."""
        return self._binding.xp

    @property
    def control(self) -> Communicator:
        """The communicator of the host; this one itself when there is none."""
        return self if self._host is None else self._host

    # ---- the way to NCCL

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        name = getattr(function, "__name__", "a call")
        try:
            return function(*args)
        except KeyError as error:
            # CuPy has no names for results 7 (in progress) and 8 (timeout) and trips over them.
            self._failed = True
            raise CommError(
                f"NCCL left {name} unfinished (result {error}); CuPy needs blocking communicators: unset "
                "NCCL_COMM_BLOCKING"
            ) from error
        except self._binding.nccl.NcclError as error:
            self._failed = self._failed or error.status != _INVALID_ARGUMENT
            raise CommError(f"NCCL failed in {name}: {error}") from error

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Start everything inside at once."""
        nccl = self._binding.nccl
        self._call(nccl.groupStart)
        try:
            yield
        except BaseException:
            # The group must end, or later calls would join it. It complains again of what is raised here.
            with suppress(nccl.NcclError, KeyError):
                nccl.groupEnd()
            raise
        self._call(nccl.groupEnd)

    def _stream(self) -> int:
        return int(self._binding.stream().ptr)

    def _put(self, part: Array, peer: int) -> None:
        if part.size:
            pointer, code = self._binding.pointer(part), _code(part)
            self._call(self._handle.send, pointer, part.size, code, peer, self._stream())

    def _take(self, part: Array, peer: int) -> None:
        if part.size:
            pointer, code = self._binding.pointer(part), _code(part)
            self._call(self._handle.recv, pointer, part.size, code, peer, self._stream())

    def _copy(self, target: Array, source: Array) -> None:
        if target.size and self._binding.pointer(target) != self._binding.pointer(source):
            self.xp.copyto(target, source)

    def _overlap(self, a: Array, b: Array) -> bool:
        at_a, at_b = self._binding.pointer(a), self._binding.pointer(b)
        return bool(a.nbytes and b.nbytes) and at_a < at_b + b.nbytes and at_b < at_a + a.nbytes

    def _flat(self, buf: Array, name: str, writes: bool = False) -> Array:
        flat = super()._flat(buf, name, writes)
        device = self._binding.device(flat)
        if device != self._device:
            raise BufferMismatchError(
                f"{name} lies on the communicator's device {self._device}, got an array on device {device}; "
                "copy it there first"
            )
        return flat

    # ---- moves

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        send, (recv, counts, displs) = _plain(send), _plain_v(recv, counts, displs)
        if len(set(counts)) == 1:
            self._all_gather_equal(send, recv, counts[0], displs)
            return
        with self._group():
            for root, (count, displ) in enumerate(zip(counts, displs, strict=True)):
                if count:
                    target = recv[displ : displ + count]
                    at = self._binding.pointer(target)
                    source = self._binding.pointer(send) if root == self.rank else at
                    self._call(self._handle.broadcast, source, at, count, _code(target), root, self._stream())

    def _all_gather_equal(self, send: Array, recv: Array, count: int, displs: Sequence[int]) -> None:
        if count == 0:
            return
        # Displacements are each rank's own affair. What goes over the wire must not depend on them.
        dense = all(displ == i * count for i, displ in enumerate(displs))
        whole = recv[: count * self.size] if dense else self.xp.empty(count * self.size, recv.dtype)
        at, source = self._binding.pointer(whole), self._binding.pointer(send)
        self._call(self._handle.allGather, source, at, count, _code(send), self._stream())
        if not dense:
            for i, displ in enumerate(displs):
                self._copy(recv[displ : displ + count], whole[i * count : (i + 1) * count])

    def _all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        send, send_counts, send_displs = _plain_v(send, send_counts, send_displs)
        recv, recv_counts, recv_displs = _plain_v(recv, recv_counts, recv_displs)
        if self._overlap(send, recv):
            send = send.copy()
        out = [send[d : d + n] for n, d in zip(send_counts, send_displs, strict=True)]
        into = [recv[d : d + n] for n, d in zip(recv_counts, recv_displs, strict=True)]
        with self._group():
            for peer in range(self.size):
                if peer != self.rank:
                    self._put(out[peer], peer)
                    self._take(into[peer], peer)
        self._copy(into[self.rank], out[self.rank])

    def _broadcast(self, buf: Array, root: int) -> None:
        buf = _plain(buf)
        if buf.size:
            at = self._binding.pointer(buf)
            self._call(self._handle.broadcast, at, at, buf.size, _code(buf), root, self._stream())

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        send = _plain(send)
        if recv is None:
            self._put(send, root)
            return
        parts = _plain(recv).reshape(self.size, send.size)
        with self._group():
            for peer in range(self.size):
                if peer != root:
                    self._take(parts[peer], peer)
        self._copy(parts[root], send)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        recv = _plain(recv)
        if send is None:
            self._take(recv, root)
            return
        parts = _plain(send).reshape(self.size, recv.size)
        with self._group():
            for peer in range(self.size):
                if peer != root:
                    self._put(parts[peer], peer)
        self._copy(recv, parts[root])

    def _send(self, buf: Array, dst: int) -> None:
        self._put(_plain(buf), dst)

    def _recv(self, buf: Array, src: int) -> None:
        self._take(_plain(buf), src)

    # ---- reductions

    def _native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        if send.size:
            in_place = self._binding.pointer(send) == self._binding.pointer(recv)
            if not in_place and self._overlap(send, recv):
                send = send.copy()
            source, at = self._binding.pointer(send), self._binding.pointer(recv)
            self._call(self._handle.allReduce, source, at, send.size, _code(send), _OPS[op], self._stream())
        return True

    def _native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        if recv.size:
            own = send[recv.size * self.rank : recv.size * (self.rank + 1)]
            in_place = self._binding.pointer(own) == self._binding.pointer(recv)
            if not in_place and self._overlap(send, recv):
                send = send.copy()
            source, at = self._binding.pointer(send), self._binding.pointer(recv)
            self._call(
                self._handle.reduceScatter, source, at, recv.size, _code(recv), _OPS[op], self._stream()
            )
        return True

    # ---- groups and life

    def _barrier(self) -> None:
        if self._host is not None:
            self._host.barrier()
            return
        one = self.xp.zeros(1, np.uint8)
        at = self._binding.pointer(one)
        self._call(self._handle.allReduce, at, at, 1, _UINT8, _OPS["sum"], self._stream())
        self._binding.stream().synchronize()

    def _split(self, color: int | None, key: int) -> Communicator | None:
        # A split may deadlock with work of the same communicator that is still under way.
        self._binding.synchronize()
        handle = self._call(self._handle.commSplit, _NO_COLOR if color is None else color, key)
        host = None if self._host is None else self._host.split(color, key)
        if handle is None:
            return None
        rank, size = int(handle.rank_id()), int(handle.size())
        return NCCLCommunicator(handle, rank, size, host, binding=self._binding)

    def _close(self) -> None:
        if self._owned:
            if not self._failed:
                with suppress(CommError):  # it sets _failed, which is all that matters here
                    self._call(self._handle.check_async_error)
            # After a failure destroy can wait for ever for a peer that is gone.
            (self._handle.abort if self._failed else self._handle.destroy)()
        if self._host is not None:
            self._host._failed = self._host._failed or self._failed
            self._host.close()


def _plain(buf: Array) -> Array:
    """Return a flat buffer in a type that NCCL has: itself, or its bytes."""
    return buf if dtypes.get(buf.dtype).nccl is not None else buf.view(np.uint8)


def _plain_v(
    buf: Array, counts: Sequence[int], displs: Sequence[int]
) -> tuple[Array, Sequence[int], Sequence[int]]:
    """As `_plain`, with counts and displacements in the elements of what it returns."""
    if dtypes.get(buf.dtype).nccl is not None:
        return buf, counts, displs
    width = buf.dtype.itemsize
    return buf.view(np.uint8), [n * width for n in counts], [d * width for d in displs]


def _code(buf: Array) -> int:
    code = dtypes.get(buf.dtype).nccl
    assert code is not None, "buffers go through _plain first"
    return code
