"""The items that a mover moves: each a box that one rank sends to another, or copies locally."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.box import Box, shape_of
from lowshard.transfer.spans import Span, span_of

Array = Any
Format = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array that is sent."""


@dataclass(eq=False, slots=True)
class Item:
    """One box that one rank sends to another or itself, as one of the two sees it."""

    number: int  # equal on both sides
    name: str
    src_box: Box  # in the sender's array
    dst_box: Box  # in the receiver's array
    dtype: str
    source: Array = None  # the sender's array; None on the other side
    target: Array = None  # the receiver's array; None on the other side, or if a transform stores it
    src_name: str = ""
    dst_name: str = ""
    makes: bool = False  # whether this rank's transform converts it before it is sent
    stores: bool = False  # whether this rank's transform stores it
    is_cast: bool = False  # whether this rank casts it before it is sent
    is_plain: bool = False  # whether the transform sends the box unconverted
    is_forwarded: bool = False  # whether the sender received it in this run
    turn: int = 0  # items of a later turn are sent when those of earlier ones have arrived
    array: int = 0  # the tensor's number
    remote_span: Span | None = None  # its span in the sender's array; None if it must not be read in place
    sent: tuple[Format, ...] = ()  # formats by the sender; empty if unknown here
    got: tuple[Format, ...] = ()  # formats by the receiver

    @property
    def is_converted(self) -> bool:
        """Whether it goes through a transform on this rank."""
        return self.makes or self.stores

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return prod(shape_of(self.src_box)) * dtypes.get(self.dtype).itemsize_bytes

    def source_span(self) -> Span:
        """Return the box's span in the sender's array."""
        return span_of(self.source, self.src_box)

    def target_span(self) -> Span:
        """Return the box's span in the receiver's array."""
        return span_of(self.target, self.dst_box)


def bytes_of(form: Format) -> int:
    """Return the bytes of an array that is sent."""
    return prod(form[1]) * dtypes.get(form[0]).itemsize_bytes
