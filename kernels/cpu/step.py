"""Optimizer steps in one pass over memory; every operation is rounded by itself, in vectors and in tails alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from lowshard.compiled import compile_cached, digest_of

_FLAT = types.Array(types.float32, 1, "C")
_READ = types.Array(types.float32, 1, "C", readonly=True)


@cache
def adamw_kernel() -> Callable[..., None]:
    """Return `kernel(param, grad, first, second, scalars)`; see `Engine.adamw`."""

    def adamw(param: Any, grad: Any, first: Any, second: Any, scalars: Any) -> None:
        keep, beta1, rest1, beta2, rest2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
        scale, root, eps = scalars[5], scalars[6], scalars[7]
        for i in range(param.size):
            g = grad[i]
            m = first[i] * beta1 + g * rest1
            v = second[i] * beta2 + (g * g) * rest2
            first[i] = m
            second[i] = v
            param[i] = param[i] * keep - (m / (np.sqrt(v) / root + eps)) * scale

    return _compiled(adamw, types.void(_FLAT, _READ, _FLAT, _FLAT, _FLAT))


@cache
def sgd_kernel(mode: int) -> Callable[..., None]:
    """Return `kernel(param, grad, buffer, scalars)` of a mode; see `Engine.sgd`."""

    def plain(param: Any, grad: Any, buffer: Any, scalars: Any) -> None:
        lr, decay = scalars[0], scalars[2]
        for i in range(param.size):
            param[i] = param[i] - (grad[i] + param[i] * decay) * lr

    def begun(param: Any, grad: Any, buffer: Any, scalars: Any) -> None:
        lr, decay = scalars[0], scalars[2]
        for i in range(param.size):
            d = grad[i] + param[i] * decay
            buffer[i] = d
            param[i] = param[i] - d * lr

    def carried(param: Any, grad: Any, buffer: Any, scalars: Any) -> None:
        lr, momentum, decay = scalars[0], scalars[1], scalars[2]
        for i in range(param.size):
            d = buffer[i] * momentum + (grad[i] + param[i] * decay)
            buffer[i] = d
            param[i] = param[i] - d * lr

    return _compiled((plain, begun, carried)[mode], types.void(_FLAT, _READ, _FLAT, _FLAT))


@cache
def square_sums_kernel() -> Callable[..., None]:
    """Return `kernel(values, sums, bits, words)`: the squares of float32 [32 n], added exactly to a wide number.

    `sums` float64 [n] takes the sum of each 32 squares, in a fixed tree: eight lanes, each four squares from the first
    on; then lanes four apart, two apart, the last two. `bits` is the same memory as uint64. `words` int64 are limbs of
    32 bits, from 2^-1074 on, and the count of sums that are Inf or NaN; limbs are below 2^32 before, and n below 2^31.
    """

    def square_sums(values: Any, sums: Any, bits: Any, words: Any) -> None:
        lanes = np.zeros(8, np.float64)
        low32 = np.uint64(0xFFFFFFFF)
        for block in range(sums.size):
            at = 32 * block
            for lane in range(8):
                a, b = np.float64(values[at + lane]), np.float64(values[at + lane + 8])
                c, d = np.float64(values[at + lane + 16]), np.float64(values[at + lane + 24])
                lanes[lane] = ((a * a + b * b) + c * c) + d * d
            half0, half1 = lanes[0] + lanes[4], lanes[1] + lanes[5]
            half2, half3 = lanes[2] + lanes[6], lanes[3] + lanes[7]
            sums[block] = (half0 + half2) + (half1 + half3)
        for block in range(sums.size):
            exponent = np.int64(bits[block] >> np.uint64(52)) & 0x7FF
            if exponent == 0x7FF:
                words[words.size - 1] += 1
                continue
            mantissa = bits[block] & np.uint64((1 << 52) - 1)
            if exponent:
                mantissa |= np.uint64(1 << 52)
                exponent -= 1
            limb, shift = exponent >> 5, np.uint64(exponent & 31)
            low = (mantissa & low32) << shift
            high = ((mantissa >> np.uint64(32)) << shift) + (low >> np.uint64(32))
            words[limb] += np.int64(low & low32)
            words[limb + 1] += np.int64(high & low32)
            words[limb + 2] += np.int64(high >> np.uint64(32))

    arrays = [types.Array(item, 1, "C") for item in (types.float64, types.uint64, types.int64)]
    return _compiled(square_sums, types.void(_READ, *arrays))


def _compiled(function: Any, signature: Any) -> Callable[..., None]:
    function.__qualname__ = f"step_{function.__name__}_{digest_of([Path(__file__)])}"
    return compile_cached(function, signature, error_model="numpy")
