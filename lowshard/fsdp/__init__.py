"""FSDP over raw buffers: parameters, gradients and optimizer state sharded over ranks, without a framework."""

from __future__ import annotations

from lowshard.fsdp.flat_plan import FlatPlan
from lowshard.fsdp.fsdp_engine import FSDP
from lowshard.fsdp.fsdp_strategy import Precision, ShardingStrategy
from lowshard.fsdp.model_state import ShardState
from lowshard.fsdp.param import Param
from lowshard.fsdp.slot import SGD, AdamW, Slot
from lowshard.fsdp.step_report import Event, Report

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


def __dir__() -> list[str]:
    return sorted(__all__)
