"""Checkpoint files: safetensors read by byte range into a layout, and written back by many ranks."""

from __future__ import annotations

from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.delta_file import ChangedTensor, Delta, DeltaReport, open_deltas, write_delta
from lowshard.checkpoint.header import Header, TensorEntry, read_header
from lowshard.checkpoint.reader import CheckpointReader, ReadPlan, plan_box, plan_read

__all__ = [
    "Catalog",
    "ChangedTensor",
    "CheckpointReader",
    "Delta",
    "DeltaReport",
    "Header",
    "ReadPlan",
    "TensorEntry",
    "open_deltas",
    "plan_box",
    "plan_read",
    "read_header",
    "write_delta",
]


def __dir__() -> list[str]:
    return sorted(__all__)
