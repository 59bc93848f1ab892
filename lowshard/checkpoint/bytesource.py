"""Reading boxes out of a checkpoint's files: long runs by positioned reads, short ones through a memory map."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, contiguous_runs, intersect, relative_slices, single_run, volume
from lowshard.checkpoint.catalog import Catalog, StoredPart
from lowshard.checkpoint.checksum import Tally, crc32
from lowshard.checkpoint.header import TensorEntry, open_for_reading
from lowshard.errors import CheckpointError

LONG_RUN_BYTES = 32 << 10
"""From here on a positioned read is faster than the page faults of a map."""
_SCRATCH_BYTES = 512 << 10
"""Of a piece that is read and then looked at again: it is still in the core's own cache."""
_MAPPED_BYTES = 4 << 20
"""Of a map, whose pages are looked up at once: half the time of the faults that would come one after the other."""
_MADV_POPULATE_READ = 22
"""Of madvise(2), since Linux 5.14; Python's mmap has no name for it before 3.14."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. Closing twice is safe."""
        for mapped in self._maps.values():
            mapped.close()
        for fd in self._fds.values():
            os.close(fd)
        self._maps, self._fds = {}, {}

    def read(self, name: str, box: Box, out: np.ndarray, tally: Tally | None = None) -> None:
        """Fill `out`, of the box's shape and the tensor's dtype (strided or not), with a box of a tensor.

        Args:
            name: the tensor.
            box: `((start, stop), ...)` in global coordinates.
            out: where it goes; its last dim is contiguous.
            tally: gets the sums of what lies in one run of a stored array that has a checksum.

        Raises:
            CheckpointError: no such tensor, or a file is shorter than it was or cannot be read.
        """
        for part in self.catalog.tensor(name).parts:
            common = intersect(part.box, box) if box else ()
            if common is not None:
                index: Any = (..., *relative_slices(common, box))  # with ..., a view even of a 0-d array
                self._read_part(name, part, part.local(common), out[index], tally)

    def verify(self, name: str, part: StoredPart) -> int:
        """Compare the stored array behind a part with its checksum; return the bytes read.

        Raises:
            CheckpointError: they differ; the text names file and tensor.
        """
        if part.crc32 is None:
            return 0
        entry, value = part.entry, 0
        with memoryview(self._map(part.file, name, entry)) as stored:  # a map with views cannot be closed
            for at in range(entry.start, entry.stop, _MAPPED_BYTES):
                end = min(at + _MAPPED_BYTES, entry.stop)
                self._look_up(part.file, name, at, end)
                with stored[at:end] as piece:
                    value = crc32(piece, value)
        part.check(name, value)
        return part.entry.size_bytes

    def _read_part(self, name: str, part: StoredPart, box: Box, out: np.ndarray, tally: Tally | None) -> None:
        entry, itemsize = part.entry, dtypes.get(part.entry.dtype).itemsize_bytes
        if not volume(box):
            return
        self.bytes_read += volume(box) * itemsize
        first = single_run(box, entry.shape)
        if first is not None:
            self._read_run(name, part, entry.start + first * itemsize, out, tally)
            return
        rows = None
        if _run_elems(box, entry.shape) * itemsize >= LONG_RUN_BYTES:
            run_elems, firsts = contiguous_runs(box, entry.shape)
            rows = _runs(out, run_elems)
        if rows is None:
            self._read_mapped(name, part, box, _as_bytes(out))
        else:
            fd = self._fd(part.file, name)
            for first, row in zip(firsts, rows, strict=True):
                self._pread(fd, row.data, entry.start + first * itemsize, part.file, name)

    def _read_mapped(self, name: str, part: StoredPart, box: Box, target: np.ndarray) -> None:
        """Copy the short runs of a box of two dims or more out of the map, some megabytes of the file at a time."""
        entry, itemsize = part.entry, dtypes.get(part.entry.dtype).itemsize_bytes
        stored = np.ndarray(
            (*entry.shape[:-1], entry.shape[-1] * itemsize),
            np.uint8,
            buffer=self._map(part.file, name, entry),
            offset=entry.start,
        )
        index = [slice(start, stop) for start, stop in box]
        index[-1] = slice(box[-1][0] * itemsize, box[-1][1] * itemsize)
        row_bytes = stored.strides[0]
        # Of the first row and of the last one, what lies before the box and behind it.
        low = sum(s.start * step for s, step in zip(index[1:], stored.strides[1:], strict=True))
        rest = (
            row_bytes
            - 1
            - sum((s.stop - 1) * step for s, step in zip(index[1:], stored.strides[1:], strict=True))
        )
        rows = max(1, _MAPPED_BYTES // row_bytes)
        for first in range(box[0][0], box[0][1], rows):
            stop = min(first + rows, box[0][1])
            self._look_up(
                part.file, name, entry.start + first * row_bytes + low, entry.start + stop * row_bytes - rest
            )
            index[0] = slice(first, stop)
            np.copyto(target[first - box[0][0] : stop - box[0][0]], stored[tuple(index)])
        del stored  # a map with views cannot be closed

    def _look_up(self, file: str, name: str, start: int, stop: int) -> None:
        """Have the pages of a stretch of a file in its map, so that touching them is no fault."""
        first = start - start % mmap.PAGESIZE
        try:
            self._maps[file].madvise(_MADV_POPULATE_READ, first, stop - first)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: the pages come by faults
                raise CheckpointError(
                    f"{file}: tensor {name!r}: reading bytes {start} to {stop} failed: {error.strerror}"
                ) from error

    def _read_run(self, name: str, part: StoredPart, at: int, out: np.ndarray, tally: Tally | None) -> None:
        """Fill `out` with one run of a file, piece by piece where somebody looks at it on the way."""
        fd = self._fd(part.file, name)
        if part.crc32 is None:
            tally = None
        for piece in _pieces(out, _SCRATCH_BYTES):
            inside = piece.flags.c_contiguous
            raw = _flat_bytes(piece) if inside else self._scratch_bytes()[: piece.nbytes]
            step = _SCRATCH_BYTES if tally is not None else raw.size
            for start in range(0, raw.size, step):
                view = raw[start : start + step].data
                self._pread(fd, view, at, part.file, name)
                if tally is not None:
                    tally.add(part.key, at, view)
                at += len(view)
            if not inside:
                np.copyto(piece, raw.view(piece.dtype).reshape(piece.shape))

    def _scratch_bytes(self) -> np.ndarray:
        if self._scratch is None:
            self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        return self._scratch

    def _fd(self, file: str, name: str) -> int:
        if file not in self._fds:
            try:
                self._fds[file] = open_for_reading(file)
                os.posix_fadvise(self._fds[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the read-ahead
            except CheckpointError as error:
                raise CheckpointError(f"{error} (needed for tensor {name!r})") from error
        return self._fds[file]

    def _map(self, file: str, name: str, entry: TensorEntry) -> mmap.mmap:
        fd = self._fd(file, name)
        size = os.fstat(fd).st_size
        if size < entry.stop:  # else a read of the map would kill the process
            raise CheckpointError(
                f"{file}: tensor {name!r}: its data ends at byte {entry.stop}, the file now at {size}: it was cut "
                "short after it was opened"
            )
        if file not in self._maps:
            self._maps[file] = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        return self._maps[file]

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


def _flat_bytes(out: np.ndarray) -> np.ndarray:
    return out.reshape(-1).view(np.uint8)


def _as_bytes(out: np.ndarray) -> np.ndarray:
    """Return a view as uint8, the last dim scaled by the element's size."""
    if out.ndim == 0:
        return out.reshape(1).view(np.uint8)
    if out.flags.c_contiguous or out.strides[-1] == out.itemsize or out.shape[-1] <= 1:
        return out.view(np.uint8) if out.size else out.reshape(-1).view(np.uint8)
    raise ValueError("the last dim of a target is contiguous")  # local arrays and their boxes are


def _run_elems(box: Box, shape: tuple[int, ...]) -> int:
    """Return the elements of each run of a box, as `contiguous_runs` finds them."""
    run = 1
    for (start, stop), extent in zip(reversed(box), reversed(shape), strict=True):
        run *= stop - start
        if stop - start != extent:
            break
    return run


def _runs(out: np.ndarray, run_elems: int) -> list[np.ndarray] | None:
    """Return the bytes of each run of the file in the target, or None where a run is not one in memory too."""
    dim, inner = out.ndim, 1
    while inner < run_elems:
        dim -= 1
        inner *= out.shape[dim]
    rows = [out[index] for index in np.ndindex(out.shape[:dim])] if dim else [out]
    if not rows[0].flags.c_contiguous:
        return None
    return [row.reshape(-1).view(np.uint8) for row in rows]
