"""`content_sum`: weighted sums over an array's bits; those of any partition of an array add up to its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowshard.argument import as_shape, brief
from lowshard.box import Box, shape_of, strides_of
from lowshard.errors import BufferMismatchError, DTypeError
from lowshard.kernels.buffer import Array, is_gpu, require_array
from lowshard.kernels.engine import host_engine
from lowshard.kernels.kernel_stream import Stream, takes_stream
from lowshard.kernels.runs import whole_array_runs


@takes_stream
def content_sum(x: Array, box: Box, shape: Sequence[int], *, stream: Stream = None) -> npt.NDArray[np.uint32]:
    """Return the weighted sums of an array's bits, uint32 [2] (`kernels.unit_weights` has the formula).

    The sums of disjoint boxes that cover an array add up, modulo 2^32, to the sums of the array. Reads `x` once; the
    GIL is released meanwhile. A CuPy array is copied to the host first.

    Args:
        x: any dtype of whole bytes, any strides; the elements of `box`.
        box: which part of the whole array they are, in its coordinates.
        shape: of the whole array.
        stream: as for `quantize_mxfp8`; the host waits for it.

    Raises:
        KernelError: no NumPy or CuPy array.
        DTypeError: an array of Python objects, whose bits are addresses.
        BufferMismatchError: no box or no shape, or the box has another shape than the array, or does not lie within
            `shape`.
    """
    array = require_array(x, "x")
    if array.dtype.hasobject:
        raise DTypeError(f"content_sum takes arrays of values, not of Python objects, got {array.dtype}")
    shape = as_shape(
        shape, "shape is that of the whole array, a sequence of extents >= 0", BufferMismatchError
    )
    box = _checked_box(box)
    fits = len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
    if not fits or shape_of(box) != array.shape:
        raise BufferMismatchError(
            f"x holds the elements of a box of the whole array, got {list(array.shape)} for the box {brief(box)} "
            f"of {list(shape)}"
        )
    if not array.size:
        return np.zeros(2, np.uint32)
    if is_gpu(array):
        array = array.get()
    places = strides_of(shape)
    runs = whole_array_runs(array.shape, array.strides, tuple(places), array.dtype.itemsize, 1)
    return host_engine().bit_digest(
        array, runs, sum(a * step for (a, _), step in zip(box, places, strict=True))
    )


def _checked_box(box: Box) -> Box:
    try:
        return tuple((operator.index(start), operator.index(stop)) for start, stop in box)
    except (TypeError, ValueError) as error:
        raise BufferMismatchError(
            f"a box is a pair of integers for each dim, ((start, stop), ...), got {brief(box)}"
        ) from error
