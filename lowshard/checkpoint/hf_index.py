"""The index of Hugging Face's (`model.safetensors.index.json`) beside a checkpoint whose files hold whole tensors.

It is a courtesy to other readers: `lowshard.index.json` alone says what the checkpoint is. It is put in place after
that one, and taken away before the files that it names are, so that it never names a file that is not there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from lowshard.errors import CheckpointError
from lowshard.reading import parse_json, read_text

HF_INDEX = "model.safetensors.index.json"
TOKEN = "[0-9a-f]{12}"
DATA_NAME = re.compile(rf"shard-({TOKEN})-\d{{5}}-of-\d{{5}}\.safetensors")
"""Names of data files: only they are written, and removed, by saves."""
DELTA_NAME = re.compile(rf"delta-({TOKEN})\.safetensors")
"""The same of deltas, whose index is this one."""
SIZES = ("total_size", "total_parameters")
"""What Hugging Face's index says of the tensors beside the user's own metadata; not carried along."""


def is_sparse_delta(metadata: Mapping[str, str]) -> bool:
    """Return whether a file's metadata says that it holds what changes, and no tensors."""
    return metadata.get("sparse", "").lower() == "true" and "model_version" in metadata


def plain_metadata(metadata: Mapping[str, str]) -> dict[str, str] | None:
    """Return what stands in the header of a file of whole tensors, or None for nothing.

    Readers of Hugging Face refuse a file that has metadata and names no format there.
    """
    if not metadata:
        return None
    return dict(metadata) if "format" in metadata else {"format": "pt", **metadata}


def write_index(folder: Path, private: Path, files: Mapping[str, str] | None, size_bytes: int) -> None:
    """Put an index in place, or take one away that is of an earlier save. One that is not of a save stays.

    Args:
        folder: of the checkpoint.
        private: a name in it that is free, and that the next save clears away.
        files: by tensor the name of its file; None where a tensor is not a whole tensor of one file.
        size_bytes: of all tensors.
    """
    path = folder / HF_INDEX
    if path.exists() and _named(path) is None:
        return
    if files is None:
        path.unlink(missing_ok=True)
        return
    data = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(files.items()))}
    with open(private, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(private, path)


def forget(folder: Path, gone: Collection[str]) -> None:
    """Take an index of a save away that names a file which is about to be removed."""
    path = folder / HF_INDEX
    named = _named(path) if gone and path.exists() else None
    if named is not None and named & set(gone):
        path.unlink(missing_ok=True)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has an index that is not of a save."""
    return (folder / HF_INDEX).exists() and _named(folder / HF_INDEX) is None


def named_files(path: Path) -> set[str]:
    """Return the files that an index names.

    Raises:
        CheckpointError: it is not an index with a weight_map.
    """
    text = read_text(path, "index with a weight_map", CheckpointError)
    data = parse_json(text, str(path), CheckpointError)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: is not an index with a weight_map")
    return set(map(str, files.values()))


def _named(path: Path) -> set[str] | None:
    """Return the files that an index of a save names; None where it is another one."""
    try:
        named = named_files(path)
    except CheckpointError:
        return None
    return named if named and all(DATA_NAME.fullmatch(name) for name in named) else None
