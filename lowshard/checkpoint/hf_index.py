"""The index of Hugging Face's (`model.safetensors.index.json`) beside a checkpoint whose files hold whole tensors.

It is a courtesy to other readers: `lowshard.index.json` alone says what the checkpoint is. It is put in place after
that one, and taken away before the files that it names are. Another save may commit between the two renames of one. So
a save looks whether its own checkpoint is still in place, before it puts this index there and again behind that, and
takes it away where it is not: of two saves at a time into one folder it may be missing, and is never another's.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from lowshard.errors import CheckpointError
from lowshard.reading import parse_json, read_text

HF_INDEX = "model.safetensors.index.json"
TOKEN = "[0-9a-f]{12}"
DATA_NAME = re.compile(rf"shard-({TOKEN})-\d{{5}}-of-\d{{5}}\.safetensors")
"""Names of data files: only they are written, and removed, by saves."""
_PART_NAME = re.compile(r".+-\d{5}-of-(\d{5})\.safetensors")
SIZES = ("total_size", "total_parameters")
"""What Hugging Face's index says of the tensors beside the user's own metadata; not carried along."""


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


def write_index(
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
        _write_locked(private, path, index_text(files, size_bytes))
    except OSError:  # readers of the index find none then, rather than one of the checkpoint before
        with suppress(OSError):
            private.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    if not is_in_place():
        path.unlink(missing_ok=True)


def index_text(files: Mapping[str, str], size_bytes: int) -> str:
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
