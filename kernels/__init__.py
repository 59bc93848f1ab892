"""Kernels over raw arrays: MXFP8 quantise and dequantise, scale layouts, packing of slices.

One call for each job. The calls here take NumPy arrays and run the plain NumPy implementation of
`lowshard.kernels.reference`; nothing but NumPy is loaded on import.
"""

from __future__ import annotations

from lowshard.kernels.mxfp8 import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.slices import BoxTable, pack, unpack
from lowshard.kernels.swizzle import swizzle_scales, unswizzle_scales

__all__ = [
    "BoxTable",
    "MXFP8Tensor",
    "dequantize_mxfp8",
    "pack",
    "quantize_mxfp8",
    "swizzle_scales",
    "unpack",
    "unswizzle_scales",
]
