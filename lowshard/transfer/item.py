"""What a mover of many arrays moves: items, each a box that one rank gives another, or keeps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from lowshard import dtypes
from lowshard.box import Box, shape_of
from lowshard.transfer.spans import Span, span_of

Array = Any
Format = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array that travels."""


@dataclass(eq=False, slots=True)
class Item:
    """One box that one rank gives another, or itself, as one of the two knows it."""

    number: int  # the same on both sides
    name: str
    src_box: Box  # in the giver's array
    dst_box: Box  # in the taker's array
    dtype: str
    source: Array = None  # the giver's array; None on the other side
    target: Array = None  # the taker's array; None on the other side, or where a transform stores what comes
    src_name: str = ""
    dst_name: str = ""
    makes: bool = False  # whether this rank's transform makes what travels
    stores: bool = False  # whether it stores what comes
    is_plain: bool = False  # whether the transform lets the box travel as it is
    is_forwarded: bool = False  # whether the giver has got it itself, in this run
    turn: int = 0  # items of a later turn are given when those of the earlier ones have come
    array: int = 0  # which of the giver's published arrays has it
    remote_span: Span | None = None  # where it lies in that; None where it is not to be read in place
    sent: tuple[Format, ...] = ()  # what travels, as the giver says; empty where that is not known here
    got: tuple[Format, ...] = ()  # what travels, as the taker says

    @property
    def is_converted(self) -> bool:
        """Whether it goes through a transform on this rank."""
        return self.makes or self.stores

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return prod(shape_of(self.src_box)) * dtypes.get(self.dtype).itemsize_bytes

    def source_span(self) -> Span:
        """Return where the box lies in the giver's array, by address."""
        return span_of(self.source, self.src_box)

    def target_span(self) -> Span:
        """Return where it goes in the taker's array, by address."""
        return span_of(self.target, self.dst_box)


def bytes_of(form: Format) -> int:
    """Return the bytes of an array that travels."""
    return prod(form[1]) * dtypes.get(form[0]).itemsize_bytes
