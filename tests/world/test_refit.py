"""Refits over threads: versions that are whole or do not come, and bits that change on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.reshard_cases import (
    LIMIT_S,
    WAYS,
    arrays_of,
)

from lowshard.comm import run_loopback
from lowshard.errors import (
    MismatchError,
    PlanError,
    VerificationError,
)
from lowshard.reshard import (
    Refit,
    TensorLayout,
    build_reshard_plan,
)


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
