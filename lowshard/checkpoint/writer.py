"""Writing a sharded state as one plain safetensors file, by all ranks at once.

Rank 0 makes a file of full size under a private name beside the target, every rank writes its own byte ranges
into it and syncs them, and rank 0 renames it: `lowshard.checkpoint.commit`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words, instance, mapping
from lowshard.argument import path as check_path
from lowshard.box import Box, contains, full_box, relative_slices
from lowshard.checkpoint.checkpoint_index import is_sparse_delta
from lowshard.checkpoint.commit import Commit
from lowshard.checkpoint.header import FilePath, TensorEntry, check_metadata, check_name, encode_header
from lowshard.checkpoint.read_shares import Share, shares
from lowshard.checkpoint.reader import plan_box
from lowshard.comm import Communicator, collective_step
from lowshard.comm.agreement import control_of
from lowshard.comm.work import Work
from lowshard.content_hash import text_digest
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError, MeshError
from lowshard.foreign_array import view_in_call
from lowshard.layout import Layout
from lowshard.tiling import Tiling

State = Mapping[str, tuple[Layout | Tiling, Any]]  # arrays of any library, or None
Parts = Sequence[tuple[Share, np.ndarray]]
"""Boxes that a rank writes, with their content."""
_LINE_BYTES = 64
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def write_state(
    path: FilePath, tensors: State, comm: Communicator, metadata: Mapping[str, str] | None = None, *, wait: bool,
    is_copy: bool = False,
) -> Work | None:  # fmt: skip
    """Write one plain safetensors file from the local arrays of all ranks; see `lowshard.weights.save`.

    Collective: all ranks of the communicator call this. The bytes are those that the safetensors library would write.
    With `is_copy` nobody changes the arrays, so that none is copied for the background.
    """
    control_of(comm)
    with collective_step(comm, "save", path=path) as step:
        check_turn(step, comm, wait)
        target = check_path(path, "path is that of the file to make", CheckpointError)
        if not target.name or os.path.isdir(target):
            raise CheckpointError(f"{target}: is a directory; give the path of the file to make")
        if not os.path.isdir(target.parent):
            raise CheckpointError(f"{target}: there is no folder {target.parent}; make it first")
        tilings = check_state(target, tensors, comm.rank, comm.size)
        check_labels({} if metadata is None else metadata, str(target))
        head, entries = encode_header({n: (t.dtype, t.shape) for n, t in tilings.items()}, metadata)
        layouts = [[e.name, tensors[e.name][0].digest()] for e in entries]
        asked = [str(target), layouts, None if metadata is None else sorted(metadata.items()), wait]
        step.digest = text_digest(json.dumps(asked))
        step.said = lambda: f"{target}, wait {wait}, {in_words(tilings)}"
    place = target if wait else target.absolute()  # the program may change its folder meanwhile

    def lay_out(fd: int) -> None:
        reserve(fd, entries[-1].stop if entries else len(head), place)
        write_at(fd, memoryview(head), 0)

    def write(over: Communicator, parts: Parts) -> None:
        with Commit(place, over, "save", lay_out) as commit:
            with commit.step():
                _write_own({entry.name: entry for entry in entries}, commit.fd, parts)
            commit.commit()

    return write_parts(comm, path, tilings, tensors, wait=wait, is_copy=is_copy, write=write)


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


def _write_own(entries: Mapping[str, TensorEntry], fd: int, parts: Parts) -> None:
    """Write the byte ranges that this rank owns, and sync them."""
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


# ---- what a rank writes: views of its arrays, or a copy for a save in the background


def write_parts(
    comm: Communicator, path: FilePath, tilings: Mapping[str, Tiling], state: State, *, wait: bool,
    is_copy: bool, write: Callable[[Communicator, Parts], None],
) -> Work | None:  # fmt: skip
    """Write what falls to this rank, at once, or in the background out of a copy; then return the work."""
    parts = own_parts(tilings, state, comm.rank)
    if wait:
        write(comm, parts)
        return None
    beside = comm.control.beside
    if not is_copy:
        with collective_step(comm, "save", path=path):
            ends = list(accumulate((_padded_bytes(a) for _, a in parts), initial=0))
            if beside.memory is None or beside.memory.size < ends[-1]:
                beside.memory = None  # before there is more
                beside.memory = np.empty(ends[-1], np.uint8)
            parts = [
                (share, _put(array, beside.memory[at:]))
                for (share, array), at in zip(parts, ends, strict=False)
            ]
    return beside.start(lambda: write(beside.comm, parts), f"save of rank {comm.rank} to {path}")


def check_turn(step: collective_step, comm: Communicator, wait: object) -> None:
    """Wait for a save that is under way, whose error the step raises; check `wait` of the next one."""
    step.error = comm.control.settle_beside()
    instance(wait, bool, "wait is True or False", CheckpointError)


def own_parts(tilings: Mapping[str, Tiling], state: State, rank: int) -> Parts:
    """Return the boxes that fall to a rank, as views of its arrays."""
    found = []
    for share in shares(tilings):
        if share.rank == rank:
            array = view_in_call(state[share.name][1], share.name)
            assert array is not None  # checked before
            found.append((share, box_of(array, tilings[share.name], rank, share.box)))
    return found


def box_of(array: np.ndarray, tiling: Tiling, rank: int, box: Box) -> np.ndarray:
    """Return a view of the part of a rank's local array that holds a box, which lies in one of its tiles."""
    if not array.ndim:
        return array
    tile = next(t for t in tiling.tiles(rank) if contains(t.box, box))
    local: np.ndarray = array[relative_slices(tile.local, full_box(array.shape))]
    return local[relative_slices(box, tile.box)]


def _padded_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _LINE_BYTES) * _LINE_BYTES


def _put(array: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Copy an array to the start of a buffer; return the copy."""
    copy: np.ndarray = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
