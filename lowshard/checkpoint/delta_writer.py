"""Writing what one version of a checkpoint changes of another, tensor by tensor.

The changes of one tensor are held, with their positions in 8 bytes each.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import brief, whole
from lowshard.argument import path as check_path
from lowshard.box import full_box, row_major_parts, shape_of
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files, StoredTensor
from lowshard.checkpoint.commit import Commit, sync_folder
from lowshard.checkpoint.delta_file import INDICES, MOST_VERSION, VALUES, VERSION_NAME, bits_of
from lowshard.checkpoint.header import FilePath, encode_header
from lowshard.checkpoint.writer import reserve, write_at
from lowshard.comm import loopback
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS

_PART_BYTES = 4 << 20


@dataclass(frozen=True)
class DeltaReport:
    """What a delta holds."""

    version: int
    base_version: int
    base_digest: str
    digest: str
    tensors: int
    changed_tensors: int
    changed_elems: int
    dense_bytes: int
    """Of all tensors."""
    written_bytes: int
    """Of the delta's file."""


def write_delta(
    base: Files | Catalog, following: Files | Catalog, path: FilePath, *, version: int | None = None,
    base_version: int | None = None,
) -> DeltaReport:  # fmt: skip
    """Write what the version that follows changes of a base: both checkpoints of any form and cut.

    A delta is one safetensors file of the indices and values of the changed elements, and digests. It is put in place
    whole, or not at all; a delta that is there already is never replaced. Both checkpoints are read once, and compared
    with their checksums.

    Args:
        base: the version that the delta is to stand on.
        following: the version that it makes.
        path: of the delta; its name ends in .safetensors.
        version: its number; None takes it from a name `weight_v000123.safetensors`, else it is 1.
        base_version: that of the base; None is the one before.

    Raises:
        CheckpointError: the checkpoints hold other tensors, or one is damaged; the path is taken or cannot be written.
        NotDurable: the delta is in place, but its folder could not be synced.
    """
    target = check_path(path, "path is that of the delta to write", CheckpointError)
    number = version_of(target, version)
    before = max(0, number - 1)
    if base_version is not None:
        rule = "base_version is a number of 0 or more, below the version"
        before = whole(base_version, rule, CheckpointError, 0, before)
    old = base if isinstance(base, Catalog) else Catalog.open(base)
    new = following if isinstance(following, Catalog) else Catalog.open(following)
    _check_same_tensors(old, new)
    if os.path.lexists(target):
        raise _taken(target)
    if not os.path.isdir(target.parent):
        raise CheckpointError(f"{target}: there is no folder {target.parent}; make it first")
    with (
        loopback(1)[0] as comm,
        Commit(target, comm, "write_delta") as commit,
        ByteSource(old) as a,
        ByteSource(new) as b,
    ):
        report = commit.step(lambda: _Writer(a, b, commit, number, before).write())
        try:
            commit.commit("", lambda _: _complete(commit))
        finally:
            # Where a delta is in place, the claim is a second name of it, or of what comes too late.
            if os.path.exists(commit.target):
                with suppress(OSError):
                    commit.claim.unlink(missing_ok=True)
    return report


def _complete(commit: Commit) -> None:
    """Give the claim its name as a second one: who has taken it meanwhile keeps it."""
    # The rename of the commit, from one name of the file to another, then changes nothing.
    sync_folder(commit.target.parent)
    try:
        os.link(commit.claim, commit.target)
    except FileExistsError as error:
        # A network may have lost the first answer alone, and then it is this delta that is there.
        if not os.path.samefile(commit.claim, commit.target):
            raise _taken(commit.target) from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # The file system has no links: the rename that follows puts the delta in place.
        if os.path.lexists(commit.target):
            raise _taken(commit.target) from error


def _taken(place: Path) -> CheckpointError:
    return CheckpointError(f"{place}: is there already; a delta is never replaced: give another name")


def version_of(target: Path, version: int | None) -> int:
    """Return the version of a delta that is to be written: as it was asked for, or as its name says."""
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: a delta is a file whose name ends in .safetensors: add that")
    named = VERSION_NAME.fullmatch(target.name)
    if version is None:
        return int(named[1]) if named else 1
    number = whole(version, "version is a number of 0 or more", CheckpointError, 0, MOST_VERSION)
    if named and int(named[1]) != number:
        raise CheckpointError(
            f"{target}: its name says version {int(named[1])}, and version {number} was asked for"
        )
    return number


def _check_same_tensors(old: Catalog, new: Catalog) -> None:
    for a, b in ((old, new), (new, old)):
        strange = a.tensors.keys() - b.tensors.keys()
        if strange:
            raise CheckpointError(
                f"a delta is between two versions of one model: tensor {brief(min(strange))} of {a.where} is not in "
                f"{b.where}"
            )
    for name, tensor in old.tensors.items():
        other = new.tensors[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise CheckpointError(
                f"a delta is between two versions of one model: tensor {name!r} is {tensor.dtype}{list(tensor.shape)} "
                f"in {old.where}, {other.dtype}{list(other.shape)} in {new.where}"
            )


class _Writer:
    """Reads both versions once, and keeps what differs in a file without a name until all sizes are known."""

    def __init__(self, old: ByteSource, new: ByteSource, commit: Commit, version: int, before: int) -> None:
        self._old, self._new = old, new
        self._commit, self._version, self._before = commit, version, before
        self._entries: dict[str, tuple[str, int, int]] = {}
        """By key: dtype, elements, where it lies in the spool."""
        self._tensors: dict[str, dict[str, Any]] = {}
        self._changed_elems = 0

    def write(self) -> DeltaReport:
        was: dict[str, str] = {}
        now: dict[str, str] = {}
        with tempfile.TemporaryFile(dir=self._commit.target.parent) as spool:
            for name, tensor in self._old.catalog.tensors.items():
                was[name], now[name] = self._one(name, tensor, spool)
            facts = {
                "base": model_digest(was),
                "digest": model_digest(now),
                "base_version": self._before,
                "tensors": self._tensors,
            }
            size_bytes = self._copy(spool, facts)
        return DeltaReport(
            self._version, self._before, str(facts["base"]), str(facts["digest"]), len(was), len(self._tensors),
            self._changed_elems, self._old.catalog.size_bytes, size_bytes,
        )  # fmt: skip

    def _one(self, name: str, tensor: StoredTensor, spool: IO[bytes]) -> tuple[str, str]:
        """Write what changes of a tensor; return the digests of both versions."""
        sums = np.zeros((2, SUMS), np.uint32)
        positions: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[Any]] = []
        done, itemsize = 0, dtypes.get(tensor.dtype).itemsize_bytes
        for before, after in self._parts(name, tensor, sums):
            new = bits_of(after, itemsize)
            found = np.flatnonzero(bits_of(before, itemsize) != new)
            positions.append(found + done)
            values.append(new[found])
            done += len(new)
        digests = (
            tensor_digest(tensor.dtype, tensor.shape, sums[0]),
            tensor_digest(tensor.dtype, tensor.shape, sums[1]),
        )
        changed = sum(map(len, positions))
        if changed:
            self._changed_elems += changed
            self._tensors[name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "base": digests[0], "digest": digests[1],
            }  # fmt: skip
            wide = "int32" if done <= 1 << 31 else "int64"
            for key, data, dtype in (
                (name + INDICES, np.concatenate(positions).astype(wide), wide),
                (name + VALUES, np.concatenate(values), tensor.dtype),
            ):
                if key in self._entries:
                    raise CheckpointError(f"tensor {key!r}: two tensors of the delta have that name")
                self._entries[key] = dtype, changed, spool.tell()
                spool.write(data.tobytes())
        return digests

    def _parts(
        self, name: str, tensor: StoredTensor, sums: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield both versions of a tensor part by part, row-major; add up their sums, and compare damage."""
        row, other = dtypes.get(tensor.dtype), self._new.catalog.tensors[name]
        for source, held in ((self._old, tensor), (self._new, other)):
            for part in held.parts if held.digest is None else ():
                source.verify(name, part)
        if prod(tensor.shape):
            for box in row_major_parts(full_box(tensor.shape), max(1, _PART_BYTES // row.itemsize_bytes)):
                made = np.empty(shape_of(box), row.numpy), np.empty(shape_of(box), row.numpy)
                for source, array, total in zip((self._old, self._new), made, sums, strict=True):
                    source.read(name, box, array)
                    total += content_sum(array, box, tensor.shape)
                yield made
        for source, held, total in ((self._old, tensor, sums[0]), (self._new, other, sums[1])):
            found = tensor_digest(tensor.dtype, tensor.shape, total)
            if held.digest not in (None, found):
                raise CheckpointError(
                    f"{source.catalog.where}: tensor {name!r}: its data is damaged: its digest is {found}, the index "
                    f"says {held.digest}"
                )

    def _copy(self, spool: IO[bytes], facts: Mapping[str, Any]) -> int:
        """Write what is in the spool behind a header; return the file's bytes."""
        metadata = {
            "sparse": "true", "model_version": str(self._version), "changed_params": str(len(self._tensors)),
            "lowshard": json.dumps(facts, separators=(",", ":")),
        }  # fmt: skip
        fd = self._commit.fd
        head, entries = encode_header(
            {key: (dtype, (elems,)) for key, (dtype, elems, _) in self._entries.items()}, metadata
        )
        size_bytes = entries[-1].stop if entries else len(head)
        reserve(fd, size_bytes, self._commit.target)
        write_at(fd, memoryview(head), 0)
        for entry in entries:
            spool.seek(self._entries[entry.name][2])
            at = entry.start
            while at < entry.stop:
                piece = spool.read(min(_PART_BYTES, entry.stop - at))
                write_at(fd, memoryview(piece), at)
                at += len(piece)
        os.fsync(fd)
        return size_bytes
