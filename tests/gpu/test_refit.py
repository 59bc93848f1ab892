"""What a version of an MXFP8 refit asks of a GPU once tables and buckets are made. A program of ranks, too."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu import nothing_told, ranks_env
from support.starting import start_ranks

from lowshard import DeviceMesh, Layout, Sharded, dtypes
from lowshard.comm import Communicator
from lowshard.errors import VerificationError
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, quantize_mxfp8
from lowshard.reshard import MXFP8ReshardTransform, Refit, build_reshard_plan

LIMIT_S = 120.0
NAMES = ("w1", "w2")
ROWS, COLS = 300, 320
"""The rows of a rank begin within a tile of scales."""
AT_MOST = {
    "allocations": 0, "uploads": 0, "host_to_device_copies": 0, "device_to_device_copies": 0,
    "device_to_host_copies": 1, "host_waits": 2, "pcie_bytes": 1024,
}  # fmt: skip
"""What the checker may count for a version: the checksums of all buckets are read at once."""


def counts_of_an_mxfp8_refit(comm: Communicator, counts: Any) -> None:
    """Push versions in every way, compare them, and what `counts()` tells of the last of each; None: nothing does."""
    cupy: Any = comm.xp
    mesh = DeviceMesh((comm.size,), ("tp",))
    have, want = (Layout(mesh, (ROWS, COLS), "bfloat16", (Sharded(dim),)) for dim in (0, 1))
    plan = build_reshard_plan(dict.fromkeys(NAMES, have), dict.fromkeys(NAMES, want))
    rows, cols = want.local_shape(comm.rank)
    for on_send, layout in product((False, True), ("rows", "128x4")):
        mine = {name: comm.empty(have.local_shape(comm.rank), "bfloat16") for name in NAMES}
        out = {}
        for name in NAMES:
            empty = quantize_mxfp8(np.zeros((rows, cols), np.float32), scale_layout=layout)
            out[name] = type(empty)(*(cupy.asarray(part) for part in (empty.data, empty.scale)))
        how = MXFP8ReshardTransform(NAMES, out, convert_on_send=on_send)
        with Refit(plan, comm, mine, {}, how) as refit:
            for version in range(1, 5):  # of two sets
                whole = {name: _values(name, version) for name in NAMES}
                for name, array in mine.items():
                    array[...] = cupy.asarray(_part(whole[name], have, comm.rank))
                cupy.cuda.runtime.deviceSynchronize()
                before = Counter(counts() if counts else {})
                refit.push(version)
                found = Counter(counts() if counts else {}) - before
                cupy.cuda.runtime.deviceSynchronize()
                for name in NAMES:
                    got: MXFP8Tensor | SwizzledMXFP8 = refit.weights[name]
                    wanted = quantize_mxfp8(_part(whole[name], want, comm.rank), scale_layout=layout)
                    np.testing.assert_array_equal(got.data.get(), wanted.data)
                    np.testing.assert_array_equal(got.scale.get(), wanted.scale)
        too_many = {what: found[what] for what, most in AT_MOST.items() if found[what] > most}
        assert not too_many, f"on send {on_send}, scales in {layout}: {too_many} of {dict(found)}"


def a_bit_that_flips_on_the_way_is_named(comm: Communicator) -> None:
    mesh = DeviceMesh((comm.size,), ("tp",))
    have, want = (Layout(mesh, (ROWS, COLS), "float32", (Sharded(dim),)) for dim in (0, 1))
    plan = build_reshard_plan({"w": have}, {"w": want})
    mine, out = (comm.empty(each.local_shape(comm.rank), "float32") for each in (have, want))
    with Refit(plan, comm, {"w": mine}, {"w": out}, version=0) as refit:
        mover = refit._movers[1]._mover
        assert mover is not None
        seal = mover._add_checksums

        def flip(bucket: Any, slot: Any) -> None:
            seal(bucket, slot)
            slot[77] ^= 1

        if comm.rank == 0:
            mover._add_checksums = flip  # type: ignore[method-assign]
        with pytest.raises(VerificationError, match=r"w: the checksum .* from rank 0 to rank 1"):
            refit.push(1)
        assert refit.version == 0
        mover._add_checksums = seal  # type: ignore[method-assign]
        refit.push(2)
        assert refit.version == 2


def _values(name: str, version: int) -> np.ndarray:
    rng = np.random.default_rng([version, *name.encode()])
    return rng.standard_normal((ROWS, COLS)).astype(dtypes.get("bfloat16").numpy)


def _part(whole: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    return np.ascontiguousarray(whole[tuple(slice(*side) for side in layout.box(rank))])


@pytest.mark.mpi
@pytest.mark.time_limit(LIMIT_S + 10)
def test_a_version_asks_little_of_the_host(tmp_path: Path) -> None:
    start_ranks(__file__, 2, timeout_s=LIMIT_S, env=ranks_env(tmp_path)).ok()
    nothing_told(tmp_path, "launches", "collectives")


if __name__ == "__main__":
    from mpi4py import MPI

    from lowshard.comm import from_mpi

    try:
        from cupy.checker import counts  # of the stand-in that counts
    except ImportError:
        counts = None
    with from_mpi(MPI.COMM_WORLD, "cuda", transport="nccl") as comm:
        counts_of_an_mxfp8_refit(comm, counts)
        a_bit_that_flips_on_the_way_is_named(comm)
