"""Writing a sharded state as one plain safetensors file, by all ranks at once.

Rank 0 makes a temporary file of full size beside the target, every rank writes its own byte ranges
into it and syncs them, and rank 0 renames it. Each step ends with an agreement, so either all ranks
see the new file or all raise the same error, the temporary file is gone and an old file is untouched.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, contains, full_box, relative_slices
from lowshard.checkpoint.header import FilePath, TensorEntry, encode_header
from lowshard.checkpoint.reader import plan_box
from lowshard.checkpoint.share import shares
from lowshard.comm import Communicator, agree
from lowshard.comm.agreement import share_text
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError, LowshardError, MeshError
from lowshard.layout import Layout
from lowshard.tiling import Tiling

T = TypeVar("T")
State = Mapping[str, tuple[Layout | Tiling, np.ndarray | None]]

_WHAT = "write_checkpoint"
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class _File:
    """What all ranks agree to write."""

    path: Path
    head: bytes
    entries: tuple[TensorEntry, ...]
    tilings: Mapping[str, Tiling]
    digest: bytes

    @property
    def size_bytes(self) -> int:
        return self.entries[-1].stop if self.entries else len(self.head)


def write_checkpoint(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one plain safetensors file from the local arrays of all ranks.

    Collective: all ranks of the communicator call this, with the same names, layouts, path and
    metadata (the order of the names does not matter). When it returns, the file is complete and
    synced on every rank. The path lies on a file system that all ranks share. No array travels
    between ranks, and each element is written by exactly one of those that hold it; what many hold is spread
    over them.

    The bytes of the file are those that the safetensors library would write. A file (or link) that
    was at the path is replaced at once, as a whole.

    Args:
        path: the file to make.
        tensors: by name, the layout or tiling and this rank's local array of it, a NumPy array of
            `layout.local_shape(rank)`. Ranks in the layout's mesh are ranks of `comm`; a rank outside
            the mesh passes None.
        comm: the communicator.
        metadata: text by text, for the file's `__metadata__`.

    Raises:
        CheckpointError: a name or the metadata is not allowed, the folder is missing, there is no
            room, or the system refused to write.
        LayoutError: a partial layout: reduce it first.
        MeshError: a mesh with ranks that the communicator lacks.
        BufferMismatchError: a local array is not the one that its layout says.
        MismatchError: the ranks ask for different files.

        On every rank the same error, whichever rank had it; no temporary file is left.
    """
    comm_rank = comm.rank
    file = together(comm, path, lambda: _prepare(path, tensors, comm_rank, comm.size, metadata))
    agree(comm, file.digest, None, _WHAT)
    token = share_text(comm.control, secrets.token_hex(6))[0]  # rank 0's
    temporary = file.path.with_name(f".{file.path.name}.{token}.tmp")
    try:
        together(comm, path, lambda: _create(file, temporary) if comm_rank == 0 else None)
        together(comm, path, lambda: _write_own(file, temporary, tensors, comm_rank))
        together(comm, path, lambda: publish(temporary, file.path) if comm_rank == 0 else None)
    except BaseException as error:
        # Any rank may be the last one alive, so each removes it.
        try:
            temporary.unlink(missing_ok=True)
        except OSError as failure:
            error.add_note(f"the temporary file {temporary} could not be removed: {failure.strerror}")
        raise


def together(comm: Communicator, path: FilePath, action: Callable[[], T], what: str = _WHAT) -> T:
    """Run a local step and return its result if it succeeded on all ranks; else raise on all.

    Collective: all ranks of the communicator call this. The step itself calls no collective.
    """
    result: list[T] = []
    failed: Exception | None = None
    try:
        result.append(action())
    except LowshardError as error:
        failed = error
    except OSError as error:
        failed = CheckpointError(f"{path}: writing it failed: {error}")
        failed.__cause__ = error
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failed = error
    agree(comm, b"", failed, what)
    return result[0]


def _prepare(
    path: FilePath, tensors: State, rank: int, size: int, metadata: Mapping[str, str] | None
) -> _File:
    target = Path(path)
    if not target.name:
        raise CheckpointError(f"{target}: give the path of the file to make")
    tilings = check_state(target, tensors, rank, size)
    head, entries = encode_header({n: (t.dtype, t.shape) for n, t in tilings.items()}, metadata)
    layouts = [[e.name, tensors[e.name][0].digest()] for e in entries]
    asked = json.dumps([str(target), layouts, None if metadata is None else sorted(metadata.items())])
    digest = hashlib.blake2b(asked.encode(), digest_size=16).digest()
    return _File(target, head, tuple(entries), tilings, digest)


def check_state(target: Path, tensors: State, rank: int, size: int) -> dict[str, Tiling]:
    """Return the tiling of each tensor of a state that can be written; this rank's arrays are checked.

    Raises:
        CheckpointError, LayoutError, MeshError, BufferMismatchError: as `write_checkpoint`.
    """
    tilings = {}
    for name, (layout, array) in tensors.items():
        where = f"{target}: tensor {name!r}"
        if not isinstance(layout, Layout | Tiling):
            raise LayoutError(
                f"{where}: a tensor is given as (Layout, local array), got {type(layout).__name__} first"
            )
        if isinstance(layout, Layout):
            _check_layout(where, layout, size)
        tiling = layout if isinstance(layout, Tiling) else Tiling.from_layout(layout)
        if tiling.num_ranks > size:
            raise MeshError(f"{where}: is cut over {tiling.num_ranks} ranks, the communicator has {size}")
        if isinstance(layout, Tiling) and not tiling.is_cover:
            raise LayoutError(f"{where}: {tiling} leaves elements on no rank, so they cannot be written")
        _check_array(where, layout, tiling, array, rank)
        tilings[name] = tiling
    return tilings


def _check_layout(where: str, layout: Layout, size: int) -> None:
    if any(layout.partials):
        raise LayoutError(
            f"{where}: the layout {layout} is partial, and a file holds values, not terms: reduce it first"
        )
    outside = [r for r in layout.mesh.ranks if r >= size]
    if outside:
        raise MeshError(
            f"{where}: mesh {layout.mesh} has rank {outside[0]}, the communicator has {size} ranks"
        )


def _check_array(
    where: str, layout: Layout | Tiling, tiling: Tiling, array: np.ndarray | None, rank: int
) -> None:
    if rank not in tiling:
        if array is not None:
            what = f"mesh {layout.mesh}" if isinstance(layout, Layout) else f"{layout}"
            raise BufferMismatchError(
                f"{where}: rank {rank} is not in {what}, so it passes None for its array"
            )
        return
    shape, dtype = tiling.local_shape(rank), dtypes.get(tiling.dtype).numpy
    if not isinstance(array, np.ndarray):
        raise BufferMismatchError(f"{where}: the local array is a NumPy array, got {type(array).__name__}")
    if array.shape != shape or array.dtype != dtype:
        kind = "layout" if isinstance(layout, Layout) else "tiling"
        raise BufferMismatchError(
            f"{where}: rank {rank} of {kind} {layout} holds {dtype}{list(shape)}, got "
            f"{array.dtype}{list(array.shape)}"
        )


def _create(file: _File, temporary: Path) -> None:
    """Make the temporary file at full size, so that a full disk is found before any data is written."""
    folder = file.path.parent
    if file.path.is_dir():
        raise CheckpointError(f"{file.path}: is a directory; give the path of the file to make")
    if not folder.is_dir():
        raise CheckpointError(f"{file.path}: there is no folder {folder}; make it first")
    _remove_leftovers(file.path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(fd, "wb", buffering=0) as out:
        _lock(out.fileno())
        reserve(out.fileno(), file.size_bytes, file.path)
        write_at(out.fileno(), memoryview(file.head), 0)
        os.fsync(out.fileno())


def reserve(fd: int, size_bytes: int, path: Path) -> None:
    """Give an open file its size, so that a full disk is found before any data is written.

    Raises:
        CheckpointError: there is no room.
    """
    folder = path.parent
    # Asked before posix_fallocate, which would fill the disk up before it gives up.
    disk = os.statvfs(folder)
    room_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and room_bytes < size_bytes:  # some file systems tell nothing: 0 blocks
        raise CheckpointError(
            f"{path}: the file takes {size_bytes} bytes, {folder} has room for {room_bytes}"
        )
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise CheckpointError(
                f"{path}: {size_bytes} bytes cannot be reserved in {folder}: {error.strerror}"
            ) from error
        os.ftruncate(fd, size_bytes)


def _lock(fd: int) -> None:
    """Hold a shared lock on a temporary file: as long as one rank of the job lives, nobody clears it away."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed jobs left beside a target; those of live jobs are locked."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    for left in list(path.parent.iterdir()):
        if not pattern.fullmatch(left.name) or not left.is_file():
            continue
        with suppress(OSError):  # another job was faster, or the file is not ours to remove
            fd = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(fd)


def _write_own(file: _File, temporary: Path, tensors: State, rank: int) -> None:
    """Write the byte ranges that this rank owns, and sync them."""
    own = [share for share in shares(file.tilings) if share.rank == rank]
    entries = {entry.name: entry for entry in file.entries}
    if not own:
        return
    fd = os.open(temporary, os.O_WRONLY)
    try:
        _lock(fd)
        for share in own:
            array = tensors[share.name][1]
            assert array is not None  # checked by _prepare
            plan = plan_box(entries[share.name], share.box)
            piece = np.ascontiguousarray(box_of(array, file.tilings[share.name], rank, share.box))
            data, done = piece.reshape(-1).view(np.uint8).data, 0
            for start, run_bytes in plan.runs:
                write_at(fd, data[done : done + run_bytes], start)
                done += run_bytes
        os.fsync(fd)
    finally:
        os.close(fd)


def box_of(array: np.ndarray, tiling: Tiling, rank: int, box: Box) -> np.ndarray:
    """Return a view of the part of a rank's local array that holds a box, which lies in one of its tiles."""
    if not array.ndim:
        return array
    tile = next(t for t in tiling.tiles(rank) if contains(t.box, box))
    local: np.ndarray = array[relative_slices(tile.local, full_box(array.shape))]
    return local[relative_slices(box, tile.box)]


def publish(temporary: Path, target: Path) -> None:
    """Put a complete temporary file in the target's place, for good.

    Raises:
        CheckpointError: the new file is in place, but its folder could not be synced.
    """
    os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise CheckpointError(
                f"{target}: the new file is in place and whole, but syncing its folder failed ({error.strerror}): "
                "it may be lost if the machine stops now"
            ) from error
    finally:
        os.close(folder)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset, however much the system takes at a time."""
    while data:
        done = os.pwrite(fd, data, offset)
        if not done:
            raise OSError(errno.EIO, "the system wrote nothing")
        data, offset = data[done:], offset + done
