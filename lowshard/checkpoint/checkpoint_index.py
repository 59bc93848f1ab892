"""The index of a sharded checkpoint: which box of which tensor lies in which file, under which checksum.

`lowshard.index.json` is one JSON object: `format`, `version`, `ranks`, `token`, `metadata`, `files` (name,
bytes, crc32 of all bytes before the data), `tensors` (dtype, shape, strategy, parts, tiling, digest of the content),
`tilings` (which rank held what; each stands once, tensors have its number) and `digest`, which is blake2b over the
rest. Files are plain safetensors files; a part is a tensor of one, row-major. Its name there is the tensor's where it
is all of it, else the tensor's with the slice, `w[0:512, 0:64]`: no slice stands under the name of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.argument import whole as check_whole
from lowshard.box import Box, covers, full_box, volume
from lowshard.checkpoint.hf_index import lies_beside
from lowshard.content_hash import DIGEST, text_digest
from lowshard.errors import CheckpointError, DTypeError
from lowshard.reading import parse_json, read_text, reader
from lowshard.tiling import Tiling

INDEX_NAME = "lowshard.index.json"
_MOST_BYTES, _MOST_VALUES = 2_000_000_000, 100_000_000
"""Of an index: one of ten thousand tensors over a thousand ranks has a tenth of it."""
_MOST_RANKS = 1 << 20
"""That save a checkpoint: far more than any job has, and few enough for what walks over all of them."""
_FORMAT, _VERSION = "lowshard sharded checkpoint", 3


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
    """How it was sharded when it was saved; for people."""
    parts: tuple[Part, ...]
    tiling: Tiling
    digest: str
    """Of its content, as `lowshard.reshard.digest` has it."""


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
    metadata: Mapping[str, str] | None

    def encode(self) -> bytes:
        """Return the index file's bytes."""
        numbers = {name: i for i, name in enumerate(self.files)}
        tilings: dict[str, tuple[int, Tiling]] = {}
        for tensor in self.tensors.values():
            tilings.setdefault(tensor.tiling.digest(), (len(tilings), tensor.tiling))
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "ranks": self.num_ranks,
            "token": self.token,
            "metadata": None if self.metadata is None else dict(self.metadata),
            "files": [[name, f.size_bytes, f.header_crc32] for name, f in self.files.items()],
            "tensors": {
                name: {
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "strategy": t.strategy,
                    "tiling": tilings[t.tiling.digest()][0],
                    "digest": t.digest,
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
            "tilings": [tiling.to_json() for _, tiling in tilings.values()],
        }
        body["digest"] = _digest(body)
        return json.dumps(body, ensure_ascii=False, indent=1).encode() + b"\n"


def read_index(path: Path) -> Index:
    """Return a checked index."""
    text = read_text(path, "index of a sharded checkpoint", CheckpointError, _MOST_BYTES)
    body = parse_json(text, f"{path}: is not an index of a sharded checkpoint", CheckpointError, _MOST_VALUES)
    if not isinstance(body, dict) or "digest" not in body:
        raise CheckpointError(f"{path}: is not an index of a sharded checkpoint: it has no digest")
    digest = body.pop("digest")
    try:
        right = _digest(body)
    except (
        ValueError,
        RecursionError,
    ) as error:  # half a surrogate pair, or levels that are read and not written
        raise CheckpointError(f"{path}: is not an index of a sharded checkpoint: {error}") from error
    if digest != right:
        raise CheckpointError(
            f"{path}: the index is damaged: its digest is {right}, it says {brief(digest)}; restore it from a copy"
        )
    if (body.get("format"), body.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{path}: this lowshard reads version {_VERSION} of a {_FORMAT!r}, the index is "
            f"{brief(body.get('format'))} version {brief(body.get('version'))}"
        )
    return _read(body, str(path))


@dataclass(frozen=True)
class _PartData:
    """A part as the file has it: its file by number."""

    file: int
    key: str
    box: Box
    crc32: int | None


@dataclass(frozen=True)
class _TensorData:
    dtype: str
    shape: tuple[int, ...]
    strategy: str | None
    parts: tuple[_PartData, ...]
    tiling: int
    digest: str


@reader("index of a sharded checkpoint", CheckpointError)
def _read(
    format: str, version: int, ranks: int, token: str, metadata: Mapping[str, str] | None,
    files: tuple[tuple[str, int, int], ...], tensors: Mapping[str, _TensorData], tilings: tuple[Tiling, ...],
) -> Index:  # fmt: skip
    check_whole(ranks, f"a checkpoint is saved by 1 to {_MOST_RANKS} ranks", CheckpointError, 1, _MOST_RANKS)
    listed = {name: IndexedFile(size, crc) for name, size, crc in files}
    names = list(listed)
    for name in names:
        if not lies_beside(name):
            raise CheckpointError(f"a file of the checkpoint lies beside its index, got {brief(name)}")
    made = {}
    for name, t in tensors.items():
        where = f"tensor {brief(name)}"
        try:
            dtype = dtypes.get(t.dtype).name
        except DTypeError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not DIGEST.fullmatch(t.digest):
            raise CheckpointError(f"{where}: a digest is 32 hexadecimal digits, got {brief(t.digest)}")
        for p in t.parts:
            if not 0 <= p.file < len(names):
                raise CheckpointError(f"{where}: the index has files 0 to {len(names) - 1}, got {p.file}")
        whole = full_box(t.shape)
        if any(
            len(p.box) != len(t.shape)
            or any(not 0 <= a < b <= n for (a, b), n in zip(p.box, t.shape, strict=True))
            for p in t.parts
        ):
            raise CheckpointError(f"{where}: a part lies outside shape {list(t.shape)}")
        boxes = [p.box for p in t.parts]
        if (
            min(t.shape, default=0) < 0
            or sum(map(volume, boxes)) != volume(whole)
            or not covers(boxes, whole)
        ):
            raise CheckpointError(f"{where}: its parts do not cover shape {list(t.shape)} once")
        parts = tuple(Part(names[p.file], p.key, p.box, p.crc32) for p in t.parts)
        if not 0 <= t.tiling < len(tilings):
            raise CheckpointError(f"{where}: the index has tilings 0 to {len(tilings) - 1}, got {t.tiling}")
        tiling = tilings[t.tiling]
        if (tiling.dtype, tiling.shape) != (dtype, t.shape) or tiling.num_ranks > ranks:
            raise CheckpointError(
                f"{where}: its tiling is {tiling}, it is {dtype}{list(t.shape)} of {ranks} ranks"
            )
        made[name] = IndexedTensor(dtype, t.shape, t.strategy, parts, tiling, t.digest)
    return Index(ranks, token, listed, made, metadata)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text_digest(text).hex()
