"""MXFP8 on arrays of any strides, alignment and byte order, on every engine; nothing beside them is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import engines
from support.mxfp8_twin import (
    BITS,
    COMBOS,
    DTYPES,
    assert_holds,
    code_values,
    exact,
    moderate_blocks,
    slow_quantize,
)
from support.places import packed_place, places

from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8

engine = engines.fixture()

shapes = st.one_of(
    st.tuples(st.sampled_from([32, 64, 96, 160])),
    st.tuples(st.integers(1, 5), st.sampled_from([32, 64, 96])),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([32, 64])),
    st.tuples(*[st.integers(1, 3)] * 4, st.sampled_from([32, 64])),
)


def swapped(dtype):
    """The other byte order, for the types that have one."""
    return np.dtype(DTYPES[dtype]).newbyteorder() if dtype != "bfloat16" else np.dtype(DTYPES[dtype])


def values_of(shape, dtype, seed=0):
    """An array of this shape with values that test rounding, and a few that are not finite."""
    return moderate_blocks(seed, int(np.prod(shape)) // 32, dtype).reshape(shape)


def twin_of(x, combo=("e4m3", "rceil")):
    codes, scale = slow_quantize(exact(x).reshape(-1, 32), *combo)
    return codes.reshape(x.shape), scale.reshape(*x.shape[:-1], x.shape[-1] // 32)


def values_under(codes, scale, elem, dtype):
    """Values of codes, for scales under which all of them are exact in each dtype."""
    wide = code_values(elem)[codes] * np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, axis=-1)
    values = wide.astype(DTYPES[dtype])
    np.testing.assert_array_equal(values.astype(np.float64), wide)
    return values


def random_q(shape, seed):
    """Finite codes and middling scales, so that every value is exact in each dtype."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, shape, dtype=np.uint8) | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)
    return codes, rng.integers(124, 131, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)


# ------------------------------------------------------------------------------------------ any places
@given(st.data(), st.sampled_from(list(DTYPES)), st.sampled_from(COMBOS), st.booleans())
def test_x_at_any_place_quantises_as_its_contiguous_copy(data, dtype, combo, swap):
    shape = data.draw(shapes)
    x = values_of(shape, dtype)
    place = data.draw(places(shape, swapped(dtype) if swap else DTYPES[dtype]))
    q = quantize_mxfp8(place.holding(x), *combo)
    codes, scale = twin_of(x, combo)
    np.testing.assert_array_equal(q.data, codes)
    np.testing.assert_array_equal(q.scale, scale)
    assert q.data.flags.c_contiguous
    assert q.scale.flags.c_contiguous


@given(st.data(), st.sampled_from(list(DTYPES)))
def test_out_at_any_place_gets_the_codes_and_scales_and_nothing_beside_it_changes(data, dtype):
    shape = data.draw(shapes)
    x = values_of(shape, dtype)
    x_place = data.draw(st.one_of(st.just(packed_place(shape, DTYPES[dtype])), places(shape, DTYPES[dtype])))
    data_place = data.draw(places(shape, np.uint8))
    scale_place = data.draw(places((*shape[:-1], shape[-1] // 32), np.uint8))
    arenas = data_place.arena(1), scale_place.arena(2)
    before = arenas[0].copy(), arenas[1].copy()
    out = MXFP8Tensor(data_place.view(arenas[0]), scale_place.view(arenas[1]))
    assert quantize_mxfp8(x_place.holding(x), out=out) is out
    codes, scale = twin_of(x)
    data_place.expect(before[0], arenas[0], codes)
    scale_place.expect(before[1], arenas[1], scale)


@given(st.data(), st.sampled_from(list(DTYPES)), st.sampled_from(["e4m3", "e5m2"]), st.booleans())
def test_q_and_out_of_dequantise_at_any_place_too(data, dtype, elem, swap):
    shape = data.draw(shapes)
    codes, scale = random_q(shape, 3)
    if elem == "e5m2":
        codes &= 0xBF | 0x80  # magnitudes that fp16 can show
    data_place = data.draw(st.one_of(st.just(packed_place(shape, np.uint8)), places(shape, np.uint8)))
    q = MXFP8Tensor(
        data_place.holding(codes),
        data.draw(st.one_of(st.just(packed_place(scale.shape, np.uint8)), places(scale.shape, np.uint8)))
        .holding(scale),
        elem,
    )  # fmt: skip
    place = data.draw(places(shape, swapped(dtype) if swap else DTYPES[dtype]))
    arena = place.arena(4)
    before = arena.copy()
    out = place.view(arena)
    assert dequantize_mxfp8(q, dtype, out=out) is out
    place.expect(before, arena, values_under(codes, scale, elem, dtype))
    native = out.astype(DTYPES[dtype])
    np.testing.assert_array_equal(dequantize_mxfp8(q, dtype).view(BITS[dtype]), native.view(BITS[dtype]))


# -------------------------------------------------------------------------- windows of a larger tensor


# ------------------------------------------------------------------------------------ named arrays of x
def strided_views(dtype):
    """Views whose strides, alignment and byte order differ; the last dim is a multiple of 32."""
    base = moderate_blocks(4, 6 * 8 * 4, dtype)
    raw = np.empty(base.nbytes + 1, np.uint8)
    raw[1:] = base.reshape(-1).view(np.uint8)
    misaligned = raw[1:].view(DTYPES[dtype])
    assert not misaligned.flags.aligned
    yield "transposed", base.reshape(64, 96).T
    yield "columns", base.reshape(48, 128)[:, 32:96]
    yield "odd offset", base.reshape(48, 128)[3::2, 7:71]
    yield "stepped", base.reshape(24, 256)[:, ::2]
    yield "reversed", base.reshape(24, 256)[::-1, ::-1]
    yield "rows reversed", base.reshape(24, 256)[::-1]
    yield "three dims", base.reshape(6, 32, 32).transpose(1, 0, 2)
    yield "last dim first", base.reshape(32, 6, 32).transpose(2, 1, 0)
    yield "four dims", base.reshape(2, 3, 32, 32)[:, ::2].transpose(1, 0, 3, 2)
    yield "five dims", base.reshape(2, 3, 2, 4, 128).transpose(3, 1, 0, 2, 4)[..., 32:96]
    yield "broadcast", np.broadcast_to(base.reshape(24, 256)[0], (3, 2, 256))
    yield "misaligned", misaligned.reshape(24, 256)
    yield "misaligned strided", misaligned.reshape(24, 256)[1::2, 3:131]
    yield "one dim", base.reshape(-1)[5:1029:2]
    if dtype != "bfloat16":
        yield "other byte order", base.astype(swapped(dtype)).reshape(24, 256)
        yield "other byte order, strided", base.astype(swapped(dtype)).reshape(48, 128)[::3, 32:96]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_alignment_and_byte_order_of_x_change_nothing(dtype):
    for name, view in strided_views(dtype):
        codes, scale = twin_of(view)
        q = quantize_mxfp8(view)
        np.testing.assert_array_equal(q.data, codes, err_msg=name)
        np.testing.assert_array_equal(q.scale, scale, err_msg=name)


# ------------------------------------------------------------------------------------------ large arrays
@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((3, 2049 * 32), slice(None)),
        ((3, 2051 * 32), slice(32, -32)),
        ((5000, 96), slice(0, 64)),
        ((7, 20, 960), slice(64, -32)),
    ],
)
def test_arrays_larger_than_a_tile_are_as_the_twin(shape, columns):
    x = np.random.default_rng(8).standard_normal(shape, dtype=np.float32)[..., columns]
    q = quantize_mxfp8(x)
    blocks = np.ascontiguousarray(x).reshape(-1, 32)
    codes, scale = q.data.reshape(-1, 32), q.scale.reshape(-1)
    some = np.r_[0:300, len(blocks) // 2 : len(blocks) // 2 + 300, len(blocks) - 300 : len(blocks)]
    twin_codes, twin_scale = slow_quantize(exact(blocks[some]), "e4m3", "rceil")
    np.testing.assert_array_equal(codes[some], twin_codes)
    np.testing.assert_array_equal(scale[some], twin_scale)
    # Every block: each element within half a step of its value, the maximum not clamped.
    values = np.ldexp(code_values("e4m3")[codes], scale.astype(int)[:, None] - 127)
    step = np.ldexp(1.0, np.maximum(np.frexp(np.abs(values))[1] - 4, scale.astype(int)[:, None] - 127 - 9))
    assert (np.abs(values - blocks) <= step / 2).all()
    got = dequantize_mxfp8(q, "float32")
    np.testing.assert_array_equal(got.reshape(-1, 32), values.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_array_without_a_contiguous_last_dim_is_staged_and_comes_out_the_same(engine, dtype):
    rows = engine.pick(3000, 300)  # 3000 x 800 is more than is staged at a time
    x = np.asfortranarray(np.random.default_rng(9).standard_normal((rows, 800)).astype(DTYPES[dtype]))
    q = quantize_mxfp8(x)
    direct = quantize_mxfp8(np.ascontiguousarray(x))
    np.testing.assert_array_equal(q.data, direct.data)
    np.testing.assert_array_equal(q.scale, direct.scale)
    flat = np.repeat(x.reshape(-1), 2)[::2]
    assert_holds(quantize_mxfp8(flat), direct.data.reshape(-1, 32), direct.scale.reshape(-1))
    out = np.zeros((800, rows), DTYPES[dtype]).T
    dequantize_mxfp8(q, dtype, out=out)
    np.testing.assert_array_equal(out, dequantize_mxfp8(direct, dtype))


# ------------------------------------------------------------------------------------- one-buffer tensors
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 1, 96), (0,), (0, 32), (4, 0)])
@pytest.mark.parametrize("spare", [0, 5])
def test_over_lays_codes_first_and_scales_at_the_next_multiple_of_16(shape, spare):
    elems = int(np.prod(shape))
    need = MXFP8Tensor.buffer_bytes(shape)
    assert need == -(-elems // 16) * 16 + elems // 32
    buffer = np.full(need + spare, 0xEE, np.uint8)
    q = MXFP8Tensor.over(buffer, shape, "e5m2")
    assert (q.shape, q.elem, q.wire_bytes) == (shape, "e5m2", elems + elems // 32)
    x = values_of(shape, "float32")
    assert quantize_mxfp8(x, "e5m2", out=q) is q
    if elems:
        codes, scale = twin_of(x, ("e5m2", "rceil"))
        np.testing.assert_array_equal(buffer[:elems], codes.reshape(-1))
        np.testing.assert_array_equal(buffer[need - elems // 32 : need], scale.reshape(-1))
        assert q.scale.ctypes.data - q.data.ctypes.data == -(-elems // 16) * 16
    assert (buffer[need:] == 0xEE).all()
