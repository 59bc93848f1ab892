"""Block formats: values stored as elements of a few bits, a block of which shares a scale.

A stored tensor is two plain arrays, its codes and its scales. `BlockFormat` says what each looks like, and which boxes
of them a box of values is. So what moves, packs or saves plain arrays does so with every block format.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lowshard import dtypes
from lowshard.argument import instance, one_of, whole, wholes
from lowshard.box import Box, full_box
from lowshard.errors import ShardingError

Packing = Literal["bytes", "low_first", "high_first"]
_BYTE_BITS = 8


class Stored(NamedTuple):
    """One of the two plain arrays that a tensor is stored as."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BlockFormat:
    """How values are stored as elements of few bits with a scale for each block. A value.

    Args:
        name: for messages.
        bits: of an element, 1 to 8.
        block: values of a block along the last dims; other dims have blocks of 1.
        element: dtype of the array of codes; "uint8" where elements are packed.
        scale: dtype of a scale.
        packing: how elements lie along the last dim: "bytes", one a byte; or packed, the first one in a byte's low
            bits or in its high ones.
        suffix: what a tensor's name gets for the name of its scales.

    Raises:
        ShardingError: bits or a block that cannot be, elements that are not packed and take no byte, or are packed in
            another array than bytes.
        DTypeError: element or scale is not a dtype of the table.
    """

    name: str
    bits: int
    block: tuple[int, ...]
    element: str
    scale: str
    packing: Packing = "bytes"
    suffix: str = "_scale"

    def __post_init__(self) -> None:
        instance(self.name, str, "the name of a block format is text", ShardingError)
        instance(self.suffix, str, "the suffix of a block format is text", ShardingError)
        whole(self.bits, "an element of a block format has 1 to 8 bits", ShardingError, 1, _BYTE_BITS)
        rule = "a block has one extent of 1 or more for each of the last dims"
        object.__setattr__(self, "block", wholes(self.block, rule, ShardingError, 1))
        if not self.block:
            raise ShardingError(f"{rule}, got none")
        one_of(self.packing, get_args(Packing), "packing", ShardingError)
        for field in ("element", "scale"):
            object.__setattr__(self, field, dtypes.get(getattr(self, field)).name)
        row = dtypes.get(self.element)
        if row.bits != _BYTE_BITS or (self.packing != "bytes" and row.name != "uint8"):
            raise ShardingError(
                f"{self.name}: codes lie in an array of bytes, packed ones in uint8; got {self.element}, {self.packing}"
            )

    @property
    def unit(self) -> tuple[int, int]:
        """Values along the last dim that fill whole bytes, and how many bytes."""
        if self.packing == "bytes":
            return 1, 1
        bits = lcm(self.bits, _BYTE_BITS)
        return bits // self.bits, bits // _BYTE_BITS

    def blocks(self, ndim: int) -> tuple[int, ...]:
        """Return the extent of a block in each dim.

        Raises:
            ShardingError: a tensor has fewer dims than the block.
        """
        if ndim < len(self.block):
            raise ShardingError(
                f"{self.name} has blocks of {len(self.block)} dims {self.block}, a tensor of {ndim} has not"
            )
        return (1,) * (ndim - len(self.block)) + self.block

    # ---- what a tensor is stored as

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        """Return the arrays that a tensor of values is stored as, by name: its codes under its own, then its scales.

        Raises:
            ShardingError: the last dim does not fill whole bytes, or fewer dims than a block has.
        """
        boxes = self.boxes(name, full_box(shape), shape)
        dtype = {name: self.element, name + self.suffix: self.scale}
        return {part: Stored(dtype[part], tuple(stop for _, stop in box)) for part, box in boxes.items()}

    def boxes(self, name: str, box: Box, shape: tuple[int, ...]) -> dict[str, Box]:
        """Return what a box of a tensor's values is of each array that it is stored as, by name as `stored`.

        Args:
            name: of the tensor.
            box: of values; it begins and ends between blocks, or where the tensor ends.
            shape: of the whole tensor.

        Raises:
            ShardingError: the box cuts a block; the text names the tensor, the dim and what would not.
        """
        blocks = self.blocks(len(shape))
        values, size = self.unit
        for dim, ((start, stop), block, extent) in enumerate(zip(box, blocks, shape, strict=True)):
            unit = lcm(block, values) if dim == len(shape) - 1 else block
            if start < stop and (start % unit or (stop % unit and stop != extent)):
                raise ShardingError(
                    f"{name} {list(shape)}: {start} to {stop} of dim {dim} is a cut inside a block of {unit} values "
                    f"({self.name}); cut another dim, or take sizes that divide {extent // unit} blocks"
                )
        if shape[-1] % values:
            raise ShardingError(
                f"{name} {list(shape)}: {self.name} stores {values} values in {size} bytes, so the last dim is a "
                f"multiple of {values}"
            )
        start, stop = box[-1]
        codes = (*box[:-1], (start // values * size, stop // values * size))
        scales = tuple(
            (a // n, -(-b // n) if a < b else a // n) for (a, b), n in zip(box, blocks, strict=True)
        )
        return {name: codes, name + self.suffix: scales}

    def values(self, scales: Box, shape: tuple[int, ...]) -> Box:
        """Return the box of a tensor's values that a box of its scales belongs to: whole blocks."""
        blocks = self.blocks(len(shape))
        return tuple((a * n, min(b * n, size)) for (a, b), n, size in zip(scales, blocks, shape, strict=True))

    def code_values(self, codes: Box) -> Box:
        """Return the box of a tensor's values that a box of its codes belongs to."""
        values, size = self.unit
        start, stop = codes[-1]
        return (*codes[:-1], (start // size * values, stop // size * values))

    # ---- elements in bytes, in the plain version

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Return element codes, uint8 [..., K], as they are stored: uint8 [..., K * bits / 8] where they are packed."""
        if self.packing == "bytes":
            return codes
        values, size = self.unit
        order: Any = "little" if self.packing == "low_first" else "big"
        bits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., : self.bits]
        if self.packing == "high_first":
            bits = bits[..., ::-1]
        flat = bits.reshape(*codes.shape[:-1], codes.shape[-1] // values * size, _BYTE_BITS)
        return np.packbits(flat, axis=-1, bitorder=order)[..., 0]

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """Return the element codes, uint8 [..., K], of what `pack` returned."""
        if self.packing == "bytes":
            return stored
        values, size = self.unit
        order: Any = "little" if self.packing == "low_first" else "big"
        bits = np.unpackbits(stored[..., None], axis=-1, bitorder=order)
        bits = bits.reshape(*stored.shape[:-1], stored.shape[-1] // size * values, self.bits)
        if self.packing == "high_first":
            bits = bits[..., ::-1]
        return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


MXFP8 = {
    elem: BlockFormat("MXFP8", 8, (32,), dtype, "float8_e8m0fnu")
    for elem, dtype in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2"))
}
"""By element type. Source: OCP Microscaling Formats v1.0, section 5: 32 elements share an e8m0 scale."""
