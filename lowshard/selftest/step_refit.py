"""The step `refit`: versions of weights from training layouts to serving layouts over MPI ranks, plain and as MXFP8."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from lowshard import DeviceMesh, Layout, Sharded
from lowshard.comm import Communicator
from lowshard.kernels import MXFP8Tensor, reference
from lowshard.reshard import MXFP8ReshardTransform, Refit, build_reshard_plan
from lowshard.selftest.comparisons import Tally, bits
from lowshard.selftest.device_arrays import put, settle
from lowshard.selftest.over_mpi import run_over_mpi
from lowshard.selftest.random_arrays import ordinary
from lowshard.selftest.step_setting import Setting

_ROWS = 90
_COLS_EACH = 96
"""Columns of a rank: whole blocks of 32."""
_NAMES = ("w1", "w2")
_VERSIONS = (1, 2, 3)


def run(setting: Setting, tally: Tally) -> None:
    """Run the refits on ranks."""
    through = run_over_mpi("refit", setting, tally)
    tally.summary = (
        f"{tally.checks} weights of {len(_VERSIONS)} versions, {setting.ranks} MPI ranks through {through}"
    )


def refit_everything(comm: Communicator, tally: Tally) -> None:
    """Push three versions, plainly and into MXFP8 buffers, all of it and what changed, as one rank.

    Collective: all ranks of the communicator call this.
    """
    mesh, whole_shape = DeviceMesh((comm.size,), ("tp",)), (_ROWS, _COLS_EACH * comm.size)
    for on_send, base in product((None, False, True), (None, "copy", "digests")):
        # Rows to columns where bits move as they are; blocks of 32 lie along the columns and stay whole by rows.
        src = Layout(mesh, whole_shape, "bfloat16", (Sharded(0),))
        dst = Layout(mesh, whole_shape, "bfloat16", (Sharded(0) if on_send else Sharded(1),))
        plan = build_reshard_plan(dict.fromkeys(_NAMES, src), dict.fromkeys(_NAMES, dst))
        mine = {name: comm.empty(src.local_shape(comm.rank), "bfloat16") for name in _NAMES}
        shape = dst.local_shape(comm.rank)
        delta: Any = {} if base is None else {"delta": "auto", "base": base}
        if on_send is None:
            out = {name: comm.empty(shape, "bfloat16") for name in _NAMES}
            refit = Refit(plan, comm, mine, out, **delta)
        else:
            held = {
                name: MXFP8Tensor(
                    put(comm.xp, np.zeros(shape, np.uint8)),
                    put(comm.xp, np.zeros((shape[0], shape[1] // reference.BLOCK_ELEMS), np.uint8)),
                )
                for name in _NAMES
            }
            how = MXFP8ReshardTransform(_NAMES, held, convert_on_send=on_send)
            refit = Refit(plan, comm, mine, {}, how, **delta)
        way = {None: "plain", False: "MXFP8 by the receiver", True: "MXFP8 by the sender"}[on_send]
        way += "" if base is None else f", what changed, by {base}"
        with refit:
            for version in _VERSIONS:
                for name in _NAMES:
                    whole = _content(whole_shape, name, version)
                    mine[name][...] = put(comm.xp, whole[_index(src, comm.rank)])
                refit.push(version)
                settle(comm.xp)
                for name in _NAMES:
                    whole = _content(whole_shape, name, version)
                    part = np.ascontiguousarray(whole[_index(dst, comm.rank)])
                    what = f"refit {way}, {name} version {version} on rank {comm.rank} of {comm.size}"
                    if on_send is None:
                        tally.same(what, refit.weights[name], part)
                        continue
                    transform = refit.transform
                    assert isinstance(transform, MXFP8ReshardTransform)
                    found = transform.persistent_buffers[name]
                    codes, scales = reference.quantize_bits(
                        reference.widen_to_fp32_bits(bits(part), "bfloat16").reshape(
                            -1, reference.BLOCK_ELEMS
                        ),
                        reference.E4M3,
                        "rceil",
                    )
                    tally.same(f"{what}, codes", found.data, codes.reshape(part.shape))
                    tally.same(f"{what}, scales", found.scale, scales.reshape(part.shape[0], -1))
                tally.true(
                    f"refit {way}, version on rank {comm.rank}", refit.version == version, str(refit.version)
                )


def _content(shape: tuple[int, ...], name: str, version: int) -> np.ndarray:
    """Return a weight of a version; a row in five differs from the version before."""
    whole = ordinary(shape, "bfloat16", "refit", name, 0)
    for later in range(1, version + 1):
        whole[later % 5 :: 5] = ordinary(shape, "bfloat16", "refit", name, later)[later % 5 :: 5]
    return whole


def _index(layout: Layout, rank: int) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in layout.box(rank))
