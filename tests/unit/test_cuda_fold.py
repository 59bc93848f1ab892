"""The fold of n arrays by CUDA, built for the host: the CPU's bits, for every dtype, op, order and number."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import mode
from support.cuda_host import HostCudaEngine, host_cuda_engine
from support.host_kernels import needs_compiler

from lowshard import dtypes
from lowshard.comm import reduction
from lowshard.comm.reduction import fold
from lowshard.errors import CommError
from lowshard.kernels.cuda.cuda_engine import MOST_FOLDED
from lowshard.selftest.arrays import hard
from lowshard.selftest.comparisons import difference
from lowshard.selftest.fold_cases import DTYPES, OPS, fold_cases

pytestmark = needs_compiler

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 100)
ELEMS = 61  # whole units of every size, and elements after the last


@pytest.fixture(scope="module")
def engine() -> HostCudaEngine:
    return host_cuda_engine()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Overflow and invalid operations are what is asked for."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def shifted(values: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy that begins `offset` elements after a 16-byte boundary."""
    memory = np.zeros(values.size + 64, values.dtype)
    start = (-memory.ctypes.data % 16) // values.itemsize + offset
    memory[start : start + values.size] = values
    return memory[start : start + values.size]


def terms_of(dtype: str, count: int) -> list[np.ndarray]:
    return [shifted(hard((ELEMS,), dtype, i), 0) for i in range(count)]


def assert_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    how = difference(found, expected, any_nan=True)
    assert not how, f"{what}: {how}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_folds_of_the_selftest_have_the_bits_of_plain_numpy(engine: HostCudaEngine, dtype: str) -> None:
    row = dtypes.get(dtype)
    for case in fold_cases(dtype, COUNTS, ELEMS):
        expected, divisor = case.expected(), len(case.terms) if case.op == "avg" else 1
        for offset in (0, 1):
            terms, found = (
                [shifted(term, offset) for term in case.terms],
                shifted(np.zeros_like(expected), offset),
            )
            engine.fold(found, terms, row.short, case.op, case.order != "rank", divisor)
            assert_same(found, expected, f"{case.what}, offset {offset}")


@pytest.mark.parametrize("op", ["sum", "prod", "min"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_of_fp8_numbers_are_rounded_as_on_the_cpu(
    engine: HostCudaEngine, dtype: str, op: str
) -> None:
    row, codes = dtypes.get(dtype), np.arange(256, dtype=np.uint8)
    terms = [part.reshape(-1).view(row.numpy) for part in (np.repeat(codes, 256), np.tile(codes, 256))]
    expected, found = np.empty(1 << 16, row.numpy), np.empty(1 << 16, row.numpy)
    fold(terms, expected, op)
    engine.fold(found, terms, row.short, op, True, 1)
    assert_same(found, expected, f"{op} of all pairs")


def test_a_fold_may_write_into_one_of_its_operands(engine: HostCudaEngine) -> None:
    terms, expected = terms_of("float32", 5), np.empty(ELEMS, np.float32)
    fold(terms, expected, "sum", "tree")
    engine.fold(terms[3], terms, "f32", "sum", True, 1)
    assert_same(terms[3], expected, "in place")


def test_a_fold_is_one_launch_and_its_table_is_kept(engine: HostCudaEngine) -> None:
    terms, out = terms_of("bfloat16", 20), terms_of("bfloat16", 1)[0]
    launches, uploads = len(engine.launcher.launches), engine.launcher.uploads
    for _ in range(3):
        engine.fold(out, terms, "bf16", "sum", True, 1)
    assert [name for name, _ in engine.launcher.launches[launches:]] == ["fold_bf16_4"] * 3
    assert engine.launcher.uploads == uploads + 1


@pytest.fixture
def on_gpu(engine: HostCudaEngine, monkeypatch: pytest.MonkeyPatch) -> HostCudaEngine:
    """Let `fold` take NumPy's arrays for a GPU's."""
    monkeypatch.setattr(reduction, "is_gpu", lambda array: True)
    monkeypatch.setattr(reduction, "engine_for", lambda *arrays: engine)
    return engine


@pytest.mark.parametrize("op", [op for op in OPS if op != "avg"])
def test_flags_fold_as_on_the_cpu(on_gpu: HostCudaEngine, op: str) -> None:
    terms = [mode.rng(f"flags {op} {i}").random(ELEMS) < 0.5 for i in range(3)]
    ufunc: Any = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    found = np.empty(ELEMS, bool)
    fold(terms, found, op)
    np.testing.assert_array_equal(found, ufunc(ufunc(terms[0], terms[1]), terms[2]))


def test_operands_of_any_strides_are_folded(on_gpu: HostCudaEngine) -> None:
    whole = np.arange(3 * 8 * 10, dtype=np.float32).reshape(3, 8, 10)
    out = np.zeros((8, 20), np.float32)
    launches = len(on_gpu.launcher.launches)
    fold([part.T[::2].T for part in whole], out[:, 1:11:2], "sum", "rank")
    np.testing.assert_array_equal(out[:, 1:11:2], whole[:, :, ::2].sum(0))
    assert not out[:, 0::2].any()
    assert len(on_gpu.launcher.launches) == launches + 1


def test_more_operands_than_the_kernel_takes_are_refused(on_gpu: HostCudaEngine) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(CommError, match=f"takes {MOST_FOLDED} operands, got {MOST_FOLDED + 1}"):
        fold([out.copy()] * (MOST_FOLDED + 1), out, "sum")
    ones = [np.ones(4, np.float32)] * MOST_FOLDED
    fold(ones, out, "sum")
    np.testing.assert_array_equal(out, MOST_FOLDED)
