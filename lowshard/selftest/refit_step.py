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
from lowshard.kernels import MXFP8Tensor, quantize_mxfp8
from lowshard.kernels.plain import PlainEngine
from lowshard.reshard import MXFP8ReshardTransform, Publisher, Refit, Subscriber, build_reshard_plan
from lowshard.selftest.arrays import ordinary, put, settle
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.kernel_cases import through
from lowshard.selftest.ranks import run_over_mpi
from lowshard.selftest.steps import Setting

_ROWS, _COLS_EACH = 90, 96
"""Columns of a rank are whole blocks of 32."""
_NAMES = ("w1", "w2")
_VERSIONS = (1, 2, 3)
_WAYS = {"plain": None, "MXFP8 by the receiver": False, "MXFP8 by the sender": True}
_KINDS: tuple[tuple[Literal["off", "auto"], Literal["double", "in_place"]], ...] = (
    ("off", "double"), ("auto", "double"), ("off", "in_place"),
)  # fmt: skip


def run(setting: Setting, tally: Tally) -> None:
    """Run the refits on ranks."""
    where = f"{setting.ranks} MPI ranks through {run_over_mpi('refit_step', setting, tally)}"
    tally.summary = f"{tally.checks} weights of {len(_VERSIONS)} versions, {where}"


def run_rank(comm: Communicator, tally: Tally) -> None:
    """Push three versions in every way, and publish them, as one rank. Collective."""
    for (way, on_send), (delta, buffering) in product(_WAYS.items(), _KINDS):
        # Rows to columns where bits move as they are; blocks of 32 lie along the columns and stay whole by rows.
        weights = _Weights(comm, tally, Sharded(0), Sharded(0) if on_send else Sharded(1))
        plan = build_reshard_plan(weights.have, weights.want)
        how = None if on_send is None else weights.quantised(on_send)
        out = {} if how else weights.out()
        with Refit(plan, comm, weights.mine, out, how, delta=delta, buffering=buffering) as refit:
            for version in _VERSIONS:
                weights.fill(version)
                refit.push(version)
                settle(comm.xp)
                weights.check(f"refit {way}, delta {delta}, {buffering}", refit.weights, version)
                tally.true(f"refit {way} on rank {comm.rank}", refit.version == version, f"{refit.version}")
    weights = _Weights(comm, tally, Sharded(0), Sharded(1))
    with tempfile.TemporaryDirectory() as folder:  # of rank 0
        where: dict[str, Any] = {"address": f"unix:{share_text(comm, folder)[0]}/p", "token": bytes(16)}
        with (
            Publisher(weights.have, weights.mine, comm, **where) as publisher,
            Subscriber(weights.want, weights.out(), comm, **where) as plain,
            Subscriber(weights.want, {}, comm, transform=weights.quantised(), **where) as quantised,
        ):
            for version in _VERSIONS:
                weights.fill(version)
                publisher.publish(version)
                for way, subscriber in (("plain", plain), ("MXFP8", quantised)):
                    subscriber.pull()
                    weights.check(f"publish {way}", subscriber.weights, version)


class _Weights:
    """Some weights of one rank in their layouts, and what is served of them."""

    def __init__(self, comm: Communicator, tally: Tally, have: Sharded, want: Sharded) -> None:
        self.comm, self.tally, self.shape = comm, tally, (_ROWS, _COLS_EACH * comm.size)
        mesh = DeviceMesh((comm.size,), ("tp",))
        self.src, self.dst = (Layout(mesh, self.shape, "bfloat16", (one,)) for one in (have, want))
        self.have, self.want = dict.fromkeys(_NAMES, self.src), dict.fromkeys(_NAMES, self.dst)
        self.mine = {name: comm.empty(self.src.local_shape(comm.rank), "bfloat16") for name in _NAMES}
        self.served = self.dst.local_shape(comm.rank)

    def out(self) -> dict[str, Any]:
        """Return buffers for what is served as it is."""
        return {name: self.comm.empty(self.served, "bfloat16") for name in _NAMES}

    def quantised(self, on_send: bool = False) -> MXFP8ReshardTransform:
        """Return a transform with buffers for what is quantised."""
        (rows, cols), out = self.served, {}
        for name in _NAMES:
            data, scale = (put(self.comm.xp, np.zeros((rows, n), np.uint8)) for n in (cols, cols // 32))
            out[name] = MXFP8Tensor(data, scale)
        return MXFP8ReshardTransform(_NAMES, out, convert_on_send=on_send)

    def whole(self, name: str, version: int) -> np.ndarray:
        """Return a weight of a version; a row in five differs from the version before."""
        whole = ordinary(self.shape, "bfloat16", "refit", name, 0)
        for later in range(1, version + 1):
            whole[later % 5 :: 5] = ordinary(self.shape, "bfloat16", "refit", name, later)[later % 5 :: 5]
        return whole

    def fill(self, version: int) -> None:
        """Write a version into this rank's parts."""
        for name, array in self.mine.items():
            array[...] = put(self.comm.xp, self.whole(name, version)[slices_of(self.src.box(self.comm.rank))])

    def check(self, way: str, weights: Any, version: int) -> None:
        """Compare what is served, arrays or MXFP8 tensors, with a version."""
        for name in _NAMES:
            what = f"{way}, {name} version {version} on rank {self.comm.rank} of {self.comm.size}"
            part = np.ascontiguousarray(self.whole(name, version)[slices_of(self.dst.box(self.comm.rank))])
            if not isinstance(weights[name], MXFP8Tensor):
                self.tally.same(what, weights[name], part)
                continue
            with through(PlainEngine()):
                wanted = quantize_mxfp8(part)
            self.tally.same(f"{what}, codes", weights[name].data, wanted.data)
            self.tally.same(f"{what}, scales", weights[name].scale, wanted.scale)
