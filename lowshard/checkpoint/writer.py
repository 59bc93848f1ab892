"""Writing a sharded state as one plain safetensors file, by all ranks at once.

Rank 0 makes a temporary file of full size beside the target, every rank writes its own byte ranges
into it and syncs them, and rank 0 renames it. Each step ends with an agreement, so either all ranks
see the new file or all raise the same error, the temporary file is gone and an old file is untouched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowshard.checkpoint.header import FilePath, TensorEntry, encode_header
from lowshard.checkpoint.reader import plan_box
from lowshard.comm import Communicator, agree
from lowshard.comm.agreement import share_text
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError, LowshardError, MeshError
from lowshard.layout import Layout

T = TypeVar("T")
State = Mapping[str, tuple[Layout, np.ndarray | None]]

_WHAT = "write_checkpoint"
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class _File:
    """What all ranks agree to write."""

    path: Path
    head: bytes
    entries: tuple[TensorEntry, ...]
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
    between ranks, and each element is written by exactly one of those that hold it: the rank whose
    coordinates along the axes that do not cut the array are 0.

    The bytes of the file are those that the safetensors library would write. A file (or link) that
    was at the path is replaced at once, as a whole.

    Args:
        path: the file to make.
        tensors: by name, the layout and this rank's local array of it, a NumPy array of
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
    file = _together(comm, path, lambda: _prepare(path, tensors, comm_rank, comm.size, metadata))
    agree(comm, file.digest, None, _WHAT)
    token = share_text(comm.control, secrets.token_hex(6))[0]  # rank 0's
    temporary = file.path.with_name(f".{file.path.name}.{token}.tmp")
    try:
        _together(comm, path, lambda: _create(file, temporary) if comm_rank == 0 else None)
        _together(comm, path, lambda: _write_own(file, temporary, tensors, comm_rank))
        _together(comm, path, lambda: _publish(file, temporary) if comm_rank == 0 else None)
    except BaseException as error:
        # Any rank may be the last one alive, so each removes it.
        try:
            temporary.unlink(missing_ok=True)
        except OSError as failure:
            error.add_note(f"the temporary file {temporary} could not be removed: {failure.strerror}")
        raise


def _together(comm: Communicator, path: FilePath, action: Callable[[], T]) -> T:
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
    agree(comm, b"", failed, _WHAT)
    return result[0]


def _prepare(
    path: FilePath, tensors: State, rank: int, size: int, metadata: Mapping[str, str] | None
) -> _File:
    target = Path(path)
    if not target.name:
        raise CheckpointError(f"{target}: give the path of the file to make")
    for name, (layout, array) in tensors.items():
        _check_tensor(f"{target}: tensor {name!r}", layout, array, rank, size)
    head, entries = encode_header({n: (lay.dtype, lay.shape) for n, (lay, _) in tensors.items()}, metadata)
    layouts = [[e.name, tensors[e.name][0].digest()] for e in entries]
    asked = json.dumps([str(target), layouts, None if metadata is None else sorted(metadata.items())])
    return _File(target, head, tuple(entries), hashlib.blake2b(asked.encode(), digest_size=16).digest())


def _check_tensor(where: str, layout: Layout, array: np.ndarray | None, rank: int, size: int) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"{where}: a tensor is given as (Layout, local array), got {type(layout).__name__} first"
        )
    if any(layout.partials):
        raise LayoutError(
            f"{where}: the layout {layout} is partial, and a file holds values, not terms: reduce it first"
        )
    outside = [r for r in layout.mesh.ranks if r >= size]
    if outside:
        raise MeshError(
            f"{where}: mesh {layout.mesh} has rank {outside[0]}, the communicator has {size} ranks"
        )
    if rank not in layout.mesh:
        if array is not None:
            raise BufferMismatchError(
                f"{where}: rank {rank} is not in mesh {layout.mesh}, so it passes None for its array"
            )
        return
    shape, dtype = layout.local_shape(rank), layout.numpy_dtype
    if not isinstance(array, np.ndarray):
        raise BufferMismatchError(f"{where}: the local array is a NumPy array, got {type(array).__name__}")
    if array.shape != shape or array.dtype != dtype:
        raise BufferMismatchError(
            f"{where}: rank {rank} of layout {layout} holds {dtype}{list(shape)}, got "
            f"{array.dtype}{list(array.shape)}"
        )


def _create(file: _File, temporary: Path) -> None:
    """Make the temporary file at full size, so that a full disk is found before any data is written."""
    folder = file.path.parent
    if file.path.is_dir():
        raise CheckpointError(f"{file.path}: is a directory; give the path of the file to make")
    if not folder.is_dir():
        raise CheckpointError(f"{file.path}: there is no folder {folder}; make it first")
    # Asked before posix_fallocate, which would fill the disk up before it gives up.
    disk = os.statvfs(folder)
    room_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and room_bytes < file.size_bytes:  # some file systems tell nothing: 0 blocks
        raise CheckpointError(
            f"{file.path}: the file takes {file.size_bytes} bytes, {folder} has room for {room_bytes}"
        )
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            os.posix_fallocate(fd, 0, file.size_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise CheckpointError(
                    f"{file.path}: {file.size_bytes} bytes cannot be reserved in {folder}: {error.strerror}"
                ) from error
            os.ftruncate(fd, file.size_bytes)
        _write_at(fd, memoryview(file.head), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_own(file: _File, temporary: Path, tensors: State, rank: int) -> None:
    """Write the byte ranges that this rank owns, and sync them."""
    own = [e for e in file.entries if e.size_bytes and _writes(tensors[e.name][0], rank)]
    if not own:
        return
    fd = os.open(temporary, os.O_WRONLY)
    try:
        for entry in own:
            layout, array = tensors[entry.name]
            assert array is not None  # checked by _prepare
            plan = plan_box(entry, layout.box(rank))
            if not plan.total_bytes:
                continue
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            done = 0
            for start, run_bytes in plan.runs:
                _write_at(fd, data[done : done + run_bytes], start)
                done += run_bytes
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(file: _File, temporary: Path) -> None:
    """Put the complete temporary file in the target's place, for good."""
    os.replace(temporary, file.path)
    folder = os.open(file.path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise CheckpointError(
                f"{file.path}: the new file is in place and whole, but syncing its folder failed ({error.strerror}): "
                "it may be lost if the machine stops now"
            ) from error
    finally:
        os.close(folder)


def _writes(layout: Layout, rank: int) -> bool:
    """Return True for the one rank, among those with the same box, that writes it."""
    if rank not in layout.mesh:
        return False
    cutting = {axis for cutters in layout.cutters for axis in cutters}
    return all(place == 0 for axis, place in enumerate(layout.mesh.coord(rank)) if axis not in cutting)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        if not done:
            raise OSError(errno.EIO, "the system wrote nothing")
        data, offset = data[done:], offset + done
