"""What a version of an MXFP8 refit asks of a GPU once tables and buckets are made. A program, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.comm_kit import refused, same
from support.gpu import checked_ranks
from support.starting import start_ranks

from lowshard import DeviceMesh, Layout, Sharded, dtypes
from lowshard.comm import Communicator
from lowshard.errors import VerificationError
from lowshard.kernels import quantize_mxfp8
from lowshard.reshard import MXFP8ReshardTransform, Refit, build_reshard_plan

NAMES, ROWS, COLS = ("w1", "w2"), 300, 320
"""The rows of a rank begin within a tile of scales."""
AT_MOST = {
    "allocations": 0, "uploads": 0, "host_to_device_copies": 0, "device_to_device_copies": 0,
    "device_to_host_copies": 1, "host_waits": 2, "pcie_bytes": 1024, "launches": 20,
}  # fmt: skip
"""What the checker may count for a version: the checksums of all buckets are read at once."""


def plan_of(comm: Communicator, dtype: str, names: Any) -> tuple[Layout, Layout, Any, dict[str, Any]]:
    """Return layouts by rows and by columns, the plan between them, and local arrays of the first."""
    mesh = DeviceMesh((comm.size,), ("tp",))
    have, want = (Layout(mesh, (ROWS, COLS), dtype, (Sharded(dim),)) for dim in (0, 1))
    plan = build_reshard_plan(dict.fromkeys(names, have), dict.fromkeys(names, want))
    return have, want, plan, {name: comm.empty(have.local_shape(comm.rank), dtype) for name in names}


def counts_of_an_mxfp8_refit(comm: Communicator, counts: Callable[[], Any]) -> None:
    """Push versions in every way, compare them, and what `counts()` tells of the last of each."""
    cupy: Any = comm.xp
    have, want, plan, mine = plan_of(comm, "bfloat16", NAMES)
    for on_send, layout in product((False, True), ("rows", "128x4")):
        empty = quantize_mxfp8(np.zeros(want.local_shape(comm.rank), np.float32), scale_layout=layout)
        out = {name: type(empty)(cupy.asarray(empty.data), cupy.asarray(empty.scale)) for name in NAMES}
        how = MXFP8ReshardTransform(NAMES, out, convert_on_send=on_send)
        with Refit(plan, comm, mine, {}, how) as refit:
            for version in range(1, 5):  # of two sets
                whole = {name: _values(name, version) for name in NAMES}
                for name, array in mine.items():
                    array[...] = cupy.asarray(_part(whole[name], have, comm.rank))
                cupy.cuda.runtime.deviceSynchronize()
                before = Counter(counts())
                refit.push(version)
                found = Counter(counts()) - before
                cupy.cuda.runtime.deviceSynchronize()
                for name in NAMES:
                    got: Any = refit.weights[name]
                    wanted = quantize_mxfp8(_part(whole[name], want, comm.rank), scale_layout=layout)
                    same(got.data, wanted.data)
                    same(got.scale, wanted.scale)
        too_many = {what: found[what] for what, most in AT_MOST.items() if found[what] > most}
        assert not too_many, f"on send {on_send}, scales in {layout}: {too_many} of {dict(found)}"


def a_bit_that_flips_on_the_way_is_named(comm: Communicator) -> None:
    _, want, plan, mine = plan_of(comm, "float32", ["w"])
    with Refit(plan, comm, mine, {"w": comm.empty(want.local_shape(comm.rank), "float32")}) as refit:
        mover: Any = refit._movers[1]._mover
        seal = mover._add_checksums

        def flip(bucket: Any, slot: Any) -> None:
            seal(bucket, slot)
            slot[77] ^= 1

        mover._add_checksums = seal if comm.rank else flip
        refused(partial(refit.push, 1), VerificationError, "w: the checksum .* from rank 0 to rank 1")
        mover._add_checksums = seal
        refit.push(2)
        assert refit.version == 2


def _values(name: str, version: int) -> np.ndarray:
    rng = np.random.default_rng([version, *name.encode()])
    return rng.standard_normal((ROWS, COLS)).astype(dtypes.get("bfloat16").numpy)


def _part(whole: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    return np.ascontiguousarray(whole[tuple(slice(*side) for side in layout.box(rank))])


@pytest.mark.mpi
def test_a_version_asks_little_of_the_host(tmp_path: Path) -> None:
    with checked_ranks(tmp_path, "launches", "collectives") as env:
        start_ranks(__file__, 2, timeout_s=100, env=env).ok()


if __name__ == "__main__":
    from mpi4py import MPI

    from lowshard.comm import from_mpi

    with from_mpi(MPI.COMM_WORLD, "cuda", transport="nccl") as comm:
        checker = getattr(comm.xp, "checker", None)  # a stand-in, which counts
        counts_of_an_mxfp8_refit(comm, checker.counts if checker else dict)
        a_bit_that_flips_on_the_way_is_named(comm)
