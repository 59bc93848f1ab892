"""What a communicator demands of buffers, counts, ops, and where its buffers lie: every transport refuses alike."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from math import prod
from operator import index
from types import ModuleType
from typing import Any

import numpy as np
from numpy import ndarray

from lowshard import dtypes
from lowshard.argument import MOST_DIMS, brief, kind_of, number, real, wholes
from lowshard.errors import BufferMismatchError, CommError, DTypeError, LowshardError
from lowshard.foreign_array import READ_ONLY, base_view, require_native, view_in_call
from lowshard.gpu_stream import Stream
from lowshard.kernels.buffer import address
from lowshard.nearest import nearest
from lowshard.settings import MOST_S

Array = Any

OPS = ("sum", "avg", "min", "max", "prod")
ORDERS = ("fast", "tree", "rank")
NAMES = (str, str)
"""The types of an op and an order that are given by name."""
RANKS = (int, int)
"""The types of two ranks."""


def deadline_s(timeout_s: object) -> float:
    """Return the deadline of every wait of a communicator in seconds, or raise CommError."""
    return min(real(timeout_s, "timeout_s is a positive number of seconds", CommError), MOST_S)


def wait_s(timeout_s: object) -> float | None:
    """Return for how many seconds to wait for a work, or raise CommError."""
    if timeout_s is None:
        return None
    rule = "timeout_s is a number of seconds, 0 or more, or None"
    return min(number(timeout_s, rule, CommError, 0), MOST_S)


def is_plain(dtype: Any) -> bool:
    """Say whether a dtype is one of NumPy's own that need no look into the table: they are all in it."""
    return dtype.kind in "fiub" and dtype.itemsize <= 8


def flat(buf: Array, name: str, xp: ModuleType, transport: str, writes: bool) -> Array:
    """Return a buffer as a flat view, or raise what is wrong with it."""
    if not isinstance(buf, xp.ndarray):
        buf = view_in_call(buf, name)
    elif xp is np and type(buf) is not np.ndarray:
        buf = base_view(buf, name)
    if not isinstance(buf, xp.ndarray):
        place = "in host memory" if xp is np else "on a GPU"
        raise BufferMismatchError(
            f"{name} of a communicator over {transport} is a {xp.__name__} array, or one of another library {place}, "
            f"got {kind_of(buf)}{_array_instead(buf, name, xp, writes)}"
        )
    if not is_plain(buf.dtype):
        dtypes.get(buf.dtype)
    if not buf.dtype.isnative:  # same name in the table, but other bytes than the peers'
        require_native(buf, name)
    if not buf.flags.c_contiguous:
        raise BufferMismatchError(
            f"{name} is C-contiguous, got strides {buf.strides} for shape {buf.shape}; pass "
            f"{xp.__name__}.ascontiguousarray({name}), or {name}.contiguous() of torch, and copy a result back"
        )
    if writes and xp is np and not buf.flags.writeable:
        raise BufferMismatchError(f"{name} {READ_ONLY}")
    return buf.reshape(-1)


def _array_instead(given: object, name: str, xp: ModuleType, writes: bool) -> str:
    """Return what to pass in place of a number or of a list, as the end of a message."""
    if isinstance(given, (list, tuple)) and any(isinstance(item, xp.ndarray) for item in given):
        return "; pass the array alone: its dtype and its elements are what is moved"
    if isinstance(given, (list, tuple, int, float, complex, np.generic)):
        return (
            f"; make {xp.__name__}.array({name}) before the call and pass that"
            + ": it has the result" * writes
        )
    return ""


def extents(shape: object, itemsize: int) -> tuple[int, ...]:
    """Return a shape, or one extent, as a tuple, or raise BufferMismatchError."""
    rule = f"a shape is an extent or a sequence of up to {MOST_DIMS} extents, 0 or more, of an array below 2^63 bytes"
    is_extent = hasattr(shape, "__index__") and getattr(shape, "ndim", 0) == 0
    found = wholes((shape,) if is_extent else shape, rule, BufferMismatchError, 0)
    if len(found) > MOST_DIMS or prod(filter(None, found)) * itemsize > sys.maxsize:
        raise BufferMismatchError(f"{rule}, got {brief(shape)}")
    return found


def apart(send: Array, recv: Array, own: Array | None = None) -> Array:
    """Return what is sent, in host memory; copied where it overlaps what is received."""
    if not np.may_share_memory(send, recv):
        return send
    shorter = send if send.size <= recv.size else recv
    if own is not None and own.size == shorter.size and own.ctypes.data == shorter.ctypes.data:
        return send
    return send.copy()


def sent_apart(
    batch: Sequence[tuple[Any, Array, int]], address: Callable[[Array], int] = address
) -> list[tuple[Any, Array, int]]:
    """Return messages that go together (call, buffer, peer); what is sent is copied where one is received over it."""
    spans = [(at := address(buf), at + buf.nbytes) for _, buf, _ in batch]
    received = sorted(
        span for (call, buf, _), span in zip(batch, spans, strict=True) if call.name == "recv" and buf.nbytes
    )
    begins = [begin for begin, _ in received]
    ends = list(accumulate((end for _, end in received), max))  # the furthest of it and those before it

    def apart(call: Any, buf: Array, begin: int, end: int) -> Array:
        before = bisect_left(begins, end)
        is_hit = call.name == "send" and before > 0 and ends[before - 1] > begin
        return buf.copy() if is_hit else buf

    return [
        (call, apart(call, buf, *span), peer) for (call, buf, peer), span in zip(batch, spans, strict=True)
    ]


def same_dtype(send: Array, recv: Array) -> None:
    """Raise BufferMismatchError unless both buffers have one dtype."""
    if send.dtype != recv.dtype:
        raise BufferMismatchError(f"send and recv have one dtype, got {send.dtype} and {recv.dtype}")


def need(ok: bool, call: str, rule: str, expected: object, got: object) -> None:
    """Raise BufferMismatchError with the rule unless ok."""
    if not ok:
        raise BufferMismatchError(f"{call}: {rule}: expected {expected}, got {got}")


def spans(
    name: str, size: int, buf: Array, counts: Sequence[int], displs: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return counts and displacements as lists; where a count is 0 the displacement becomes 0."""
    try:
        c, d = list(map(index, counts)), list(map(index, displs))
    except TypeError:
        raise BufferMismatchError(
            f"{name}_counts and {name}_displs are sequences of integers, got {brief(counts)} and {brief(displs)}"
        ) from None
    if len(c) != size or len(d) != size:
        raise BufferMismatchError(
            f"{name}_counts and {name}_displs have one entry a rank ({size}), got {len(c)} and {len(d)}"
        )
    for peer, (count, displ) in enumerate(zip(c, d, strict=True)):
        if count < 0 or displ < 0 or (count and displ + count > buf.size):
            raise BufferMismatchError(
                f"{name}_counts[{peer}]={count} at {name}_displs[{peer}]={displ} leaves a buffer of "
                f"{buf.size} elements"
            )
    return c, [x if n else 0 for n, x in zip(c, d, strict=True)]


def apart_in_recv(counts: Sequence[int], displs: Sequence[int]) -> None:
    """Raise BufferMismatchError where two ranks' parts of what is received overlap: one would be written over."""
    parts = sorted(
        (displ, count, rank) for rank, (count, displ) in enumerate(zip(counts, displs, strict=True)) if count
    )
    for (at, count, rank), (next_at, _, other) in pairwise(parts):
        if at + count > next_at:
            raise BufferMismatchError(
                f"parts of recv do not overlap, got recv_counts[{rank}]={count} at recv_displs[{rank}]={at}, and "
                f"recv_displs[{other}]={next_at}"
            )


def rank(given: object) -> int:
    """Return a rank as an int; what is not an integer as text, which the check of ranks refuses."""
    if type(given) is int:
        return given
    try:
        if isinstance(given, (bool, np.bool_)):  # True is equal to 1, and a call of that may be known
            raise TypeError
        return index(given)  # type: ignore[arg-type]  # what is not an integer raises
    except TypeError:
        return brief(given)  # type: ignore[return-value]  # refused where a call is made


def names(op: object, order: object) -> tuple[str, str]:
    """Return op and order as text: mpi4py's SUM, MAX, MIN and PROD by their names, what is neither as it reads."""
    return _text_of(op), _text_of(order)


def _text_of(given: object) -> str:
    if isinstance(given, str):
        return str(given)
    mpi = sys.modules.get("mpi4py.MPI")  # who passes one of its ops has imported it
    if mpi is not None and isinstance(given, mpi.Op):
        name = given.__reduce__() if given.is_predefined else "Op"
        return {"SUM": "sum", "MAX": "max", "MIN": "min", "PROD": "prod"}.get(name, f"MPI.{name}")
    return brief(given)


def reducible(buf: Array, op: str, order: str) -> None:
    """Raise unless op and order exist and make sense for the buffer's dtype."""
    if op not in OPS:
        raise CommError(f"op is one of {', '.join(OPS)}, got {op!r}{nearest(op, OPS)}")
    if order not in ORDERS:
        raise CommError(f"order is one of {', '.join(ORDERS)}, got {order!r}{nearest(order, ORDERS)}")
    if (buf.dtype.kind == "b" and op == "avg") or not (
        is_plain(buf.dtype) or dtypes.get(buf.dtype).kind != "scale"
    ):
        raise DTypeError(f"{op} is not defined for dtype {dtypes.get(buf.dtype).name}")


NOTHING_WRONG: AbstractContextManager[LowshardError | None] = nullcontext()
"""What a block gets whose stream is right, or where there are none."""


class HostBuffers:
    """Buffers in host memory: NumPy arrays, and no streams."""

    def __init__(self, transport: str) -> None:
        """Name the transport, for errors."""
        self.transport = transport

    @property
    def xp(self) -> ModuleType:
        """The array module of the buffers: numpy or cupy."""
        return np

    def holds(self, *buffers: Array | None) -> bool:
        """Say whether all of some buffers are arrays of `xp` itself, or None."""
        return all(buf is None or type(buf) is np.ndarray for buf in buffers)

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """Return an array, not filled; see `Communicator.empty`."""
        kind = dtypes.get(dtype).in_memory(self.xp)
        return self.xp.empty(extents(shape, kind.itemsize), kind)

    def flat(self, buf: Array, name: str, writes: bool = False) -> Array:
        """Return a buffer with one dim, or raise what is wrong with it."""
        return flat(buf, name, self.xp, self.transport, writes)

    def ready(self, buf: Array, writes: bool = False) -> bool:
        """Say whether a buffer passes as it is; where it does not, `flat` says what is wrong, if anything is."""
        if type(buf) is not ndarray:
            return False
        flags = buf.flags
        return flags.carray or (flags.c_contiguous and (flags.writeable or not writes))

    def to_host(self, array: Array) -> np.ndarray:
        """Return an array that ranks have exchanged facts in, where this process can read it."""
        return array if isinstance(array, np.ndarray) else array.get()

    def current(self, stream: Stream, grouped: bool) -> AbstractContextManager[LowshardError | None]:
        """Make the device of the buffers and, unless it is None, a stream current for a block.

        The block gets what is wrong with the stream, for the caller to let all ranks raise; here there are none.
        """
        if stream is None:
            return NOTHING_WRONG
        text = (
            f"stream= is for communicators over GPU arrays, but this one ({self.transport}) moves host memory"
        )
        return nullcontext(CommError(f"{text}; leave it out"))

    def meeting(
        self, what: str, stream: Stream, grouped: bool
    ) -> AbstractContextManager[LowshardError | None]:
        """As `current`, for a call in which hosts meet, so that no CUDA graph records it."""
        return self.current(stream, grouped)

    def refuse_capture(self, what: str) -> None:
        """Raise CaptureError where a CUDA graph records the current stream."""
