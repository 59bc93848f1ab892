"""Resharding to MXFP8 over threads: bit for bit that of the whole, on either side of the wire."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import BF16, LIMIT_S, WAYS, arrays_of, held, local_part, on_all, weights

from lowshard.comm import run_loopback
from lowshard.errors import KernelError, MismatchError
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8, swizzle_scales, unswizzle_scales
from lowshard.reshard import (
    DimSharding,
    MXFP8ReshardTransform,
    Refit,
    Reshard,
    TensorLayout,
    build_reshard_plan,
    execute_reshard_plan,
)


@pytest.mark.parametrize(
    ("elem", "swizzled", "on_send", "way"),
    mode.sample(list(product(("e4m3", "e5m2"), (False, True), (False, True), WAYS)), 5, "reshard in MXFP8"),
)
def test_mxfp8_is_bit_for_bit_that_of_the_whole(
    rng: np.random.Generator, way: str, on_send: bool, swizzled: bool, elem: Any
) -> None:
    # Both cuts: rows to rows and columns to columns, and columns that begin within a block of 32.
    shape = (int(rng.integers(3, 70)) * 2, 192)
    whole = {"w": weights(rng, *shape)}
    apart, staging_bytes = int(rng.choice([0, 1, 3])), int(rng.choice([1024, 8192, 1 << 20]))
    points = (0, *sorted(rng.integers(1, 192, 2).tolist()), 192)
    for src_dim, dst_dim in ((0, 0), (1, 1), (0, 1), (1, 0), ("odd", 0)):
        if src_dim == "odd":
            src = TensorLayout.sharded(
                shape, "bfloat16", {"tp": (3, 1)}, {1: DimSharding(192, 3, points=points)}, by={1: "tp"}
            )
        else:
            src = TensorLayout.sharded(shape, "bfloat16", {"tp": (3, 1)}, {src_dim: "tp"})
        dst = TensorLayout.sharded(
            shape, "bfloat16", {"dp": (2, 2), "tp": (2, 1)}, {dst_dim: "tp"}, offset=apart
        )
        plan = build_reshard_plan({"w": src}, {"w": dst})

        def work(comm: Any, src: Any = src, dst: Any = dst, plan: Any = plan) -> int:
            mine = dst.local_shape(comm.rank)
            buffers = {} if mine is None else {"serve.w": held(*mine, swizzled, elem)}
            how = MXFP8ReshardTransform({"w"}, buffers, "serve.", on_send, elem=elem)
            kept = [(b.data.ctypes.data, b.scale.ctypes.data) for b in buffers.values()]
            receives_only = not on_send and comm.rank not in dst
            made = Reshard(
                plan, arrays_of({"w": src}, comm.rank, whole), {}, comm, None if receives_only else how, way=way,
                staging_bytes=staging_bytes,
            )  # fmt: skip
            report = made.run()
            made.run()  # nothing of the first is left
            for b in buffers.values():
                q = quantize_mxfp8(local_part(dst, comm.rank, whole["w"]), elem)
                assert np.array_equal(b.data, q.data)
                scale = unswizzle_scales(b.scale, *q.scale.shape) if swizzled else b.scale
                assert np.array_equal(scale, q.scale)
            assert kept == [(b.data.ctypes.data, b.scale.ctypes.data) for b in buffers.values()]
            return report.sent_bytes

        run_loopback(max(3, 4 + apart), work, LIMIT_S)


def test_mxfp8_on_the_wire_is_33_64_of_bf16_and_replicas_are_quantised_once(rng: np.random.Generator) -> None:
    shape = (256, 512)
    whole = {"w": weights(rng, *shape)}
    src = {"w": TensorLayout.sharded(shape, "bfloat16", {"tp": (2, 1)}, {0: "tp"})}
    dst = {"w": TensorLayout.sharded(shape, "bfloat16", {"dp": (4, 1)}, offset=2)}
    plan = build_reshard_plan(src, dst)

    def work(comm: Any) -> tuple[int, int, int]:
        mine = dst["w"].local_shape(comm.rank)
        how = MXFP8ReshardTransform(
            {"w"}, {} if mine is None else {"w": held(*mine, False, "e4m3")}, "", True
        )
        report = execute_reshard_plan(plan, arrays_of(src, comm.rank, whole), {}, comm, how)
        assert comm.traffic.sent_bytes == report.sent_bytes
        return report.sent_bytes, plan.sent_bytes(comm.rank), how.quantized_elems

    for sent, plain, quantized in run_loopback(6, work, LIMIT_S)[:2]:
        assert sent * 64 == plain * 33
        assert quantized == 128 * 512


def test_a_receiver_alone_quantises_what_comes_in_another_float(rng: np.random.Generator) -> None:
    whole = {"w": rng.standard_normal((8, 64)).astype(np.float32)}
    src = {"w": TensorLayout.sharded((8, 64), "float32", {})}
    dst = {"w": TensorLayout.sharded((8, 64), "float32", {}, offset=1)}
    plan = build_reshard_plan(src, dst)

    def work(comm: Any) -> None:
        buffer = held(8, 64, False, "e4m3")
        how = MXFP8ReshardTransform({"w"}, {"w": buffer}) if comm.rank else None
        execute_reshard_plan(plan, whole if not comm.rank else None, {}, comm, how)
        if comm.rank:
            assert np.array_equal(buffer.data, quantize_mxfp8(whole["w"].astype(BF16)).data)

    run_loopback(2, work, LIMIT_S)


def test_columns_within_a_block_are_refused_as_asked() -> None:
    src = {"w": TensorLayout.sharded((8, 96), "bfloat16", {"tp": (2, 1)}, {1: "tp"})}
    dst = {"w": TensorLayout.sharded((8, 96), "bfloat16", {}, offset=2)}
    plan = build_reshard_plan(src, dst)

    def make(comm: Any) -> None:
        buffers = {"w": held(8, 96, False, "e4m3")} if comm.rank == 2 else {}
        how = MXFP8ReshardTransform({"w"}, buffers, misaligned="refuse")
        Reshard(plan, {"w": np.zeros((8, 48), BF16)} if comm.rank < 2 else {}, {}, comm, how)

    errors = on_all(3, make)
    assert all(isinstance(e, MismatchError) and "no multiples of 32" in str(e) for e in errors)


def test_buffers_that_do_not_fit_are_refused() -> None:
    codes, scales = np.zeros((4, 64), np.uint8), np.zeros((4, 2), np.uint8)
    wrong: list[tuple[Any, ...]] = [
        ("multiple of 32", codes[:, :40], scales[:, :1]),
        ("uint8", codes.astype(np.float32), scales),
        ("4, 2", codes, np.zeros((4, 3), np.uint8)),
        ("rows, K", codes[0], scales[0]),
        *(("elem", codes, scales, elem) for elem in ("fp8", ["e4m3"], None)),
    ]
    for word, data, scale, *elem in wrong:
        given = SimpleNamespace(data=data, scale=scale, **({"elem": elem[0]} if elem else {}))
        with pytest.raises(KernelError, match=word):
            MXFP8ReshardTransform({"w"}, {"w": given})
    buffers = {"w": held(4, 64, False, "e4m3")}  # whose names may stand for those of the tensors
    assert MXFP8ReshardTransform(buffers, buffers).convertible_params == {"w"}


def test_sources_that_are_quantised_are_sent_as_bf16_as_they_are_then(rng: np.random.Generator) -> None:
    first, second = weights(rng, 8, 64), weights(rng, 8, 64)
    plan = build_reshard_plan(
        {"w": TensorLayout.sharded((8, 64), "bfloat16", {})},
        {"w": TensorLayout.sharded((8, 64), "bfloat16", {"dp": (2, 1)})},
    )

    def work(comm: Any) -> None:
        out, q = np.zeros((8, 64), BF16), quantize_mxfp8(first)
        made = Reshard(plan, {"w": q} if comm.rank == 0 else None, {"w": out}, comm)
        for values in (first, second):
            quantize_mxfp8(values, out=q)
            made.run()
            assert np.array_equal(out, dequantize_mxfp8(q if comm.rank == 0 else quantize_mxfp8(values)))

    run_loopback(2, work, LIMIT_S)


def test_mxfp8_versions_have_buffers_of_their_own(rng: np.random.Generator) -> None:
    src = {"w": TensorLayout.sharded((4, 64), "bfloat16", {})}
    dst = {"w": TensorLayout.sharded((4, 64), "bfloat16", {}, offset=1)}
    plan = build_reshard_plan(src, dst)

    def work(comm: Any) -> None:
        mine = {"w": np.zeros((4, 64), BF16)} if comm.rank == 0 else {}
        how = MXFP8ReshardTransform({"w"}, {"w": held(4, 64, True, "e4m3")}) if comm.rank else None
        refit = Refit(plan, comm, mine, {}, how)
        for version in (1, 2):
            for array in mine.values():
                array[...] = version
            refit.push(version) if mine else refit.pull()
            if comm.rank:
                q = refit.transform.persistent_buffers["w"]  # type: ignore[union-attr]
                expected = quantize_mxfp8(np.full((4, 64), version, BF16))
                assert np.array_equal(q.data, expected.data)
                assert np.array_equal(q.scale, swizzle_scales(expected.scale))

    run_loopback(2, work, LIMIT_S)
