"""The fold of n arrays by CUDA, built for the host: the CPU's bits, for every dtype, op, order and number."""

from __future__ import annotations

import re
import subprocess
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
from lowshard.kernels.cuda.cuda_module import program_of, source

pytestmark = needs_compiler

DTYPES = [row.name for row in dtypes.all_dtypes() if row.kind in ("float", "int", "uint")]
OPS = ("sum", "avg", "min", "max", "prod")
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


def terms_of(dtype: str, count: int, offset: int) -> list[np.ndarray]:
    """Return operands with every special value, `offset` elements after a 16-byte boundary."""
    rng, row = mode.rng(f"fold {dtype} {count}"), dtypes.get(dtype)
    terms = []
    for _ in range(count):
        if row.kind == "float":
            values = rng.standard_normal(ELEMS) * np.exp2(rng.integers(-3, 4, ELEMS))
            found = values.astype(row.numpy)
            bits = found.view(f"u{row.itemsize_bytes}")
            some = rng.random(ELEMS)
            # Any pattern: subnormals, NaN and Inf where the type has them; zeros of both signs.
            patterns = rng.integers(0, 1 << 63, ELEMS, dtype=np.uint64)
            bits[some < 0.1] = patterns.astype(bits.dtype)[some < 0.1]
            bits[(some > 0.1) & (some < 0.2)] &= bits.dtype.type((1 << (row.bits - 1)) | 7)
            found[some > 0.9] = rng.choice([0.0, -0.0], int((some > 0.9).sum()))
        else:
            found = rng.integers(
                np.iinfo(row.numpy).min, np.iinfo(row.numpy).max, ELEMS, row.numpy, endpoint=True
            )
        memory = np.zeros(ELEMS + 64, row.numpy)
        start = (-memory.ctypes.data % 16) // row.itemsize_bytes + offset
        memory[start : start + ELEMS] = found
        terms.append(memory[start : start + ELEMS])
    return terms


def assert_same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    differs = found.view(np.uint8) != expected.view(np.uint8)
    differs = differs.reshape(found.size, -1).any(axis=1)
    if expected.dtype.kind not in "iub":
        differs &= ~(np.isnan(found.astype(float)) & np.isnan(expected.astype(float)))
    at = np.flatnonzero(differs)
    assert not at.size, f"{what}: element {at[0]}: {found[at[0]]!r} for {expected[at[0]]!r}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_a_fold_has_the_bits_of_the_cpus(engine: HostCudaEngine, dtype: str, op: str) -> None:
    row = dtypes.get(dtype)
    for count in COUNTS:
        for order in ("tree", "rank"):
            for offset in (0, 1):
                terms = terms_of(dtype, count, offset)
                expected, found = np.empty(ELEMS, row.numpy), terms_of(dtype, 1, offset)[0]
                fold(terms, expected, op, order)
                divisor = count if op == "avg" else 1
                engine.fold(found, terms, row.short, op, order == "tree", divisor)
                assert_same(found, expected, f"{op} {order} of {count} {dtype}, offset {offset}")


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
    terms, expected = terms_of("float32", 5, 0), np.empty(ELEMS, np.float32)
    fold(terms, expected, "sum", "tree")
    engine.fold(terms[3], terms, "f32", "sum", True, 1)
    assert_same(terms[3], expected, "in place")


def test_a_fold_is_one_launch_and_its_table_is_kept(engine: HostCudaEngine) -> None:
    terms, out = terms_of("bfloat16", 20, 0), terms_of("bfloat16", 1, 0)[0]
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtypes_kernels_are_compiled_alone(dtype: str) -> None:
    row = dtypes.get(dtype)
    kernels = [f"fold_{row.short}_{count}" for count in (1, 2 if row.itemsize_bytes == 8 else 4)]
    file, options = program_of(kernels[0])
    assert options != program_of("cast_1")[1]
    command = ["g++", "-E", "-P", "-x", "c++", *options, "-"]
    done = subprocess.run(command, input=source(file), capture_output=True, text=True, check=True, timeout=60)
    assert sorted(re.findall(r"fold_\w+_\d\b", done.stdout)) == kernels
