"""`save`: a sharded checkpoint, one safetensors file a rank and an index; or a merged plain file.

What is new is written under names of its own and synced; then the index, which alone says what the checkpoint is, is
put in place by one rename. A kill at any moment leaves the old index with all its files, or the new one with all of
its own. Files that a killed job left are removed by the next save: a live job holds a lock on each file that it has
not published yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.box import Box, shape_of
from lowshard.checkpoint.checksum import crc32
from lowshard.checkpoint.header import FilePath, encode_header
from lowshard.checkpoint.index import INDEX_NAME, Index, IndexedFile, IndexedTensor, Part, read_index
from lowshard.checkpoint.share import shares
from lowshard.checkpoint.writer import (
    box_of,
    check_state,
    publish,
    reserve,
    together,
    write_at,
    write_checkpoint,
)
from lowshard.comm import Communicator, agree, loopback, share_text
from lowshard.errors import CheckpointError
from lowshard.layout import Layout
from lowshard.tiling import Tiling

State = Mapping[str, tuple[Layout | Tiling, np.ndarray | None]]

_DATA = re.compile(r"shard-(?P<token>[0-9a-f]{12})-\d{5}-of-\d{5}\.safetensors\Z")
_TEMPORARY = re.compile(r"\.lowshard\.index\.json\.[0-9a-f]{12}\.tmp\Z")
_PIECE_BYTES = 8 << 20


def save(
    path: FilePath,
    state: State,
    comm: Communicator | None = None,
    *,
    merged: bool = False,
    strategies: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint from the local arrays of all ranks.

    Collective: all ranks of the communicator call this, with the same path, names, tilings and metadata. When it
    returns, the checkpoint is whole and synced, and what was there before is gone. What several ranks hold is
    written once, spread over them. No array travels between ranks.

    Args:
        path: the folder of a sharded checkpoint, made where it is missing; or the file of a merged one.
        state: by name, the tiling (or layout) and this rank's local array; None on a rank that takes no part.
        comm: the communicator; None for one rank.
        merged: write one plain safetensors file.
        strategies: how each tensor is cut, noted in the index (`str()` of it).
        metadata: text by text.

    Raises:
        CheckpointError: the folder cannot be made or written, there is no room, a tensor is on no rank.
        BufferMismatchError: a local array is not the one its tiling says.
        LayoutError: a partial layout.
        MismatchError: ranks ask for different checkpoints.
        (Each on every rank; the old checkpoint is untouched and what was written is removed.)
    """
    if comm is None:
        with loopback(1)[0] as alone:
            save(path, state, alone, merged=merged, strategies=strategies, metadata=metadata)
        return
    if merged:
        write_checkpoint(path, state, comm, metadata)
        return
    _save_sharded(Path(path), state, comm, strategies or {}, dict(metadata or {}))


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what killed saves left in a checkpoint's folder; return the names of the files removed.

    Files that the index names, and files of a save that still runs, stay.
    """
    removed = []
    with _folder_lock(folder):
        kept = set(read_index(folder / INDEX_NAME).files) if (folder / INDEX_NAME).exists() else set()
        for file in sorted(folder.iterdir()):
            if file.name in kept or not (_DATA.match(file.name) or _TEMPORARY.match(file.name)):
                continue
            with suppress(FileNotFoundError):
                fd = os.open(file, os.O_RDONLY)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.unlink()
                    removed.append(file.name)
                except BlockingIOError:
                    pass  # its writer lives
                finally:
                    os.close(fd)
    return removed


@dataclass(frozen=True)
class Item:
    """One box of a tensor that goes into a rank's file."""

    key: str
    """Its name in the file."""
    name: str
    """The tensor."""
    dtype: str
    box: Box


def items_of(boxes: Iterable[tuple[str, str, Box]]) -> list[Item]:
    """Return items for (name, dtype, box), with keys of their own: the tensor's name, then name@1, name@2, ..."""
    made: dict[str, Item] = {}
    for name, dtype, box in boxes:
        key, number = name, 1
        while key in made:
            key, number = f"{name}@{number}", number + 1
        made[key] = Item(key, name, dtype, box)
    return list(made.values())


class ShardFile:
    """One rank's file in the making: of full size from the start, locked until the index is in place."""

    def __init__(self, path: Path, items: Iterable[Item]) -> None:
        self.path = path
        self._items = {item.key: item for item in items}
        self._head, entries = encode_header({k: (i.dtype, shape_of(i.box)) for k, i in self._items.items()})
        self.entries = {e.name: e for e in entries}
        self.size_bytes = entries[-1].stop if entries else len(self._head)
        self._at = {e.name: e.start for e in entries}
        self._crc = dict.fromkeys(self._at, 0)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reserve(self._fd, self.size_bytes, path)
            write_at(self._fd, memoryview(self._head), 0)
        except BaseException:
            self.discard()
            raise

    def put(self, key: str, array: np.ndarray) -> None:
        """Append elements to an item; they come in row-major order."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        write_at(self._fd, data, self._at[key])
        self._crc[key] = crc32(data, self._crc[key])
        self._at[key] += len(data)

    def finish(self) -> dict[str, Any]:
        """Sync the file and return what the index says of it.

        Raises:
            CheckpointError: an item did not get all of its elements.
        """
        for key, entry in self.entries.items():
            if self._at[key] != entry.stop:
                raise CheckpointError(
                    f"{self.path}: tensor {key!r} got {self._at[key] - entry.start} bytes of {entry.size_bytes}"
                )
        os.fsync(self._fd)
        parts = [[i.name, i.key, i.box, self._crc[i.key]] for i in self._items.values()]
        return {
            "file": self.path.name,
            "bytes": self.size_bytes,
            "header": crc32(self._head),
            "parts": parts,
        }

    def close(self) -> None:
        """Let go of the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.close()


class Publication:
    """A sharded checkpoint in the making, on all ranks: files are added, then the index makes them one.

    Leave it by an error and every file made is gone.
    """

    def __init__(self, folder: Path, comm: Communicator) -> None:
        self.folder, self.comm = folder, comm
        self.token = ""
        self._is_new = False
        self._files: list[ShardFile] = []
        self._temporary: Path | None = None

    def __enter__(self) -> Publication:
        said = share_text(self.comm.control, f"{secrets.token_hex(6)} {self.folder.exists():d}")[
            0
        ]  # rank 0's
        self.token, existed = said.split()
        self._is_new = existed == "0"
        together(self.comm, self.folder, self._open_folder if self.comm.rank == 0 else lambda: None, "save")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for file in self._files:
            file.close() if error is None else file.discard()
        if error is not None and self._temporary is not None:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
        if error is not None and self._is_new:
            with suppress(OSError):  # others still have files in it; the last one removes it
                self.folder.rmdir()

    def file(self, number: int, count: int, items: Iterable[Item]) -> ShardFile:
        """Return a new file, `number` of `count`."""
        name = f"shard-{self.token}-{number:05d}-of-{count:05d}.safetensors"
        made = ShardFile(self.folder / name, items)
        self._files.append(made)
        return made

    def publish(
        self,
        rows: Iterable[dict[str, Any]],
        tensors: Mapping[str, tuple[str, tuple[int, ...], str | None]],
        num_ranks: int,
        metadata: Mapping[str, str],
    ) -> None:
        """Put the index in place: from here on the checkpoint is the new one, and the old one's files go.

        Collective: all ranks of the communicator call this.

        Args:
            rows: what `ShardFile.finish` returned, for this rank's files.
            tensors: dtype, shape and strategy by name.
            num_ranks: ranks that the checkpoint is cut over.
            metadata: text by text.
        """
        texts = share_text(self.comm.control, json.dumps(list(rows)))
        first = self.comm.rank == 0
        together(
            self.comm, self.folder,
            lambda: self._write_index(texts, tensors, num_ranks, metadata) if first else None, "save",
        )  # fmt: skip
        for file in self._files:
            file.close()
        self.comm.barrier()
        if first:
            with suppress(OSError, CheckpointError):  # the new checkpoint is in place, whatever is left over
                remove_leftovers(self.folder)
        self.comm.barrier()

    def _open_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def _write_index(
        self,
        texts: Iterable[str],
        tensors: Mapping[str, tuple[str, tuple[int, ...], str | None]],
        num_ranks: int,
        metadata: Mapping[str, str],
    ) -> None:
        files: dict[str, IndexedFile] = {}
        parts: dict[str, list[Part]] = {name: [] for name in tensors}
        for row in sorted((r for text in texts for r in json.loads(text)), key=lambda r: str(r["file"])):
            files[row["file"]] = IndexedFile(row["bytes"], row["header"])
            for name, key, box, crc in row["parts"]:
                parts[name].append(Part(row["file"], key, tuple((a, b) for a, b in box), crc))
        rows = {n: IndexedTensor(d, s, said, tuple(parts[n])) for n, (d, s, said) in tensors.items()}
        index = Index(num_ranks, self.token, files, rows, metadata).encode()
        self._temporary = self.folder / f".{INDEX_NAME}.{self.token}.tmp"
        fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(fd, "wb", buffering=0) as out:
            with suppress(OSError):
                fcntl.flock(out.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_at(out.fileno(), memoryview(index), 0)
            os.fsync(out.fileno())
            _sync_folder(self.folder)  # the data files' names, before the index that speaks of them
            with _folder_lock(self.folder):
                publish(self._temporary, self.folder / INDEX_NAME)


def _save_sharded(
    folder: Path, state: State, comm: Communicator, strategies: Mapping[str, object], metadata: dict[str, str]
) -> None:
    def prepare() -> dict[str, Tiling]:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise CheckpointError(f"{folder}: metadata maps text to text, got {key!r}: {value!r}")
        return check_state(folder, state, comm.rank, comm.size)

    tilings = together(comm, folder, prepare, "save")
    asked = [str(folder), sorted(metadata.items()), sorted((n, t.digest()) for n, t in tilings.items())]
    agree(comm, hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).digest(), None, "save")
    with Publication(folder, comm) as publication:

        def write_own() -> list[dict[str, Any]]:
            own = [s for s in shares(tilings) if s.rank == comm.rank]
            items = items_of((s.name, tilings[s.name].dtype, s.box) for s in own)
            if not items:
                return []
            file = publication.file(comm.rank, comm.size, items)
            for item in items:
                array = state[item.name][1]
                assert array is not None  # checked
                for piece in _pieces(box_of(array, tilings[item.name], comm.rank, item.box)):
                    file.put(item.key, piece)
            return [file.finish()]

        rows = together(comm, folder, write_own, "save")
        tensors = {
            name: (tiling.dtype, tiling.shape, str(strategies[name]) if name in strategies else None)
            for name, tiling in tilings.items()
        }
        publication.publish(rows, tensors, comm.size, metadata)


def _pieces(view: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in row-major order, a few megabytes at a time."""
    rows = view.shape[0] if view.ndim else 1
    step = max(1, _PIECE_BYTES // max(view.nbytes // max(rows, 1), 1))
    for start in range(0, rows, step):
        yield view[start : start + step] if view.ndim else view


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system that syncs no folders
            os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: while an index is put in place nobody judges what is left over."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
