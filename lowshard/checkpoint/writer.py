"""Writing a sharded state as one plain safetensors file, by all ranks at once.

Rank 0 makes a file of full size under a private name beside the target, every rank writes its own byte ranges
into it and syncs them, and rank 0 renames it: `lowshard.checkpoint.commit`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words, mapping
from lowshard.argument import path as check_path
from lowshard.checkpoint.commit import Commit
from lowshard.checkpoint.header import FilePath, TensorEntry, check_metadata, check_name, encode_header
from lowshard.checkpoint.hf_index import is_sparse_delta
from lowshard.checkpoint.own_parts import Parts, State, check_turn, write_parts
from lowshard.checkpoint.reader import plan_box
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import control_of
from lowshard.comm.work import Work
from lowshard.content_hash import text_digest
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError, MeshError
from lowshard.foreign_array import view_in_call
from lowshard.layout import Layout
from lowshard.tiling import Tiling

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


@overload
def write_checkpoint(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None, *,
    wait: Literal[True] = True,
) -> None: ...  # fmt: skip


@overload
def write_checkpoint(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None, *,
    wait: Literal[False],
) -> Work: ...  # fmt: skip


def write_checkpoint(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None, *,
    wait: bool = True,
) -> Work | None:  # fmt: skip
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
        wait: False writes in the background, as for `lowshard.weights.save`.

    Every rank raises what one had. But for NotDurable, what was at the path is untouched then and what was written is
    removed.

    Raises:
        CheckpointError: a name or the metadata is not allowed, the folder is missing, there is no
            room, or the system refused to write.
        LayoutError: a partial layout: reduce it first.
        MeshError: a mesh with ranks that the communicator lacks.
        BufferMismatchError: a local array is not the one that its layout says.
        MismatchError: the ranks ask for different files.
        NotDurable: the new file is in place, but its folder could not be synced.
        PeerFailed, TimedOut: a rank did not come. A note says whether the new file is in place, where this rank knows.
    """
    return write_state(path, tensors, comm, metadata, wait=wait)


def write_state(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None, *, wait: bool,
    is_copy: bool = False,
) -> Work | None:  # fmt: skip
    """As `write_checkpoint`; with `is_copy` nobody changes the arrays, so that none is copied for the background."""
    control_of(comm)
    with collective_step(comm, _WHAT, path=path) as step:
        check_turn(step, comm, wait)
        file = _prepare(path, tensors, comm.rank, comm.size, metadata, wait)
        step.digest = file.digest
        step.said = lambda: f"{file.path}, wait {wait}, {in_words(file.tilings)}"

    def write(over: Communicator, parts: Parts) -> None:
        with Commit(file.path, over, _WHAT, lambda fd: _lay_out(file, fd)) as commit:
            with commit.step():
                _write_own(file, commit.fd, parts)
            commit.commit()

    return write_parts(comm, path, _WHAT, file.tilings, tensors, wait=wait, is_copy=is_copy, write=write)


def _prepare(
    path: FilePath, tensors: State, rank: int, size: int, metadata: Mapping[str, str] | None, wait: bool
) -> _File:
    target = check_path(path, "path is that of the file to make", CheckpointError)
    if not target.name:
        raise CheckpointError(f"{target}: give the path of the file to make")
    if os.path.isdir(target):
        raise CheckpointError(f"{target}: is a directory; give the path of the file to make")
    if not os.path.isdir(target.parent):
        raise CheckpointError(f"{target}: there is no folder {target.parent}; make it first")
    tilings = check_state(target, tensors, rank, size)
    check_labels({} if metadata is None else metadata, str(target))
    head, entries = encode_header({n: (t.dtype, t.shape) for n, t in tilings.items()}, metadata)
    layouts = [[e.name, tensors[e.name][0].digest()] for e in entries]
    asked = json.dumps([str(target), layouts, None if metadata is None else sorted(metadata.items()), wait])
    place = target if wait else target.absolute()  # the program may change its folder meanwhile
    return _File(place, head, tuple(entries), tilings, text_digest(asked))


def check_labels(metadata: Mapping[str, str], where: str) -> dict[str, str]:
    """Return a copy of a checkpoint's metadata, or raise CheckpointError where it cannot be one's."""
    found = check_metadata(metadata, where)
    if is_sparse_delta(found):
        raise CheckpointError(
            f"{where}: metadata that has 'sparse': 'true' and 'model_version' makes a delta of a file, which is not "
            "read as a checkpoint: call one of them something else"
        )
    return found


def check_state(target: Path, tensors: State, rank: int, size: int) -> dict[str, Tiling]:
    """Return the tiling of each tensor of a state that can be written; this rank's arrays are checked."""
    tilings = {}
    rule = f"{target}: tensors are a mapping of names to (layout or tiling, local array)"
    for name, given in mapping(tensors, rule, CheckpointError).items():
        where = f"{target}: tensor {name!r}"
        check_name(name, str(target))
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise CheckpointError(f"{rule}; {name} has {brief(given)}")
        layout, array = given
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
    array = view_in_call(array, where)
    if not isinstance(array, np.ndarray):
        raise BufferMismatchError(f"{where}: the local array is a NumPy array, got {type(array).__name__}")
    if array.shape != shape or array.dtype != dtype:
        kind = "layout" if isinstance(layout, Layout) else "tiling"
        raise BufferMismatchError(
            f"{where}: rank {rank} of {kind} {layout} holds {dtype}{list(shape)}, got "
            f"{array.dtype}{list(array.shape)}"
        )


def _lay_out(file: _File, fd: int) -> None:
    """Give the new file its full size, so that a full disk is found before any data is written, and its header."""
    reserve(fd, file.size_bytes, file.path)
    write_at(fd, memoryview(file.head), 0)


def reserve(fd: int, size_bytes: int, path: Path) -> None:
    """Give an open file its size, so that a full disk is found before any data is written."""
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


def _write_own(file: _File, fd: int, parts: Parts) -> None:
    """Write the byte ranges that this rank owns, and sync them."""
    entries = {entry.name: entry for entry in file.entries}
    for share, array in parts:
        plan = plan_box(entries[share.name], share.box)
        data, done = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, 0
        for start, run_bytes in plan.runs:
            write_at(fd, data[done : done + run_bytes], start)
            done += run_bytes
    if parts:
        os.fsync(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset, however much the system takes at a time."""
    while data:
        done = os.pwrite(fd, data, offset)
        if not done:
            raise OSError(errno.EIO, "the system wrote nothing")
        data, offset = data[done:], offset + done
