"""Optimizer steps: all engines give the bits of the formula, written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import engines

from lowshard.kernels import adamw_step, sgd_step
from lowshard.kernels.plain import PlainEngine
from lowshard.selftest.kernel_cases import through

engine = engines.fixture()
f = np.float32


def numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Floats of all sizes, some of them special."""
    made = (rng.standard_normal(n) * np.exp(rng.standard_normal(n) * 8)).astype(np.float32)
    made[:: max(7, n // 5)] = rng.choice(np.array([0, -0.0, 1e-42, 3e38, np.inf], np.float32), 1)
    return np.asarray(made)


@pytest.mark.parametrize("n", [0, 1, 7, 33, 1000, 70_001])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_its_formula(
    engine: engines.TestedEngine, n: int, decay: float, rng: np.random.Generator
) -> None:
    n = engine.pick(n, min(n, 500))
    p, m, v = numbers(rng, n), numbers(rng, n), np.abs(numbers(rng, n))
    lr, b1, b2, eps = 1e-2, 0.9, 0.999, 1e-8
    for t in (1, 2, 3):
        g = numbers(rng, n)
        with np.errstate(all="ignore"):
            m1 = m * f(b1) + g * f(1 - b1)
            v1 = v * f(b2) + (g * g) * f(1 - b2)
            size = np.sqrt(v1) / f(math.sqrt(1 - b2**t)) + f(eps)
            p1 = p * f(1 - lr * decay) - (m1 / size) * f(lr / (1 - b1**t))
        kept = g.copy()
        adamw_step(p, g, m, v, lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=decay, step=t)
        for found, wanted in ((p, p1), (m, m1), (v, v1)):
            assert same(found, wanted)
        assert g.tobytes() == kept.tobytes()


@pytest.mark.parametrize("n", [0, 1, 7, 33, 1000, 70_001])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_its_formula(
    engine: engines.TestedEngine, n: int, momentum: float, rng: np.random.Generator
) -> None:
    n = engine.pick(n, min(n, 500))
    p, b = numbers(rng, n), np.full(n, 7, np.float32)
    for t in range(3):
        g = numbers(rng, n)
        with np.errstate(all="ignore"):
            d = g + p * f(0.01)
            if momentum and t:
                d = b * f(momentum) + d
            p1 = p - d * f(0.1)
        sgd_step(p, g, b if momentum else None, lr=0.1, momentum=momentum, weight_decay=0.01, first=t == 0)
        assert same(p, p1)
        assert not momentum or same(b, d)


def at_element(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy that begins `offset` elements after a 16-byte boundary, with elements of 7 around it."""
    space = np.full(array.size + 16, 7, np.float32)
    start = 4 + -space.ctypes.data % 16 // 4 + offset
    space[start : start + array.size] = array
    return space[start : start + array.size]


@pytest.mark.parametrize(
    "offsets", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 2, 0, 0), (0, 0, 3, 0), (0, 0, 0, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("n", [1, 3, 4, 6, 301])
def test_arrays_at_any_element_give_the_same_bits_and_leave_their_neighbours(
    n: int, offsets: tuple[int, ...], rng: np.random.Generator
) -> None:
    arrays = [np.abs(numbers(rng, n)) for _ in offsets]
    found = [at_element(array, offset) for array, offset in zip(arrays, offsets, strict=True)]
    wanted = [at_element(array, 0) for array in arrays]
    with through(PlainEngine()):
        adamw_step(*wanted, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2)
        sgd_step(*wanted[:3], lr=0.1, momentum=0.9, weight_decay=0.1, first=False)
    adamw_step(*found, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2)
    sgd_step(*found[:3], lr=0.1, momentum=0.9, weight_decay=0.1, first=False)
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)
        assert np.count_nonzero(one.base == 7) >= 16


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Bit for bit; a NaN is a NaN."""
    nan = np.isnan(wanted)
    return bool((np.isnan(found) == nan).all()) and found[~nan].tobytes() == wanted[~nan].tobytes()
