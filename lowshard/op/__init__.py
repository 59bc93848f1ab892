"""Ops on sharded arrays: an action of `lowshard.solver` run on every rank's shards through a communicator."""

from __future__ import annotations

from lowshard.op import elementwise_ops, index_ops, product_ops, reduction_ops, shape_ops
from lowshard.op.action_run import compute, move_operands, run_action, unsharded
from lowshard.op.graph_run import prove, run_graph, run_unsharded
from lowshard.op.op_part import KERNELS, Part, run_kernel

__all__ = [
    "KERNELS", "Part", "compute", "move_operands", "prove", "run_action", "run_graph", "run_kernel", "run_unsharded",
    "unsharded",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


_MODULES = (elementwise_ops, index_ops, product_ops, reduction_ops, shape_ops)  # each registers its kernels
