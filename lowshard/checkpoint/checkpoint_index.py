"""The index of a sharded checkpoint: which box of which tensor lies in which file, under which checksum.

`lowshard.index.json` is one JSON object: `format`, `version`, `ranks`, `token`, `metadata`, `files` (name,
bytes, crc32 of all bytes before the data), `tensors` (dtype, shape, strategy, parts, tiling, digest of the content),
`tilings` (which rank held what; each stands once, tensors have its number) and `digest`, which is blake2b over the
rest. Files are plain safetensors files; a part is a tensor of one, row-major. Its name there is the tensor's where it
is all of it, else the tensor's with the slice, `w[0:512, 0:64]`: no slice stands under the name of the whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.argument import whole as check_whole
from lowshard.box import Box, covers, full_box, volume
from lowshard.content_hash import DIGEST, text_digest
from lowshard.errors import CheckpointError, DTypeError
from lowshard.reading import parse_json, read_text, reader
from lowshard.tiling import Tiling

INDEX_NAME = "lowshard.index.json"
HF_INDEX = "model.safetensors.index.json"
TOKEN = "[0-9a-f]{12}"
DATA_NAME = re.compile(rf"shard-({TOKEN})-\d{{5}}-of-\d{{5}}\.safetensors")
"""Names of data files: only they are written, and removed, by saves."""
_PART_NAME = re.compile(r".+-\d{5}-of-(\d{5})\.safetensors")
SIZES = ("total_size", "total_parameters")
"""What Hugging Face's index says of the tensors beside the user's own metadata; not carried along."""
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


# ---- the index of Hugging Face's (`model.safetensors.index.json`) beside a checkpoint whose files hold whole tensors
#
# It is a courtesy to other readers: `lowshard.index.json` alone says what the checkpoint is. It is put in place after
# that one, and taken away before the files that it names are. Another save may commit between the two renames of one.
# So a save looks whether its own checkpoint is still in place, before it puts this index there and again behind that,
# and takes it away where it is not: of two saves at a time into one folder it may be missing, and is never another's.


def lies_beside(file: str) -> bool:
    """Return whether a name that an index gives is that of a file in the index's own folder, on one line."""
    return Path(file).name == file and file not in ("", "..") and "\n" not in file


def files_of_set(name: str) -> int:
    """Return how many files hold a checkpoint together, as the name of one of them says; 1 where it says nothing."""
    found = _PART_NAME.fullmatch(name)
    return 1 if found is None else int(found[1])


def is_sparse_delta(metadata: Mapping[str, str]) -> bool:
    """Return whether a file's metadata says that it holds what changes, and no tensors."""
    return metadata.get("sparse", "").lower() == "true" and "model_version" in metadata


def write_hf_index(
    folder: Path, private: Path, files: Mapping[str, str] | None, size_bytes: int, is_in_place: Callable[[], bool]
) -> None:  # fmt: skip
    """Put an index in place, or take one away that is of an earlier save. One that is not of a save stays."""
    path = folder / HF_INDEX
    if not is_in_place() or is_foreign(folder):
        return
    if not files:
        path.unlink(missing_ok=True)
        return
    try:
        _write_locked(private, path, hf_index_text(files, size_bytes))
    except OSError:  # readers of the index find none then, rather than one of the checkpoint before
        with suppress(OSError):
            private.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    if not is_in_place():
        path.unlink(missing_ok=True)


def hf_index_text(files: Mapping[str, str], size_bytes: int) -> str:
    """Return the text of an index: the file of each tensor, as transformers writes it."""
    data = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _write_locked(private: Path, path: Path, text: str) -> None:
    """Write a file and rename it; it is locked meanwhile, so that no other save takes it for a leftover."""
    while True:
        fd = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with open(fd, "w", encoding="utf-8") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            if not os.fstat(fd).st_nlink:
                continue  # another save has just taken it for a leftover
            file.write(text)
            file.flush()
            os.fsync(fd)
            os.replace(private, path)
            return


def forget(folder: Path, gone: Collection[str]) -> None:
    """Take an index of a save away that names a file which is about to be removed."""
    path = folder / HF_INDEX
    if gone and path.exists() and (_named(path) or set()) & set(gone):
        path.unlink(missing_ok=True)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has an index that is not of a save."""
    return (folder / HF_INDEX).exists() and _named(folder / HF_INDEX) is None


def _named(path: Path) -> set[str] | None:
    """Return the files that an index of a save names; None where it is another one."""
    try:
        text = read_text(path, "index with a weight_map", CheckpointError)
        data = parse_json(text, str(path), CheckpointError)
    except CheckpointError:
        return None
    said = data.get("weight_map") if isinstance(data, dict) else None
    named = set(map(str, said.values())) if isinstance(said, dict) else set()
    return named if named and all(DATA_NAME.fullmatch(name) for name in named) else None
