"""Logical tensors of safetensors files, from their headers alone."""

from __future__ import annotations

import os
from pathlib import Path

from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.header import read_header
from lowshard.checkpoint.hf_index import HF_INDEX
from lowshard.errors import CheckpointError
from lowshard.rules.checkpoint_rules import name_tensors
from lowshard.rules.finding import Finding
from lowshard.rules.logical_tensor import LogicalTensor
from lowshard.rules.ruleset import RuleSet


def checkpoint_tensors(
    rules: RuleSet, path: str | os.PathLike[str]
) -> tuple[tuple[LogicalTensor, ...], list[Finding]]:
    """Return the tensors of a checkpoint with logical names by pattern, and what has none; see `name_tensors`."""
    folder = Path(path)
    if any(os.path.exists(folder / name) for name in (INDEX_NAME, HF_INDEX)):
        catalog = Catalog.open(folder)
        return name_tensors(rules, {name: (t.shape, t.dtype) for name, t in sorted(catalog.tensors.items())})
    paths = sorted(folder.glob("*.safetensors")) if os.path.isdir(folder) else [folder]
    if not paths:
        raise CheckpointError(f"{folder}: the folder holds no .safetensors file")
    shapes: dict[str, tuple[tuple[int, ...], object]] = {}
    for file in paths:
        for name, entry in read_header(file).tensors.items():
            if name in shapes:
                raise CheckpointError(f"{file}: tensor {name!r} stands in another file of the folder too")
            shapes[name] = (entry.shape, entry.dtype)
    return name_tensors(rules, dict(sorted(shapes.items())))
