"""Wrong calls of the kernels: the class of the error and the word that helps, before any element is read or written.

What is no array, no table or no such name: tests/unit/test_wrong_calls.py puts it in the place of every argument.
"""

from __future__ import annotations

import numpy as np
import pytest

from lowshard.errors import BufferMismatchError, DependencyError, DTypeError, KernelError, LowshardError
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    SwizzledMXFP8,
    adamw_step,
    cast,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    sgd_step,
    sum_into,
    swizzle_scales,
    unpack,
    unpack_dequantize,
    unswizzle_scales,
)
from lowshard.kernels.bit_sums import content_sum


class OnGpu:
    """What a kernel sees of a GPU array of another library: the protocol attribute, and no NumPy array."""

    @property
    def __cuda_array_interface__(self):
        raise AssertionError("it must not be asked")


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def tensor(data_shape, scale_shape, elem="e4m3"):
    return MXFP8Tensor(np.zeros(data_shape, np.uint8), np.zeros(scale_shape, np.uint8), elem)


def q_of(elems, elem="e4m3"):
    return MXFP8Tensor.over(np.zeros(MXFP8Tensor.buffer_bytes((elems,)), np.uint8), (elems,), elem)


def tiled(x, out=None, elem="e4m3"):
    return quantize_mxfp8(x, elem, out=out, scale_layout="128x4")


def steps(arrays, step=1):
    return adamw_step(*arrays, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=step)


def momentum(param, grad, first):
    return sgd_step(param, grad, first, lr=0.1, momentum=0.9, weight_decay=0, first=True)


ONES = np.ones((2, 64), np.float32)
GOOD = tensor((2, 64), (2, 2))
READ_ONLY = read_only(np.zeros((2, 64), np.uint8))
ARENA = np.zeros(4 * 64 * 4, np.uint8)
BYTES = ARENA[:128].reshape(2, 64)
IN_ARENA = ARENA[:512].view(np.float32).reshape(2, 64)
CODES, TILE = np.zeros((2, 64), np.uint8), np.zeros(512, np.uint8)
IN_TILES = SwizzledMXFP8(CODES, TILE)
SMALL = np.arange(12, dtype=np.float32).reshape(3, 4)
SMALL_TABLE, PACKED = BoxTable((3, 4), [((0, 2), (0, 4)), ((2, 3), (1, 3))]), np.zeros(10, np.float32)
SRC = np.zeros((4, 64), np.float32)
ARENA_SRC = ARENA.view(np.float32).reshape(4, 64)
TABLE = BoxTable((4, 64), [((0, 2), (0, 64)), ((3, 4), (32, 64))])
NARROW = [((0, 1), (0, 32)), ((1, 2), (10, 50))]
CROSSING = [((0, 2), (0, 32)), ((1, 3), (31, 63))]
X, SCALE, EIGHT = np.ones((2, 3), np.float32), np.zeros((4, 4), np.uint8), np.zeros((4, 8), np.float32)

CALLS = {
    "quantize_mxfp8": [
        (lambda: quantize_mxfp8(ONES[:, :40]), KernelError, "multiple of 32"),
        (lambda: quantize_mxfp8(ONES.tolist()), KernelError, "numpy.asarray"),
        (lambda: quantize_mxfp8(OnGpu()), DependencyError, "CuPy"),
        (lambda: quantize_mxfp8(ONES.astype(np.float64)), DTypeError, "float64"),
        (lambda: quantize_mxfp8(ONES, "e3m4"), KernelError, "e4m3"),
        (lambda: quantize_mxfp8(ONES[:0], mode="round"), KernelError, "rceil"),
        (lambda: quantize_mxfp8(ONES, min_scale_byte=255), KernelError, "0 to 254"),
        (lambda: quantize_mxfp8(ONES, "e5m2", out=GOOD), BufferMismatchError, "e4m3"),
        (lambda: quantize_mxfp8(ONES, out=tensor((2, 32), (2, 1))), BufferMismatchError, "out.data"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(READ_ONLY, GOOD.scale)), BufferMismatchError, "written to"),
        (lambda: quantize_mxfp8(IN_ARENA, out=MXFP8Tensor(BYTES, GOOD.scale)), BufferMismatchError, "out.data must"),
        (lambda: quantize_mxfp8(IN_ARENA, out=MXFP8Tensor(GOOD.data, ARENA[508:512].reshape(2, 2))),
         BufferMismatchError, "out.scale must not share memory"),
        (lambda: quantize_mxfp8(ONES, out=MXFP8Tensor(BYTES, ARENA[4:8].reshape(2, 2))),
         BufferMismatchError, "must not share memory with out.scale"),
    ],
    "dequantize_mxfp8": [
        (lambda: dequantize_mxfp8(GOOD, "float64"), DTypeError, "float64"),
        (lambda: dequantize_mxfp8(GOOD, out=ONES.copy()), BufferMismatchError, "bfloat16"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=ONES[:1].copy()), BufferMismatchError, "out must be"),
        (lambda: dequantize_mxfp8(GOOD, "float32", out=read_only(ONES)), BufferMismatchError, "read-only"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(BYTES, GOOD.scale), "float32", IN_ARENA), BufferMismatchError, "q.data"),
        (lambda: dequantize_mxfp8(MXFP8Tensor(GOOD.data, ARENA[:4].reshape(2, 2)), "float32", out=IN_ARENA),
         BufferMismatchError, "q.scale"),
    ],
    "MXFP8Tensor": [
        (lambda: MXFP8Tensor(GOOD.data, GOOD.data), BufferMismatchError, "needs scale"),
        (lambda: tensor((2, 33), (2, 1)), KernelError, "multiple of 32"),
        (lambda: MXFP8Tensor(GOOD.data.view(np.int8), GOOD.scale), DTypeError, "view"),
        (lambda: MXFP8Tensor.over(ARENA[:131], (2, 64)), BufferMismatchError, "132 bytes"),
    ],
    "scales in tiles": [
        (lambda: quantize_mxfp8(ONES, scale_layout="4x128"), KernelError, "128x4"),
        (lambda: tiled(ONES[0]), KernelError, "2-D"),
        (lambda: tiled(ONES, GOOD), KernelError, "SwizzledMXFP8"),
        (lambda: quantize_mxfp8(ONES, out=IN_TILES), KernelError, "scale_layout="),
        (lambda: tiled(ONES, SwizzledMXFP8(CODES, ARENA[::2])), BufferMismatchError, "contiguous"),
        (lambda: tiled(ONES, SwizzledMXFP8(BYTES, ARENA[:512])), BufferMismatchError, "with out.scale"),
        (lambda: tiled(IN_ARENA, SwizzledMXFP8(CODES, ARENA[:512])), BufferMismatchError, "share memory with x"),
        (lambda: SwizzledMXFP8(CODES, TILE[:4].reshape(2, 2)), BufferMismatchError, "swizzle_scales"),
        (lambda: SwizzledMXFP8(np.zeros((129, 64), np.uint8), TILE), BufferMismatchError, "1024"),
        (lambda: dequantize_mxfp8(SwizzledMXFP8(CODES, ARENA[:512]), "float32", IN_ARENA), BufferMismatchError, "q.sc"),
        (lambda: pack_quantize(ONES, [((0, 2), (0, 64))], out=IN_TILES), KernelError, "got Swizzled"),
        (lambda: unpack_dequantize(IN_TILES, [((0, 2), (0, 64))], ONES.copy()), KernelError, "got Swizzled"),
        (lambda: swizzle_scales(np.zeros(4, np.uint8)), KernelError, "2-D"),
        (lambda: swizzle_scales(SCALE.view(np.int8)), DTypeError, "int8"),
        (lambda: swizzle_scales(SCALE, out=np.zeros(1024, np.uint8)[::2]), BufferMismatchError, "contiguous"),
        (lambda: swizzle_scales(TILE[:16].reshape(4, 4), out=TILE), BufferMismatchError, "share memory with scale"),
        (lambda: unswizzle_scales(TILE, 129, 4), BufferMismatchError, "expected 1024 bytes"),
        (lambda: unswizzle_scales(TILE[:0], 1 << 70, 0), KernelError, "shape of scales"),
        (lambda: unswizzle_scales(TILE, 4, 4, out=TILE[:16].reshape(4, 4)), BufferMismatchError, "with swizzled"),
    ],
    "BoxTable": [
        (lambda: BoxTable((3, 4), [((0, 2),)]), KernelError, "2 dims"),
        (lambda: BoxTable((3, 4), [((0, 2), (1, 5))]), KernelError, "stop <= 4 in dim 1"),
        (lambda: BoxTable((3, 4), [((-1, 1), (0, 1))]), KernelError, "0 <= start"),
        (lambda: BoxTable((3, 4), [((0, 1.5), (0, 1))]), KernelError, "integers"),
    ],
    "pack": [
        (lambda: pack(SMALL.T, SMALL_TABLE), BufferMismatchError, "built for shape"),
        (lambda: pack(SMALL, SMALL_TABLE, PACKED[:9]), BufferMismatchError, "10"),
        (lambda: pack(SMALL, SMALL_TABLE, PACKED.astype(">f4")), BufferMismatchError, "converts nothing"),
        (lambda: pack(SMALL, SMALL_TABLE, read_only(PACKED)), BufferMismatchError, "read-only"),
        (lambda: pack(SMALL, SMALL_TABLE, SMALL.reshape(-1)[:10]), BufferMismatchError, "share memory with src"),
        (lambda: unpack(PACKED[:9], SMALL_TABLE, SMALL.copy()), BufferMismatchError, "packed must be"),
        (lambda: unpack(PACKED.astype(np.float16), SMALL_TABLE, SMALL.copy()), BufferMismatchError, "dtype of out"),
        (lambda: unpack(SMALL.reshape(-1)[:10], SMALL_TABLE, SMALL), BufferMismatchError, "share memory"),
        (lambda: unpack(PACKED[:9], [((0, 2), (0, 4)), ((1, 2), (3, 4))], SMALL.copy()), KernelError, "overlap"),
    ],
    "pack_quantize": [
        (lambda: pack_quantize(SRC, NARROW), KernelError, "split at multiples of 32"),
        (lambda: pack_quantize(SRC, BoxTable((4, 64), NARROW)), KernelError, "in box 1"),
        (lambda: pack_quantize(SRC[:, :32], TABLE), BufferMismatchError, "built for shape"),
        (lambda: pack_quantize(SRC.astype(np.float64), TABLE), DTypeError, "src.astype"),
        (lambda: pack_quantize(OnGpu(), TABLE), DependencyError, "CuPy"),
        (lambda: pack_quantize(SRC, TABLE, "e5m2", out=q_of(160)), BufferMismatchError, "e4m3"),
        (lambda: pack_quantize(SRC, TABLE, out=q_of(128)), BufferMismatchError, "out.data"),
        (lambda: pack_quantize(SRC, TABLE, out=MXFP8Tensor(read_only(np.zeros(160, np.uint8)), TILE[:5])),
         BufferMismatchError, "written to"),
        (lambda: pack_quantize(ARENA_SRC, TABLE, out=MXFP8Tensor.over(ARENA, (160,))), BufferMismatchError, "with src"),
    ],
    "unpack_dequantize": [
        (lambda: unpack_dequantize(q_of(160), TABLE, SRC[:, :32].copy()), BufferMismatchError, "built for shape"),
        (lambda: unpack_dequantize(q_of(128), TABLE, SRC.copy()), BufferMismatchError, "q.data"),
        (lambda: unpack_dequantize(q_of(160), TABLE, read_only(SRC)), BufferMismatchError, "written to"),
        (lambda: unpack_dequantize(MXFP8Tensor.over(ARENA, (160,)), TABLE, ARENA_SRC), BufferMismatchError, "q.data"),
        (lambda: unpack_dequantize(MXFP8Tensor(np.zeros(160, np.uint8), ARENA[5:10]), TABLE, ARENA_SRC),
         BufferMismatchError, "q.scale"),
        (lambda: unpack_dequantize(q_of(128), CROSSING, SRC.copy()), KernelError, "overlap"),
    ],
    "cast": [
        (lambda: cast(X.astype(np.float64), "bf16"), DTypeError, "float64"),
        (lambda: cast(X, "float64"), DTypeError, "float64"),
        (lambda: cast(X, "fp16", out=np.zeros((3, 2), np.float16)), BufferMismatchError, "2, 3"),
        (lambda: cast(X, "fp16", out=X.copy()), BufferMismatchError, "float32"),
        (lambda: cast(X, "fp16", out=read_only(np.zeros((2, 3), np.float16))), BufferMismatchError, "read-only"),
        (lambda: cast(X, "fp16", out=X.view(np.float16)[:, :3]), BufferMismatchError, "share memory"),
    ],
    "sum_into": [
        (lambda: sum_into(X, []), KernelError, "at least one source"),
        (lambda: sum_into(X, [X.copy(), X[:1].copy()]), BufferMismatchError, "nothing is broadcast"),
        (lambda: sum_into(X, X.astype(np.float64)), DTypeError, "float64"),
        (lambda: sum_into(X, [X.copy(), X[::-1]]), BufferMismatchError, "share memory with sources"),
        (lambda: sum_into(read_only(X), X), BufferMismatchError, "written to"),
    ],
    "content_sum": [
        (lambda: content_sum(np.zeros(3), ((0, 2),), (4,)), BufferMismatchError, "for the box"),
        (lambda: content_sum(np.zeros(3), ((2, 5),), (4,)), BufferMismatchError, "of the whole array"),
        (lambda: content_sum(np.zeros(3), ((0, 3),), (1 << 70,)), BufferMismatchError, "of the whole array"),
        (lambda: content_sum(np.array([None, "a", 3]), ((0, 3),), (3,)), DTypeError, "Python objects"),
    ],
    "steps": [
        (lambda: steps(EIGHT, step=0), KernelError, "step 1"),
        (lambda: steps([EIGHT[0], np.zeros(9, np.float32), *EIGHT[2:]]), BufferMismatchError, "8"),
        (lambda: steps([EIGHT[0], np.zeros(8), *EIGHT[2:]]), BufferMismatchError, "float64"),
        (lambda: steps([EIGHT[0], np.zeros(16, np.float32)[::2], *EIGHT[2:]]), BufferMismatchError, "contiguous"),
        (lambda: steps([EIGHT[0], EIGHT[1], EIGHT[0], EIGHT[3]]), BufferMismatchError, "share memory"),
        (lambda: momentum(EIGHT[0], EIGHT[1], read_only(EIGHT[2])), BufferMismatchError, "writeable"),
        (lambda: momentum(np.ones(8, ">f4"), EIGHT[1], EIGHT[2]), BufferMismatchError, "byte order"),
    ],
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("function", CALLS)
def test_wrong_calls_raise_the_named_error(function):
    for call, error, word in CALLS[function]:
        with pytest.raises(error, match=word) as caught:
            call()
        assert isinstance(caught.value, LowshardError)
    assert (X == 1).all()


def test_nothing_is_written_by_a_call_that_raises():
    out, boxes = tensor((2, 64), (2, 2)), np.zeros((4, 64), np.float32)
    for wrong in (ONES[:, :32], ONES.astype(np.float64), ONES.tolist()):
        with pytest.raises(LowshardError):
            quantize_mxfp8(wrong, out=out)
    with pytest.raises(BufferMismatchError):
        quantize_mxfp8(ONES, out=MXFP8Tensor(out.data, READ_ONLY[:, :2]))
    with pytest.raises(KernelError, match="overlap"):
        unpack_dequantize(
            MXFP8Tensor(np.full(128, 0x38, np.uint8), np.full(4, 127, np.uint8)), CROSSING, boxes
        )
    assert not out.data.any()
    assert not out.scale.any()
    assert not boxes.any()
