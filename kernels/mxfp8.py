"""Quantise arrays to MXFP8 and back: checks, then one call of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, overload

import numpy as np

from lowshard import dtypes
from lowshard.argument import choice, truth, whole
from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.foreign_array import like
from lowshard.kernels import reference
from lowshard.kernels.buffer import Array, allocate, dtype_name, require_apart, require_array, require_out
from lowshard.kernels.cuda.cuda_engine import CudaEngine
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.mxfp8_tensor import (
    TILE_ROWS,
    MXFP8Tensor,
    ScaleLayout,
    SwizzledMXFP8,
    scale_shape,
    swizzled_bytes,
    swizzled_scale_shape,
    tensor_like,
)
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.runs import whole_array_runs
from lowshard.kernels.staging import assign, contiguous
from lowshard.kernels.swizzle import put_scales, unswizzle_scales

FLOATS = ("bfloat16", "float16", "float32")

_UINT8 = np.dtype(np.uint8)

# Elements that are copied at a time where strides or byte order keep a kernel from working in place.
_STAGED_ELEMS = 1 << 20


@overload
def quantize_mxfp8(
    x: Array,
    elem: Elem = "e4m3",
    mode: Mode = "rceil",
    out: MXFP8Tensor | None = None,
    min_scale_byte: int = 0,
    *,
    scale_layout: Literal["rows"] = "rows",
    streaming: bool | None = None,
    stream: Stream = None,
) -> MXFP8Tensor: ...


@overload
def quantize_mxfp8(
    x: Array,
    elem: Elem = "e4m3",
    mode: Mode = "rceil",
    out: SwizzledMXFP8 | None = None,
    min_scale_byte: int = 0,
    *,
    scale_layout: Literal["128x4"],
    streaming: bool | None = None,
    stream: Stream = None,
) -> SwizzledMXFP8: ...


@takes_stream
def quantize_mxfp8(
    x: Array,
    elem: Elem = "e4m3",
    mode: Mode = "rceil",
    out: MXFP8Tensor | SwizzledMXFP8 | None = None,
    min_scale_byte: int = 0,
    *,
    scale_layout: ScaleLayout = "rows",
    streaming: bool | None = None,
    stream: Stream = None,
) -> MXFP8Tensor | SwizzledMXFP8:
    """Quantise an array to MXFP8 in blocks of 32 along its last dim.

    Elements are rounded to nearest, ties to even, and clamped to the largest finite value; zero keeps its
    sign. A block of zeros gets scale byte 0. A block that holds a NaN or an Inf gets scale byte 255 and
    code 0x7F throughout.

    Args:
        x: bf16, fp16 or fp32 array [..., K] of any strides and any library, K a multiple of 32. Where the last dim is
            not contiguous it is copied first, some million elements at a time.
        elem: element type, "e4m3" (maximum 448) or "e5m2" (57344).
        mode: how the power-of-two scale is chosen. "rceil": the smallest under which nothing is clamped;
            "floor": the one of the OCP text, which clamps maxima above 1.75 * 2^n; "even": as floor after
            rounding the maximum to the element's mantissa; "ceil": the maximum rounded up to a power of two.
        out: buffers to write into; they must not share memory with x or with each other.
        min_scale_byte: lowest scale byte of a finite block, 0 to 254. Some consumers read byte 0
            as zero: pass 1 for them.
        scale_layout: "rows", scale bytes [..., K/32]; or "128x4", the tiles that block-scaled matrix products read:
            the bytes of `swizzle_scales`, padding zeroed, written in the same pass. x is a matrix then: each matrix
            of a stack has tiles of its own.
        streaming: write past a CPU's caches; by default where x alone would fill them. True is for one of many
            arrays that nobody reads soon.
        stream: on GPUs, where the work is put: a stream of CuPy or torch, an object with __cuda_stream__, or an
            address; by default the current one of the GPU that holds the arrays.

    Returns:
        `out` if given, else a new `MXFP8Tensor`, or for "128x4" a new `SwizzledMXFP8`, with C-contiguous buffers of
        the library that x is of.

    Raises:
        KernelError: x is not an array, has no dim or a last dim that is not a multiple of 32, or for "128x4" is
            not 2-D; unknown elem, mode or scale_layout; out is of the other layout; min_scale_byte out of range.
        DTypeError: x is not bf16, fp16 or fp32.
        BufferMismatchError: out has another shape or elem, is read-only, or shares memory; for "128x4" its scale is
            not contiguous.
        KernelError: x and out lie in different places (host, GPU), or a stream is named and they lie on the host.
        StreamError: stream is not a stream, or belongs to another GPU.
    """
    floor_byte = checked_options(elem, mode, min_scale_byte)
    choice(scale_layout, get_args(ScaleLayout), 'scale_layout is "rows" or "128x4"', KernelError)
    if streaming is not None:
        streaming = truth(streaming, "streaming is True, False or None", KernelError)
    source = require_float(x, "x", "quantize_mxfp8")
    if scale_layout == "128x4":
        swizzled = _quantize_swizzled(source, elem, mode, out, floor_byte, streaming)
        return tensor_like(swizzled, x) if out is None else swizzled
    rowwise = _quantize_rows(source, elem, mode, out, floor_byte, streaming)
    return tensor_like(rowwise, x) if out is None else rowwise


def _quantize_rows(
    source: Array,
    elem: Elem,
    mode: Mode,
    out: MXFP8Tensor | SwizzledMXFP8 | None,
    floor_byte: int,
    streaming: bool | None,
) -> MXFP8Tensor:
    blocks = scale_shape(source.shape, "x")
    if out is None:
        out = MXFP8Tensor(allocate(source.shape, _UINT8, source), allocate(blocks, _UINT8, source), elem)
        data, scale = out.data, out.scale
    elif isinstance(out, SwizzledMXFP8):
        raise KernelError(
            'out is a SwizzledMXFP8 and scale_layout says "rows"; pass scale_layout="128x4", or an MXFP8Tensor'
        )
    else:
        data, scale = checked_out(out, elem, source, "x", source.shape)
    if not source.size:
        return out

    engine = engine_for(source, data, scale)
    if source.dtype.isnative and scales_follow(data, scale):
        runs = whole_array_runs(source.shape, source.strides, data.strides, source.dtype.itemsize, 1)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            engine.quantize(source, data, scale, runs, elem, mode, floor_byte, streaming)
            return out
    for part, blocks_part in _parts(source.shape):
        q = quantize_mxfp8(contiguous(source[part]), elem, mode, min_scale_byte=floor_byte)
        assign(data[part], q.data)
        assign(scale[blocks_part], q.scale)
    return out


def _quantize_swizzled(
    source: Array,
    elem: Elem,
    mode: Mode,
    out: MXFP8Tensor | SwizzledMXFP8 | None,
    floor_byte: int,
    streaming: bool | None,
) -> SwizzledMXFP8:
    expected = swizzled_scale_shape(source.shape, "x")
    if out is None:
        out = SwizzledMXFP8(allocate(source.shape, _UINT8, source), allocate(expected, _UINT8, source), elem)
        data, scale = out.data, out.scale
    elif isinstance(out, SwizzledMXFP8):
        data, scale = _checked_buffers(out, elem, source, "x", source.shape)
        if not scale.flags.c_contiguous:
            raise BufferMismatchError(
                "out.scale in the 128x4 layout must be contiguous; pass a buffer that is not a slice"
            )
    else:
        raise KernelError(
            f'out of scale_layout="128x4" must be a SwizzledMXFP8, got {type(out).__qualname__}; '
            "write SwizzledMXFP8(data, swizzled, elem)"
        )
    if not source.size:
        return out

    engine = engine_for(source, data, scale)
    if source.dtype.isnative and data.flags.c_contiguous:
        runs = whole_array_runs(source.shape, source.strides, data.strides, source.dtype.itemsize, 1)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            engine.quantize_swizzled(source, data, scale, elem, mode, floor_byte, streaming)
            return out
    rowwise = MXFP8Tensor(data, allocate(scale_shape(source.shape, "x"), _UINT8, source), elem)
    quantize_mxfp8(source, elem, mode, rowwise, floor_byte, streaming=streaming)
    engine.swizzle(rowwise.scale, scale)
    return out


def quantize_into_tiles(
    x: Array, data: Array, scale: Array, row: int, column: int, elem: Elem, mode: Mode
) -> None:
    """Quantise a part of a matrix, whose scales lie in the 128x4 layout, from a row and a column on; the rest stays."""
    width = data.shape[1]
    engine = engine_for(x, data, scale)
    if isinstance(engine, CudaEngine) and data.flags.c_contiguous:
        above = row // TILE_ROWS * TILE_ROWS
        offset = (row - above) * width + column
        runs = whole_array_runs(x.shape, x.strides, data.strides, x.dtype.itemsize, 1, offset)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            blocks = width // BLOCK_ELEMS
            tiles = scale[swizzled_bytes(above, blocks) :]
            engine.quantize(x, data[above:], tiles, runs, elem, mode, 0, None, blocks)
            return
    codes = data[row : row + x.shape[0], column : column + x.shape[1]]
    rowwise = allocate(scale_shape(x.shape, "x"), _UINT8, x)
    quantize_mxfp8(x, elem, mode, MXFP8Tensor(codes, rowwise, elem), streaming=True)
    put_scales(rowwise, scale, row, column // BLOCK_ELEMS, rowwise.shape, width // BLOCK_ELEMS)


@takes_stream
def dequantize_mxfp8(
    q: MXFP8Tensor | SwizzledMXFP8,
    dtype: object = "bfloat16",
    out: Array | None = None,
    *,
    stream: Stream = None,
) -> Array:
    """Return the values of an MXFP8 tensor: the exact product of code and scale, rounded once.

    Rounding is to nearest, ties to even. Products too large for `dtype` become Inf; scale byte 255 and NaN
    codes become NaN.

    Args:
        q: the quantised tensor. The scales of a `SwizzledMXFP8` are copied to rows first, 1/32 byte an element.
        dtype: "bfloat16", "float16" or "float32" (or an alias of these, or a dtype of NumPy, torch or JAX).
        out: array of q's shape and of `dtype` to write into; it must not share memory with q.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new C-contiguous array of q's shape, of the library that q.data is of.

    Raises:
        KernelError: q is neither MXFP8Tensor nor SwizzledMXFP8, or out no array.
        DTypeError: dtype is none of the three.
        BufferMismatchError: out has another shape or dtype, is read-only, or shares memory with q.
    """
    if not isinstance(q, (MXFP8Tensor, SwizzledMXFP8)):
        raise KernelError(
            f"dequantize_mxfp8 takes an MXFP8Tensor, got {type(q).__qualname__}; "
            "write MXFP8Tensor(data, scale, elem)"
        )
    row = dtypes.get(dtype)
    if row.name not in FLOATS:
        raise DTypeError(f"dequantize_mxfp8 gives {', '.join(FLOATS)}, got dtype {row.name}")
    data, scale = require_array(q.data, "q.data"), require_array(q.scale, "q.scale")
    if out is None:
        target = allocate(data.shape, row.numpy, data)
    else:
        target = require_out(out, "out", data.shape, row.numpy)
        require_apart(target, "out", data, "q.data")
        require_apart(target, "out", scale, "q.scale")
    _dequantize(q, data, scale, target)
    return like(target, q.data) if out is None else out


def _dequantize(q: MXFP8Tensor | SwizzledMXFP8, data: Array, scale: Array, target: Array) -> None:
    if not target.size:
        return
    if isinstance(q, SwizzledMXFP8):
        scale = unswizzle_scales(scale, *scale_shape(data.shape, "q.data"))

    engine = engine_for(data, scale, target)
    if target.dtype.isnative and scales_follow(data, scale):
        runs = whole_array_runs(data.shape, data.strides, target.strides, 1, target.dtype.itemsize)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            engine.dequantize(data, scale, q.elem, target, runs)
            return
    for part, blocks_part in _parts(data.shape):
        piece = MXFP8Tensor(contiguous(data[part]), contiguous(scale[blocks_part]), q.elem)
        assign(target[part], dequantize_mxfp8(piece, dtype_name(target.dtype)))


def checked_options(elem: Elem, mode: Mode, min_scale_byte: int) -> int:
    """Return min_scale_byte as an int, or raise KernelError for any of the three."""
    reference.scale_round_up(reference.element_format(elem), mode)
    rule = "min_scale_byte is an integer from 0 to 254 (255 is NaN)"
    return whole(min_scale_byte, rule, KernelError, 0, reference.SCALE_NAN - 1)


def require_float(x: object, name: str, call: str) -> Array:
    """Return `x` if it is a bf16, fp16 or fp32 array; else raise KernelError or DTypeError."""
    source = require_array(x, name)
    if dtype_name(source.dtype) not in FLOATS:
        raise DTypeError(
            f"{call} takes {', '.join(FLOATS)}, got {source.dtype.name}; convert it first, "
            f"{name}.astype(numpy.float32), or {name}.float() of torch"
        )
    return source


def checked_out(
    out: object, elem: str, source: Array, name: str, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Return the two buffers of an output tensor, or raise KernelError or BufferMismatchError."""
    if not isinstance(out, MXFP8Tensor):
        raise KernelError(
            f"out must be an MXFP8Tensor, got {type(out).__qualname__}; write MXFP8Tensor(data, scale, elem)"
        )
    return _checked_buffers(out, elem, source, name, shape)


def _checked_buffers(
    out: MXFP8Tensor | SwizzledMXFP8, elem: str, source: Array, name: str, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    if out.elem != elem:
        raise BufferMismatchError(f'out is for "{out.elem}" and elem says "{elem}"; pass elem="{out.elem}"')
    data = require_out(out.data, "out.data", shape, _UINT8)
    scale = require_out(out.scale, "out.scale", out.scale.shape, _UINT8)
    require_apart(data, "out.data", source, name)
    require_apart(scale, "out.scale", source, name)
    require_apart(data, "out.data", scale, "out.scale")
    return data, scale


def scales_follow(data: Array, scale: Array) -> bool:
    """Return True when the scale of the block at byte i of data lies at byte i / 32 of scale."""
    *outer, last = zip(data.shape, data.strides, scale.strides, strict=True)
    if last[0] > BLOCK_ELEMS and last[2] != 1:
        return False
    return all(extent == 1 or step == BLOCK_ELEMS * scale_step for extent, step, scale_step in outer)


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the first dim, of an array and of its scales, of some `_STAGED_ELEMS` elements."""
    per = BLOCK_ELEMS if len(shape) == 1 else 1
    rows = shape[0] // per
    row_elems = int(np.prod(shape)) // rows
    step = max(1, _STAGED_ELEMS // row_elems)
    for row in range(0, rows, step):
        stop = min(row + step, rows)
        yield slice(row * per, stop * per), slice(row, stop)
