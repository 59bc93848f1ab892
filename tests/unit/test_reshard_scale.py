"""Slices of block scales, and what can be sent: Megatron's results, and errors where those are silently wrong."""

from __future__ import annotations

import numpy as np
import pytest
from support.recorded import oracle

from lowshard.errors import KernelError
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8, swizzle_scales
from lowshard.kernels.swizzle import put_scales
from lowshard.reshard import SwizzledMXFP8, ensure_sendable, scale_slice_from_data_slice


@pytest.mark.parametrize(
    ("data", "scale"),
    [
        ((slice(0, 4), slice(0, 64)), (slice(0, 4), slice(0, 2))),
        ((slice(0, 4), slice(-64, None)), (slice(0, 4), slice(-2, None))),
        ((slice(None), slice(None)), (slice(None), slice(None))),
        ((slice(0, 4), slice(32, 96, 1)), (slice(0, 4), slice(1, 3))),
        ((3, 31), (3, 0)),
        ((3, -1), (3, -1)),
        ((slice(1), True), (slice(1), 0)),
        ((np.int64(40),), (1,)),
        ((slice(np.int32(32), 64),), (slice(1, 2),)),
    ],
)
def test_the_last_entry_is_divided(data: tuple, scale: tuple) -> None:
    assert scale_slice_from_data_slice(data) == scale


def test_oracle() -> None:
    def made(entry: dict) -> object:
        return slice(*entry["slice"]) if "slice" in entry else entry["int"]

    for case in oracle("megatron_reshard")["scale_slices"]:
        data = tuple(map(made, case["data"]))
        stepped = any(isinstance(e, slice) and e.step not in (None, 1) for e in data)
        if stepped or "error" in case:
            with pytest.raises((AssertionError, IndexError)):
                scale_slice_from_data_slice(data, case["block"])
        else:
            assert scale_slice_from_data_slice(data, case["block"]) == tuple(map(made, case["scale"]))


def test_sendable_is_an_array_as_it_is_or_a_quantised_one_in_bf16(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 64)).astype(np.float32)
    assert ensure_sendable(x) is x
    assert ensure_sendable(x[:, ::2]).base is x
    q = quantize_mxfp8(x)
    expected = dequantize_mxfp8(q, "bfloat16")
    assert np.array_equal(ensure_sendable(q), expected)
    assert np.array_equal(ensure_sendable(SwizzledMXFP8(q.data, swizzle_scales(q.scale))), expected)
    with pytest.raises(KernelError, match="got list"):
        ensure_sendable([1.0])


def test_places_in_the_swizzled_layout_are_those_of_the_kernel(rng: np.random.Generator) -> None:
    scale = rng.integers(1, 255, (300, 11), dtype=np.uint8)
    whole = swizzle_scales(scale)
    for (r0, r1), (c0, c1) in (
        ((37, 290), (2, 7)),
        ((0, 300), (0, 11)),
        ((130, 131), (5, 6)),
        ((96, 256), (3, 9)),
        ((7, 7), (0, 4)),
    ):
        rest, expected = scale.copy(), np.zeros_like(scale)
        rest[r0:r1, c0:c1], expected[r0:r1, c0:c1] = 0, scale[r0:r1, c0:c1]
        tiles = np.zeros_like(whole)
        for source in (scale[r0:r1, c0:c1], whole):
            put_scales(source, tiles, r0, c0, (r1 - r0, c1 - c0), 11)
            assert np.array_equal(tiles, swizzle_scales(expected))
        put_scales(rest, tiles, 0, 0, rest.shape, 11)
        assert np.array_equal(tiles, swizzle_scales(rest))
