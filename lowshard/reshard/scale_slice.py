"""The slice of block scales that belongs to a slice of data."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from lowshard.argument import whole
from lowshard.errors import PlanError


class ScaleSliceError(PlanError, IndexError, AssertionError):
    """A slice with no matching slice of block scales. Also derives from the builtins that Megatron-LM raises here."""


def scale_slice_from_data_slice(
    data_slice: Sequence[Any] | None, block_size: int = 32
) -> tuple[Any, ...] | None:
    """Return the slice of block scales that belongs to a slice of the data; blocks lie along the last dim.

    Every entry but the last stays. In the last one a slice has both ends divided (each None or a multiple of
    block_size), and an index the block it lies in (also from the end: -1 stays in the last block). As
    `_scale_slice_from_data_slice` of Megatron-LM d98e8a64, and errors where that gives a wrong slice.

    Args:
        data_slice: a tuple of slices and integers, one a dim; None (the whole array) stays None.
        block_size: elements a block.

    Raises:
        ScaleSliceError: no entry; an end that is not a multiple of block_size; a step other than 1; an entry that is
            no slice and no integer (an Ellipsis or a new axis does not say where the last dim is sliced).
    """
    if data_slice is None:
        return None
    block_size = whole(block_size, "block_size is a number of elements >= 1", ScaleSliceError, 1)
    entries = tuple(data_slice) if isinstance(data_slice, (tuple, list)) else (data_slice,)
    if not entries:
        raise ScaleSliceError("a slice has one entry a dim, the last for the dim of the blocks, got none")
    for entry in entries:
        if entry is Ellipsis or entry is None:
            raise ScaleSliceError(
                f"a slice for scales has one entry a dim, a slice or an integer, got {entry}; write slice(None) for a "
                "whole dim"
            )
    return (*entries[:-1], _scale_entry(entries[-1], block_size))


def _scale_entry(entry: Any, block_size: int) -> Any:
    if isinstance(entry, slice):
        if entry.step is not None:
            rule = "blocks are contiguous: the last slice has no step; take the whole range and step after"
            whole(entry.step, rule, ScaleSliceError, 1, 1)
        ends: list[int | None] = []
        rule = f"the last slice begins and ends at multiples of the block of {block_size}"
        for end in (entry.start, entry.stop):
            at = None if end is None else whole(end, rule, ScaleSliceError)
            if at is not None and at % block_size:
                raise ScaleSliceError(f"{rule}, got {entry}")
            ends.append(None if at is None else at // block_size)
        return slice(*ends)
    try:
        return operator.index(entry) // block_size
    except TypeError:
        raise ScaleSliceError(
            f"the last entry of a slice is a slice or an integer, got {entry!r}; write slice(None) for the whole dim"
        ) from None
