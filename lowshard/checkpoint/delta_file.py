"""Deltas as files: what one version of a model changes of the one before, written, read, and put into a chain.

A delta is one safetensors file. For each changed tensor it has `<name>.indices`, flat positions of elements (int32;
int64 of a tensor that has more than 2^31 elements), and `<name>.values`. Its metadata has `sparse`, `model_version`,
`changed_params`, and under `lowshard` the digests (`model_digest`) of the version it stands on and of the one it makes,
and the digests of each changed tensor before and after.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import brief, items, whole
from lowshard.argument import path as check_path
from lowshard.box import Box, shape_of, single_run, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, Files, plain_catalog
from lowshard.checkpoint.checkpoint_index import is_sparse_delta
from lowshard.checkpoint.commit import Commit
from lowshard.checkpoint.header import FilePath, TensorEntry, encode_header, read_header
from lowshard.checkpoint.writer import reserve, write_at
from lowshard.comm import loopback
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError, DTypeError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS
from lowshard.nearest import nearest
from lowshard.reading import parse_json, reader

_INDICES, _VALUES = ".indices", ".values"
_VERSION_NAME = re.compile(r"weight_v(\d{1,18})\.safetensors")
_MOST_VERSION = 10**18 - 1
_COPY_BYTES = 4 << 20


def _bits(array: np.ndarray) -> npt.NDArray[Any]:
    """Return an array's elements, flat, as unsigned integers; a view where it is contiguous."""
    return array.reshape(-1).view(np.uint8).view(f"u{array.itemsize}")


@dataclass(frozen=True)
class Patch:
    """The changed elements of a tensor: their flat positions, ascending, and their new bits."""

    shape: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    bits: npt.NDArray[Any]

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self.bits.nbytes + self.positions.nbytes

    def apply(self, values: np.ndarray, box: Box) -> None:
        """Change a contiguous array in place that holds a box of the tensor."""
        if not volume(box):
            return
        first, last = (
            int(np.ravel_multi_index(corner, self.shape)) if box else 0
            for corner in ([a for a, _ in box], [b - 1 for _, b in box])
        )
        low, high = np.searchsorted(self.positions, [first, last + 1]).tolist()
        positions, bits = self.positions[low:high], self.bits[low:high]
        if single_run(box, self.shape) is not None:
            _bits(values)[positions - first] = bits
            return
        places = np.array(np.unravel_index(positions, self.shape))
        starts, stops = np.array(box).T[..., None]
        inside = ((places >= starts) & (places < stops)).all(axis=0)
        local = (places - starts)[:, inside]
        _bits(values)[np.ravel_multi_index(tuple(local), shape_of(box))] = bits[inside]


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor that a delta changes."""

    name: str
    indices: TensorEntry
    values: TensorEntry
    dtype: str
    shape: tuple[int, ...]
    base: str
    """Digest of the content that it stands on."""
    digest: str
    """Of the new content."""

    @property
    def patch_bytes(self) -> int:
        """Memory of its `Patch`."""
        return self.values.size_bytes + 8 * self.indices.size_elems


@dataclass(frozen=True)
class Delta:
    """What one version of a model changes of another, read from the file's header."""

    where: str
    """Its path."""
    version: int
    base_version: int
    base_digest: str
    """Of the model it stands on, as `model_digest` has it."""
    digest: str
    """Of the model it makes."""
    tensors: Mapping[str, ChangedTensor]
    catalog: Catalog | None = field(default=None, compare=False, repr=False)
    """Where its indices and values lie in the file."""

    @classmethod
    def open(cls, path: FilePath) -> Delta:
        """Return a delta, given by its file. No tensor is read.

        Raises:
            CheckpointError: there is no delta, or it is damaged; the text names file and tensor.
        """
        header = read_header(check_path(path, "a delta is the path of a file", CheckpointError))
        where, said = header.path, header.metadata
        if not is_sparse_delta(said) or "lowshard" not in said:
            raise CheckpointError(
                f"{where}: is no delta of lowshard: the metadata of one has sparse, model_version and lowshard, this "
                f"has {brief(dict(said))}"
            )
        facts = read_facts(parse_json(said["lowshard"], f"{where}: lowshard", CheckpointError), where)
        version = said["model_version"]
        if not (version.isascii() and version.isdecimal() and len(version) < 19):
            raise CheckpointError(f"{where}: model_version is a number of 0 or more, got {brief(version)}")
        tensors = _changed_tensors(where, header.tensors, facts)
        catalog = plain_catalog([header], where)
        return cls(where, int(version), facts.base_version, facts.base, facts.digest, tensors, catalog)

    def patch(self, name: str) -> Patch:
        """Return what changes of a tensor, read from the file and checked.

        Raises:
            CheckpointError: the delta changes no tensor of that name; the file is truncated or was replaced; positions
                lie outside of the tensor, or twice.
        """
        changed = self.tensors.get(name) if isinstance(name, str) else None
        if changed is None or self.catalog is None:
            raise CheckpointError(
                f"{self.where}: tensor {brief(name)}: the delta changes none of that name{nearest(name, self.tensors)}"
            )
        count = changed.indices.size_elems
        given = np.empty(count, changed.indices.dtype)
        values = np.empty(count, dtypes.get(changed.dtype).numpy)
        with ByteSource(self.catalog) as source:
            source.read(changed.indices.name, ((0, count),), given)
            source.read(changed.values.name, ((0, count),), values)
        positions, bits = given.astype(np.int64), _bits(values)
        if (np.diff(positions) < 0).any():
            order = np.argsort(positions, kind="stable")
            positions, bits = positions[order], bits[order]
        where, size = f"{self.where}: tensor {name!r}", prod(changed.shape)
        if count and not (positions[0] >= 0 and positions[-1] < size):
            wrong = positions[0] if positions[0] < 0 else positions[-1]
            raise CheckpointError(f"{where}: positions lie from 0 to {size - 1}, got {wrong}")
        twice = np.flatnonzero(np.diff(positions) == 0)
        if len(twice):
            raise CheckpointError(f"{where}: a position stands once, {positions[twice[0]]} stands twice")
        return Patch(changed.shape, positions, bits)


def open_deltas(paths: Iterable[FilePath]) -> tuple[Delta, ...]:
    """Return deltas in the order of their versions; a folder gives all that are in it.

    Raises:
        CheckpointError: one is missing or damaged, or a folder has none.
    """
    found: list[Delta] = []
    for path in items(paths, "deltas are a sequence of paths", CheckpointError):
        given = check_path(path, "a delta is the path of a file, or of a folder of them", CheckpointError)
        if not os.path.isdir(given):
            found.append(Delta.open(given))
            continue
        try:
            files = sorted(given / name for name in os.listdir(given) if name.endswith(".safetensors"))
        except OSError as error:
            raise CheckpointError(
                f"{given}: this folder of deltas cannot be read: {error.strerror}; give its user the right to, or "
                "another folder"
            ) from error
        inner = [Delta.open(p) for p in files if is_sparse_delta(read_header(p).metadata)]
        if not inner:
            raise CheckpointError(
                f"{given}: deltas are safetensors files that say what changes; there is none"
            )
        found += inner
    return tuple(sorted(found, key=lambda d: d.version))


def chain_of(deltas: Sequence[Delta], base: str, base_where: str) -> tuple[Delta, ...]:
    """Return the deltas that lead from a base (a digest) to the newest version, each on what the last one makes."""
    left, chain, at = sorted(deltas, key=lambda d: d.version), list[Delta](), base
    while step := next(
        (d for d in left if d.base_digest == at and (not chain or d.version >= chain[-1].version)), None
    ):
        chain.append(step)
        left.remove(step)
        at = step.digest
    if not chain:
        reached = max((d.version for d in left if d.digest == base), default=-1)
        newer = next((d for d in left if d.version > reached), None)
        if newer is None:
            return ()  # it is the newest version already
        raise CheckpointError(
            f"{base_where}: holds {base}, and no delta stands on that: {newer.where} stands on {newer.base_digest} "
            f"(version {newer.base_version}). Take the checkpoint that it was made from, or add the deltas that lead "
            "there"
        )
    older = chain[0].version
    lost = next((d for d in left if d.version > older or (d.version == older and d.digest != base)), None)
    if lost is not None:
        raise CheckpointError(
            f"a link of the chain is missing, or two stand on the same version: {lost.where} (version {lost.version}) "
            f"stands on {lost.base_digest}, which is not on the way from {base_where} to version {chain[-1].version}"
        )
    return tuple(chain)


class DeltaChain:
    """The deltas that lead from a base to its newest version, applied box by box while the base is read."""

    def __init__(
        self, deltas: Sequence[Delta] = (), digests: Mapping[str, str] | None = None, memory_bytes: int = 0
    ) -> None:
        self.deltas, self.digests = tuple(deltas), dict(digests or {})
        """In order; the digest that each tensor of the result is to have."""
        self._memory_bytes = memory_bytes
        self._patches: dict[str, tuple[Patch, ...]] = {}

    @classmethod
    def of(
        cls, deltas: Sequence[Delta], base: Mapping[str, str], where: str, memory_bytes: int
    ) -> DeltaChain:
        """Return the chain that stands on a base, given by the digests of its tensors; no tensor is read.

        Raises:
            CheckpointError: no delta stands on the base, a link is missing or contradicts the one before, or what the
                chain changes of one tensor does not fit into the memory.
        """
        chain, digests = chain_of(deltas, model_digest(base), where), dict(base)
        need_bytes = dict.fromkeys(base, 0)
        for delta in chain:
            for name, changed in delta.tensors.items():
                at = f"{delta.where}: tensor {name!r}"
                if changed.base != digests[name]:
                    raise CheckpointError(
                        f"{at}: the delta stands on a content of the digest {changed.base}, and what it is applied to "
                        f"has {digests[name]}: the delta is damaged"
                    )
                digests[name] = changed.digest
                need_bytes[name] += 2 * changed.patch_bytes  # sorting makes copies
                if need_bytes[name] > memory_bytes:
                    raise CheckpointError(
                        f"{at}: to apply what the deltas up to this one change of it takes "
                        f"{need_bytes[name] / 1e6:.0f} MB, and there is room for {memory_bytes / 1e6:.0f} MB: apply "
                        "fewer deltas at a time, one result on the other, or give more memory"
                    )
        if chain and (found := model_digest(digests)) != chain[-1].digest:
            raise CheckpointError(
                f"{chain[-1].where}: makes a model of the digest {chain[-1].digest}, and its tensors have {found}: a "
                "delta of the chain is damaged"
            )
        return cls(chain, digests, memory_bytes)

    def last(self, name: str) -> Delta | None:
        """Return the last delta that changes a tensor."""
        return next((delta for delta in reversed(self.deltas) if name in delta.tensors), None)

    def apply(self, name: str, box: Box, values: np.ndarray) -> None:
        """Turn a box of the base, in a contiguous array, into the same of the result."""
        if name not in self._patches:
            made = tuple(delta.patch(name) for delta in self.deltas if name in delta.tensors)
            kept = sum(patch.size_bytes for patches in (made, *self._patches.values()) for patch in patches)
            if kept > self._memory_bytes // 2:
                self._patches.clear()
            self._patches[name] = made
        for patch in self._patches[name]:
            patch.apply(values, box)


def check_deltas(deltas: Sequence[Delta], catalog: Catalog) -> None:
    """Compare what deltas change with the tensors of a checkpoint."""
    for delta in deltas:
        for name, changed in delta.tensors.items():
            tensor, where = catalog.tensors.get(name), f"{delta.where}: tensor {name!r}"
            if tensor is None:
                raise CheckpointError(
                    f"{where}: the delta changes it, and {catalog.where} has none of that name"
                    f"{nearest(name, catalog.tensors)}"
                )
            if (changed.dtype, changed.shape) != (tensor.dtype, tensor.shape):
                advice = (
                    "they are of different models"
                    if changed.shape != tensor.shape
                    else "one was quantised or converted: apply deltas to what they were made from, and quantise what "
                    "comes out (`lowshard reshard --apply` with --mxfp8)"
                )
                raise CheckpointError(
                    f"{where}: the delta changes {changed.dtype}{list(changed.shape)}, the base has "
                    f"{tensor.dtype}{list(tensor.shape)}: {advice}"
                )


# ---- the header


@dataclass(frozen=True)
class _TensorFacts:
    dtype: str
    shape: tuple[int, ...]
    base: str
    digest: str


@dataclass(frozen=True)
class Facts:
    """What stands under `lowshard` in the metadata."""

    base: str
    digest: str
    base_version: int
    tensors: Mapping[str, _TensorFacts]


@reader("head of a delta", CheckpointError)
def read_facts(base: str, digest: str, base_version: int, tensors: Mapping[str, _TensorFacts]) -> Facts:
    """Return what a delta says of itself."""
    for name, tensor in tensors.items():
        try:
            known = dtypes.get(tensor.dtype).name == tensor.dtype
        except DTypeError:
            known = False
        if not known or min(tensor.shape, default=0) < 0:
            raise CheckpointError(
                f"tensor {brief(name)}: no tensor has dtype {brief(tensor.dtype)} and shape {brief(tensor.shape)}"
            )
    return Facts(base, digest, base_version, dict(tensors))


def _changed_tensors(path: str, entries: Mapping[str, TensorEntry], facts: Facts) -> dict[str, ChangedTensor]:
    tensors = {}
    for name, known in facts.tensors.items():
        indices, values = entries.get(name + _INDICES), entries.get(name + _VALUES)
        if indices is None or values is None:
            raise CheckpointError(
                f"{path}: tensor {name!r}: the metadata has an entry for it, the file lacks {name}{_INDICES} or "
                f"{name}{_VALUES}"
            )
        is_flat = len(indices.shape) == 1 and indices.shape == values.shape
        if indices.dtype not in ("int32", "int64") or not is_flat or values.dtype != known.dtype:
            raise CheckpointError(
                f"{path}: tensor {name!r}: indices are int32 or int64 of one dim, and there are as many values of "
                f"{known.dtype}, got {indices.dtype}{list(indices.shape)} and {values.dtype}{list(values.shape)}"
            )
        tensors[name] = ChangedTensor(
            name, indices, values, known.dtype, known.shape, known.base, known.digest
        )
    strange = entries.keys() - {name + end for name in tensors for end in (_INDICES, _VALUES)}
    if strange:
        raise CheckpointError(
            f"{path}: a delta has NAME{_INDICES} and NAME{_VALUES} of each tensor that its metadata has an entry for, "
            f"got {brief(min(strange))} by itself"
        )
    return tensors


# ---- writing


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
    """Write what the version that follows changes of a base: both checkpoints of any form, sharded alike or not.

    A delta is one safetensors file of the indices and values of the changed elements, and digests. It is put in place
    whole, or not at all; a delta that is there already is not replaced. Both checkpoints are read once, and compared
    with their digests. The changes of one tensor are held in memory.

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
    _check_free(target)
    if not os.path.isdir(target.parent):
        raise CheckpointError(f"{target}: there is no folder {target.parent}; make it first")
    with (
        loopback(1)[0] as comm,
        Commit(target, comm, "write_delta") as commit,
        ByteSource(old) as a,
        ByteSource(new) as b,
    ):
        with commit.step():
            report = _write(a, b, commit, number, before)
        commit.commit("", lambda _: _check_free(target))  # another one may have been written meanwhile
    return report


def version_of(target: Path, version: int | None) -> int:
    """Return the version of a delta that is to be written: as it was asked for, or as its name says."""
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: a delta is a file whose name ends in .safetensors: add that")
    named = _VERSION_NAME.fullmatch(target.name)
    if version is None:
        return int(named[1]) if named else 1
    number = whole(version, "version is a number of 0 or more", CheckpointError, 0, _MOST_VERSION)
    if named and int(named[1]) != number:
        raise CheckpointError(
            f"{target}: its name says version {int(named[1])}, and version {number} was asked for"
        )
    return number


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: is there already; a delta is never replaced: give another name")


def _check_same_tensors(old: Catalog, new: Catalog) -> None:
    rule = "a delta is between two versions of one model"
    for a, b in ((old, new), (new, old)):
        if strange := a.tensors.keys() - b.tensors.keys():
            raise CheckpointError(f"{rule}: tensor {brief(min(strange))} of {a.where} is not in {b.where}")
    for name, tensor in old.tensors.items():
        other = new.tensors[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise CheckpointError(
                f"{rule}: tensor {name!r} is {tensor.dtype}{list(tensor.shape)} in {old.where}, "
                f"{other.dtype}{list(other.shape)} in {new.where}"
            )


def _write(old: ByteSource, new: ByteSource, commit: Commit, version: int, base_version: int) -> DeltaReport:
    """Compare both versions tensor by tensor; what differs is held in a nameless file until all sizes are known."""
    digests: tuple[dict[str, str], dict[str, str]] = {}, {}
    tensors: dict[str, dict[str, Any]] = {}
    spooled: dict[str, tuple[str, int, int]] = {}  # by key: dtype, elements, place in the spool
    with tempfile.TemporaryFile(dir=commit.target.parent) as spool:
        for name, tensor in old.catalog.tensors.items():
            positions, values = _changes(name, old, new, digests)
            if not len(positions):
                continue
            tensors[name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape),
                "base": digests[0][name], "digest": digests[1][name],
            }  # fmt: skip
            wide = "int32" if prod(tensor.shape) <= 1 << 31 else "int64"
            for key, data, dtype in (
                (name + _INDICES, positions.astype(wide), wide),
                (name + _VALUES, values, tensor.dtype),
            ):
                if key in spooled:
                    raise CheckpointError(f"tensor {key!r}: two tensors of the delta have that name")
                spooled[key] = dtype, len(data), spool.tell()
                spool.write(data.tobytes())
        facts = {
            "base": model_digest(digests[0]), "digest": model_digest(digests[1]), "base_version": base_version,
            "tensors": tensors,
        }  # fmt: skip
        metadata = {
            "sparse": "true", "model_version": str(version), "changed_params": str(len(tensors)),
            "lowshard": json.dumps(facts, separators=(",", ":")),
        }  # fmt: skip
        size_bytes = _copy(spool, spooled, metadata, commit)
    return DeltaReport(
        version, base_version, str(facts["base"]), str(facts["digest"]), len(digests[0]), len(tensors),
        sum(elems for _, elems, _ in spooled.values()) // 2, old.catalog.size_bytes, size_bytes,
    )  # fmt: skip


def _changes(
    name: str, old: ByteSource, new: ByteSource, digests: tuple[dict[str, str], dict[str, str]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return positions and bits of what differs in a tensor, and note its digests in both versions."""
    tensor = old.catalog.tensors[name]
    sums = np.zeros((2, SUMS), np.uint32)
    positions: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    values: list[npt.NDArray[Any]] = [np.zeros(0, f"u{dtypes.get(tensor.dtype).itemsize_bytes}")]
    done = 0
    for (box, before), (_, after) in zip(old.boxes(name), new.boxes(name), strict=True):
        sums += [content_sum(array, box, tensor.shape) for array in (before, after)]
        found = np.flatnonzero(_bits(before) != _bits(after))
        positions.append(found + done)
        values.append(_bits(after)[found])
        done += after.size
    for source, known, total in zip((old, new), digests, sums, strict=True):
        known[name] = tensor_digest(tensor.dtype, tensor.shape, total)
        source.catalog.tensors[name].check_digest(known[name], source.catalog.where)
    return np.concatenate(positions), np.concatenate(values)


def _copy(
    spool: IO[bytes], spooled: Mapping[str, tuple[str, int, int]], metadata: Mapping[str, str], commit: Commit
) -> int:
    """Write what is in the spool behind a header; return the file's bytes."""
    shapes = {key: (dtype, (elems,)) for key, (dtype, elems, _) in spooled.items()}
    head, entries = encode_header(shapes, metadata)
    size_bytes = entries[-1].stop if entries else len(head)
    reserve(commit.fd, size_bytes, commit.target)
    write_at(commit.fd, memoryview(head), 0)
    for entry in entries:
        spool.seek(spooled[entry.name][2])
        for at in range(entry.start, entry.stop, _COPY_BYTES):
            write_at(commit.fd, memoryview(spool.read(min(_COPY_BYTES, entry.stop - at))), at)
    os.fsync(commit.fd)
    return size_bytes
