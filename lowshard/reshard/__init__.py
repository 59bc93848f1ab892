"""Resharding: tensors from the layout they are trained in to the one they are served in, planned and moved."""

from __future__ import annotations

from lowshard.reshard.cut import Cut
from lowshard.reshard.layout import TensorLayout
from lowshard.reshard.parameter import ParameterMetadata, resolve_name
from lowshard.reshard.plan import Move, ReshardPlan, build_reshard_plan
from lowshard.reshard.seat import Grid, Roster

__all__ = [
    "Cut",
    "Grid",
    "Move",
    "ParameterMetadata",
    "ReshardPlan",
    "Roster",
    "TensorLayout",
    "build_reshard_plan",
    "resolve_name",
]
