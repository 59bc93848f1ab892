"""Wrong calls of the MXFP8 kernels: the named error, before any element is read or written."""

from __future__ import annotations

import numpy as np
import pytest

from lowshard.errors import BufferMismatchError, DependencyError, DTypeError, KernelError, LowshardError
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8


class OnGpu:
    """What a kernel sees of a GPU array of another library: the protocol attribute, and no NumPy array."""

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("it must not be asked")


def read_only(array):
    array.flags.writeable = False
    return array


def tensor(data_shape, scale_shape, elem="e4m3"):
    return MXFP8Tensor(np.zeros(data_shape, np.uint8), np.zeros(scale_shape, np.uint8), elem)


ONES = np.ones((2, 64), np.float32)
GOOD = tensor((2, 64), (2, 2))
READ_ONLY = read_only(np.zeros((2, 64), np.uint8))
ARENA = np.zeros(2 * 64 * 4, np.uint8)
IN_ARENA = ARENA.view(np.float32).reshape(2, 64)


CALLS = {
    "quantize": [
        (lambda: quantize_mxfp8(ONES[:, :40]), KernelError, "multiple of 32"),
        (lambda: quantize_mxfp8(np.zeros((), np.float32)), KernelError, "at least one dim"),
        (lambda: quantize_mxfp8(ONES.tolist()), KernelError, "numpy.asarray"),
        (lambda: quantize_mxfp8(OnGpu()), DependencyError, "CuPy"),
        (lambda: quantize_mxfp8(ONES.astype(np.float64)), DTypeError, "float64"),
        (lambda: quantize_mxfp8(np.ma.masked_array(ONES)), BufferMismatchError, "mask"),
        (lambda: quantize_mxfp8(ONES, "e3m4"), KernelError, "e4m3"),
        (lambda: quantize_mxfp8(ONES[:0], mode="round"), KernelError, "rceil"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=255), KernelError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, out=ONES), KernelError, "MXFP8Tensor"),
        (lambda: quantize_mxfp8(ONES, "e5m2", out=GOOD), BufferMismatchError, "e4m3"),
        (lambda: quantize_mxfp8(ONES, out=tensor((2, 32), (2, 1))), BufferMismatchError, "out.data"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(READ_ONLY, GOOD.scale)), BufferMismatchError, "written to"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(GOOD.data, READ_ONLY[:, :2])), BufferMismatchError, "out.scale"),
        (lambda: quantize_mxfp8(IN_ARENA, out=MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale)),
         BufferMismatchError, "out.data must not share memory"),
        (lambda: quantize_mxfp8(IN_ARENA, out=MXFP8Tensor(GOOD.data, ARENA[508:].reshape(2, 2))),
         BufferMismatchError, "out.scale must not share memory"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(ARENA[:128].reshape(2, 64), ARENA[4:8].reshape(2, 2))),
         BufferMismatchError, "must not share memory with out.scale"),
    ],
    "dequantize": [
        (lambda: dequantize_mxfp8(GOOD.data), KernelError, "MXFP8Tensor"),
        (lambda: dequantize_mxfp8(GOOD, "float64"), DTypeError, "float64"),
        (lambda: dequantize_mxfp8(GOOD, out=ONES.copy()), BufferMismatchError, "bfloat16"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=OnGpu()), DependencyError, "CuPy"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=ONES[:1].copy()), BufferMismatchError, "out must be"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=read_only(ONES.copy())), BufferMismatchError, "read-only"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale), "float32", out=IN_ARENA),
         BufferMismatchError, "q.data"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(GOOD.data, ARENA[:4].reshape(2, 2)), "float32", out=IN_ARENA),
         BufferMismatchError, "q.scale"),
    ],
    "MXFP8Tensor": [
        (lambda: MXFP8Tensor(GOOD.data, GOOD.data), BufferMismatchError, "needs scale"),
        (lambda: tensor((2, 33), (2, 1)), KernelError, "multiple of 32"),
        (lambda: MXFP8Tensor(GOOD.data.view(np.int8), GOOD.scale), DTypeError, "view"),
        (lambda: MXFP8Tensor(GOOD.data, None), KernelError, "scale must be"),
        (lambda: MXFP8Tensor.over(ONES, (2, 64)), DTypeError, "numpy.uint8"),
        (lambda: MXFP8Tensor.over(ARENA[:131], (2, 64)), BufferMismatchError, "132 bytes"),
        (lambda: MXFP8Tensor.over(ARENA[::2], (2, 64)), BufferMismatchError, "contiguous"),
        (lambda: MXFP8Tensor.over(ARENA, (64, 2)), KernelError, "multiple of 32"),
        (lambda: MXFP8Tensor.buffer_bytes((2, -64)), KernelError, "0 or more"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_wrong_calls_raise_the_named_error(function):
    for call, error, word in CALLS[function]:
        with pytest.raises(error, match=word):
            call()


def test_buffers_that_interleave_without_a_common_byte_are_apart():
    arena = np.zeros((4, 2, 64), np.uint8)
    x = np.full((4, 64), 1, np.float32)
    out = MXFP8Tensor(arena[:, 0], arena[:, 1, 10:12])
    quantize_mxfp8(x, out=out)
    assert (out.scale != 0).all()
    assert not arena[:, 1, :10].any()


def test_nothing_is_written_by_a_call_that_raises():
    out = tensor((2, 64), (2, 2))
    for wrong in (ONES[:, :32], ONES.astype(np.float64), ONES.tolist()):
        with pytest.raises(LowshardError):
            quantize_mxfp8(wrong, out=out)
    with pytest.raises(BufferMismatchError):
        quantize_mxfp8(ONES, out=MXFP8Tensor(out.data, READ_ONLY[:, :2]))
    assert not out.data.any()
    assert not out.scale.any()
