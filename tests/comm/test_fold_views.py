"""Compiled folds of strided arrays have the bits of NumPy's, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("mpi4py")

from lowshard import dtypes as dt
from lowshard.comm.node.fold_views import FOLD_FROM_BYTES, fold_views, may_fold
from lowshard.comm.reduction import fold


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "int32", "uint8"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_any_strides_give_the_bits_of_the_plain_fold(name: str, op: str, rng: np.random.Generator) -> None:
    kind = dt.get(name).numpy
    for shape in ((7, 300), (3, 5, 17), (40000,), (6, 1, 9), (1, 1), (5, 3, 2, 7)):
        for terms in (2, 3, 5, 8):
            wholes = [_whole(shape, kind, rng) for _ in range(terms)]
            views = [whole[..., : shape[-1]] for whole in wholes]
            if len(shape) > 1:  # one operand lies otherwise than the rest
                views[1] = np.asfortranarray(views[1])
            divisor = terms if op == "sum" and kind.kind not in "iu" else 1
            made, plain = np.zeros((*shape, 2), kind)[..., 0], np.zeros(shape, kind)
            fold_views(views, made, op, divisor)
            fold([np.ascontiguousarray(v) for v in views], plain, op, "tree", divisor)
            assert made.tobytes() == plain.tobytes(), (shape, terms)
            fold(views, made, op, "tree", divisor)
            assert made.tobytes() == plain.tobytes(), (shape, terms)


def _whole(shape: tuple[int, ...], kind: np.dtype, rng: np.random.Generator) -> np.ndarray:
    values = rng.integers(0, 3, (*shape[:-1], shape[-1] + 3))
    if kind.kind in "iu":
        return values.astype(kind)
    return (values + 0.5 * rng.random(values.shape)).astype(np.float32).astype(kind)


def test_small_results_and_divided_integers_are_left_to_numpy() -> None:
    assert may_fold(np.zeros(FOLD_FROM_BYTES, np.float32), "sum", 3)
    assert not may_fold(np.zeros(FOLD_FROM_BYTES // 8, np.float32), "sum", 3)
    assert not may_fold(np.zeros(FOLD_FROM_BYTES, np.int32), "sum", 3)
    assert not may_fold(np.zeros(FOLD_FROM_BYTES, bool), "max", 1)
