"""Optimizer steps in one pass over memory; every operation is rounded separately, in vectors and tails alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.compiled import Signature, digest_of, load_compiled
from lowshard.compiled.deferred import njit

_FLAT = "float32[1]"


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

    return _compiled(adamw, (_FLAT,) * 5)


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

    return _compiled((plain, begun, carried)[mode], (_FLAT,) * 4)


@cache
def square_sums_kernel() -> Callable[..., None]:
    """Return `kernel(values, sums, bits, words)`: the squares of float32 [32 n], added exactly to a wide number.

    `sums` float64 [n] takes the sum of each 32 squares, in a fixed tree: eight lanes, each four squares from the first
    on; then lanes four apart, two apart, the last two. `bits` is the same memory as uint64. `words` int64 are limbs of
    32 bits, from 2^-1074 on, then the counts of sums that are Inf and of those that are NaN; limbs are below 2^32
    before, and n below 2^31.
    """

    def square_sums(values: Any, sums: Any, bits: Any, words: Any) -> None:
        low32 = np.uint64(0xFFFFFFFF)
        for block in range(sums.size):
            at = 32 * block
            half0, half1 = (
                lane(values, at) + lane(values, at + 4),
                lane(values, at + 1) + lane(values, at + 5),
            )
            half2, half3 = (
                lane(values, at + 2) + lane(values, at + 6),
                lane(values, at + 3) + lane(values, at + 7),
            )
            sums[block] = (half0 + half2) + (half1 + half3)
        for block in range(sums.size):
            exponent = np.int64(bits[block] >> np.uint64(52)) & 0x7FF
            mantissa = bits[block] & np.uint64((1 << 52) - 1)
            if exponent == 0x7FF:
                words[words.size - (1 if mantissa else 2)] += 1
                continue
            if exponent:
                mantissa |= np.uint64(1 << 52)
                exponent -= 1
            limb, shift = exponent >> 5, np.uint64(exponent & 31)
            low = (mantissa & low32) << shift
            high = ((mantissa >> np.uint64(32)) << shift) + (low >> np.uint64(32))
            words[limb] += np.int64(low & low32)
            words[limb + 1] += np.int64(high & low32)
            words[limb + 2] += np.int64(high >> np.uint64(32))

    return _compiled(square_sums, (_FLAT, "float64[1]", "uint64[1]", "int64[1]"))


@njit(nogil=True)
def lane(values: Any, at: int) -> Any:
    """Return the sum of the squares of four values, eight apart."""
    a, b = np.float64(values[at]), np.float64(values[at + 8])
    c, d = np.float64(values[at + 16]), np.float64(values[at + 24])
    return ((a * a + b * b) + c * c) + d * d


def _compiled(function: Any, args: tuple[str, ...]) -> Callable[..., None]:
    name = f"step_{function.__name__}_{digest_of([Path(__file__)])}"
    return load_compiled(name, lambda: function, Signature(args, "void"), error_model="numpy")
