"""Quantise an array to MXFP8 and back.

    python examples/quantize.py

MXFP8 is the block format of the Open Compute Project's MX specification: 32 elements of 8 bits share a scale that is a
power of two. Blocks lie along the last dim. NumPy arrays go through compiled CPU code, CuPy arrays through CUDA, with
the same bytes. No rank and no MPI is needed.

Output:

    16384 bytes of bf16 become 8192 of codes and 256 of scales
    codes uint8 (64, 128), scales uint8 (64, 4)
    largest error, as a share of the largest element of its block: 0.06
"""

import ml_dtypes
import numpy as np

from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8

x = np.random.default_rng(0).standard_normal((64, 128)).astype(ml_dtypes.bfloat16)
q = quantize_mxfp8(
    x
)  # elem="e4m3" or "e5m2"; mode="rceil", "floor", "even" or "ceil"; out= for buffers of yours
back = dequantize_mxfp8(q, "bfloat16")

print(f"{x.nbytes} bytes of bf16 become {q.data.nbytes} of codes and {q.scale.nbytes} of scales")
print(f"codes {q.data.dtype} {q.data.shape}, scales {q.scale.dtype} {q.scale.shape}")
blocks, restored = (a.astype(np.float32).reshape(-1, 32) for a in (x, back))
error = (np.abs(restored - blocks).max(axis=1) / np.abs(blocks).max(axis=1)).max()
print(f"largest error, as a share of the largest element of its block: {error:.2f}")
