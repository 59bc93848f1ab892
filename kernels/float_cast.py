"""Float arrays in another float dtype, and sums of 16-bit floats that are accumulated in fp32."""

from __future__ import annotations

from collections.abc import Sequence

from lowshard import dtypes
from lowshard.argument import truth
from lowshard.errors import BufferMismatchError, DTypeError, KernelError
from lowshard.foreign_array import like
from lowshard.kernels.buffer import Array, allocate, require_apart, require_out
from lowshard.kernels.engine import engine_for
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.mxfp8 import FLOATS, require_float
from lowshard.kernels.runs import whole_array_runs
from lowshard.kernels.staging import assign, contiguous


@takes_stream
def cast(x: Array, dtype: object, out: Array | None = None, *, stream: Stream = None) -> Array:
    """Return an array in another float dtype: to nearest, ties to even, overflow to Inf.

    A NaN becomes the quiet NaN of its sign: 0x7FC0 (bf16), 0x7E00 (fp16), 0x7FC00000 (fp32), plus the sign bit. The
    result does not depend on the rounding or flush-to-zero mode of the process.

    Args:
        x: bf16, fp16 or fp32 array of any shape and strides.
        dtype: "bfloat16", "float16" or "float32" (or an alias of these, or a dtype of NumPy, torch or JAX).
        out: array of x's shape and of `dtype` to write into; it must not share memory with x.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out` if given, else a new C-contiguous array of the library that x is of.

    Raises:
        KernelError: x or out is not an array.
        DTypeError: x or dtype is none of the three.
        BufferMismatchError: out has another shape or dtype, is read-only, or shares memory with x.
    """
    source = require_float(x, "x", "cast")
    row = dtypes.get(dtype)
    if row.name not in FLOATS:
        raise DTypeError(f"cast gives {', '.join(FLOATS)}, got dtype {row.name}")
    if out is None:
        target = allocate(source.shape, row.numpy, source)
    else:
        target = require_out(out, "out", source.shape, row.numpy)
        require_apart(target, "out", source, "x")
    if source.size:
        _cast(source, target)
    return like(target, x) if out is None else out


def _cast(source: Array, target: Array) -> None:
    engine = engine_for(source, target)
    source = _native(source)
    native = target
    if not target.dtype.isnative:
        native = allocate(target.shape, target.dtype.newbyteorder("="), target)
    runs = whole_array_runs(
        source.shape, source.strides, native.strides, source.dtype.itemsize, native.dtype.itemsize
    )
    engine.cast(source, native, runs)
    if native is not target:
        assign(target, native)


@takes_stream
def sum_into(
    out: Array, sources: Array | Sequence[Array], accumulate: bool = True, *, stream: Stream = None
) -> Array:
    """Add arrays to `out`, in fp32 from left to right, rounded once to out's dtype at the end.

    The value is `((out + s0) + s1) + ...`; without `accumulate` it is `(s0 + s1) + ...` and what `out` held
    counts for nothing. NaN results are NaN; which one is not said.

    Args:
        out: bf16, fp16 or fp32 array of any shape and strides, written in place.
        sources: one array or several, each bf16, fp16 or fp32 and of out's shape. They must not share memory
            with out.
        accumulate: whether what `out` holds is the first term.
        stream: as for `quantize_mxfp8`.

    Returns:
        `out`.

    Raises:
        KernelError: an argument is not an array, or there is no source.
        DTypeError: a dtype is none of the three.
        BufferMismatchError: a source has another shape than out or shares memory with it; out is read-only.
    """
    accumulate = truth(accumulate, "accumulate is True or False", KernelError)
    target = require_float(out, "out", "sum_into")
    require_out(out, "out", target.shape, target.dtype)
    listed = list(sources) if isinstance(sources, (list, tuple)) else [sources]
    if not listed:
        raise KernelError("sum_into needs at least one source, got none; write sum_into(out, [x, ...])")
    parts = []
    for index, item in enumerate(listed):
        name = f"sources[{index}]"
        part = require_float(item, name, "sum_into")
        if part.shape != target.shape:
            raise BufferMismatchError(
                f"{name} must have the shape of out, {list(target.shape)}, got {list(part.shape)}; "
                "nothing is broadcast"
            )
        require_apart(target, "out", part, name)
        parts.append(part)
    if not target.size:
        return out
    engine = engine_for(target, *parts)
    flat = [_native(part) if part.flags.c_contiguous else contiguous(part) for part in parts]
    if target.flags.c_contiguous and target.dtype.isnative:
        engine.sum_into(target, flat, accumulate)
    else:
        staged = contiguous(target)
        engine.sum_into(staged, flat, accumulate)
        assign(target, staged)
    return out


def _native(array: Array) -> Array:
    return array if array.dtype.isnative else contiguous(array)
