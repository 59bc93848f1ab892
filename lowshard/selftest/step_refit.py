"""The step `refit`: versions of weights from training layouts to serving layouts over MPI ranks, plain and as MXFP8.

By a `Refit`, and by a `Publisher` and a `Subscriber` of the same ranks.
"""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any, Literal

import numpy as np

from lowshard import DeviceMesh, Layout, Sharded
from lowshard.box import slices_of
from lowshard.comm import Communicator, share_text
from lowshard.kernels import MXFP8Tensor, reference
from lowshard.reshard import MXFP8ReshardTransform, Publisher, Refit, Subscriber, build_reshard_plan
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
_DELTAS: tuple[Literal["off", "auto"], ...] = "off", "auto"


def run(setting: Setting, tally: Tally) -> None:
    """Run the refits on ranks."""
    through = run_over_mpi("refit", setting, tally)
    tally.summary = (
        f"{tally.checks} weights of {len(_VERSIONS)} versions, {setting.ranks} MPI ranks through {through}"
    )


def refit_everything(comm: Communicator, tally: Tally) -> None:
    """Push three versions in every way, and publish them, as one rank. Collective."""
    _push_everything(comm, tally)
    _publish_everything(comm, tally)


def _push_everything(comm: Communicator, tally: Tally) -> None:
    mesh, whole_shape = DeviceMesh((comm.size,), ("tp",)), (_ROWS, _COLS_EACH * comm.size)
    for on_send, delta in product((None, False, True), _DELTAS):
        # Rows to columns where bits move as they are; blocks of 32 lie along the columns and stay whole by rows.
        src = Layout(mesh, whole_shape, "bfloat16", (Sharded(0),))
        dst = Layout(mesh, whole_shape, "bfloat16", (Sharded(0) if on_send else Sharded(1),))
        plan = build_reshard_plan(dict.fromkeys(_NAMES, src), dict.fromkeys(_NAMES, dst))
        mine = {name: comm.empty(src.local_shape(comm.rank), "bfloat16") for name in _NAMES}
        shape = dst.local_shape(comm.rank)
        if on_send is None:
            out = {name: comm.empty(shape, "bfloat16") for name in _NAMES}
            refit = Refit(plan, comm, mine, out, delta=delta)
        else:
            how = MXFP8ReshardTransform(_NAMES, _rooms(comm, shape), convert_on_send=on_send)
            refit = Refit(plan, comm, mine, {}, how, delta=delta)
        way = {None: "plain", False: "MXFP8 by the receiver", True: "MXFP8 by the sender"}[on_send]
        way += "" if delta == "off" else ", what changed"
        with refit:
            for version in _VERSIONS:
                for name in _NAMES:
                    whole = _content(whole_shape, name, version)
                    mine[name][...] = put(comm.xp, whole[slices_of(src.box(comm.rank))])
                refit.push(version)
                settle(comm.xp)
                for name in _NAMES:
                    what = f"refit {way}, {name} version {version} on rank {comm.rank} of {comm.size}"
                    part = _content(whole_shape, name, version)[slices_of(dst.box(comm.rank))]
                    _check(tally, what, refit.weights[name], part)
                tally.true(
                    f"refit {way}, version on rank {comm.rank}", refit.version == version, str(refit.version)
                )


def _publish_everything(comm: Communicator, tally: Tally) -> None:
    mesh, whole_shape = DeviceMesh((comm.size,), ("tp",)), (_ROWS, _COLS_EACH * comm.size)
    rows, cols = (Layout(mesh, whole_shape, "bfloat16", (Sharded(dim),)) for dim in (0, 1))
    mine = {name: comm.empty(rows.local_shape(comm.rank), "bfloat16") for name in _NAMES}
    shape = cols.local_shape(comm.rank)
    out = {name: comm.empty(shape, "bfloat16") for name in _NAMES}
    how = MXFP8ReshardTransform(_NAMES, _rooms(comm, shape))
    with tempfile.TemporaryDirectory() as folder:  # of rank 0
        where: dict[str, Any] = {"address": f"unix:{share_text(comm, folder)[0]}/p", "token": bytes(16)}
        want = dict.fromkeys(_NAMES, cols)
        with (
            Publisher(dict.fromkeys(_NAMES, rows), mine, comm, **where) as publisher,
            Subscriber(want, out, comm, **where) as plain,
            Subscriber(want, {}, comm, transform=how, **where) as quantised,
        ):
            for version in _VERSIONS:
                for name in _NAMES:
                    content = _content(whole_shape, name, version)
                    mine[name][...] = put(comm.xp, content[slices_of(rows.box(comm.rank))])
                publisher.publish(version)
                for way, subscriber in (("plain", plain), ("MXFP8", quantised)):
                    subscriber.pull()
                    for name in _NAMES:
                        what = f"publish {way}, {name} version {version} on rank {comm.rank} of {comm.size}"
                        part = _content(whole_shape, name, version)[slices_of(cols.box(comm.rank))]
                        _check(tally, what, subscriber.weights[name], part)


def _rooms(comm: Communicator, shape: tuple[int, ...]) -> dict[str, MXFP8Tensor]:
    """Return buffers for what is quantised."""
    scales = shape[0], shape[1] // reference.BLOCK_ELEMS
    return {
        name: MXFP8Tensor(put(comm.xp, np.zeros(shape, np.uint8)), put(comm.xp, np.zeros(scales, np.uint8)))
        for name in _NAMES
    }


def _check(tally: Tally, what: str, found: Any, part: np.ndarray) -> None:
    """Compare what is served, an array or an MXFP8 tensor, with what it is made of."""
    part = np.ascontiguousarray(part)
    if not isinstance(found, MXFP8Tensor):
        tally.same(what, found, part)
        return
    values = reference.widen_to_fp32_bits(bits(part), "bfloat16").reshape(-1, reference.BLOCK_ELEMS)
    codes, scales = reference.quantize_bits(values, reference.E4M3, "rceil")
    tally.same(f"{what}, codes", found.data, codes.reshape(part.shape))
    tally.same(f"{what}, scales", found.scale, scales.reshape(part.shape[0], -1))


def _content(shape: tuple[int, ...], name: str, version: int) -> np.ndarray:
    """Return a weight of a version; a row in five differs from the version before."""
    whole = ordinary(shape, "bfloat16", "refit", name, 0)
    for later in range(1, version + 1):
        whole[later % 5 :: 5] = ordinary(shape, "bfloat16", "refit", name, later)[later % 5 :: 5]
    return whole
