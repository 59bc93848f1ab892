"""Weights: which part of each a device holds, and how checkpoints are read and written in parts."""

from __future__ import annotations

from lowshard.checkpoint.commit import remove_leftovers
from lowshard.weights.checkpoint_convert import ConvertReport, apply_deltas
from lowshard.weights.head import Segment
from lowshard.weights.load import LoadReport, load, nodes_of
from lowshard.weights.load_plan import LoadPlan, plan_load
from lowshard.weights.module_weights import shard_module
from lowshard.weights.name_pattern import Matching, NamePatterns, Sizes
from lowshard.weights.quantization import ExpertScales, Quantization, expert_scales, scale_strategy
from lowshard.weights.save import save
from lowshard.weights.sharded_load import ShardedWeights, load_sharded, saved_tilings
from lowshard.weights.sharding_strategy import ShardingStrategy
from lowshard.weights.weight import Weight

__all__ = [
    "ConvertReport",
    "ExpertScales",
    "LoadPlan",
    "LoadReport",
    "Matching",
    "NamePatterns",
    "Quantization",
    "Segment",
    "ShardedWeights",
    "ShardingStrategy",
    "Sizes",
    "Weight",
    "apply_deltas",
    "expert_scales",
    "load",
    "load_sharded",
    "nodes_of",
    "plan_load",
    "remove_leftovers",
    "save",
    "saved_tilings",
    "scale_strategy",
    "shard_module",
]


def __dir__() -> list[str]:
    return sorted(__all__)
