"""MXFP8 arrays as values: element codes, scale bytes, and how both lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from lowshard.argument import as_shape
from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.foreign_array import is_foreign, like
from lowshard.kernels import reference
from lowshard.kernels.buffer import Array, require_array
from lowshard.kernels.reference import BLOCK_ELEMS, Elem

ScaleLayout = Literal["rows", "128x4"]
"""Where scale bytes lie: as an array [..., K/32], or in tiles of 128 rows by 4 columns (see `swizzle_scales`)."""

TILE_ROWS = 128
TILE_COLS = 4
TILE_BYTES = TILE_ROWS * TILE_COLS

SHAPE = "a shape is a tuple of integers of 0 or more, such as array.shape"
"""What an error says of a shape."""

_SCALE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class MXFP8Tensor:
    """A quantised array. It holds its two buffers, it does not copy them.

    Compared by identity: codes can differ where values are equal, and NaN has no equal.

    Attributes:
        data: uint8 element codes [..., K], K a multiple of 32.
        scale: uint8 E8M0 scale bytes [..., K/32], row-major (see `SwizzledMXFP8` for the GEMM layout).
        elem: element type, "e4m3" or "e5m2".

    Raises:
        KernelError: unknown elem, no arrays, no dim, or a last dim that is not a multiple of 32.
        DTypeError: data or scale is not uint8.
        BufferMismatchError: the shape of scale does not fit the shape of data.
    """

    data: Array
    scale: Array
    elem: Elem = "e4m3"

    def __post_init__(self) -> None:
        _require_bytes(self, "an MXFP8Tensor")
        expected = scale_shape(self.data.shape, "data")
        if self.scale.shape != expected:
            raise BufferMismatchError(
                f"an MXFP8Tensor has one scale byte for every {BLOCK_ELEMS} elements of the last dim: data "
                f"{list(self.data.shape)} needs scale {list(expected)}, got {list(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for, which is the shape of `data`."""
        return tuple(self.data.shape)

    @property
    def wire_bytes(self) -> int:
        """Bytes to send for it: codes and scales, 33/32 byte an element."""
        return math.prod(self.shape) + math.prod(map(int, self.scale.shape))

    @classmethod
    def over(cls, buffer: Array, shape: tuple[int, ...], elem: Elem = "e4m3") -> MXFP8Tensor:
        """Return a tensor that is two views of one buffer, so that it travels as one message.

        The codes come first, the scales after them at the next multiple of 16 bytes.

        Args:
            buffer: uint8 [n], contiguous, n at least `buffer_bytes(shape)`.
            shape: shape of the tensor [..., K].
            elem: element type.

        Raises:
            KernelError: buffer is not an array, or shape has no dim, a last dim that is not a multiple of 32,
                or is not a tuple of integers.
            DTypeError: buffer is not uint8.
            BufferMismatchError: buffer is not 1-D and contiguous, or too small.
        """
        flat = require_array(buffer, "buffer")
        if flat.dtype != np.uint8:
            raise DTypeError(f"buffer must be uint8, got {flat.dtype.name}; write buffer.view(numpy.uint8)")
        shape = as_shape(shape, SHAPE, KernelError)
        need_bytes = cls.buffer_bytes(shape)
        if flat.ndim != 1 or not flat.flags.c_contiguous or flat.size < need_bytes:
            raise BufferMismatchError(
                f"an MXFP8Tensor {list(shape)} lies in a contiguous 1-D buffer of {need_bytes} bytes or more, "
                f"got {list(flat.shape)}; write numpy.empty(MXFP8Tensor.buffer_bytes(shape), numpy.uint8)"
            )
        blocks = scale_shape(shape, "shape")
        data_bytes, first = math.prod(shape), need_bytes - math.prod(blocks)
        codes, scales = flat[:data_bytes].reshape(shape), flat[first:need_bytes].reshape(blocks)
        return cls(like(codes, buffer), like(scales, buffer), elem)

    @staticmethod
    def buffer_bytes(shape: tuple[int, ...]) -> int:
        """Return the bytes that `over` needs for a tensor of this shape.

        Raises:
            KernelError: shape has no dim, a last dim that is not a multiple of 32, or is not a tuple of integers.
        """
        shape = as_shape(shape, SHAPE, KernelError)
        blocks = math.prod(scale_shape(shape, "shape"))
        return -(-math.prod(shape) // _SCALE_ALIGN_BYTES) * _SCALE_ALIGN_BYTES + blocks


@dataclass(frozen=True, slots=True, eq=False)
class SwizzledMXFP8:
    """A quantised matrix whose scale bytes lie in the 128x4 layout. It holds its two buffers, it does not copy them.

    Compared by identity, as an `MXFP8Tensor`. `unswizzle_scales(scale, rows, K // 32)` gives the scales of one.

    Attributes:
        data: uint8 element codes [rows, K], K a multiple of 32.
        scale: uint8 E8M0 scale bytes [ceil(rows / 128) * ceil(K/32 / 4) * 512] in the layout that `swizzle_scales`
            writes.
        elem: element type, "e4m3" or "e5m2".

    Raises:
        KernelError: unknown elem, no arrays, data that is not 2-D, or K that is not a multiple of 32.
        DTypeError: data or scale is not uint8.
        BufferMismatchError: the shape of scale does not fit the shape of data.
    """

    data: Array
    scale: Array
    elem: Elem = "e4m3"

    def __post_init__(self) -> None:
        _require_bytes(self, "a SwizzledMXFP8")
        expected = swizzled_scale_shape(self.data.shape, "data")
        if self.scale.shape != expected:
            raise BufferMismatchError(
                f"the scales of data {list(self.data.shape)} take {expected[0]} bytes in the 128x4 layout, padding "
                f"included: expected scale {list(expected)}, got {list(self.scale.shape)}; write swizzle_scales(scale)"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for, which is the shape of `data`."""
        return tuple(self.data.shape)


Q = TypeVar("Q", MXFP8Tensor, SwizzledMXFP8)


def tensor_like(q: Q, given: object) -> Q:
    """Return a new tensor over NumPy's or CuPy's arrays as one over arrays of the library that an input is of."""
    return type(q)(like(q.data, given), like(q.scale, given), q.elem) if is_foreign(given) else q


def swizzled_bytes(rows: int, cols: int) -> int:
    """Return the bytes that the scales [rows, cols] take in the 128x4 layout, padding included."""
    return -(-rows // TILE_ROWS) * -(-cols // TILE_COLS) * TILE_BYTES


def swizzled_scale_shape(shape: tuple[int, ...], name: str) -> tuple[int]:
    """Return the shape of the scale bytes of a matrix in the 128x4 layout, or raise KernelError."""
    if len(shape) != 2:
        raise KernelError(
            f"the 128x4 layout is that of a matrix: {name} must be 2-D [rows, K], got {list(shape)}; write "
            f"{name}.reshape(-1, {name}.shape[-1]) for one matrix of all rows, or take each matrix of a stack alone"
        )
    return (swizzled_bytes(*scale_shape(shape, name)),)


def scale_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return the shape of the scale bytes of an array, or raise KernelError."""
    if not shape:
        raise KernelError(f"{name} must have at least one dim to lay blocks along, got a 0-d array")
    if shape[-1] % BLOCK_ELEMS:
        raise KernelError(
            f"the last dim of {name} must be a multiple of {BLOCK_ELEMS}, the MX block, got {list(shape)}; "
            "nothing is padded for you: pad it, or quantise a slice, as the consumer of the blocks needs"
        )
    return (*shape[:-1], shape[-1] // BLOCK_ELEMS)


def _require_bytes(q: MXFP8Tensor | SwizzledMXFP8, kind: str) -> None:
    reference.element_format(q.elem)
    for name, array in (("data", q.data), ("scale", q.scale)):
        seen = require_array(array, name)
        if not hasattr(array, "shape"):  # a bare buffer, which is an array from here on
            object.__setattr__(q, name, seen)
        dtype = seen.dtype
        if dtype != np.uint8:
            raise DTypeError(
                f"{name} of {kind} holds raw bytes: expected uint8, got {dtype.name}; "
                f"for an 8-bit dtype write {name}.view(numpy.uint8), or what its library has for that"
            )
