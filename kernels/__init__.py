"""Kernels over raw arrays: MXFP8 quantisation, packing of slices, casts, sums, scale layouts, optimizer steps.

One call for each job, for NumPy arrays (Numba; plain NumPy without it) and for CuPy arrays (CUDA). Numba and CuPy are
loaded on first use. GPU calls run asynchronously on the current stream, or the one that is given.
"""

from __future__ import annotations

from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.float_cast import cast, sum_into
from lowshard.kernels.fused import pack_quantize, unpack_dequantize
from lowshard.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.mxfp8_tensor import MXFP8Tensor, SwizzledMXFP8
from lowshard.kernels.optimizer_step import adamw_step, sgd_step
from lowshard.kernels.slices import BoxTable, pack, unpack
from lowshard.kernels.swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "BoxTable",
    "MXFP8Tensor",
    "SwizzledMXFP8",
    "adamw_step",
    "cast",
    "content_sum",
    "dequantize_mxfp8",
    "pack",
    "pack_quantize",
    "quantize_mxfp8",
    "sgd_step",
    "sum_into",
    "swizzle_scales",
    "unpack",
    "unpack_dequantize",
    "unswizzle_scales",
]


def __dir__() -> list[str]:
    return sorted(__all__)
