"""Resharding: plans and moves tensors from one layout to another, such as from training to serving."""

from __future__ import annotations

from lowshard.content_hash import model_digest
from lowshard.kernels import SwizzledMXFP8
from lowshard.reshard.cache_layouts import kv_cache_layout, ssm_state_layouts
from lowshard.reshard.content_digest import digest
from lowshard.reshard.dim_sharding import DimSharding
from lowshard.reshard.mxfp8_transform import MXFP8ReshardTransform, ensure_sendable
from lowshard.reshard.parameter_record import ParameterMetadata, resolve_name
from lowshard.reshard.plan_builder import build_reshard_plan
from lowshard.reshard.publisher import Publisher
from lowshard.reshard.rank_grid import Grid, Roster
from lowshard.reshard.refit import Refit
from lowshard.reshard.reshard_plan import Move, ReshardPlan
from lowshard.reshard.reshard_run import Report, Reshard, execute_reshard_plan
from lowshard.reshard.scale_slice import scale_slice_from_data_slice
from lowshard.reshard.subscriber import Subscriber
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.reshard.version_server import Member
from lowshard.transfer.transform_contract import CastTransform, ReshardTransform

__all__ = [
    "CastTransform",
    "DimSharding",
    "Grid",
    "MXFP8ReshardTransform",
    "Member",
    "Move",
    "ParameterMetadata",
    "Publisher",
    "Refit",
    "Report",
    "Reshard",
    "ReshardPlan",
    "ReshardTransform",
    "Roster",
    "Subscriber",
    "SwizzledMXFP8",
    "TensorLayout",
    "build_reshard_plan",
    "digest",
    "ensure_sendable",
    "execute_reshard_plan",
    "kv_cache_layout",
    "model_digest",
    "resolve_name",
    "scale_slice_from_data_slice",
    "ssm_state_layouts",
]


def __dir__() -> list[str]:
    return sorted(__all__)
