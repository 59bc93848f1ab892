"""The index of a sharded checkpoint: which box of which tensor lies in which file, under which checksum.

`lowshard.index.json` is one JSON object: `format`, `version`, `ranks`, `token`, `metadata`, `files` (name,
bytes, crc32 of all bytes before the data), `tensors` (dtype, shape, strategy, parts) and `digest`, which
is blake2b over the rest. Files are plain safetensors files; a part is a tensor of one, row-major.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowshard import dtypes
from lowshard.box import Box, covers, full_box, volume
from lowshard.errors import CheckpointError, DTypeError

INDEX_NAME = "lowshard.index.json"
_FORMAT, _VERSION = "lowshard sharded checkpoint", 1


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a tensor in one file."""

    file: str
    """Name of the file, in the folder of the index."""
    key: str
    """Name of the tensor in that file."""
    box: Box
    crc32: int | None
    """Of the part's bytes, where it is known."""


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """One tensor of a sharded checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    strategy: str | None
    """How it was cut when it was saved; for people."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One file of a sharded checkpoint."""

    size_bytes: int
    header_crc32: int


@dataclass(frozen=True)
class Index:
    """What a sharded checkpoint holds."""

    num_ranks: int
    token: str
    files: Mapping[str, IndexedFile]
    tensors: Mapping[str, IndexedTensor]
    metadata: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the index file's bytes."""
        numbers = {name: i for i, name in enumerate(self.files)}
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "ranks": self.num_ranks,
            "token": self.token,
            "metadata": dict(self.metadata),
            "files": [[name, f.size_bytes, f.header_crc32] for name, f in self.files.items()],
            "tensors": {
                name: {
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "strategy": t.strategy,
                    "parts": [
                        {
                            "file": numbers[p.file],
                            "key": p.key,
                            "box": [list(i) for i in p.box],
                            "crc32": p.crc32,
                        }
                        for p in t.parts
                    ],
                }
                for name, t in self.tensors.items()
            },
        }
        body["digest"] = _digest(body)
        return json.dumps(body, ensure_ascii=False, indent=1).encode() + b"\n"


def read_index(path: Path) -> Index:
    """Return a checked index.

    Raises:
        CheckpointError: it is missing, damaged, or its parts do not cover a tensor once.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the index cannot be read: {error.strerror}") from error
    try:
        body = json.loads(raw)
        digest = body.pop("digest")
        right = _digest(body)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no index of a sharded checkpoint: {error!r}") from error
    if digest != right:
        raise CheckpointError(
            f"{path}: the index is damaged: its digest is {right}, it says {digest!r}; restore it from a copy"
        )
    if body.get("format") != _FORMAT or body.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: this lowshard reads version {_VERSION} of a {_FORMAT!r}, the index is "
            f"{body.get('format')!r} version {body.get('version')!r}"
        )
    try:
        return _decode(body, path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: the index has a field that is missing or no good: {error!r}"
        ) from error


def _decode(body: Mapping[str, Any], path: Path) -> Index:
    files = {str(name): IndexedFile(int(size), int(crc)) for name, size, crc in body["files"]}
    names = list(files)
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: a file of the checkpoint lies beside its index, got {name!r}")
    tensors = {}
    for name, t in body["tensors"].items():
        shape = tuple(int(n) for n in t["shape"])
        parts = tuple(
            Part(names[p["file"]], str(p["key"]), tuple((int(a), int(b)) for a, b in p["box"]), p["crc32"])
            for p in t["parts"]
        )
        where = f"{path}: tensor {name!r}"
        try:
            dtype = dtypes.get(t["dtype"]).name
        except DTypeError as error:
            raise CheckpointError(f"{where}: {error}") from error
        whole = full_box(shape)
        if any(
            len(p.box) != len(shape)
            or any(not 0 <= a < b <= n for (a, b), n in zip(p.box, shape, strict=True))
            for p in parts
        ):
            raise CheckpointError(f"{where}: a part lies outside shape {list(shape)}")
        if sum(volume(p.box) for p in parts) != volume(whole) or not covers((p.box for p in parts), whole):
            raise CheckpointError(f"{where}: its parts do not cover shape {list(shape)} once")
        tensors[name] = IndexedTensor(dtype, shape, t["strategy"], parts)
    return Index(int(body["ranks"]), str(body["token"]), files, tensors, dict(body["metadata"]))


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
