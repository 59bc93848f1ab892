"""Packing and MXFP8 in one pass: boxes of an array to quantised bytes for a message, and back.

Every box is quantised by itself, in blocks of 32 along its own last dim from its own start. Weights split at multiples
of 32 there, and the blocks are those of the whole weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowshard.box import Box
from lowshard.errors import DTypeError, KernelError
from lowshard.kernels.buffer import Array, allocate, dtype_name, require_apart, require_array, require_out
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.mxfp8 import (
    FLOATS,
    checked_options,
    checked_out,
    dequantize_mxfp8,
    quantize_mxfp8,
    require_float,
    scales_follow,
)
from lowshard.kernels.mxfp8_tensor import MXFP8Tensor, tensor_like
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.slices import BoxTable, as_table, pack, require_disjoint, unpack


@takes_stream
def pack_quantize(
    src: Array,
    table: BoxTable | Sequence[Box],
    elem: Elem = "e4m3",
    mode: Mode = "rceil",
    out: MXFP8Tensor | None = None,
    min_scale_byte: int = 0,
    *,
    stream: Stream = None,
) -> MXFP8Tensor:
    """Quantise boxes of an array, each row-major, one after the other into a 1-D tensor, in one pass.

    The bytes are those of `quantize_mxfp8(pack(src, table))`.

    Args:
        src: bf16, fp16 or fp32 array of any strides, with the table's shape. Where its last dim is not contiguous
            the boxes are packed first, and then quantised.
        table: a `BoxTable`, or the boxes themselves (checked on every call then). The extent of every box in
            the last dim is a multiple of 32.
        elem: element type, as in `quantize_mxfp8`.
        mode: how the scale is chosen, as in `quantize_mxfp8`.
        out: tensor [total_elems] to write into; it must not share memory with src.
        min_scale_byte: lowest scale byte of a finite block.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new tensor [total_elems] in one buffer, codes then scales (`MXFP8Tensor.over`), of the
        library that src is of.

    Raises:
        KernelError: src is not an array, a box does not fit or is not a multiple of 32 wide, or an option
            is unknown.
        DTypeError: src is not bf16, fp16 or fp32.
        BufferMismatchError: src has another shape than the table, or out is not the tensor described above.
    """
    floor_byte = checked_options(elem, mode, min_scale_byte)
    source = require_float(src, "src", "pack_quantize")
    boxes = as_table(table, source, "src")
    _require_whole_blocks(boxes)
    shape = (boxes.total_elems,)
    if out is None:
        wire = allocate((MXFP8Tensor.buffer_bytes(shape),), np.dtype(np.uint8), source)
        made = MXFP8Tensor.over(wire, shape, elem)
    else:
        made = MXFP8Tensor(*checked_out(out, elem, source, "src", shape), elem)
    if boxes.total_elems:
        _pack_quantize(source, boxes, made, mode, floor_byte)
    return tensor_like(made, src) if out is None else out


def _pack_quantize(source: Array, boxes: BoxTable, there: MXFP8Tensor, mode: Mode, floor_byte: int) -> None:
    data, scale, elem = there.data, there.scale, there.elem
    engine = engine_for(source, data, scale)
    if source.dtype.isnative and scales_follow(data, scale):
        runs = boxes.runs(source.strides, source.dtype.itemsize, data.strides[0], 1, False)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            engine.quantize(source, data, scale, runs, elem, mode, floor_byte)
            return
    quantize_mxfp8(pack(source, boxes), elem, mode, there, floor_byte)


@takes_stream
def unpack_dequantize(
    q: MXFP8Tensor, table: BoxTable | Sequence[Box], out: Array, *, stream: Stream = None
) -> Array:
    """Dequantise a packed tensor into the boxes of an array, in one pass; other elements stay as they are.

    Args:
        q: what `pack_quantize` gave with this table, [total_elems].
        table: a `BoxTable`, or the boxes themselves (checked on every call then).
        out: bf16, fp16 or fp32 array of any strides, with the table's shape; it must not share memory with q.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out`.

    Raises:
        KernelError: q is not an MXFP8Tensor, out is not an array; a box does not fit or is not a multiple of 32
            wide; two boxes overlap.
        DTypeError: out is not bf16, fp16 or fp32.
        BufferMismatchError: out or q has another shape, out is read-only, or they share memory.
    """
    if not isinstance(q, MXFP8Tensor):
        raise KernelError(
            f"unpack_dequantize takes an MXFP8Tensor, got {type(q).__qualname__}; "
            "write MXFP8Tensor(data, scale, elem)"
        )
    target = require_array(out, "out")
    if dtype_name(target.dtype) not in FLOATS:
        raise DTypeError(f"unpack_dequantize writes {', '.join(FLOATS)}, got out of {target.dtype.name}")
    boxes = as_table(table, target, "out")
    _require_whole_blocks(boxes)
    require_out(out, "out", boxes.shape, target.dtype)
    data = require_out(q.data, "q.data", (boxes.total_elems,), np.dtype(np.uint8), writeable=False)
    scale = require_array(q.scale, "q.scale")
    require_apart(target, "out", data, "q.data")
    require_apart(target, "out", scale, "q.scale")
    require_disjoint(boxes, "unpack_dequantize")
    if not boxes.total_elems:
        return out

    engine = engine_for(data, scale, target)
    if target.dtype.isnative and scales_follow(data, scale):
        runs = boxes.runs(target.strides, target.dtype.itemsize, data.strides[0], 1, True)
        if runs.run_divisor_elems % BLOCK_ELEMS == 0:
            engine.dequantize(data, scale, q.elem, target, runs)
            return out
    packed = allocate((boxes.total_elems,), target.dtype, target)
    unpack(dequantize_mxfp8(q, target.dtype.name, packed), boxes, target)
    return out


def _require_whole_blocks(table: BoxTable) -> None:
    if not table.shape:
        raise KernelError("boxes of MXFP8 blocks need at least one dim to lay them along, got a 0-d array")
    if table.last_dim_divisor % BLOCK_ELEMS:
        index = next(i for i, box in enumerate(table.boxes) if (box[-1][1] - box[-1][0]) % BLOCK_ELEMS)
        start, stop = table.boxes[index][-1]
        raise KernelError(
            f"every box must be a multiple of {BLOCK_ELEMS} elements wide in the last dim, the MX block, got "
            f"({start}, {stop}) in box {index}; split at multiples of {BLOCK_ELEMS}, or send this box unquantised"
        )
