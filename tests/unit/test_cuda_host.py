"""The CUDA sources on the host, where no GPU is large enough or tells what it was asked for.

That they have the bytes of the plain engine is tested with other engines, and on GPU arrays in tests/gpu.
"""

from __future__ import annotations

import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cuda_host import HostFault, host_cuda_engine, host_library
from support.gpu import needs_compiler

from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, pack, pack_quantize, quantize_mxfp8
from lowshard.kernels.cuda import cuda_table
from lowshard.selftest.arrays import hard_blocks
from lowshard.selftest.kernel_cases import through

FLOATS = [np.dtype(name) for name in (ml_dtypes.bfloat16, np.float16, np.float32)]
pytestmark = needs_compiler


def test_the_sources_compile_without_a_warning() -> None:
    assert host_library()[1] == ""


def test_a_misaligned_access_is_a_fault() -> None:
    launch, words = host_cuda_engine()._launcher.launch, np.zeros(64, np.uint8)
    with pytest.raises(HostFault, match="no multiple of it"):
        launch("checksum_start", 1, 256, (words.ctypes.data + 1, 0, 2, 7))


def test_the_divisors_divide_exactly(rng: np.random.Generator) -> None:
    divisors = np.unique([*range(1, 70), *(2**k + d for k in range(2, 31) for d in (-1, 0, 1)), 2**31 - 1])
    words = np.zeros((len(divisors), 4), np.uint32)
    cuda_table._set_divisor(words, divisors)
    for divisor, (_, magic, shift, _) in zip(divisors.tolist(), words.tolist(), strict=True):
        near = divisor * np.append(rng.integers(0, 2**31 // divisor + 1, 500), 2**31 // divisor)
        n = np.clip([near - 1, near, near + divisor - 1], 0, 2**31 - 1).astype(np.uint64)
        quotient = ((2 * n * np.uint64(magic)) >> np.uint64(32)) >> np.uint64(shift)
        np.testing.assert_array_equal(quotient, n // np.uint64(divisor))


def reserved(count: int, dtype: Any) -> Any:
    """Return an array of address space that costs memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), np.uint8).view(dtype)


def test_offsets_and_totals_beyond_32_bits(rng: np.random.Generator) -> None:
    width, bf16 = 1 << 30, FLOATS[0]
    x = reserved(5 * width, bf16).reshape(5, width)  # 10 GiB of addresses
    boxes = [((0, 5), (width - 64, width)), ((4, 5), (width - 96, width)), ((1, 4), (0, 32))]
    for (r0, r1), (c0, c1) in boxes:
        x[r0:r1, c0:c1] = hard_blocks((r1 - r0, c1 - c0), "bfloat16", 3)
    with through(host_cuda_engine()):
        found = pack_quantize(x, boxes).data.tobytes(), pack(x, boxes).tobytes()
    assert found == (pack_quantize(x, boxes).data.tobytes(), pack(x, boxes).tobytes())

    engine, elems = host_cuda_engine(), (1 << 32) + 8192 + 96
    launcher: Any = engine._launcher
    flat, back = reserved(elems, bf16), reserved(elems, bf16)
    data, scale = reserved(elems, np.uint8), reserved(elems // 32, np.uint8)
    tail, ctas = slice(elems - 8192 - 96, None), -(-elems // 8192)
    flat[tail] = hard_blocks((259, 32), "bfloat16", 5).reshape(-1)
    expected: Any = quantize_mxfp8(flat[tail])
    restored: Any = dequantize_mxfp8(expected)
    with through(engine):
        launcher.multiprocessors, launcher.only_ctas = 10**9, (ctas - 2, ctas)
        quantize_mxfp8(flat, out=MXFP8Tensor(data, scale))
        assert launcher.launches[-1] == ("quantize_bf16_e4m3_linear", ctas)
        dequantize_mxfp8(MXFP8Tensor(data, scale), out=back)
    pairs = (data[tail], expected.data), (scale[-259:], expected.scale), (back[tail], restored)
    assert all(here.tobytes() == wanted.tobytes() for here, wanted in pairs)
