"""Casts and sums of the CUDA sources, run on the host, give the bytes of the plain engine."""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
from support.cuda_host import HostCudaEngine, host_cuda_engine
from support.host_kernels import (
    DTYPES,
    WAYS,
    any_dtype,
    assert_as_plain,
    assert_same,
    at_offset,
    blocks,
    engine_that_runs,
    floats,
    strided,
    through,
)

from lowshard.kernels import cast, sum_into
from lowshard.kernels import engine as engine_module
from lowshard.kernels.cuda import cuda_engine as cuda_engine
from lowshard.kernels.plain import PlainEngine

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which builds the kernels, is not on PATH"
)


@pytest.fixture(autouse=True)
def plain_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test expects, and what it prepares, comes from the plain engine."""
    plain = PlainEngine()
    monkeypatch.setattr(engine_module, "host_engine", lambda: plain)


@pytest.fixture(scope="module")
def engine() -> HostCudaEngine:
    return host_cuda_engine()


@pytest.fixture(scope="module", params=WAYS)
def any_engine(request: pytest.FixtureRequest) -> HostCudaEngine:
    return engine_that_runs(request.param)


@pytest.mark.parametrize("source_dtype", ["bfloat16", "float16"])
@any_dtype
def test_every_16_bit_pattern_is_cast(source_dtype: str, dtype: str, any_engine: HostCudaEngine) -> None:
    x = floats(np.arange(1 << 16), source_dtype)
    assert_as_plain(any_engine, cast, x, dtype)
    assert_as_plain(any_engine, cast, x[1:], dtype)


@any_dtype
def test_fp32_of_every_exponent_and_all_ties_are_cast(
    dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator, full: bool
) -> None:
    # For every sign and exponent: ties of both 16-bit types and their neighbours, among random mantissas.
    ties = np.concatenate([np.arange(8)[:, None] << 12, np.arange(8)[:, None] << 15, [[0]]])
    mantissa = np.concatenate(
        [(ties + np.arange(-2, 3)).reshape(-1) % (1 << 23), rng.integers(0, 1 << 23, 64)]
    )
    bits = (np.arange(512)[:, None] << 23 | mantissa).reshape(-1)
    if full:
        bits = np.concatenate([bits, rng.integers(0, 1 << 32, 1 << 22)])
    assert_as_plain(any_engine, cast, floats(bits, "float32"), dtype)


@any_dtype
def test_strided_arrays_are_cast(dtype: str, any_engine: HostCudaEngine, rng: np.random.Generator) -> None:
    for target in DTYPES:
        x = strided(rng, blocks(rng, dtype, 60).reshape(4, 3, 5, 32))
        assert_as_plain(any_engine, cast, x, target)
        assert_as_plain(any_engine, cast, x[..., ::2], target)
        assert_as_plain(any_engine, cast, x[..., :27], target)
        assert_as_plain(any_engine, cast, x.T, target)


@any_dtype
@pytest.mark.parametrize("accumulate", [True, False])
def test_sums_of_any_number_of_sources(
    dtype: str, accumulate: bool, engine: HostCudaEngine, rng: np.random.Generator
) -> None:
    counts = (1, 2, 5, 7, 8, 9, 16, 20)
    for count, mixed in [*product(counts, (False, True))]:
        size = int(rng.integers(1, 4000))
        kinds = rng.choice(list(DTYPES), count if mixed else 1).tolist() * (1 if mixed else count)
        offsets = [0] * (count + 1) if rng.random() < 0.5 else rng.integers(0, 17, count + 1).tolist()
        sources = [
            at_offset(blocks(rng, kind, -(-size // 32)).reshape(-1)[:size], offset)
            for kind, offset in zip(kinds, offsets[1:], strict=True)
        ]
        out = blocks(rng, dtype, -(-size // 32)).reshape(-1)[:size]

        with through(PlainEngine()):
            expected = sum_into(at_offset(out, offsets[0]), sources, accumulate)
        with through(engine):
            result = sum_into(at_offset(out, offsets[0]), sources, accumulate)
        nan = np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), nan)
        assert_same(result[~nan], expected[~nan])
        unit = 8 if "float32" not in (dtype, *kinds) and len(set(kinds)) == 1 else 4
        unit = 1 if any(offset % 16 for offset in offsets) else unit
        assert engine.launcher.launches[-1][0].endswith(f"_{unit}")


@any_dtype
@pytest.mark.parametrize("kinds", [*DTYPES, "mixed"])
@pytest.mark.parametrize("offset", [0, 2])
def test_zeros_of_sign_minus_stay_and_absent_terms_add_nothing(
    dtype: str, kinds: str, offset: int, engine: HostCudaEngine
) -> None:
    for count in (1, 2, 8, 9):
        picked = (list(DTYPES) * 3)[:count] if kinds == "mixed" else [kinds] * count
        sources = [at_offset(np.full(21, -0.0, DTYPES[kind]), offset) for kind in picked]
        out = at_offset(np.full(21, -0.0, DTYPES[dtype]), offset)
        for accumulate in (True, False):
            with through(engine):
                assert np.signbit(sum_into(out, sources, accumulate)).all()
            assert not out.any()


def test_the_first_sources_need_no_table_and_later_ones_keep_theirs() -> None:
    engine = host_cuda_engine()
    sources = [np.full(100, i, np.float32) for i in range(9)]
    out = np.zeros(100, np.float32)
    with through(engine):
        sum_into(out, sources[:8])
        assert engine.launcher.uploads == 0
        for _ in range(3):
            sum_into(out, sources)
        assert engine.launcher.uploads == 1
        engine.launcher.current_stream = "another"
        sum_into(out, sources)
        assert engine.launcher.uploads == 2
        assert out.tolist() == [28.0 + 4 * 36.0] * 100
        for last in np.zeros((cuda_engine._KEPT_SOURCE_TABLES + 10, 100), np.float32):
            sum_into(out, [*sources[:8], last])
    assert len(engine._sources) == cuda_engine._KEPT_SOURCE_TABLES
