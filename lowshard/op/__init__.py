"""Ops on sharded arrays: an action of `lowshard.solver` run on every rank's shards through a communicator."""

from __future__ import annotations

from lowshard.op import elementwise, index, product, reduction, shape
from lowshard.op.graph import prove, run_graph, run_unsharded
from lowshard.op.part import Part
from lowshard.op.registry import KERNELS, run_kernel
from lowshard.op.run import compute, move_operands, run_action, unsharded

__all__ = [
    "KERNELS", "Part", "compute", "move_operands", "prove", "run_action", "run_graph", "run_kernel", "run_unsharded",
    "unsharded",
]  # fmt: skip

_MODULES = (elementwise, index, product, reduction, shape)  # each registers its kernels
