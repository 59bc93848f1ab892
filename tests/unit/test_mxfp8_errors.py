"""Wrong calls of the MXFP8 kernels: the named error, with the rule in its text, before any element is read."""

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
FROZEN_VALUES = read_only(np.zeros((2, 64), np.float32))


@pytest.mark.parametrize(
    ("call", "error", "builtin", "text"),
    [
        (lambda: quantize_mxfp8(ONES[:, :40]), KernelError, ValueError, r"multiple of 32.*\[2, 40\].*padded for you"),
        (lambda: quantize_mxfp8(np.float32(1) + np.zeros(())), KernelError, ValueError,
         r"x must be a NumPy or CuPy array.*, got numpy.float64; write numpy.asarray\(x, dtype\)"),
        (lambda: quantize_mxfp8(np.zeros((), np.float32)), KernelError, ValueError, "at least one dim"),
        (lambda: quantize_mxfp8(ONES.tolist()), KernelError, ValueError,
         r"NumPy or CuPy array.*, got builtins.list; write numpy.asarray\(x, dtype\)"),
        (lambda: quantize_mxfp8(OnGpu()), DependencyError, ImportError, "seen through CuPy, which is not"),
        (lambda: quantize_mxfp8(ONES.astype(np.float64)), DTypeError, TypeError, "got float64; convert it first"),
        (lambda: quantize_mxfp8(np.ma.masked_array(ONES)), BufferMismatchError, ValueError, "without a mask"),
        (lambda: quantize_mxfp8(ONES.astype(np.int32)), DTypeError, TypeError, "got int32"),
        (lambda: quantize_mxfp8(ONES, "e3m4"), KernelError, ValueError, '"e4m3" or "e5m2", got \'e3m4\''),
        (lambda: quantize_mxfp8(ONES, ["e4m3"]), KernelError, ValueError, "e5m2"),
        (lambda: quantize_mxfp8(ONES, mode="round"), KernelError, ValueError, "one of rceil, floor, even, ceil"),
        (lambda: quantize_mxfp8(ONES[:0], mode="round"), KernelError, ValueError, "one of rceil"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=255), KernelError, ValueError, "0 to 254.*got 255"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=-1), KernelError, ValueError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=1.0), KernelError, ValueError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, out=ONES), KernelError, ValueError, "out must be an MXFP8Tensor"),
        (lambda: quantize_mxfp8(ONES, "e5m2", out=GOOD), BufferMismatchError, ValueError, 'out is for "e4m3"'),
        (lambda: quantize_mxfp8(ONES, out=tensor((2, 32), (2, 1))), BufferMismatchError, ValueError,
         r"out.data must be uint8 \[2, 64\], got uint8 \[2, 32\]"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(READ_ONLY, GOOD.scale)), BufferMismatchError, ValueError,
         "out.data is written to, but"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(GOOD.data, READ_ONLY[:, :2])), BufferMismatchError, ValueError,
         "out.scale is written to, but"),
        (lambda: quantize_mxfp8(ARENA.view(np.float32).reshape(2, 64),
                                out=MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale)),
         BufferMismatchError, ValueError, "out.data must not share memory with x"),
        (lambda: quantize_mxfp8(ARENA.view(np.float32).reshape(2, 64),
                                out=MXFP8Tensor(GOOD.data, ARENA[508:].reshape(2, 2))),
         BufferMismatchError, ValueError, "out.scale must not share memory with x"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(ARENA[:128].reshape(2, 64), ARENA[4:8].reshape(2, 2))),
         BufferMismatchError, ValueError, "out.data must not share memory with out.scale"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.data), BufferMismatchError, ValueError,
         r"\[2, 64\] needs scale \[2, 2\], got \[2, 64\]"),
        (lambda: tensor((2, 33), (2, 1)), KernelError, ValueError, "last dim of data must be a multiple of 32"),
        (lambda: tensor((), ()), KernelError, ValueError, "at least one dim"),
        (lambda: MXFP8Tensor(GOOD.data.view(np.int8), GOOD.scale), DTypeError, TypeError, "data.view"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.scale.astype(np.float32)), DTypeError, TypeError, "got float32"),
        (lambda: MXFP8Tensor(OnGpu(), GOOD.scale), DependencyError, ImportError, "seen through CuPy, which is not"),
        (lambda: MXFP8Tensor(GOOD.data, None), KernelError, ValueError, "scale must be a NumPy or CuPy array"),
        (lambda: MXFP8Tensor(GOOD.data, GOOD.scale, "fp8"), KernelError, ValueError, "e4m3"),
        (lambda: dequantize_mxfp8(GOOD.data), KernelError, ValueError, "takes an MXFP8Tensor, got ndarray"),
        (lambda: dequantize_mxfp8(GOOD, "float64"), DTypeError, TypeError, "got dtype float64"),
        (lambda: dequantize_mxfp8(GOOD, "no such"), DTypeError, TypeError, "no such"),
        (lambda: dequantize_mxfp8(GOOD, out=ONES.copy()), BufferMismatchError, ValueError,
         r"out must be bfloat16 \[2, 64\], got float32"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=OnGpu()), DependencyError, ImportError,
         "seen through CuPy, which is not"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=ONES[:1].copy()), BufferMismatchError, ValueError,
         r"got float32 \[1, 64\]"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=FROZEN_VALUES), BufferMismatchError, ValueError, "read-only"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(ARENA[:128].reshape(2, 64), GOOD.scale), "float32",
                                  out=ARENA.view(np.float32).reshape(2, 64)),
         BufferMismatchError, ValueError, "must not share memory with q.data"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(GOOD.data, ARENA[:4].reshape(2, 2)), "float32",
                                  out=ARENA.view(np.float32).reshape(2, 64)),
         BufferMismatchError, ValueError, "must not share memory with q.scale"),
        (lambda: MXFP8Tensor.over(ONES, (2, 64)), DTypeError, TypeError,
         r"buffer must be uint8, got float32; write buffer.view\(numpy.uint8\)"),
        (lambda: MXFP8Tensor.over([0] * 132, (2, 64)), KernelError, ValueError, "buffer must be a NumPy or CuPy array"),
        (lambda: MXFP8Tensor.over(ARENA[:131], (2, 64)), BufferMismatchError, ValueError,
         r"MXFP8Tensor \[2, 64\] lies in a contiguous 1-D buffer of 132 bytes or more, got \[131\]; write numpy.empty"),
        (lambda: MXFP8Tensor.over(ARENA[::2], (2, 64)), BufferMismatchError, ValueError, "contiguous 1-D buffer"),
        (lambda: MXFP8Tensor.over(ARENA.reshape(2, 256), (2, 64)), BufferMismatchError, ValueError, r"got \[2, 256\]"),
        (lambda: MXFP8Tensor.over(ARENA, (64, 2)), KernelError, ValueError,
         "last dim of shape must be a multiple of 32"),
        (lambda: MXFP8Tensor.over(ARENA, ()), KernelError, ValueError, "at least one dim"),
        (lambda: MXFP8Tensor.over(ARENA, (2, 64), "e3m4"), KernelError, ValueError, "e5m2"),
        (lambda: MXFP8Tensor.over(ARENA, (-2, 64)), KernelError, ValueError, "integers of 0 or more"),
        (lambda: MXFP8Tensor.buffer_bytes((2, -64)), KernelError, ValueError, "integers of 0 or more"),
        (lambda: MXFP8Tensor.buffer_bytes(64), KernelError, ValueError, "integers of 0 or more"),
        (lambda: MXFP8Tensor.buffer_bytes((1.0, 64)), KernelError, ValueError, "integers of 0 or more"),
        (lambda: MXFP8Tensor.buffer_bytes((1 << 70, 64)), KernelError, ValueError, "integers of 0 or more"),
        (lambda: MXFP8Tensor.buffer_bytes((4, 65)), KernelError, ValueError, "multiple of 32"),
    ],
)  # fmt: skip
def test_wrong_calls_raise_the_named_error_with_the_rule_in_its_text(call, error, builtin, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, LowshardError)


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
