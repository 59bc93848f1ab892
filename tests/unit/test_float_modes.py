"""Kernels give the same bytes in a process that rounds another way or flushes subnormals to zero."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from support import engines
from support.float_twin import DTYPES, bits_of, decode, encode, patterns
from support.mxfp8_twin import (
    COMBOS,
    ELEMS,
    assert_holds,
    code_values,
    exact,
    random_fp32_blocks,
    slow_quantize,
)

from lowshard.kernels import MXFP8Tensor, cast, dequantize_mxfp8, quantize_mxfp8, reference

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the modes are set through glibc's fenv_t of x86-64",
)
# Not the CUDA sources on the host: the floats there stand for a GPU's, which has no such modes.
engine = engines.fixture(("plain", "numba"))

# Bits of MXCSR, the last word of fenv_t: rounding in bits 13 and 14, flush to zero 15, subnormals read as zero 6.
MODES = {"up": 0x4000, "down": 0x2000, "to zero": 0x6000, "flush": 0x8040, "flush and up": 0xC040}


@contextmanager
def float_mode(bits):
    libm = ctypes.CDLL("libm.so.6")
    kept, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(kept)
    libm.fegetenv(changed)
    changed[7] |= bits
    libm.fesetenv(changed)
    try:
        yield
    finally:
        libm.fesetenv(kept)


def test_the_modes_are_in_force_inside_the_block_and_gone_after_it():
    one, tiny = np.array([1.0], np.float32), np.array([2.0**-30], np.float32)
    low = np.array([2.0**-126], np.float32)
    with float_mode(MODES["up"]):
        assert (one + tiny)[0] > 1
    with float_mode(MODES["flush"]):
        assert (low * np.float32(0.5))[0] == 0
    assert (one + tiny)[0] == 1
    assert (low * np.float32(0.5))[0] > 0


@pytest.mark.parametrize("name", MODES)
def test_quantise_gives_the_codes_of_the_twin(engine, name):
    x = random_fp32_blocks(3, 300)
    with np.errstate(over="ignore", invalid="ignore"):
        sources = [x.astype(dtype) for dtype in DTYPES.values()]
    for elem, mode_ in COMBOS:
        for source in sources:
            expected = slow_quantize(exact(source), elem, mode_)
            # Compiled before: a compiler may misread constants in such a mode.
            quantize_mxfp8(source, elem, mode_)
            with float_mode(MODES[name]):
                q = quantize_mxfp8(source, elem, mode_)
            assert_holds(q, *expected)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise_rounds_to_nearest_and_keeps_subnormals(name, dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for elem in ELEMS:
        q = MXFP8Tensor(codes, scale, elem)
        dequantize_mxfp8(q, dtype)
        reference.value_table.cache_clear()  # the table is made within the mode, as in a process that runs in it
        values = code_values(elem)[codes] * np.ldexp(1.0, np.arange(256) - 127)[:, None]
        values[255] = np.nan
        expected = encode(np.where(np.isnan(values), np.nan, values), dtype)
        try:
            with float_mode(MODES[name]):
                got = dequantize_mxfp8(q, dtype)
        finally:
            reference.value_table.cache_clear()
        np.testing.assert_array_equal(bits_of(got), expected)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("src", DTYPES)
@pytest.mark.parametrize("dst", DTYPES)
def test_casts_round_to_nearest_and_keep_subnormals(name, src, dst):
    rng = np.random.default_rng(4)
    if src == "float32":
        bits = np.r_[rng.integers(0, 1 << 32, 20_000), encode(rng.standard_normal(20_000) * 2.0**-15, src)]
        bits = np.r_[bits, rng.integers(0, 1 << 24, 2000)]
    else:
        bits = np.arange(1 << 16)
    expected = encode(decode(bits, src), dst)
    x = patterns(bits, src)
    cast(x, dst)
    with float_mode(MODES[name]):
        got = cast(x, dst)
    np.testing.assert_array_equal(bits_of(got), expected)
