"""MXFP8: arrays of 8-bit elements with one E8M0 scale byte for every 32 of the last dim."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.kernels import reference
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode, require_apart, require_numpy, require_out

_FLOATS = ("bfloat16", "float16", "float32")

# 64 Ki elements: small enough for the 4-byte and 8-byte temporaries of a tile to stay in cache, large
# enough to spread the Python cost of some thirty NumPy calls.
_TILE_BLOCKS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class MXFP8Tensor:
    """A quantised array. It holds its two buffers, it does not copy them.

    Compared by identity: codes can differ where values are equal, and NaN has no equal.

    Attributes:
        data: uint8 element codes [..., K], K a multiple of 32.
        scale: uint8 E8M0 scale bytes [..., K/32], row-major (see `swizzle_scales` for the GEMM layout).
        elem: element type, "e4m3" or "e5m2".

    Raises:
        KernelError: unknown elem, no NumPy array, no dim, or a last dim that is no multiple of 32.
        DTypeError: data or scale is not uint8.
        BufferMismatchError: the shape of scale does not fit the shape of data.
    """

    data: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.uint8]
    elem: Elem = "e4m3"

    def __post_init__(self) -> None:
        reference.element_format(self.elem)
        for name, array in (("data", self.data), ("scale", self.scale)):
            dtype = require_numpy(array, name).dtype
            if dtype != np.uint8:
                raise DTypeError(
                    f"{name} of an MXFP8Tensor holds raw bytes: expected uint8, got {dtype.name}; "
                    f"for an 8-bit dtype write {name}.view(numpy.uint8)"
                )
        expected = _scale_shape(self.data.shape, "data")
        if self.scale.shape != expected:
            raise BufferMismatchError(
                f"an MXFP8Tensor has one scale byte for every {BLOCK_ELEMS} elements of the last dim: data "
                f"{list(self.data.shape)} needs scale {list(expected)}, got {list(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for, which is the shape of `data`."""
        return self.data.shape

    @property
    def wire_bytes(self) -> int:
        """Bytes to send for it: codes and scales, 33/32 byte an element."""
        return self.data.size + self.scale.size


def quantize_mxfp8(
    x: npt.NDArray[Any],
    elem: Elem = "e4m3",
    mode: Mode = "rceil",
    out: MXFP8Tensor | None = None,
    min_scale_byte: int = 0,
) -> MXFP8Tensor:
    """Quantise an array to MXFP8 in blocks of 32 along its last dim.

    Elements are rounded to nearest, ties to even, and clamped to the largest finite value; zero keeps its
    sign. A block of zeros gets scale byte 0. A block that holds a NaN or an Inf gets scale byte 255 and
    code 0x7F throughout.

    Args:
        x: bf16, fp16 or fp32 array [..., K] of any strides, K a multiple of 32. An array of three or more
            dims whose leading dims do not fold into one is copied first.
        elem: element type, "e4m3" (maximum 448) or "e5m2" (57344).
        mode: how the power-of-two scale is chosen. "rceil": the smallest under which nothing is clamped;
            "floor": the one of the OCP text, which clamps maxima above 1.75 * 2^n; "even": as floor after
            rounding the maximum to the element's mantissa; "ceil": the maximum rounded up to a power of two.
        out: buffers to write into; they must not share memory with x or with each other.
        min_scale_byte: lowest scale byte of a finite block, 0 to 254. Some consumers read byte 0
            as zero: pass 1 for them.

    Returns:
        `out` if given, else a new tensor with C-contiguous buffers.

    Raises:
        KernelError: x is no NumPy array, has no dim or a last dim that is no multiple of 32; unknown elem
            or mode; min_scale_byte out of range.
        DTypeError: x is not bf16, fp16 or fp32.
        BufferMismatchError: out has another shape or elem, is read-only, or shares memory.
    """
    fmt = reference.element_format(elem)
    reference.scale_round_up(fmt, mode)  # refuses an unknown mode, also for an empty x
    floor_byte = _scale_byte(min_scale_byte)
    source = require_numpy(x, "x")
    if source.dtype.name not in _FLOATS:
        raise DTypeError(
            f"quantize_mxfp8 takes {', '.join(_FLOATS)}, got {source.dtype.name}; convert it first, "
            "x.astype(numpy.float32)"
        )
    scale_shape = _scale_shape(source.shape, "x")
    if out is None:
        out = MXFP8Tensor(np.empty(source.shape, np.uint8), np.empty(scale_shape, np.uint8), elem)
        data, scale = out.data, out.scale
    else:
        data, scale = _checked_out(out, elem, source)
    if not source.size:
        return out

    flat = all(array.flags.c_contiguous for array in (source, data, scale))
    rows, blocks = _grid(source.shape, flat)
    x_grid = source.reshape(rows, blocks, BLOCK_ELEMS)
    data_grid = _writeable_view(data, (rows, blocks, BLOCK_ELEMS))
    scale_grid = _writeable_view(scale, (rows, blocks))
    for tile in _tiles(rows, blocks):
        bits = _fp32_bits(x_grid[tile])
        codes, bytes_ = reference.quantize_bits(bits.reshape(-1, BLOCK_ELEMS), fmt, mode, floor_byte)
        data_grid[tile] = codes.reshape(bits.shape)
        scale_grid[tile] = bytes_.reshape(bits.shape[:2])
    _copy_back(data, data_grid)
    _copy_back(scale, scale_grid)
    return out


def dequantize_mxfp8(
    q: MXFP8Tensor, dtype: object = "bfloat16", out: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Return the values of an MXFP8 tensor: the exact product of code and scale, rounded once.

    Rounding is to nearest, ties to even. Products too large for `dtype` become Inf; scale byte 255 and NaN
    codes become NaN.

    Args:
        q: the quantised tensor.
        dtype: "bfloat16", "float16" or "float32" (or an alias or NumPy dtype of these).
        out: array of q's shape and of `dtype` to write into; it must not share memory with q.

    Returns:
        `out` if given, else a new C-contiguous array of q's shape.

    Raises:
        KernelError: q is no MXFP8Tensor, or out no NumPy array.
        DTypeError: dtype is none of the three.
        BufferMismatchError: out has another shape or dtype, is read-only, or shares memory with q.
    """
    if not isinstance(q, MXFP8Tensor):
        raise KernelError(
            f"dequantize_mxfp8 takes an MXFP8Tensor, got {type(q).__qualname__}; "
            "write MXFP8Tensor(data, scale, elem)"
        )
    row = dtypes.get(dtype)
    if row.name not in _FLOATS:
        raise DTypeError(f"dequantize_mxfp8 gives {', '.join(_FLOATS)}, got dtype {row.name}")
    data, scale = require_numpy(q.data, "q.data"), require_numpy(q.scale, "q.scale")
    if out is None:
        out = np.empty(data.shape, row.numpy)
        target = out
    else:
        target = require_out(out, "out", data.shape, row.numpy)
        require_apart(target, "out", data, "q.data")
        require_apart(target, "out", scale, "q.scale")
    if not target.size:
        return out

    flat = all(array.flags.c_contiguous for array in (data, scale, target))
    rows, blocks = _grid(data.shape, flat)
    data_grid = data.reshape(rows, blocks, BLOCK_ELEMS)
    scale_grid = scale.reshape(rows, blocks)
    target_grid = _writeable_view(target, (rows, blocks, BLOCK_ELEMS))
    table = reference.value_table(q.elem, row.name)
    for tile in _tiles(rows, blocks):
        index = scale_grid[tile].astype(np.intp)[:, :, None] << 8
        index = index | data_grid[tile]
        # Assigned as floats, not as bits: the copy then also serves a target of the other byte order.
        target_grid[tile] = table[index].view(row.numpy)
    _copy_back(target, target_grid)
    return out


def _scale_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    if not shape:
        raise KernelError(f"{name} must have at least one dim to lay blocks along, got a 0-d array")
    if shape[-1] % BLOCK_ELEMS:
        raise KernelError(
            f"the last dim of {name} must be a multiple of {BLOCK_ELEMS}, the MX block, got {list(shape)}; "
            "nothing is padded for you: pad it, or quantise a slice, as the consumer of the blocks needs"
        )
    return (*shape[:-1], shape[-1] // BLOCK_ELEMS)


def _scale_byte(value: int) -> int:
    try:
        byte = operator.index(value)
    except TypeError:
        byte = -1
    if not 0 <= byte < reference.SCALE_NAN:
        raise KernelError(f"min_scale_byte is an integer from 0 to 254 (255 is NaN), got {value!r}")
    return byte


def _checked_out(
    out: MXFP8Tensor, elem: str, source: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if not isinstance(out, MXFP8Tensor):
        raise KernelError(
            f"out must be an MXFP8Tensor, got {type(out).__qualname__}; write MXFP8Tensor(data, scale, elem)"
        )
    if out.elem != elem:
        raise BufferMismatchError(f'out is for "{out.elem}" and elem says "{elem}"; pass elem="{out.elem}"')
    data = require_out(out.data, "out.data", source.shape, np.dtype(np.uint8))
    scale = require_out(out.scale, "out.scale", out.scale.shape, np.dtype(np.uint8))
    require_apart(data, "out.data", source, "x")
    require_apart(scale, "out.scale", source, "x")
    require_apart(data, "out.data", scale, "out.scale")
    return data, scale


def _grid(shape: tuple[int, ...], flat: bool) -> tuple[int, int]:
    """Return rows and blocks a row; one long row when every buffer is contiguous."""
    rows = 1 if flat else math.prod(shape[:-1])
    return rows, math.prod(shape) // BLOCK_ELEMS // rows


def _tiles(rows: int, blocks: int) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of a [rows, blocks] grid, none above `_TILE_BLOCKS` blocks, of like size."""
    pieces = -(-blocks // _TILE_BLOCKS)
    wide = -(-blocks // pieces)
    high = max(1, _TILE_BLOCKS // wide)
    for row in range(0, rows, high):
        for block in range(0, blocks, wide):
            yield slice(row, row + high), slice(block, block + wide)


def _fp32_bits(tile: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Return the bit patterns of a tile after exact widening to fp32, in a new contiguous array."""
    bits = np.empty(tile.shape, np.uint32)
    if tile.dtype.name == "bfloat16":
        bits[...] = tile.view(np.uint16)
        bits <<= 16
    else:
        with np.errstate(invalid="ignore"):  # a signalling NaN is data here
            bits.view(np.float32)[...] = tile
    return bits


def _writeable_view(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a view of another shape, or a new array for `_copy_back` where strides allow no view."""
    try:
        return array.reshape(shape, copy=False)
    except ValueError:
        return np.empty(shape, array.dtype)


def _copy_back(array: npt.NDArray[Any], grid: npt.NDArray[Any]) -> None:
    if not np.may_share_memory(array, grid):
        array[...] = grid.reshape(array.shape)
