"""The 128x4 layout of scale bytes that block-scaled matrix products of cuBLAS and cuDNN read.

Tiles of 128 rows by 4 columns follow each other row-major, 512 bytes each. Inside a tile the byte of
row r and column c lies at (r % 32) * 16 + (r // 32) * 4 + c. Ragged edges are padded with zero bytes.
Source: cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.kernels.reference import require_numpy

TILE_ROWS = 128
TILE_COLS = 4
TILE_BYTES = TILE_ROWS * TILE_COLS


def swizzle_scales(scale: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return row-major scale bytes in the 128x4 layout.

    Args:
        scale: uint8 [rows, cols], cols being K/32; any strides.

    Returns:
        uint8 [ceil(rows / 128) * ceil(cols / 4) * 512], zero where no scale falls.

    Raises:
        KernelError: scale is no NumPy array or not 2-D.
        DTypeError: scale is not uint8.
    """
    source = _require_bytes(scale, "scale")
    if source.ndim != 2:
        raise KernelError(
            f"swizzle_scales takes a 2-D array [rows, K/32], got {list(source.shape)}; "
            "write scale.reshape(-1, scale.shape[-1]), or swizzle each matrix of a stack alone"
        )
    rows, cols = source.shape
    tile_rows, tile_cols = _tile_counts(rows, cols)
    padded = np.zeros((tile_rows * TILE_ROWS, tile_cols * TILE_COLS), np.uint8)
    padded[:rows, :cols] = source
    tiles = padded.reshape(tile_rows, 4, 32, tile_cols, TILE_COLS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(swizzled: npt.NDArray[np.uint8], rows: int, cols: int) -> npt.NDArray[np.uint8]:
    """Return the row-major scale bytes of an array in the 128x4 layout; the padding is dropped unread.

    Args:
        swizzled: uint8 of any shape with ceil(rows / 128) * ceil(cols / 4) * 512 elements, read row-major.
        rows: rows of the matrix.
        cols: scale bytes a row, K/32.

    Returns:
        uint8 [rows, cols], C-contiguous.

    Raises:
        KernelError: swizzled is no NumPy array; rows or cols is no integer or negative.
        DTypeError: swizzled is not uint8.
        BufferMismatchError: swizzled has another number of bytes than rows and cols need.
    """
    source = _require_bytes(swizzled, "swizzled")
    rows, cols = _extent(rows, "rows"), _extent(cols, "cols")
    tile_rows, tile_cols = _tile_counts(rows, cols)
    expected_bytes = tile_rows * tile_cols * TILE_BYTES
    if source.size != expected_bytes:
        raise BufferMismatchError(
            f"{rows} x {cols} scales take {tile_rows} x {tile_cols} tiles of {TILE_BYTES} bytes: expected "
            f"{expected_bytes} bytes, got {source.size}; rows and cols are those of the matrix before padding"
        )
    tiles = source.reshape(tile_rows, tile_cols, 32, 4, TILE_COLS)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(tile_rows * TILE_ROWS, tile_cols * TILE_COLS)
    return np.ascontiguousarray(padded[:rows, :cols])


def _tile_counts(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // TILE_ROWS), -(-cols // TILE_COLS)


def _require_bytes(array: object, name: str) -> npt.NDArray[np.uint8]:
    source = require_numpy(array, name)
    if source.dtype != np.uint8:
        raise DTypeError(
            f"{name} holds E8M0 bytes: expected uint8, got {source.dtype.name}; "
            f"write {name}.view(numpy.uint8)"
        )
    return source


def _extent(value: int, name: str) -> int:
    try:
        extent = operator.index(value)
    except TypeError:
        extent = -1
    if extent < 0:
        raise KernelError(f"{name} must be an integer of 0 or more, got {value!r}")
    return extent
