"""Snapshots of a rank's tensors, in memory that processes of other jobs may map and read.

A snapshot is an anonymous file (memfd): a page of its own, then the tensors, each C-contiguous.

```
page 0: publisher id (16 bytes), number of the snapshot (8 bytes; 0 while it is being written)
tensor 0 | padding to a page | tensor 1 | ...
```

Two snapshots are enough while readers keep up: the newest, and the one being written. One that is still being read is
not overwritten; then there is a third. A reader checks the number before and after it copies, so it notices when a
publisher that had lost the connection reused the snapshot. Where subscribers may be on other hosts, checksums are taken
part by part while a snapshot is filled and in cache: once a version, not once a subscriber.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.box import Box, slices_of
from lowshard.checkpoint.catalog import crc32, joined
from lowshard.errors import CommError
from lowshard.kernels.buffer import address, is_gpu
from lowshard.reshard.tensor_layout import TensorLayout
from lowshard.transfer.device_copies import DeviceCopies, read_into

Array = Any
PAGE_BYTES = 4096
ID_BYTES = 16
PIECE_BYTES = 2 << 20
"""Bytes packed or unpacked at a time."""
PART_BYTES = 2 << 20
"""Bytes of a tensor that one checksum covers."""
_NUMBER_AT = ID_BYTES


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a snapshot."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    name: str

    def part(self, memory: np.ndarray, box: Box) -> np.ndarray:
        """Return a box of the tensor in a snapshot's bytes."""
        found: np.ndarray = box_of(self.view(memory), box)
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * dtypes.get(self.dtype).itemsize_bytes

    def view(self, memory: np.ndarray) -> np.ndarray:
        """Return the tensor in a snapshot's bytes."""
        found = memory[self.offset : self.offset + self.size_bytes]
        return found.view(dtypes.get(self.dtype).numpy).reshape(self.shape)


def places_of(layouts: Mapping[str, TensorLayout], rank: int) -> tuple[dict[str, Place], int]:
    """Return where a rank's tensors lie in its snapshots, and the bytes of a snapshot."""
    places, at = {}, PAGE_BYTES
    for name, layout in layouts.items():
        shape = layout.local_shape(rank)
        if shape is not None:
            places[name] = Place(at, shape, layout.dtype, name)
            at += -(-prod(shape) * layout.itemsize_bytes // PAGE_BYTES) * PAGE_BYTES
    return places, at


class Memory:
    """An anonymous file, mapped whole. Unmapped and closed with the last reference."""

    def __init__(self, fd: int, size_bytes: int, writes: bool) -> None:
        """Map an open file, which is closed with this."""
        self.size_bytes = size_bytes
        kind = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        self._mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, kind)
        self.bytes = np.frombuffer(self._mapped, np.uint8)
        self._number = self.bytes[_NUMBER_AT : _NUMBER_AT + 8].view(np.int64)
        self.sums: dict[int, int] = {}
        """In the process that writes: CRC-32 of parts of tensors, by the first byte of each; of some, or none."""
        self.fd = fd  # last: where something has failed before, the caller closes it

    @property
    def number(self) -> int:
        """The number of the complete snapshot here, or 0."""
        return int(self._number[0])

    @property
    def publisher_id(self) -> bytes:
        """The publisher's id."""
        return self.bytes[:ID_BYTES].tobytes()

    def set_number(self, number: int) -> None:
        """Set the number of the complete snapshot."""
        self._number[0] = number

    def runs(self, place: Place, box: Box, crc: int) -> Iterator[tuple[memoryview, int]]:
        """Yield the bytes of a box, row-major, run by run, each with the CRC-32 (from `crc` on) up to its end."""
        part = place.part(self.bytes, box)
        if not part.flags.c_contiguous:
            yield from runs_of(part, crc)
            return
        at, sums = address(part) - address(self.bytes), self.sums
        end, tensor_end = at + part.nbytes, place.offset + place.size_bytes
        while at < end:
            stop = place.offset + ((at - place.offset) // PART_BYTES + 1) * PART_BYTES
            data = self.bytes[at : min(stop, end)].data
            own = sums.get(at) if min(stop, tensor_end) <= end else None
            crc = crc32(data, crc) if own is None else joined(crc, own, len(data))
            yield data, crc
            at = stop

    def is_at(self, pid: int, fd: int) -> bool:
        """Return whether a process's descriptor is still this file: numbers are reused."""
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(self.fd))
        except OSError:
            return False

    def __del__(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def of_process(cls, pid: int, fd: int, size_bytes: int, publisher_id: bytes) -> Memory:
        """Map another process's snapshot to read from it."""
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != size_bytes:
                raise OSError("it has another size")
            made = cls(opened, size_bytes, False)
        except BaseException:
            os.close(opened)
            raise
        if made.publisher_id != publisher_id:
            raise OSError("it belongs to another publisher")
        return made


class VersionStore:
    """The snapshots of one rank of a publisher. `fill` is called by one thread; `find` by any."""

    def __init__(
        self,
        layouts: Mapping[str, TensorLayout],
        rank: int,
        publisher_id: bytes,
        copies: DeviceCopies,
        sums: bool = False,
    ) -> None:
        """Make an empty store."""
        self._copies, self._takes_sums = copies, sums
        self.places, self.size_bytes = places_of(layouts, rank)
        self._publisher_id = publisher_id
        self._lock = threading.Lock()
        self._snapshots: list[Memory] = []

    def fill(self, sources: Mapping[str, Array], number: int, held: Collection[int]) -> None:
        """Copy the sources into a snapshot that nobody reads."""
        memory = self._free(held)
        sums: dict[int, int] = {}
        try:
            for name, place in self.places.items():
                for at, part in self._copied(sources[name], place.view(memory.bytes)):
                    if self._takes_sums:
                        sums[place.offset + at] = crc32(part)
        except MemoryError as error:
            raise CommError(f"there is no memory for a snapshot of {self.size_bytes} bytes") from error
        memory.sums = sums
        memory.set_number(number)

    def find(self, number: int) -> Memory | None:
        """Return a snapshot by number, or None."""
        with self._lock:
            return next((one for one in self._snapshots if one.number == number), None)

    def close(self) -> None:
        """Drop all snapshots. The memory of one is freed with its last reader."""
        with self._lock:
            self._snapshots.clear()

    @property
    def kept(self) -> int:
        """Number of snapshots."""
        return len(self._snapshots)

    def _copied(self, source: Array, target: np.ndarray) -> Iterator[tuple[int, memoryview]]:
        """Copy an array; yield the copied parts, each with the offset of its first byte."""
        raw = target.reshape(-1).view(np.uint8)
        by_part = not is_gpu(source) and source.flags.c_contiguous
        if is_gpu(source):
            self._copies.fetch(source, read_into(raw))
        elif not by_part:
            copy_bits(source, target)
        for at in range(0, raw.size, PART_BYTES):
            part = raw[at : at + PART_BYTES]
            if by_part:
                part[...] = source.reshape(-1).view(np.uint8)[at : at + PART_BYTES]
            yield at, part.data

    def _free(self, held: Collection[int]) -> Memory:
        with self._lock:
            unused = [one for one in self._snapshots if one.number not in held]
            for spare in unused[1:]:  # somebody was slow once
                spare.set_number(0)
                self._snapshots.remove(spare)
            found = unused[0] if unused else self._made()
            found.set_number(0)
            return found

    def _made(self) -> Memory:
        try:
            fd = os.memfd_create("lowshard-version", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, self.size_bytes)
                made = Memory(fd, self.size_bytes, True)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError) as error:
            raise CommError(f"no snapshot of {self.size_bytes} bytes can be made: {error}") from error
        made.bytes[:ID_BYTES] = np.frombuffer(self._publisher_id, np.uint8)
        self._snapshots.append(made)
        return made


def runs_of(part: np.ndarray, crc: int) -> Iterator[tuple[memoryview, int]]:
    """Yield an array's bytes, row-major, piece by piece, each with the CRC-32 up to its end."""
    for piece in pieces_of(part, PIECE_BYTES):
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        crc = crc32(data, crc)
        yield data, crc


def box_of(array: Array, box: Box) -> Array:
    """Return a view of a box of an array, also of a 0-d one."""
    return array[(*slices_of(box), ...)]


def copy_bits(source: np.ndarray, target: np.ndarray) -> None:
    """Copy an array as integers: NumPy copies dtypes it does not know element by element."""
    kind = f"u{source.dtype.itemsize}" if source.dtype.itemsize in (1, 2, 4, 8) else source.dtype
    np.copyto(target.view(kind), source.view(kind))


def pieces_of(array: np.ndarray, most_bytes: int) -> list[np.ndarray]:
    """Return an array in parts along its first dims, each of at most so many bytes if possible; row-major."""
    if array.nbytes <= most_bytes or array.ndim == 0:
        return [array] if array.size else []
    rows = max(1, most_bytes * len(array) // array.nbytes)
    parts = [array[at : at + rows] for at in range(0, len(array), rows)]
    if rows == 1 and array.ndim > 1:
        return [piece for part in parts for piece in pieces_of(part[0], most_bytes)]
    return parts
