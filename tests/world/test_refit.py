"""Refits over threads: versions that are whole or do not come, and bits that change on the way."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.reshard_cases import LIMIT_S, WAYS, arrays_of

from lowshard import dtypes
from lowshard.comm import run_loopback, share_text
from lowshard.errors import LowshardError, MismatchError, PlanError, VerificationError
from lowshard.kernels import MXFP8Tensor, quantize_mxfp8
from lowshard.reshard import (
    MXFP8ReshardTransform,
    Refit,
    Reshard,
    ReshardTransform,
    TensorLayout,
    build_reshard_plan,
)

BF16 = dtypes.get("bfloat16").numpy


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
        mover = refit._movers[1]._mover
        assert mover is not None
        seal = mover._add_checksums

        def flip(bucket: Any, slot: np.ndarray) -> None:
            seal(bucket, slot)
            slot[at] ^= 1 << bit

        if comm.rank == 0:
            mover._add_checksums = flip  # type: ignore[method-assign]
        with pytest.raises(VerificationError, match=r"b: the checksum .* from rank 0 to rank 1"):
            refit.push(1) if mine else refit.pull()
        assert refit.version == 0
        assert not any(a.any() for a in refit.weights.values())
        if comm.rank == 0:
            mover._add_checksums = seal  # type: ignore[method-assign]
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


@pytest.mark.parametrize("buffering", ["double", "in_place"])
@pytest.mark.parametrize("convert_on_send", [False, True])
def test_weights_are_the_buffers_of_the_version_that_is_served(
    buffering: Any, convert_on_send: bool, rng: np.random.Generator
) -> None:
    src = {n: TensorLayout.sharded((64, 64), "bfloat16", {"tp": (2, 1)}, {0: "tp"}) for n in ("fc", "norm")}
    dst = {n: TensorLayout.sharded((64, 64), "bfloat16", {"tp": (2, 1)}, {1: "tp"}, offset=2) for n in src}
    plan = build_reshard_plan(src, dst)
    versions = [rng.standard_normal((64, 64)).astype(BF16) for _ in range(4)]

    def work(comm: Any) -> None:
        mine = {n: np.zeros((32, 64), BF16) for n in src} if comm.rank < 2 else {}
        out = {} if mine else {"norm": np.zeros((64, 32), BF16)}
        held = (
            {}
            if mine
            else {"model.fc": MXFP8Tensor(np.full((64, 32), 9, np.uint8), np.zeros((64, 1), np.uint8))}
        )
        transform = MXFP8ReshardTransform(["fc"], held, "model.", convert_on_send)
        rows = slice(32 * comm.rank, 32 * comm.rank + 32)
        cols = slice(32 * comm.rank - 64, 32 * comm.rank - 32)
        with Refit(plan, comm, mine, out, transform, buffering=buffering) as refit:
            places = []
            for number, whole in enumerate(versions, 1):
                for array in mine.values():
                    array[...] = whole[rows]
                refit.push(number) if mine else refit.pull()
                if mine:
                    assert not refit.weights
                    continue
                assert set(refit.weights) == {"fc", "norm"}
                wanted, came = quantize_mxfp8(np.ascontiguousarray(whole[:, cols])), refit.weights["fc"]
                assert np.array_equal(came.data, wanted.data)
                assert np.array_equal(came.scale, wanted.scale)
                assert np.array_equal(refit.weights["norm"].view(np.uint16), whole[:, cols].view(np.uint16))
                places.append(came is held["model.fc"])
            assert mine or places == ([False, True] * 2 if buffering == "double" else [True] * 4)

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
        with pytest.raises(MismatchError, match="every rank has called pull; call push"):
            refit.pull()
        with pytest.raises(PlanError, match="version is an integer"):
            refit.push(-3)
        assert refit.version == 0
        refit.push(1)
        assert (refit.weights["w"] == 1).all()

    run_loopback(2, work, LIMIT_S)


class _NoSend(ReshardTransform):
    """It says that it takes every tensor, and does nothing for them."""

    def should_transform(self, param_name: str) -> bool:
        return True


BAD_VERSIONS = (1 << 63, np.bool_(True), -1, 2.5, np.array([1, 2]))  # more: test_wrong_collectives.py


@pytest.mark.parametrize("who", [0, 1, 2])
def test_an_unusable_version_is_the_same_error_on_every_rank_and_the_next_push_works(who: int) -> None:
    layouts = {"w": TensorLayout.sharded((4,), "float32", {"tp": (2, 1)}, {0: "tp"})}
    served = {"w": TensorLayout.sharded((4,), "float32", {"dp": (2, 1)}, offset=2)}
    plan = build_reshard_plan(layouts, served)

    def work(comm: Any) -> None:
        trains = comm.rank < 2
        mine = {"w": np.ones(2, np.float32)} if trains else {}
        refit = Refit(plan, comm, mine, {} if trains else {"w": np.zeros(4, np.float32)}, version=0)
        version = 0
        for bad in BAD_VERSIONS:
            said = bad if comm.rank == who else version + 1
            with pytest.raises(PlanError, match="a version is an integer from 0 to"):
                refit.push(said) if trains else refit.pull(said)
            assert refit.version == version
            version += 1
            for array in mine.values():
                array[...] = version
            refit.push(np.int32(version)) if trains else refit.pull(np.uint8(version))
            assert refit.version == version
            assert all((array == version).all() for array in refit.weights.values())
        with pytest.raises(PlanError, match="from 0 to"):
            refit.push(None) if comm.rank == who else refit.pull()  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"is pushed by ranks \[3\], which have none"):
            refit.push(99) if comm.rank == 3 else refit.pull()
        assert refit.version == version
        refit.push(version + 1) if comm.rank != 2 else refit.pull()  # who has no sources may name it too
        assert refit.version == version + 1

    run_loopback(4, work, LIMIT_S)


@pytest.mark.parametrize("made", [Refit, Reshard])
def test_what_one_rank_gives_wrong_is_an_error_on_all(made: Any) -> None:
    """More of what users pass by mistake: tests/world/test_wrong_collectives.py."""
    layouts = {"w": TensorLayout.sharded((4,), "float32", {"tp": (2, 1)}, {0: "tp"})}
    plan = build_reshard_plan(layouts, {"w": TensorLayout.sharded((4,), "float32", {"dp": (2, 1)})})

    def work(comm: Any) -> None:
        for wrong in (
            {"dst": {"w": None}},
            {"dst": {"w": [0.0] * 4}},
            {"transform": _NoSend()},
            {"chunks": 3},
        ):
            given = {"src": {"w": np.ones(2, np.float32)}, "dst": {"w": np.zeros(4, np.float32)}}
            with pytest.raises(LowshardError) as caught:
                made(plan=plan, comm=comm, **{"transform": None, **given, **(wrong if comm.rank else {})})
            assert len(set(share_text(comm, type(caught.value).__name__))) == 1

    run_loopback(2, work, LIMIT_S)


@pytest.mark.parametrize("buffering", ["double", "in_place"])
def test_a_report_says_what_the_last_version_has_cost(buffering: Any) -> None:
    src = {"w": TensorLayout.sharded((12, 8), "float32", {"tp": (2, 1)}, {0: "tp"})}
    dst = {"w": TensorLayout.sharded((12, 8), "float32", {"dp": (2, 1)}, offset=2)}
    plan = build_reshard_plan(src, dst)

    def work(comm: Any) -> None:
        mine = {"w": np.ones((6, 8), np.float32)} if comm.rank < 2 else {}
        out = {} if mine else {"w": np.zeros((12, 8), np.float32)}
        with Refit(plan, comm, mine, out, buffering=buffering) as refit:
            nothing = {"dense_bytes": 0, "sent_bytes": 0, "changed_elems": 0, "pause_s": 0.0, "phases": {}}
            assert refit.report() == nothing
            start_s = time.perf_counter()
            refit.push(1) if mine else refit.pull()
            span_s, said = time.perf_counter() - start_s, refit.report()
            assert said["sent_bytes"] == said["dense_bytes"] == plan.sent_bytes(comm.rank)
            assert said["changed_elems"] * 4 == said["sent_bytes"]
            assert list(said["phases"]) == ["readers", "agree", "move", "vote"]
            assert 0 < sum(said["phases"].values()) <= span_s
            assert 0 < said["pause_s"] < span_s
            assert (said["pause_s"] >= said["phases"]["move"]) == (buffering == "in_place")
            with pytest.raises(PlanError):
                refit.push(-1) if comm.rank == 0 else refit.pull()
            assert refit.report() == said

    run_loopback(4, work, LIMIT_S)
