"""What NCCL is called with, worked out once a kind of call: codes, counts in its units, offsets in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowshard import dtypes
from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_handle import NCCLHandle
from lowshard.settings import NCCL_REDUCE16

UINT8 = 1
"""ncclUint8."""
SUM = 0
"""ncclSum."""
_OPS = {"sum": SUM, "prod": 1, "max": 2, "min": 3, "avg": 4}  # ncclRedOp_t

# NCCL reduces these as the contract asks. It takes fp16 and bf16 too, but promises no float32 accumulator for them, so
# these go through the exchange of Communicator unless the environment says otherwise.
_NATIVE = frozenset(("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"))
_NATIVE16 = frozenset(("float16", "bfloat16"))


@dataclass(frozen=True)
class Wire:
    """How NCCL carries the elements of a dtype: in its own type for them, or as bytes.

    Attributes:
        code: ncclDataType_t.
        per_elem: what NCCL counts for an element: 1, or its bytes.
        item_bytes: bytes of an element.
    """

    code: int
    per_elem: int
    item_bytes: int


@cache
def wire_of(dtype: Any) -> Wire:
    """Return how NCCL carries elements of a NumPy dtype."""
    code, item_bytes = dtypes.get(dtype).nccl, int(dtype.itemsize)
    return Wire(UINT8, item_bytes, item_bytes) if code is None else Wire(code, 1, item_bytes)


@dataclass(frozen=True)
class Exchange:
    """An all_to_all_v as NCCL takes it: what remains are the addresses of the two buffers.

    Attributes:
        code: ncclDataType_t.
        messages: peer, NCCL's count sent, where it begins in bytes, count received, where that begins; other ranks
            with neither are left out.
        own: bytes that stay on this rank, where they begin in the one buffer, and where in the other.
    """

    code: int
    messages: tuple[tuple[int, int, int, int, int], ...]
    own: tuple[int, int, int]

    def is_in_place(self, source: int, target: int) -> bool:
        """Say whether buffers at these addresses may overlap: the own part stays where it is, the rest goes one way."""
        _, from_bytes, to_bytes = self.own
        sends, takes = any(row[1] for row in self.messages), any(row[3] for row in self.messages)
        return source + from_bytes == target + to_bytes and not (sends and takes)


def exchange_of(
    wire: Wire, rank: int, send_counts: Sequence[int], send_displs: Sequence[int], recv_counts: Sequence[int],
    recv_displs: Sequence[int],
) -> Exchange:  # fmt: skip
    """Return an exchange from counts and displacements in elements, as `all_to_all_v` takes them."""
    unit, width = wire.per_elem, wire.item_bytes
    spans = zip(send_counts, send_displs, recv_counts, recv_displs, strict=True)
    messages = tuple(
        (peer, sent * unit, sent_at * width, taken * unit, taken_at * width)
        for peer, (sent, sent_at, taken, taken_at) in enumerate(spans)
        if peer != rank and (sent or taken)
    )
    own = send_counts[rank] * width, send_displs[rank] * width, recv_displs[rank] * width
    return Exchange(wire.code, messages, own)


def exchange_parts(
    nccl: NCCLHandle, binding: Binding, exchange: Exchange, source: int, target: int, stream: int
) -> None:
    """Send and receive the parts of two buffers in one group; what stays on this rank is copied on the device."""
    code, call, send, recv = exchange.code, nccl.call, nccl.raw.send, nccl.raw.recv
    if exchange.messages:
        with nccl.group():
            for peer, sent, sent_at_bytes, taken, taken_at_bytes in exchange.messages:
                if sent:
                    call(send, source + sent_at_bytes, sent, code, peer, stream)
                if taken:
                    call(recv, target + taken_at_bytes, taken, code, peer, stream)
    own_bytes, from_bytes, to_bytes = exchange.own
    if own_bytes and target + to_bytes != source + from_bytes:
        binding.copy(target + to_bytes, source + from_bytes, own_bytes, stream)


def native_code(dtype: Any, op: str, order: str) -> int | None:
    """Return NCCL's number of a reduction, or None where it goes through the exchange and the fold.

    NCCL's average scales each operand before it adds them: one pass, where dividing the sum takes a second. Integers it
    would add in their own width, in which the sum may wrap, and truncate.
    """
    row = dtypes.get(dtype)
    native = row.name in _NATIVE or (row.name in _NATIVE16 and reduces_16_bits())
    if order != "fast" or not native or (op == "avg" and row.kind != "float"):
        return None
    return _OPS[op]


def reduces_16_bits() -> bool:
    """Return whether NCCL is to reduce fp16 and bf16 itself where order="fast", in the precision that it chooses."""
    return NCCL_REDUCE16.choice() == "nccl"
