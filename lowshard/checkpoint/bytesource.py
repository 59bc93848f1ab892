"""Reading boxes out of a checkpoint's files: positioned reads, straight into place or through a small scratch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.box import (
    Box,
    full_box,
    intersect,
    relative_slices,
    row_major_parts,
    shape_of,
    single_run,
    slices_of,
    strides_of,
    volume,
)
from lowshard.checkpoint.catalog import Catalog, StoredPart, Tally, crc32
from lowshard.checkpoint.checkpoint_index import INDEX_NAME, read_index
from lowshard.checkpoint.header import open_for_reading, stamp_of
from lowshard.errors import CheckpointError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS

_SCRATCH_BYTES = 512 << 10
"""Of a piece that is read and then looked at again: it is still in the core's own cache."""
_PART_BYTES = 4 << 20
_APART_BYTES = 16 << 10
"""Rows this far apart are read one by one; nearer ones together, which costs less than so many calls of the system."""


class ByteSource:
    """The open files of a checkpoint. Use it in a `with` block; each rank opens its own."""

    bytes_read: int
    """Bytes of tensor data taken out of the files."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.bytes_read = 0
        self._fds: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._scratch: np.ndarray | None = None

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Closing twice is safe."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds, self._maps = {}, {}  # a map lives as long as an array over it

    def read(self, name: str, box: Box, out: np.ndarray, tally: Tally | None = None) -> None:
        """Fill `out`, of the box's shape and the tensor's dtype (strided or not), with a box of a tensor."""
        for part in self.catalog.tensor(name).parts:
            common = intersect(part.box, box)
            if common is not None:
                index: Any = (..., *relative_slices(common, box))  # with ..., a view even of a 0-d array
                self.read_part(name, part, part.local(common), out[index], tally)

    def boxes(self, name: str) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield a tensor in row-major parts of a few megabytes: each box and its values."""
        tensor = self.catalog.tensor(name)
        row = dtypes.get(tensor.dtype)
        if not tensor.parts:
            return
        for box in row_major_parts(full_box(tensor.shape), max(1, _PART_BYTES // row.itemsize_bytes)):
            values = np.empty(shape_of(box), row.numpy)
            self.read(name, box, values)
            yield box, values

    def read_part(
        self, name: str, part: StoredPart, box: Box, out: np.ndarray, tally: Tally | None = None
    ) -> None:
        """Fill `out` with a box of a stored array, in that array's coordinates; else as `read`."""
        entry, itemsize = part.entry, dtypes.get(part.entry.dtype).itemsize_bytes
        if not volume(box):
            return
        first = single_run(box, entry.shape)
        if first is not None:
            self._read_into(name, part, entry.start + first * itemsize, out, tally)
            return
        steps = strides_of(entry.shape, itemsize)
        self._read_rows(name, part, entry.start, box, entry.shape, steps, out)

    def read_run(self, name: str, part: StoredPart, at: int, into: memoryview, tally: Tally | None) -> None:
        """Fill a buffer with the bytes of a stored array that lie at `at` in its file."""
        fd = self._fd(part.file, name)
        self.bytes_read += len(into)
        if tally is None or part.crc32 is None:
            self._pread(fd, into, at, part.file, name)
            return
        for start in range(0, len(into), _SCRATCH_BYTES):  # so that what is summed is still in the cache
            with into[start : start + _SCRATCH_BYTES] as piece:
                self._pread(fd, piece, at + start, part.file, name)
                tally.add(part.key, at + start, piece)

    def mapped(
        self, name: str, part: StoredPart, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray:
        """Return an array over a run of a file that begins at `at`: a private map, read as its pages are touched."""
        fd = self._fd(part.file, name)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes >= part.entry.stop and part.file not in self._maps:
                self._maps[part.file] = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(
                f"{part.file}: tensor {name!r}: mapping failed: {error.strerror}"
            ) from error
        if size_bytes < part.entry.stop:  # else a read of the map would kill the process
            raise CheckpointError(
                f"{part.file}: tensor {name!r}: its data ends at byte {part.entry.stop}, the file now at {size_bytes}: "
                "it was cut short after it was opened"
            )
        return np.ndarray(shape, dtype, self._maps[part.file], at)

    def verify(self, name: str, part: StoredPart) -> int:
        """Compare the stored array behind a part with its checksum; return the bytes read."""
        if part.crc32 is None:
            return 0
        entry, value, fd = part.entry, 0, self._fd(part.file, name)
        for at in range(entry.start, entry.stop, _SCRATCH_BYTES):
            piece = self._scratch_bytes(min(_SCRATCH_BYTES, entry.stop - at)).data
            self._pread(fd, piece, at, part.file, name)
            value = crc32(piece, value)
        part.check(name, value)
        return entry.size_bytes

    def verify_content(self, name: str, part: StoredPart, shape: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Do as `verify`, and return the sums of the part's bits (`kernels.content_sum`) in a tensor of that shape."""
        entry, row = part.entry, dtypes.get(part.entry.dtype)
        value, at, fd = 0, entry.start, self._fd(part.file, name)
        sums = np.zeros(SUMS, np.uint32)
        for box in row_major_parts(full_box(entry.shape), _SCRATCH_BYTES // row.itemsize_bytes):
            raw = self._scratch_bytes(volume(box) * row.itemsize_bytes)
            self._pread(fd, raw.data, at, part.file, name)
            value, at = crc32(raw.data, value), at + raw.nbytes
            place = tuple((a + o, b + o) for (a, b), o in zip(box, part.origin, strict=True))
            sums += content_sum(raw.view(row.numpy).reshape(shape_of(box)), place, shape)
        if part.crc32 is not None:
            part.check(name, value)
        return sums

    def _read_into(self, name: str, part: StoredPart, at: int, out: np.ndarray, tally: Tally | None) -> None:
        """Fill `out`, strided or not, with one run of a file."""
        for piece in _pieces(out, _SCRATCH_BYTES):
            if piece.flags.c_contiguous:
                self.read_run(name, part, at, piece.reshape(-1).view(np.uint8).data, tally)
            else:
                raw = self._scratch_bytes(piece.nbytes)
                self.read_run(name, part, at, raw.data, tally)
                np.copyto(piece, raw.view(piece.dtype).reshape(piece.shape))
            at += piece.nbytes

    def _read_rows(
        self, name: str, part: StoredPart, at: int, box: Box, shape: Sequence[int], steps: Sequence[int],
        out: np.ndarray,
    ) -> None:  # fmt: skip
        """Fill `out` with a box of more than one run, of an array whose first byte is at `at` in the file."""
        (start, stop), step = box[0], steps[0]
        if step > _APART_BYTES:
            first = single_run(box[1:], shape[1:])
            for i in range(start, stop):
                row, into = at + i * step, out[i - start]
                if first is None:
                    self._read_rows(name, part, row, box[1:], shape[1:], steps[1:], into)
                else:
                    self._read_into(name, part, row + first * steps[-1], into, None)
            return
        fd, together = self._fd(part.file, name), _SCRATCH_BYTES // step
        columns = slices_of(box[1:])
        for low in range(start, stop, together):
            rows = min(together, stop - low)
            raw = self._scratch_bytes(rows * step)
            self._pread(fd, raw.data, at + low * step, part.file, name)
            whole = raw.view(out.dtype).reshape(rows, *shape[1:])
            np.copyto(out[low - start : low - start + rows], whole[(slice(None), *columns)])
        self.bytes_read += out.nbytes

    def _scratch_bytes(self, size_bytes: int) -> np.ndarray:
        if self._scratch is None:
            self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        return self._scratch[:size_bytes]

    def _fd(self, file: str, name: str) -> int:
        if file not in self._fds:
            try:
                fd = open_for_reading(file)
            except CheckpointError as error:
                replaced = (
                    "; a newer save has replaced the checkpoint since it was opened: open it anew, and plan anew"
                    if self._was_replaced(file)
                    else ""
                )
                raise CheckpointError(f"{error} (needed for tensor {name!r}){replaced}") from error
            self._fds[file] = fd
            stamp = self.catalog.stamps.get(file)
            if stamp is not None and stamp_of(fd) != stamp:
                os.close(self._fds.pop(file))
                raise CheckpointError(
                    f"{file}: tensor {name!r}: the file was replaced or changed since the checkpoint was opened, so "
                    "its tensors may lie elsewhere in it: open the checkpoint anew, and plan anew"
                )
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the read-ahead
        return self._fds[file]

    def _was_replaced(self, file: str) -> bool:
        """Return whether a sharded checkpoint's index no longer names a file of the catalog that is missing."""
        path = Path(file)
        try:
            return not path.exists() and path.name not in read_index(path.with_name(INDEX_NAME)).files
        except CheckpointError:
            return False

    def _pread(self, fd: int, view: memoryview, offset: int, file: str, name: str) -> None:
        while view:
            try:
                got = os.preadv(fd, [view], offset)
            except OSError as error:
                raise CheckpointError(
                    f"{file}: tensor {name!r}: reading at byte {offset} failed: {error.strerror}"
                ) from error
            if not got:
                raise CheckpointError(
                    f"{file}: tensor {name!r}: the file ends at byte {offset}, the data goes on for {len(view)} bytes: "
                    "it was cut short after it was opened"
                )
            view, offset = view[got:], offset + got


def _pieces(out: np.ndarray, limit_bytes: int) -> Iterator[np.ndarray]:
    """Yield an array in row-major order, in views that are contiguous or of at most limit_bytes."""
    if out.flags.c_contiguous or out.nbytes <= limit_bytes:
        yield out
        return
    row_bytes = out.nbytes // out.shape[0]
    if row_bytes > limit_bytes:
        for row in out:
            yield from _pieces(row, limit_bytes)
        return
    step = limit_bytes // row_bytes
    for start in range(0, out.shape[0], step):
        yield out[start : start + step]
