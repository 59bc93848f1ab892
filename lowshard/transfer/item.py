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
    """One box that one rank gives another, or itself, as one of the two knows it.

    Attributes:
        number: the same on both sides.
        name: of the tensor, for errors.
        src_box: in the giver's array.
        dst_box: in the taker's array.
        dtype: of the tensor.
        source: the giver's array; None on the other side.
        target: the taker's array; None on the other side, or where a transform stores what comes.
        src_name: what the giver calls it.
        dst_name: what the taker calls it.
        makes: whether this rank's transform makes what travels.
        stores: whether it stores what comes.
        is_plain: whether the transform lets the box travel as it is.
        hands_on: whether the giver has got it itself, in this run.
        turn: items of a later turn are given when those of the earlier ones have come.
        array: which of the giver's published arrays has it.
        there: where it lies in that, from its begin; None where it is not to be read in place.
        sent: what travels, as the giver says; empty where that is not known here.
        got: what travels, as the taker says.
    """

    number: int
    name: str
    src_box: Box
    dst_box: Box
    dtype: str
    source: Array = None
    target: Array = None
    src_name: str = ""
    dst_name: str = ""
    makes: bool = False
    stores: bool = False
    is_plain: bool = False
    hands_on: bool = False
    turn: int = 0
    array: int = 0
    there: Span | None = None
    sent: tuple[Format, ...] = ()
    got: tuple[Format, ...] = ()

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
