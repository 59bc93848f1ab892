"""The 128x4 layout of scale bytes that block-scaled matrix products of cuBLAS and cuDNN read.

Tiles of 128 rows by 4 columns follow each other row-major, 512 bytes each. Inside a tile the byte of
row r and column c lies at (r % 32) * 16 + (r // 32) * 4 + c. Ragged edges are padded with zero bytes.
Source: cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lowshard.argument import as_shape, whole
from lowshard.bounded import bounded_cache
from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.foreign_array import like
from lowshard.kernels.buffer import Array, allocate, require_apart, require_array, require_out
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.mxfp8_tensor import TILE_BYTES, TILE_COLS, TILE_ROWS, swizzled_bytes
from lowshard.kernels.runs import RunTable, lower


@takes_stream
def swizzle_scales(scale: Array, out: Array | None = None, *, stream: Stream = None) -> Array:
    """Return row-major scale bytes in the 128x4 layout; `quantize_mxfp8` can write them so at once.

    Args:
        scale: uint8 [rows, cols], cols being K/32; any strides.
        out: uint8 [ceil(rows / 128) * ceil(cols / 4) * 512] to write into, contiguous; it must not share
            memory with scale.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new array of that form; zero where no scale falls.

    Raises:
        KernelError: scale or out is not an array, or scale is not 2-D.
        DTypeError: scale is not uint8.
        BufferMismatchError: out is not the buffer described above, is read-only, or shares memory.
    """
    source = _require_bytes(scale, "scale")
    if source.ndim != 2:
        raise KernelError(
            f"swizzle_scales takes a 2-D array [rows, K/32], got {list(source.shape)}; "
            "write scale.reshape(-1, scale.shape[-1]), or swizzle each matrix of a stack alone"
        )
    target = _target(out, (swizzled_bytes(*source.shape),), source, "scale")
    if not target.flags.c_contiguous:
        raise BufferMismatchError(
            "out of swizzle_scales must be contiguous; pass a buffer that is not a slice"
        )
    if target.size:
        engine_for(source, target).swizzle(source, target)
    return like(target, scale) if out is None else out


@takes_stream
def unswizzle_scales(
    swizzled: Array, rows: int, cols: int, out: Array | None = None, *, stream: Stream = None
) -> Array:
    """Return the row-major scale bytes of an array in the 128x4 layout; the padding is dropped unread.

    Args:
        swizzled: uint8 of any shape with ceil(rows / 128) * ceil(cols / 4) * 512 elements, read row-major.
        rows: rows of the matrix.
        cols: scale bytes a row, K/32.
        out: uint8 [rows, cols] to write into, any strides; it must not share memory with swizzled.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new C-contiguous array [rows, cols].

    Raises:
        KernelError: swizzled or out is not an array; rows or cols is not an integer, or is negative.
        DTypeError: swizzled is not uint8.
        BufferMismatchError: swizzled has another number of bytes than rows and cols need; out has another
            shape or dtype, is read-only, or shares memory.
    """
    source = _require_bytes(swizzled, "swizzled")
    rows = whole(rows, "rows must be an integer of 0 or more", KernelError, 0)
    cols = whole(cols, "cols must be an integer of 0 or more", KernelError, 0)
    as_shape((rows, cols), "rows and cols are the shape of scales", KernelError)
    expected_bytes = swizzled_bytes(rows, cols)
    if source.size != expected_bytes:
        raise BufferMismatchError(
            f"{rows} x {cols} scales take {expected_bytes // TILE_BYTES} tiles of {TILE_BYTES} bytes: expected "
            f"{expected_bytes} bytes, got {source.size}; rows and cols are those of the matrix before padding"
        )
    target = _target(out, (rows, cols), source, "swizzled")
    if target.size:
        flat = source.reshape(-1)
        # A strided 1-D array comes out of reshape as it was; an engine reads contiguous bytes.
        engine_for(source, target).unswizzle(flat if flat.flags.c_contiguous else flat.copy(), target)
    return like(target, swizzled) if out is None else out


def put_scales(scale: Array, tiles: Array, row: int, column: int, shape: tuple[int, int], width: int) -> None:
    """Copy scales of a box of a matrix of `width` columns to its 128x4 tiles, from [rows, columns] or other tiles."""
    above = swizzled_bytes(row // TILE_ROWS * TILE_ROWS, width)
    strides = scale.strides if scale.ndim == 2 else ()
    runs = _box_runs(row % TILE_ROWS, column, shape, width, strides)
    scale = scale if strides else scale[above:]
    engine_for(scale, tiles).copy(scale, tiles[above:], runs)


def scale_place(row: Array, column: Array, width: int) -> Array:
    """Return where the scales of given rows and columns lie in the 128x4 tiles of a matrix."""
    tile = row // TILE_ROWS * -(-width // TILE_COLS) + column // TILE_COLS
    return tile * TILE_BYTES + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + column % TILE_COLS


@bounded_cache(1 << 22)
def _box_runs(
    row: int, column: int, shape: tuple[int, int], width: int, strides: tuple[int, ...]
) -> RunTable:
    """Return the runs of `put_scales`: places are strided within 32 rows, and for whole groups of four columns."""
    bottom, right = row + shape[0], column + shape[1]
    whole_from = min(-(-column // 4) * 4, right)
    edges = (column, whole_from, max(whole_from, right // 4 * 4), right)
    rows = np.unique([row, *range(row // 32 * 32 + 32, bottom, 32), bottom])
    extents, places, offsets = [], [], []
    for top, end in pairwise(rows.tolist()):
        for first, last in pairwise(edges):
            groups = max(1, (last - first) // 4)
            extents.append((end - top, groups, (last - first) // groups))
            places.append(scale_place(top, first, width))
            offsets.append(
                (top - row) * strides[0] + (first - column) * strides[1] if strides else places[-1]
            )
    steps = np.broadcast_to([16, TILE_BYTES, 1], (len(extents), 3))
    own = np.broadcast_to([strides[0], 4 * strides[1], strides[1]], steps.shape) if strides else steps
    boxes = np.array(extents, np.int64).reshape(-1, 3)
    return lower(boxes, np.array(offsets, np.int64), np.array(places, np.int64), own, steps, 1, 1)


def _target(out: Array | None, shape: tuple[int, ...], source: Array, name: str) -> Array:
    if out is None:
        return allocate(shape, source.dtype, source)
    target = require_out(out, "out", shape, source.dtype)
    require_apart(target, "out", source, name)
    return target


def _require_bytes(array: object, name: str) -> Array:
    source = require_array(array, name)
    if source.dtype != np.uint8:
        raise DTypeError(
            f"{name} holds E8M0 bytes: expected uint8, got {source.dtype.name}; "
            f"write {name}.view(numpy.uint8)"
        )
    return source
