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


def _compiled(function: Any, signature: Any) -> Callable[..., None]:
    function.__qualname__ = f"step_{function.__name__}_{digest_of([Path(__file__)])}"
    return compile_cached(function, signature, error_model="numpy")
