"""Resharding over threads: every way to move, transforms on either side, errors on all ranks alike, refits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import mode
from support.reshard_cases import arrays_of, local_part, random_case, run_case

from lowshard import DeviceMesh, Layout, Replicated, Sharded, dtypes
from lowshard.comm import run_loopback
from lowshard.errors import (
    BufferMismatchError,
    KernelError,
    LowshardError,
    MeshError,
    MismatchError,
    PlanError,
    VerificationError,
)
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8, swizzle_scales, unswizzle_scales
from lowshard.kernels.swizzle import swizzled_bytes
from lowshard.reshard import (
    MXFP8ReshardTransform,
    Refit,
    Reshard,
    ReshardTransform,
    SwizzledMXFP8,
    TensorLayout,
    build_reshard_plan,
    execute_reshard_plan,
)

BF16 = dtypes.get("bfloat16").numpy
WAYS = ("direct", "slots", "messages")
LIMIT_S = 30.0


def on_all(ranks: int, call: Callable[[Any], Any]) -> list[Exception | None]:
    """Run a call on threads and return what each raised."""

    def work(comm: Any) -> Exception | None:
        try:
            call(comm)
        except LowshardError as error:
            return error
        return None

    return run_loopback(ranks, work, LIMIT_S)


def weights(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    return (rng.standard_normal((rows, cols)) * 0.02).astype(BF16)


# ---- moving


def test_a_reshard_is_slicing_the_whole(rng: np.random.Generator) -> None:
    for _ in range(250 if mode.full() else 30):
        case = random_case(rng)
        moved = run_loopback(case.ranks, lambda comm, case=case: run_case(comm, case, False), LIMIT_S)
        assert [s for s, _ in moved] == [case.plan.sent_bytes(r) for r in range(case.ranks)]
        assert [r for _, r in moved] == [case.plan.received_bytes(r) for r in range(case.ranks)]


@pytest.mark.parametrize("way", WAYS)
def test_staging_is_bounded_and_pools_and_idle_ranks_take_part(rng: np.random.Generator, way: str) -> None:
    src = {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (2, 1)}, {0: "tp"})}
    pools = [
        {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (2, 1)}, {1: "tp"}, offset=2)},
        {"w": TensorLayout.sharded((40, 64), "float32", {"tp": (1, 1)}, offset=5)},
    ]
    plan = build_reshard_plan(src, pools)
    whole = {"w": rng.standard_normal((40, 64)).astype(np.float32)}

    def work(comm: Any) -> Any:
        dst = {}
        for pool in pools:
            dst |= {n: np.zeros(a.shape, a.dtype) for n, a in arrays_of(pool, comm.rank, whole).items()}
        report = execute_reshard_plan(
            plan, arrays_of(src, comm.rank, whole), dst, comm, way=way, staging_bytes=4096
        )
        for pool in pools:
            if comm.rank in pool["w"]:
                assert np.array_equal(dst["w"], local_part(pool["w"], comm.rank, whole["w"]))
        return report

    reports = run_loopback(7, work, LIMIT_S)
    assert all(r.staging_bytes <= 4096 for r in reports)
    assert reports[4].sent_bytes == reports[4].received_bytes == 0  # idle
    assert sum(r.sent_bytes for r in reports) == 2 * 40 * 64 * 4


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


# ---- errors: the same on all ranks, before anything is written


def pair() -> Any:
    mesh = DeviceMesh((2,), ("tp",))
    return build_reshard_plan(
        {"w": Layout(mesh, (4, 4), "float32", (Sharded(0),))},
        {"w": Layout(mesh, (4, 4), "float32", (Sharded(1),))},
    )


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda s, d: s.pop("w"), BufferMismatchError, "rank 1: w: rank 1 has a part of this source tensor"),
        (lambda s, d: d.pop("w"), BufferMismatchError, "part of this destination tensor"),
        (lambda s, d: s.update(w=s["w"].astype(np.float64)), BufferMismatchError, r"got float64\[2, 4\]"),
        (
            lambda s, d: d.update(w=d["w"].T),
            BufferMismatchError,
            r"float32\[4, 2\] of this destination.*\[2, 4\]",
        ),
        (lambda s, d: d["w"].setflags(write=False), BufferMismatchError, "read-only"),
    ],
)
def test_wrong_arrays_raise_on_all_ranks_before_a_write(spoil: Any, error: type, text: str) -> None:
    plan = pair()

    def work(comm: Any) -> None:
        src, dst = {"w": np.ones((2, 4), np.float32)}, {"w": np.zeros((4, 2), np.float32)}
        kept = dst["w"]
        if comm.rank == 1:
            spoil(src, dst)
        with pytest.raises(error, match=text):
            execute_reshard_plan(plan, src, dst, comm)
        assert not kept.any()

    run_loopback(2, work, LIMIT_S)


def test_a_destination_over_a_source_is_refused_unless_it_stays_as_it_is() -> None:
    layouts = [{"w": TensorLayout.sharded((4, 4), "float32", {"tp": (2, 1)}, {dim: "tp"})} for dim in (0, 1)]
    moved, kept = build_reshard_plan(*layouts), build_reshard_plan(layouts[0], layouts[0])

    def work(comm: Any) -> None:
        mine = np.arange(8, dtype=np.float32).reshape(2, 4) + 8 * comm.rank
        with pytest.raises(BufferMismatchError, match="rank 0: w: on rank 0 its destination shares memory"):
            execute_reshard_plan(moved, {"w": mine}, {"w": mine.reshape(4, 2)}, comm)
        execute_reshard_plan(kept, {"w": mine}, {"w": mine}, comm)
        assert np.array_equal(mine.reshape(-1), np.arange(8) + 8 * comm.rank)

    run_loopback(2, work, LIMIT_S)


def test_plans_and_worlds_that_differ_raise_on_all_ranks() -> None:
    other = build_reshard_plan(*({"v": TensorLayout.sharded((2,), "float32", {})},) * 2)
    errors = on_all(2, lambda c: Reshard(other if c.rank else pair(), *arrays(c), c))
    assert all(isinstance(e, MismatchError) for e in errors)
    wide = build_reshard_plan(
        {"w": TensorLayout.sharded((2,), "float32", {})},
        {"w": TensorLayout.sharded((2,), "float32", {}, offset=5)},
    )
    errors = on_all(2, lambda c: Reshard(wide, {"w": np.ones(2, np.float32)}, None, c))
    assert all(isinstance(e, MeshError) and "start 6" in str(e) for e in errors)


def arrays(comm: Any) -> tuple[dict, dict]:
    found = {"w": np.ones((2, 4), np.float32), "v": np.ones(2, np.float32)}
    return found, {"w": np.zeros((4, 2), np.float32), "v": np.zeros(2, np.float32)}


class Doubling(ReshardTransform):
    """Sends halves of two; counts its calls."""

    def __init__(self, arrays: int) -> None:
        self.arrays, self.calls = arrays, {"send": 0, "recv": 0, "finalize": 0}

    def should_transform(self, param_name: str) -> bool:
        return True

    def prepare_send(self, param_name: str, src_slice: Any, src_param: Any) -> list[Any]:
        self.calls["send"] += 1
        return [(src_param[src_slice] / self.arrays).copy() for _ in range(self.arrays)]

    def prepare_recv(self, param_name: str, dst_slice: Any) -> list[Any]:
        self.calls["recv"] += 1
        shape = tuple(s.stop - s.start for s in dst_slice)
        return [np.zeros(shape, np.float32) for _ in range(self.arrays)]

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[Any]) -> None:
        self.calls["finalize"] += 1
        self.stored = getattr(self, "stored", np.zeros((4, 2), np.float32))
        self.stored[dst_slice] = sum(recv_buffers)


@pytest.mark.parametrize("way", WAYS)
def test_a_transform_of_ones_own_is_called_once_a_box(way: str) -> None:
    plan = pair()

    def work(comm: Any) -> None:
        how = Doubling(2)
        src = {"w": np.arange(8, dtype=np.float32).reshape(2, 4) + 8 * comm.rank}
        execute_reshard_plan(plan, src, {}, comm, how, way=way)
        assert how.calls == {"send": 2, "recv": 2, "finalize": 2}  # one box stays, one goes
        whole = np.arange(16, dtype=np.float32).reshape(4, 4)
        assert np.array_equal(how.stored, whole[:, 2 * comm.rank : 2 * comm.rank + 2])

    run_loopback(2, work, LIMIT_S)


def test_unequal_counts_raise_on_both_sides_before_a_byte_moves() -> None:
    src = {"w": TensorLayout.sharded((4, 2), "float32", {})}
    dst = {"w": TensorLayout.sharded((4, 2), "float32", {}, offset=1)}
    plan = build_reshard_plan(src, dst)
    hows = [Doubling(2), Doubling(3)]
    errors = on_all(
        2,
        lambda c: Reshard(
            plan, {"w": np.ones((4, 2), np.float32)} if not c.rank else {}, {}, c, hows[c.rank]
        ),
    )
    assert all(isinstance(e, MismatchError) for e in errors)
    assert all("sends 2 arrays for 1 boxes to rank 1, which makes room for 3" in str(e) for e in errors)
    assert hows[1].calls["finalize"] == 0


def test_an_error_of_a_transform_is_raised_on_all_ranks_and_the_next_run_works() -> None:
    plan = pair()

    class Failing(Doubling):
        fails = True

        def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[Any]) -> None:
            if self.fails:
                raise KernelError("no room")
            super().finalize_recv(param_name, dst_slice, recv_buffers)

    def work(comm: Any) -> None:
        how = Failing(1)
        how.fails = comm.rank == 1
        made = Reshard(plan, {"w": np.ones((2, 4), np.float32)}, {}, comm, how)
        with pytest.raises(KernelError, match="rank 1: no room"):
            made.run()
        how.fails = False
        made.run()
        assert (how.stored == 1).all()

    run_loopback(2, work, LIMIT_S)


# ---- MXFP8


def held(rows: int, cols: int, swizzled: bool, elem: str) -> Any:
    data = np.zeros((rows, cols), np.uint8)
    if swizzled:
        return SwizzledMXFP8(data, np.zeros(swizzled_bytes(rows, cols // 32), np.uint8), elem)  # type: ignore[arg-type]
    return MXFP8Tensor(data, np.zeros((rows, cols // 32), np.uint8), elem)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_send", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
def test_mxfp8_is_bit_for_bit_that_of_the_whole(
    rng: np.random.Generator, way: str, on_send: bool, swizzled: bool, elem: Any
) -> None:
    # Both cuts: rows to rows and columns to columns, and columns that begin within a block of 32.
    shape = (int(rng.integers(3, 70)) * 2, 192)
    whole = {"w": weights(rng, *shape)}
    apart = int(rng.choice([0, 1, 3]))
    points = (0, *sorted(rng.integers(1, 192, 2).tolist()), 192)
    for src_dim, dst_dim in ((0, 0), (1, 1), (0, 1), (1, 0), ("odd", 0)):
        from lowshard.reshard import Cut

        if src_dim == "odd":
            src = TensorLayout.sharded(
                shape, "bfloat16", {"tp": (3, 1)}, {1: Cut(192, 3, points=points)}, by={1: "tp"}
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
                staging_bytes=8192,
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


@pytest.mark.parametrize(
    ("data", "scale", "text"),
    [
        (np.zeros((4, 40), np.uint8), np.zeros((4, 1), np.uint8), "K a multiple of 32"),
        (np.zeros((4, 64), np.float32), np.zeros((4, 2), np.uint8), "uint8"),
        (np.zeros((4, 64), np.uint8), np.zeros((4, 3), np.uint8), r"\[4, 2\], or \[512\]"),
        (np.zeros(64, np.uint8), np.zeros(2, np.uint8), "rows, K"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(data: Any, scale: Any, text: str) -> None:
    with pytest.raises(KernelError, match=text):
        MXFP8ReshardTransform({"w"}, {"w": SwizzledMXFP8(data, scale)})


def test_parts_that_come_twice_or_not_at_all_are_errors() -> None:
    how = MXFP8ReshardTransform({"w"}, {"w": held(4, 64, False, "e4m3")})
    half = np.ones((4, 16), BF16)
    how.begin()
    how.finalize_recv("w", (slice(0, 4), slice(0, 16)), [half])
    with pytest.raises(PlanError, match="arrived twice"):
        how.finalize_recv("w", (slice(0, 4), slice(0, 16)), [half])
    with pytest.raises(PlanError, match="got 64 of 128"):
        how.end()
    how.begin()  # an aborted reshard poisons none after it
    how.finalize_recv("w", (slice(0, 4), slice(0, 16)), [half])
    how.finalize_recv("w", (slice(0, 4), slice(16, 32)), [half])
    how.end()


# ---- checksums and refits


@pytest.mark.parametrize("way", ["slots", "messages"])
def test_a_bit_that_flips_on_the_way_is_named(rng: np.random.Generator, way: Any) -> None:
    src = {n: TensorLayout.sharded((16, 16), "float32", {}) for n in ("a", "b", "c")}
    dst = {n: TensorLayout.sharded((16, 16), "float32", {}, offset=1) for n in src}
    plan = build_reshard_plan(src, dst)
    whole = {n: rng.standard_normal((16, 16)).astype(np.float32) for n in src}
    at, bit = int(rng.integers(1024, 2048)), int(rng.integers(8))

    def work(comm: Any) -> None:
        mine = arrays_of(src, comm.rank, whole)
        out = {n: np.zeros((16, 16), np.float32) for n in dst} if comm.rank else {}
        refit = Refit(plan, comm, mine, out, way=way, version=0)
        channel = refit._movers[1]._channel
        post = channel.post

        def flip(peer: int, size_bytes: int) -> None:
            channel._out[channel._at][at] ^= 1 << bit
            post(peer, size_bytes)

        if comm.rank == 0:
            channel.post = flip
        with pytest.raises(VerificationError, match=r"b: the checksum .* from rank 0 to rank 1"):
            refit.push(1) if mine else refit.pull()
        assert refit.version == 0
        assert not any(a.any() for a in refit.weights.values())
        if comm.rank == 0:
            channel.post = post
        refit.push(2) if mine else refit.pull(2)
        assert refit.version == 2
        assert all(np.array_equal(a, whole[n]) for n, a in refit.weights.items())

    run_loopback(2, work, LIMIT_S)


@pytest.mark.parametrize("buffering", ["double", "in_place"])
@pytest.mark.parametrize("way", WAYS)
def test_versions_follow_each_other(buffering: Any, way: Any) -> None:
    src = {"w": TensorLayout.sharded((12, 8), "float32", {"tp": (2, 1)}, {0: "tp"})}
    dst = {"w": TensorLayout.sharded((12, 8), "float32", {"tp": (3, 1)}, {1: "tp"}, offset=1)}
    plan = build_reshard_plan(src, dst)

    def work(comm: Any) -> None:
        mine = {"w": np.zeros((6, 8), np.float32)} if comm.rank in src["w"] else {}
        out = {"w": np.zeros(dst["w"].local_shape(comm.rank), np.float32)} if comm.rank in dst["w"] else {}
        with Refit(plan, comm, mine, out, buffering=buffering, way=way) as refit:
            seen = set()
            for version in (3, 4, 9, 10):
                for array in mine.values():
                    array[...] = version
                refit.push(version) if mine else refit.pull()
                assert (refit.version, refit.torn) == (version, False)
                assert all((a == version).all() for a in refit.weights.values())
                seen |= {a.ctypes.data for a in refit.weights.values()}
            assert len(seen) == (2 if buffering == "double" else 1) * len(out)

    run_loopback(4, work, LIMIT_S)


def test_versions_that_ranks_do_not_agree_on_are_refused_and_the_old_one_stays() -> None:
    layouts = {"w": TensorLayout.sharded((4,), "float32", {"tp": (2, 1)}, {0: "tp"})}
    whole = {"w": TensorLayout.sharded((4,), "float32", {"dp": (2, 1)})}
    plan = build_reshard_plan(layouts, whole)

    def work(comm: Any) -> None:
        out = {"w": np.zeros(4, np.float32)}
        refit = Refit(plan, comm, {"w": np.ones(2, np.float32)}, out, version=0)
        with pytest.raises(MismatchError, match=r"pushed \[1, 2\]"):
            refit.push(1 + comm.rank)
        with pytest.raises(MismatchError, match=r"pushed \[\]"):
            refit.pull()
        with pytest.raises(PlanError, match="version is an integer"):
            refit.push(-3)
        assert refit.version == 0
        refit.push(1)
        assert (refit.weights["w"] == 1).all()

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


def test_replicated_meshes_of_layouts_reshard(rng: np.random.Generator) -> None:
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    src = Layout(mesh, (6, 10), "int32", (Replicated(), Sharded(0)))
    dst = Layout(mesh, (6, 10), "int32", (Sharded(1), Sharded(0)))
    plan = build_reshard_plan({"w": src}, {"w": dst})
    whole = rng.integers(0, 99, (6, 10)).astype(np.int32)

    def work(comm: Any) -> None:
        (a, b), (p, q) = src.box(comm.rank), dst.box(comm.rank)
        out = np.zeros(dst.local_shape(comm.rank), np.int32)
        execute_reshard_plan(plan, {"w": whole[slice(*a), slice(*b)].copy()}, {"w": out}, comm)
        assert np.array_equal(out, whole[slice(*p), slice(*q)])

    run_loopback(4, work, LIMIT_S)
