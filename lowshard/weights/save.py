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
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.box import Box, shape_of
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
    _Save(Path(path), state, comm, strategies or {}, dict(metadata or {})).run()


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


class _Save:
    """One rank's part of a save."""

    def __init__(
        self,
        folder: Path,
        state: State,
        comm: Communicator,
        strategies: Mapping[str, object],
        metadata: dict[str, str],
    ) -> None:
        self.folder, self.state, self.comm = folder, state, comm
        self.strategies, self.metadata = strategies, metadata
        self.tilings: dict[str, Tiling] = {}
        self.fds: list[int] = []
        self.written: list[Path] = []

    def run(self) -> None:
        comm, rank = self.comm, self.comm.rank
        together(comm, self.folder, self._prepare, "save")
        agree(comm, self._digest(), None, "save")
        token = share_text(comm.control, secrets.token_hex(6))[0]  # rank 0's
        try:
            if rank == 0:
                together(comm, self.folder, self._open_folder, "save")
            else:
                together(comm, self.folder, lambda: None, "save")
            rows = together(comm, self.folder, lambda: self._write_own(token), "save")
            texts = share_text(comm.control, json.dumps(rows))
            together(comm, self.folder, lambda: self._publish(token, texts) if rank == 0 else None, "save")
        except BaseException:
            for file in self.written:
                with suppress(OSError):
                    file.unlink(missing_ok=True)
            raise
        finally:
            for fd in self.fds:
                os.close(fd)  # the locks go with them
        if rank == 0:
            with suppress(OSError, CheckpointError):  # the new checkpoint is in place, whatever is left over
                remove_leftovers(self.folder)
        comm.barrier()

    def _prepare(self) -> None:
        self.tilings = check_state(self.folder, self.state, self.comm.rank, self.comm.size)
        for key, value in self.metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise CheckpointError(f"{self.folder}: metadata maps text to text, got {key!r}: {value!r}")

    def _digest(self) -> bytes:
        asked = [
            str(self.folder),
            sorted(self.metadata.items()),
            sorted((n, t.digest()) for n, t in self.tilings.items()),
        ]
        return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).digest()

    def _open_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def _write_own(self, token: str) -> dict[str, Any]:
        """Write this rank's file, synced and locked; return what the index says of it."""
        rank = self.comm.rank
        mine: dict[str, tuple[str, Box]] = {}
        for share in shares(self.tilings):
            if share.rank == rank:
                key, number = share.name, 1
                while key in mine:
                    key, number = f"{share.name}@{number}", number + 1
                mine[key] = (share.name, share.box)
        if not mine:
            return {"file": None, "parts": []}
        path = self.folder / f"shard-{token}-{rank:05d}-of-{self.comm.size:05d}.safetensors"
        head, entries = encode_header({k: (self.tilings[n].dtype, shape_of(b)) for k, (n, b) in mine.items()})
        size = entries[-1].stop
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.fds.append(fd)
        self.written.append(path)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        reserve(fd, size, path)
        write_at(fd, memoryview(head), 0)
        parts = []
        for entry in entries:
            name, box = mine[entry.name]
            crc, at = 0, entry.start
            for piece in self._pieces(name, box):
                data = piece.reshape(-1).view(np.uint8).data
                write_at(fd, data, at)
                crc = zlib.crc32(data, crc)
                at += len(data)
            parts.append([name, entry.name, box, crc])
        os.fsync(fd)
        return {"file": path.name, "bytes": size, "header": zlib.crc32(head), "parts": parts}

    def _pieces(self, name: str, box: Box) -> Iterator[np.ndarray]:
        """Yield a box of this rank's array in row-major order, a few megabytes at a time, contiguous."""
        array = self.state[name][1]
        assert array is not None  # checked
        view = box_of(array, self.tilings[name], self.comm.rank, box)
        rows = view.shape[0] if view.ndim else 1
        step = max(1, _PIECE_BYTES // max(view.nbytes // rows, 1))
        for start in range(0, rows, step):
            yield np.ascontiguousarray(view[start : start + step] if view.ndim else view)

    def _publish(self, token: str, texts: list[str]) -> None:
        """Write the index and put it in place: from here on the checkpoint is the new one."""
        files: dict[str, IndexedFile] = {}
        parts: dict[str, list[Part]] = {name: [] for name in self.tilings}
        for text in texts:
            row = json.loads(text)
            if row["file"] is None:
                continue
            files[row["file"]] = IndexedFile(row["bytes"], row["header"])
            for name, key, box, crc in row["parts"]:
                parts[name].append(Part(row["file"], key, tuple((a, b) for a, b in box), crc))
        tensors = {}
        for name, tiling in self.tilings.items():
            said = str(self.strategies[name]) if name in self.strategies else None
            tensors[name] = IndexedTensor(tiling.dtype, tiling.shape, said, tuple(parts[name]))
        index = Index(self.comm.size, token, files, tensors, self.metadata).encode()
        temporary = self.folder / f".{INDEX_NAME}.{token}.tmp"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.fds.append(fd)
        self.written.append(temporary)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_at(fd, memoryview(index), 0)
        os.fsync(fd)
        _sync_folder(self.folder)  # the data files' names, before the index that speaks of them
        with _folder_lock(self.folder):
            publish(temporary, self.folder / INDEX_NAME)


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
