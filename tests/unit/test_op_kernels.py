"""Kernels on whole arrays, against NumPy or plain loops: what sharded ops are compared with must itself be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.op_samples import SAMPLES, real

from lowshard import dtypes
from lowshard.op import KERNELS, unsharded

Rng = np.random.Generator


def one(op: str, *arrays: np.ndarray, **args: Any) -> np.ndarray:
    (made,) = unsharded(op, *arrays, **args)
    return np.asarray(made)


UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0), "abs": np.abs, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda x: x**-0.5, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))), "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "erf": np.vectorize(math.erf), "floor": np.floor, "round": np.round, "trunc": np.trunc,
    "log1p": np.log1p, "atanh": np.arctanh, "acos": np.arccos, "negate": np.negative, "passthrough": lambda x: x,
    "is_nan": np.isnan, "is_inf": np.isinf, "logical_not": np.logical_not,
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(UNARY))
def test_unary(op: str, rng: Rng) -> None:
    x = rng.uniform(0.05, 0.95, (5, 7)).astype(np.float32)
    if op not in ("log", "sqrt", "rsqrt", "atanh", "acos", "log1p"):
        x = x * 8 - 4
    np.testing.assert_allclose(one(op, x), UNARY[op](x.astype(np.float64)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "ufunc"),
    [
        ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide), ("maximum", np.maximum),
        ("minimum", np.minimum), ("greater", np.greater), ("less_equal", np.less_equal), ("equal", np.equal),
        ("logical_xor", np.logical_xor),
    ],
)  # fmt: skip
def test_binary(op: str, ufunc: Any, rng: Rng) -> None:
    x, y = real(rng, 4, 5), real(rng, 5) + 10
    np.testing.assert_array_equal(one(op, x, y), ufunc(x, y))


def test_products(rng: Rng) -> None:
    a, b = real(rng, 2, 3, 4), real(rng, 4, 5)
    np.testing.assert_array_equal(one("matmul", a, b), a @ b)
    np.testing.assert_array_equal(one("einsum", a, b, subscripts="bik, kj -> bij"), a @ b)
    np.testing.assert_array_equal(one("outer", a[0, 0], b[0]), np.outer(a[0, 0], b[0]))
    starts = np.array([0, 1, 3])
    w = real(rng, 2, 5, 4)
    expected = np.concatenate([a[0, :1] @ w[0].T, a[0, 1:] @ w[1].T])
    np.testing.assert_array_equal(one("grouped_matmul", a[0], w, starts), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_its_definition(groups: int, rng: Rng) -> None:
    x, w, bias = real(rng, 2, 5, 6, 4), real(rng, 3, 2, 4 // groups, 6), real(rng, 6)
    how = {"stride": [2, 1], "padding": [[1, 0], [0, 1]], "groups": groups}
    made = one("conv2d", x, w, bias, **how)
    padded = np.pad(x, [(0, 0), (1, 0), (0, 1), (0, 0)])
    expected = np.zeros((2, 2, 6, 6), np.float32) + bias
    for n, i, j, c in product(range(2), range(2), range(6), range(6)):
        g = c // (6 // groups)
        window = padded[n, 2 * i : 2 * i + 3, j : j + 2, g * (4 // groups) : (g + 1) * (4 // groups)]
        expected[n, i, j, c] += (window * w[..., c]).sum()
    np.testing.assert_array_equal(made, expected)
    first = one("conv2d", np.moveaxis(x, -1, 1), w, bias, **how, layout="NCHW")
    np.testing.assert_array_equal(np.moveaxis(first, 1, -1), expected)


def test_a_transposed_convolution_is_the_transpose(rng: Rng) -> None:
    """<conv(x), y> = <x, conv_transpose(y)> for filters with the channel dims swapped."""
    x, w, stride = real(rng, 1, 7, 7, 3), real(rng, 3, 3, 3, 2), 2
    forward = one("conv2d", x, w, stride=stride)
    y = real(rng, *forward.shape)
    back = one("conv2d_transpose", y, w, stride=stride)
    assert back.shape == x.shape
    assert float((forward * y).sum()) == float((x * back).sum())


def test_reductions(rng: Rng) -> None:
    x = real(rng, 4, 5)
    for op in ("sum", "max", "min", "mean"):
        expected = getattr(np, op)(x, axis=0, keepdims=True)
        np.testing.assert_allclose(one(op, x, axis=0), expected, rtol=1e-6)
    np.testing.assert_array_equal(one("sum", x, axis=None), x.sum().reshape(1, 1))
    np.testing.assert_array_equal(one("cumsum", x, axis=1), x.cumsum(axis=1))
    np.testing.assert_array_equal(one("argmax", x, axis=1), x.argmax(axis=1)[:, None])
    np.testing.assert_array_equal(one("argmin", x, axis=0), x.argmin(axis=0)[None])
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(one("softmax", x, axis=0), e / e.sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(
        one("logsoftmax", x), np.log(e / e.sum(axis=1, keepdims=True)), rtol=1e-5, atol=1e-6
    )


def test_norms(rng: Rng) -> None:
    x, w, b = real(rng, 3, 8), real(rng, 8), real(rng, 8)
    wide = x.astype(np.float64)
    rms = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-3) * w
    np.testing.assert_allclose(one("rms_norm", x, w, eps=1e-3), rms, rtol=1e-5, atol=1e-6)
    mean, var = wide.mean(axis=-1, keepdims=True), wide.var(axis=-1, keepdims=True)
    layer = (wide - mean) / np.sqrt(var + 1e-3) * w + b
    np.testing.assert_allclose(one("layer_norm", x, w, b, eps=1e-3), layer, rtol=1e-5, atol=1e-5)


def test_a_norm_of_large_equal_values_keeps_its_variance() -> None:
    """Sums and squares of one pass would leave noise here."""
    x = np.full((1, 64), 1e4, np.float32) + np.arange(64, dtype=np.float32)
    made = one("layer_norm", x, np.ones(64, np.float32), np.zeros(64, np.float32))
    np.testing.assert_allclose(made.std(), 1, rtol=1e-4)


def test_shapes(rng: Rng) -> None:
    x = real(rng, 4, 6)
    np.testing.assert_array_equal(one("permute", x, dims=[1, 0]), x.T)
    np.testing.assert_array_equal(one("reshape", x, shape=[2, -1]), x.reshape(2, 12))
    np.testing.assert_array_equal(one("slice", x, slices=[[1, 3], [0, 6, 2]]), x[1:3, ::2])
    np.testing.assert_array_equal(
        one("pad", x, pads=[[1, 0], [0, 2]], value=3), np.pad(x, [(1, 0), (0, 2)], constant_values=3)
    )
    np.testing.assert_array_equal(one("band_part", x, lower=-1, upper=0), np.tril(x))
    np.testing.assert_array_equal(one("band_part", x, lower=0, upper=-1), np.triu(x))
    np.testing.assert_array_equal(one("tile", x, repeats=[2, 1]), np.tile(x, (2, 1)))
    parts = unsharded("split", x, sizes=[1, 5], axis=1)
    np.testing.assert_array_equal(parts[1], x[:, 1:])
    np.testing.assert_array_equal(one("irfft", x), np.fft.irfft(x).astype(np.float32))


def test_lookups(rng: Rng) -> None:
    x = real(rng, 4, 6)
    ids = np.array([[3, -1], [0, 2]])
    np.testing.assert_array_equal(one("gather", x, ids, axis=1), np.take(x, ids, axis=1))
    np.testing.assert_array_equal(one("embedding", x, np.abs(ids)), x[np.abs(ids)])
    np.testing.assert_array_equal(one("gather_nd", x, np.array([[0, 1], [3, 5]])), x[[0, 3], [1, 5]])
    zeros, ones = np.zeros((4, 2), np.float32), np.ones((3, 2), np.float32)
    added = one("scatter_add", zeros, ones, np.array([[0, 1]] * 3), axis=0)
    np.testing.assert_array_equal(added, [[3, 0], [0, 3], [0, 0], [0, 0]])
    values, places = unsharded("top_k", np.array([[1.0, 3, 3, 2]], np.float32), k=3)
    np.testing.assert_array_equal(values, [[3, 3, 2]])
    np.testing.assert_array_equal(places, [[1, 2, 3]])  # of equals the first comes first
    np.testing.assert_array_equal(one("argsort", x), np.argsort(x, axis=-1, kind="stable"))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_its_definition(causal: bool, rng: Rng) -> None:
    q, k, v = real(rng, 2, 6, 3, 4), real(rng, 2, 2, 5, 4), real(rng, 2, 2, 5, 7)
    made = one("attention", q, k, v, causal=causal)
    for b, h, i in product(range(2), range(6), range(3)):
        keys = i + 3 if causal else 5  # the last query sees every key
        scores = (q[b, h, i].astype(np.float64) @ k[b, h // 3, :keys].T) / 2
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(
            made[b, h, i], weights / weights.sum() @ v[b, h // 3, :keys], rtol=1e-4, atol=1e-5
        )


def test_narrow_floats_are_summed_wide_and_rounded_once() -> None:
    x = np.full((1, 4096), 1.0, np.float16)
    assert one("sum", x)[0, 0] == 4096
    assert one("matmul", x, x.T)[0, 0] == 4096
    places = np.zeros(4096, np.int64)
    assert one("scatter_add", np.zeros(1, np.float16), x[0], places) == 4096
    overlapping = np.ones((1, 64, 65), np.float16)
    overlapping[..., 0] = 2048
    # 2048 and 63 ones, rounded to even.
    assert one("fold", overlapping, shape=[1, 1, 1, 128], kernel=[1, 64])[0, 0, 0, 63] == 2112


def test_every_kernel_gives_the_shapes_and_dtypes_of_its_rule(rng: Rng) -> None:
    from lowshard import DeviceMesh, Layout, Replicated
    from lowshard.solver import action_set

    for op in sorted(KERNELS):
        for _ in range(5):
            arrays, args = SAMPLES[op](rng)
            mesh = DeviceMesh((1,), ("one",))
            results = action_set(
                op, [Layout(mesh, x.shape, x.dtype, (Replicated(),)) for x in arrays], **args
            ).results
            made = unsharded(op, *arrays, **args)
            assert [(x.shape, str(x.dtype)) for x in made] == [tuple(r) for r in results], op


# ---- dtypes at their ends


def test_integers_of_64_bits_are_not_computed_as_floats() -> None:
    x = np.array([2**53 + 1, -(2**63), 2**63 - 1])
    for op in ("round", "floor", "trunc"):
        np.testing.assert_array_equal(one(op, x), x)
    np.testing.assert_array_equal(one("where", x < 0, x, np.zeros(3, np.float32)), np.minimum(x, 0))
    np.testing.assert_array_equal(one("where", x < 0, np.zeros_like(x), x), np.maximum(x, 0))
    assert one("mul_scalar", np.array([2**64 - 1], np.uint64), value=0.75) == 3 * 2**62
    assert one("mean", np.full(4, 2**62), axis=0) == 2**62
    assert one("mean", np.full(3, 2**64 - 1, np.uint64), axis=0) == 2**64 - 1
    np.testing.assert_array_equal(one("concat", x, np.zeros(1, np.float32))[:3], x)


def test_averages_of_integers_are_rounded_down() -> None:
    x = np.array([-1, 0, 2, 5, -7, -8], np.int8)
    assert one("mean", x, axis=0) == x.sum() // 6
    made = one("avg_pool", x.reshape(1, 6, 1, 1), size=[2, 1])
    np.testing.assert_array_equal(made.ravel(), x.reshape(3, 2).sum(axis=1) // 2)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)
def test_nan_is_sorted_last_in_every_dtype(dtype: str) -> None:
    x = np.array([4, np.nan, 1, np.nan, 2, 8], np.float32).astype(dtypes.get(dtype).numpy)
    np.testing.assert_array_equal(one("sort", x).astype(np.float32), [1, 2, 4, 8, np.nan, np.nan])
    np.testing.assert_array_equal(one("argsort", x), [2, 4, 0, 5, 1, 3])
    np.testing.assert_array_equal(unsharded("top_k", x, k=4)[1], [1, 3, 5, 0])
    np.testing.assert_array_equal(unsharded("bottom_k", x, k=2)[1], [2, 4])


@pytest.mark.parametrize("order", ["C", "F"])
def test_results_are_row_major_and_what_is_an_operand_still_is_read_only(order: Any, rng: Rng) -> None:
    for op in sorted(KERNELS):
        arrays, args = SAMPLES[op](rng)
        arrays = [np.asarray(x, order=order) for x in arrays]
        for k, made in enumerate(unsharded(op, *arrays, **args)):
            assert made.flags.c_contiguous, (op, k)
            shares = any(np.may_share_memory(made, x) for x in arrays)
            assert made.flags.writeable is not shares, (op, k)
