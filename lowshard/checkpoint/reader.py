"""Reading a safetensors file by byte range: each rank asks the system for its own bytes only.

A plan says which bytes those are; it is worked out from the header and the layout alone, for any
rank. The reader walks the plan with one positioned read a run, straight into the output buffer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import as_shape, brief, instance, items, kind_of, wholes
from lowshard.box import Box, contiguous_runs, full_box, shape_of
from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.header import FilePath, Header, TensorEntry, header_from_fd, open_for_reading
from lowshard.checkpoint.torch_files import OFFSETS
from lowshard.errors import BufferMismatchError, CheckpointError, LayoutError
from lowshard.foreign_array import view_in_call
from lowshard.layout import Layout


@dataclass(frozen=True)
class ReadPlan:
    """The byte ranges of a file that hold one box of one tensor, in the order of the box's elements.

    All runs have one length, and no two of them touch: what lies together in the file is one run.
    """

    name: str
    """The tensor."""
    run_bytes: int
    """Bytes of each run."""
    starts: tuple[int, ...]
    """File offset of each run, ascending."""

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """Each run as (file offset, bytes)."""
        return ((start, self.run_bytes) for start in self.starts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs: exactly the box's."""
        return self.run_bytes * len(self.starts)


def plan_read(entry: TensorEntry, layout: Layout, rank: int, *, reshape: bool = False) -> ReadPlan:
    """Return which bytes of the file a rank reads to hold its box of a layout.

    Args:
        entry: the tensor, from a `Header`.
        layout: of the tensor's dtype and shape, without partial axes.
        rank: any rank of the layout's mesh.
        reshape: True allows a layout of another shape with as many elements: the tensor is taken as
            if it were stored in that shape (a weight [384, 384] as [12, 32, 384], to shard it by heads).

    Raises:
        LayoutError: the layout is for another shape or dtype, or it is partial.
        MeshError: the rank is not in the mesh.
    """
    instance(entry, TensorEntry, "entry is a TensorEntry, from a Header", CheckpointError)
    _check_layout(entry, layout, reshape, f"tensor {entry.name!r}")
    return plan_box(entry, layout.box(rank), shape=layout.shape)


def plan_box(entry: TensorEntry, box: Box, *, shape: Sequence[int] | None = None) -> ReadPlan:
    """Return which bytes of the file hold a box of a tensor.

    Args:
        entry: the tensor, from a `Header`.
        box: `((start, stop), ...)`, one interval a dim.
        shape: the shape in which the box is meant, with as many elements as the tensor; None: its own.

    Raises:
        LayoutError: the box is not inside the shape, or the shape has another number of elements.
    """
    instance(entry, TensorEntry, "entry is a TensorEntry, from a Header", CheckpointError)
    extents = entry.shape
    if shape is not None:
        extents = as_shape(shape, "shape is the extents of a tensor, each 0 or more", LayoutError)
    if prod(extents) != entry.size_elems:
        raise LayoutError(_other_count(f"tensor {entry.name!r}", entry, extents))
    rule = f"tensor {entry.name!r}: a box has one interval 0 <= start <= stop <= extent for each dim of {extents}"
    given = tuple(wholes(interval, rule, LayoutError, 0) for interval in items(box, rule, LayoutError))
    box = tuple((i[0], i[1]) for i in given if len(i) == 2)
    if (
        len(given) != len(extents)
        or len(box) != len(extents)
        or not all(a <= b <= n for (a, b), n in zip(box, extents, strict=True))
    ):
        raise LayoutError(f"{rule}, got {brief(given)}")
    run_elems, firsts = contiguous_runs(box, extents)
    itemsize = dtypes.get(entry.dtype).itemsize_bytes
    return ReadPlan(
        entry.name, run_elems * itemsize, tuple(entry.start + first * itemsize for first in firsts)
    )


class CheckpointReader:
    """One open safetensors file. Use it in a `with` block; each rank opens its own.

    The file is opened once, so a file put in its place meanwhile is not seen.

    Args:
        path: the file.

    Raises:
        CheckpointError: as `read_header`; or it is a file of torch's with parts of tensors: `Catalog.open` takes them.
    """

    header: Header
    bytes_read: int
    """Bytes of tensor data that the system was asked for and gave; the header is not counted."""

    def __init__(self, path: FilePath) -> None:
        # A file object, so that a reader that is never closed is reported and closed by Python.
        self._file = os.fdopen(open_for_reading(path), "rb", buffering=0)
        self._lock = threading.Lock()
        self.bytes_read = 0
        try:
            self.header = header_from_fd(self._file.fileno(), path)
            if OFFSETS in self.header.metadata:  # of torch: it may hold parts of tensors
                Catalog.open([path])
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of the data."""
        return tuple(self.header.tensors)

    def plan(self, name: str, layout: Layout, rank: int, *, reshape: bool = False) -> ReadPlan:
        """Return what `read` would read; see `plan_read`.

        Raises:
            CheckpointError: the file has no such tensor.
            LayoutError: as `plan_read`.
        """
        entry = self.header.entry(name)
        _check_layout(entry, layout, reshape, f"{self.header.path}: tensor {name!r}")
        return plan_box(entry, layout.box(rank), shape=layout.shape)

    def read(
        self, name: str, layout: Layout, rank: int, out: Any = None, *, reshape: bool = False
    ) -> np.ndarray | Any:
        """Return a rank's local array of a layout, `layout.local_shape(rank)`; only its bytes are read.

        Args:
            name: the tensor.
            layout: of the tensor's dtype and shape, without partial axes.
            rank: any rank of the layout's mesh.
            out: the array to fill, C-contiguous; None makes a new one.
            reshape: as for `plan_read`.

        Raises:
            CheckpointError: no such tensor, the reader is closed, or the file ended or failed under us.
            LayoutError: the layout is for another shape or dtype, or it is partial.
            BufferMismatchError: out has another shape or dtype, or cannot be filled.
            MeshError: the rank is not in the mesh.
        """
        plan = self.plan(name, layout, rank, reshape=reshape)
        return self._fill(plan, layout.local_shape(rank), out)

    def read_box(
        self, name: str, box: Box | None = None, out: Any = None, *, shape: Sequence[int] | None = None
    ) -> np.ndarray | Any:
        """Return one box of a tensor; only its bytes are read.

        Args:
            name: the tensor.
            box: `((start, stop), ...)`, one interval a dim; None is the whole tensor.
            out: the array to fill, C-contiguous; None makes a new one.
            shape: as for `plan_box`.

        Raises:
            CheckpointError: no such tensor, the reader is closed, or the file ended or failed under us.
            LayoutError: as `plan_box`.
            BufferMismatchError: out has another shape or dtype, or cannot be filled.
        """
        entry = self.header.entry(name)
        if box is None:
            rule = "shape is the extents of a tensor, each 0 or more"
            box = full_box(entry.shape if shape is None else as_shape(shape, rule, LayoutError))
        plan = plan_box(entry, box, shape=shape)
        return self._fill(plan, shape_of(box), out)

    def close(self) -> None:
        """Close the file. Closing twice is safe."""
        self._file.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._file.closed else ""
        return f"<CheckpointReader {self.header.path}: {len(self.header.tensors)} tensors{state}>"

    def _fill(self, plan: ReadPlan, shape: tuple[int, ...], out: Any) -> Any:
        dtype = dtypes.get(self.header.entry(plan.name).dtype).numpy
        if self._file.closed:
            raise CheckpointError(f"{self.header.path}: this reader is closed; open a new CheckpointReader")
        if out is None:
            out = into = np.empty(shape, dtype)
        else:
            into = view_in_call(out, f"tensor {plan.name!r}: out")
            _check_out(into, shape, dtype, plan.name)
        if plan.total_bytes:
            # ml_dtypes arrays give no buffer of their own, their bytes do
            self._read_runs(plan, into.reshape(-1).view(np.uint8).data)
        return out

    def _read_runs(self, plan: ReadPlan, into: memoryview) -> None:
        fd, size, done = self._file.fileno(), plan.run_bytes, 0
        preadv = os.preadv
        try:
            for start in plan.starts:
                left = size
                while left:
                    got = preadv(fd, [into[done : done + left]], start + size - left)
                    if not got:
                        raise CheckpointError(
                            f"{self.header.path}: tensor {plan.name!r}: the file ends at byte "
                            f"{start + size - left}, its data goes on for {left} bytes: it was cut short "
                            "after it was opened"
                        )
                    done += got
                    left -= got
        except OSError as error:
            raise CheckpointError(
                f"{self.header.path}: tensor {plan.name!r}: reading {size} bytes at {start} failed: "
                f"{error.strerror}"
            ) from error
        finally:
            with self._lock:  # threads may share a reader
                self.bytes_read += done


def _check_layout(entry: TensorEntry, layout: Layout, reshape: bool, where: str) -> None:
    instance(layout, Layout, "layout is a Layout of the tensor", LayoutError)
    if layout.dtype != entry.dtype:
        raise LayoutError(
            f"{where} is {entry.dtype}, the layout is for {layout.dtype}: make it for {entry.dtype}"
        )
    if any(layout.partials):
        raise LayoutError(
            f"{where}: the layout {layout} is partial, and a file holds values, not terms: shard or replicate"
        )
    if layout.size_elems != entry.size_elems:
        raise LayoutError(_other_count(where, entry, layout.shape))
    if layout.shape != entry.shape and not reshape:
        raise LayoutError(
            f"{where} has shape {entry.shape}, the layout is for {layout.shape}; if the tensor is meant to be "
            "taken in that shape (as many elements, same order), pass reshape=True"
        )


def _other_count(where: str, entry: TensorEntry, shape: tuple[int, ...]) -> str:
    return (
        f"{where} has shape {entry.shape} ({entry.size_elems} elements), the layout is for {shape} "
        f"({prod(shape)} elements): a layout belongs to one shape, or to a reshape of it"
    )


def _check_out(out: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    if not isinstance(out, np.ndarray):
        raise BufferMismatchError(f"tensor {name!r}: out is a NumPy array, got {kind_of(out)}")
    is_writable = out.flags.c_contiguous and out.flags.writeable
    if out.shape != shape or out.dtype != dtype or not is_writable:
        raise BufferMismatchError(
            f"tensor {name!r}: out has the shape and dtype of the box, {dtype}{list(shape)}, is C-contiguous and "
            f"writeable; got {out.dtype}{list(out.shape)}, strides {out.strides}, writeable={out.flags.writeable}"
        )
