"""FSDP over raw buffers: parameters, gradients and optimizer state sharded over ranks, without a framework."""

from __future__ import annotations

from lowshard.fsdp.engine import FSDP
from lowshard.fsdp.param import Param
from lowshard.fsdp.plan import FlatPlan
from lowshard.fsdp.report import Event, Report
from lowshard.fsdp.slot import SGD, AdamW, Slot
from lowshard.fsdp.state import ShardState
from lowshard.fsdp.strategy import Precision, ShardingStrategy

__all__ = [
    "FSDP",
    "SGD",
    "AdamW",
    "Event",
    "FlatPlan",
    "Param",
    "Precision",
    "Report",
    "ShardState",
    "ShardingStrategy",
    "Slot",
]
