"""Writing what one version of a checkpoint changes of another, tensor by tensor.

Memory is bounded where bits are flipped ("xor"); of the other forms the changes of one tensor are held, with their
positions in 8 bytes each.
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
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import brief, one_of, whole
from lowshard.argument import path as check_path
from lowshard.box import full_box, row_major_parts, shape_of
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files, StoredTensor
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.commit import Commit, sync_folder
from lowshard.checkpoint.delta_codec import COMPRESSIONS, Checksum, compressor
from lowshard.checkpoint.delta_file import ENCODINGS, FOLDER_NAME, INDICES, VALUES
from lowshard.checkpoint.header import FilePath, encode_header
from lowshard.checkpoint.hf_index import DELTA_NAME, HF_INDEX
from lowshard.checkpoint.tensor_patch import bits_of
from lowshard.checkpoint.writer import reserve, write_at
from lowshard.comm import loopback
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS

_PART_BYTES = 4 << 20
_MOST_VERSION = 10**18 - 1
_CHECKSUM = "adler32"
"""Python and other readers of such folders have it; contents are compared by digest as well."""


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
    """Of all of the delta's files."""


def write_delta(
    base: Files | Catalog,
    following: Files | Catalog,
    path: FilePath,
    *,
    version: int | None = None,
    base_version: int | None = None,
    encoding: Literal["xor", "overwrite"] = "xor",
    compression: str = "zlib",
) -> DeltaReport:
    """Write what the version that follows changes of a base: both checkpoints of any form and cut.

    A path that ends in .safetensors makes a sparse file as TRL reads it (indices and values of the changed elements),
    any other a folder shaped like a Hugging Face checkpoint. It is put in place whole, or not at all; a delta that is
    there already is never replaced. Both checkpoints are read once, and compared with their checksums.

    Args:
        base: the version that the delta is to stand on.
        following: the version that it makes.
        path: of the delta.
        version: its number; None takes it from a name `weight_v000123` or `weight_v000123.safetensors`, else it is 1.
        base_version: that of the base; None is the one before.
        encoding: of a folder: "xor", the bits that flip, or "overwrite", positions and new bytes.
        compression: of a folder: "zlib", "none", or "zstd" where the zstandard package is installed.

    Raises:
        CheckpointError: the checkpoints hold other tensors, or one is damaged; the path is taken or cannot be written.
        DependencyError: the package of the compression is missing.
        NotDurable: the delta is in place, but its folder could not be synced.
    """
    target = check_path(path, "path is that of the delta to write", CheckpointError)
    is_sparse = target.name.endswith(".safetensors")
    one_of(encoding, ENCODINGS, "encoding", CheckpointError)
    one_of(compression, COMPRESSIONS, "compression", CheckpointError)
    compressor(compression)  # its package is there
    number = version_of(target, version)
    before = max(0, number - 1)
    if base_version is not None:
        rule = "base_version is a number of 0 or more, below the version"
        before = whole(base_version, rule, CheckpointError, 0, before)
    old = base if isinstance(base, Catalog) else Catalog.open(base)
    new = following if isinstance(following, Catalog) else Catalog.open(following)
    _check_same_tensors(old, new)
    _check_free(target, is_sparse)
    kind = "sparse" if is_sparse else encoding
    with (
        loopback(1)[0] as comm,
        Commit(target if is_sparse else target / HF_INDEX, comm, "write_delta") as commit,
        ByteSource(old) as a,
        ByteSource(new) as b,
    ):
        made = commit.step(lambda: _Writer(a, b, kind, compression, commit, number, before).write())
        try:
            commit.commit("", lambda _: _complete(made, commit))
        finally:
            # Where a delta is in place, the claim is a second name of it, or of what comes too late.
            if os.path.exists(commit.target):
                with suppress(OSError):
                    commit.claim.unlink(missing_ok=True)
    return made.report


def _complete(made: _Writer, commit: Commit) -> None:
    """Write the index, and give the claim its name as a second one: who has taken it meanwhile keeps it.

    The rename of the commit, from one name of the file to another, then changes nothing.
    """
    made.complete(commit.fd)
    os.fsync(commit.fd)
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
    """Return the version of a delta that is to be written: as it was asked for, or as its name says.

    Raises:
        CheckpointError: it is no version, or its name says another one.
    """
    named = FOLDER_NAME.fullmatch(target.name.removesuffix(".safetensors"))
    if version is None:
        return int(named[1]) if named else 1
    number = whole(version, "version is a number of 0 or more", CheckpointError, 0, _MOST_VERSION)
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


def _check_free(target: Path, is_sparse: bool) -> None:
    if is_sparse:
        if os.path.lexists(target):
            raise _taken(target)
        if not os.path.isdir(target.parent):
            raise CheckpointError(f"{target}: there is no folder {target.parent}; make it first")
        return
    try:
        names = os.listdir(target) if os.path.lexists(target) else []
    except OSError as error:
        raise CheckpointError(
            f"{target}: a delta is written to a folder that is empty, or is not there yet, and what is there cannot be "
            f"read: {error.strerror}; give another name"
        ) from error
    for name in sorted(names):
        if name in (HF_INDEX, INDEX_NAME):
            raise _taken(target / name)
        if name.endswith(".safetensors") and not DELTA_NAME.fullmatch(name):  # those a killed writer has left
            raise CheckpointError(
                f"{target / name}: is there already, and the index of a delta beside it would make a delta of it: give "
                "another folder"
            )


class _Writer:
    """Reads both versions once, and keeps what differs in a file without a name until all sizes are known."""

    def __init__(
        self,
        old: ByteSource,
        new: ByteSource,
        kind: str,
        compression: str,
        commit: Commit,
        version: int,
        before: int,
    ) -> None:
        self._old, self._new, self._kind, self._compression = old, new, kind, compression
        self._commit, self._version, self._before = commit, version, before
        self._entries: dict[str, tuple[str, int, int, int]] = {}
        """By key: dtype, elements, where it lies in the spool, bytes."""
        self._checksums: dict[str, str] = {}
        self._tensors: dict[str, dict[str, Any]] = {}
        self._changed_elems = 0
        self._index: bytes = b""
        self._file = ""
        self.report: DeltaReport

    def write(self) -> _Writer:
        """Write all but the index."""
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
        if self._kind != "sparse":
            self._index = self._index_of(facts)
            size_bytes += len(self._index)
        self.report = DeltaReport(
            self._version, self._before, str(facts["base"]), str(facts["digest"]), len(was), len(self._tensors),
            self._changed_elems, self._old.catalog.size_bytes, size_bytes,
        )  # fmt: skip
        return self

    def complete(self, fd: int) -> None:
        """Write the index, which is what is renamed."""
        if self._index:
            write_at(fd, memoryview(self._index), 0)

    def _one(self, name: str, tensor: StoredTensor, spool: IO[bytes]) -> tuple[str, str]:
        """Write what changes of a tensor; return the digests of both versions."""
        sums = np.zeros((2, SUMS), np.uint32)
        begin, changed = spool.tell(), 0
        checksum, flipped = Checksum(_CHECKSUM), compressor(self._compression)
        positions: list[npt.NDArray[np.int64]] = []
        values: list[npt.NDArray[Any]] = []
        done, itemsize = 0, dtypes.get(tensor.dtype).itemsize_bytes
        for before, after in self._parts(name, tensor, sums):
            checksum.update(after.tobytes())
            apart = bits_of(before, itemsize) ^ bits_of(after, itemsize)
            changed += int(np.count_nonzero(apart))
            if self._kind == "xor":
                spool.write(flipped.compress(apart.tobytes()))
            else:
                unit = itemsize if self._kind == "sparse" else 1
                found = np.flatnonzero(apart.view(f"u{unit}"))
                positions.append(found + done * itemsize // unit)
                values.append(bits_of(after, unit)[found])
            done += len(apart)
        digests = (
            tensor_digest(tensor.dtype, tensor.shape, sums[0]),
            tensor_digest(tensor.dtype, tensor.shape, sums[1]),
        )
        if not changed:
            spool.seek(begin)
            spool.truncate()
            return digests
        self._changed_elems += changed
        self._checksums[name] = checksum.hexdigest()
        self._tensors[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "base": digests[0], "digest": digests[1],
        }  # fmt: skip
        if self._kind == "xor":
            spool.write(flipped.flush())
            self._add(name, "uint8", spool.tell() - begin, begin, spool.tell() - begin)
        else:
            self._add_positions(name, tensor, np.concatenate(positions), np.concatenate(values), spool)
        return digests

    def _add_positions(
        self, name: str, tensor: StoredTensor, positions: npt.NDArray[np.int64], values: npt.NDArray[Any],
        spool: IO[bytes],
    ) -> None:  # fmt: skip
        is_sparse = self._kind == "sparse"
        most = 1 << (31 if is_sparse else 32)
        if positions[-1] >= most:
            raise CheckpointError(
                f"tensor {name!r}: {tensor.dtype}{list(tensor.shape)} has more positions than the {most} that the "
                f"{self._kind} form can say: write a folder with the encoding xor"
            )
        if is_sparse:
            for key, data, dtype in (
                (INDICES, positions.astype("<i4"), "int32"),
                (VALUES, values, tensor.dtype),
            ):
                at = spool.tell()
                spool.write(data.tobytes())
                self._add(name + key, dtype, len(data), at, data.nbytes)
            return
        made, at = compressor(self._compression), spool.tell()
        for data in (np.array([len(positions)], "<u4"), positions.astype("<u4"), values):
            spool.write(made.compress(data.tobytes()))
        spool.write(made.flush())
        self._add(name, "uint8", spool.tell() - at, at, spool.tell() - at)

    def _add(self, key: str, dtype: str, elems: int, at: int, size_bytes: int) -> None:
        if key in self._entries:
            raise CheckpointError(
                f"tensor {key!r}: two tensors of the sparse form have that name: write a folder"
            )
        self._entries[key] = dtype, elems, at, size_bytes

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
        """Write the data file: what is in the spool, behind a header; return its bytes."""
        if self._kind == "sparse":
            metadata = {
                "sparse": "true", "model_version": str(self._version), "changed_params": str(len(self._tensors)),
                "lowshard": json.dumps(facts, separators=(",", ":")),
            }  # fmt: skip
            fd = os.dup(self._commit.fd)
        elif not self._entries:
            return 0
        else:
            metadata = self._checksums
            path = self._commit.data_file(0, 1)
            self._file = path.name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            head, entries = encode_header(
                {key: (dtype, (elems,)) for key, (dtype, elems, _, _) in self._entries.items()}, metadata
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
        finally:
            os.close(fd)
        return size_bytes

    def _index_of(self, facts: Mapping[str, Any]) -> bytes:
        body = {
            "metadata": {
                "total_size": sum(size for *_, size in self._entries.values()),
                "version": f"{self._version:06d}", "base_version": f"{self._before:06d}",
                "delta_encoding": self._kind, "compression_format": self._compression, "checksum_format": _CHECKSUM,
            },
            "weight_map": dict.fromkeys(sorted(self._entries), self._file),
            "lowshard": facts,
        }  # fmt: skip
        return json.dumps(body, indent=1, ensure_ascii=False).encode() + b"\n"
