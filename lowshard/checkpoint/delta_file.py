"""Deltas as files: what one version of a model changes of the one before, and the chains that they make.

A delta is one safetensors file. For each changed tensor it has `<name>.indices`, flat positions of elements (int32;
int64 of a tensor that has more than 2^31 elements), and `<name>.values`. Its metadata has `sparse`, `model_version`,
`changed_params`, and under `lowshard` the digests (`model_digest`) of the version it stands on and of the one it makes,
and both contents of each tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import brief, instance, items
from lowshard.argument import path as check_path
from lowshard.box import Box, shape_of, single_run, volume
from lowshard.checkpoint.header import (
    FilePath,
    Header,
    Stamp,
    TensorEntry,
    open_for_reading,
    read_header,
    stamp_of,
)
from lowshard.checkpoint.hf_index import is_sparse_delta
from lowshard.errors import CheckpointError, DTypeError
from lowshard.nearest import nearest
from lowshard.reading import parse_json, reader

INDICES, VALUES = ".indices", ".values"
VERSION_NAME = re.compile(r"weight_v(\d{1,18})\.safetensors")
"""Names that say a version."""
MOST_VERSION = 10**18 - 1
_PIECE_BYTES = 64 << 20


def bits_of(array: np.ndarray, unit_bytes: int) -> npt.NDArray[Any]:
    """Return an array's bits, flat, as unsigned integers of so many bytes; a view where it is contiguous."""
    return array.reshape(-1).view(np.uint8).view(f"u{unit_bytes}")


@dataclass(frozen=True)
class Patch:
    """The elements of a tensor that are changed."""

    shape: tuple[int, ...]
    bits: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    """Where they lie, row-major, ascending."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self.bits.nbytes + self.positions.nbytes

    def apply(self, values: np.ndarray, box: Box) -> None:
        """Change a contiguous array in place that holds a box of the tensor."""
        if not volume(box):
            return
        flat = bits_of(values, self.bits.itemsize)
        first = int(np.ravel_multi_index([a for a, _ in box], self.shape)) if box else 0
        last = int(np.ravel_multi_index([b - 1 for _, b in box], self.shape)) if box else 0
        low, high = np.searchsorted(self.positions, [first, last + 1]).tolist()
        near, bits = self.positions[low:high], self.bits[low:high]
        if single_run(box, self.shape) is not None:
            flat[near - first] = bits
            return
        places = np.unravel_index(near, self.shape)
        inside = np.ones(len(near), bool)
        for place, (a, b) in zip(places, box, strict=True):
            inside &= (place >= a) & (place < b)
        local = [place[inside] - a for place, (a, _) in zip(places, box, strict=True)]
        flat[np.ravel_multi_index(local, shape_of(box))] = bits[inside]


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


@dataclass(frozen=True)
class Delta:
    """What one version of a model changes of another: the facts, read from the file's head."""

    where: str
    """Its path."""
    version: int
    base_version: int
    base_digest: str
    """Of the model it stands on, as `model_digest` has it."""
    digest: str
    """Of the model it makes."""
    tensors: Mapping[str, ChangedTensor]
    stamp: Stamp | None = field(default=None, compare=False, repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of what it holds of all tensors."""
        return sum(t.indices.size_bytes + t.values.size_bytes for t in self.tensors.values())

    @classmethod
    def open(cls, path: FilePath) -> Delta:
        """Return a delta, given by its file. Tensors are not read.

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
        tensors = _changed_tensors(header, facts)
        return cls(where, int(version), facts.base_version, facts.base, facts.digest, tensors, header.stamp)

    def check_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Compare what the delta says of a tensor with what it is to change.

        Raises:
            CheckpointError: it is of another dtype or shape, or the delta changes none of that name.
        """
        changed = self._changed(name)
        where = f"{self.where}: tensor {name!r}"
        if (changed.dtype, changed.shape) != (dtype, shape):
            advice = (
                "they are of different models"
                if changed.shape != shape
                else "one was quantised or converted: apply deltas to what they were made from, and quantise what "
                "comes out (`lowshard reshard --apply` with --mxfp8)"
            )
            raise CheckpointError(
                f"{where}: the delta changes {changed.dtype}{list(changed.shape)}, the base has {dtype}{list(shape)}: "
                f"{advice}"
            )
        if changed.values.dtype != dtype:
            raise CheckpointError(
                f"{where}: the delta has values of {changed.values.dtype}, the base has {dtype}"
            )
        if changed.values.size_elems > prod(shape):
            raise CheckpointError(
                f"{where}: the delta changes {changed.values.size_elems} elements, the base has {prod(shape)}: they "
                "are of different models"
            )

    def patch(self, name: str, dtype: str, shape: tuple[int, ...]) -> Patch:
        """Return what changes of a tensor, read from the file and checked.

        Args:
            name: of a tensor of the delta.
            dtype: of the tensor.
            shape: of the tensor.

        Raises:
            CheckpointError: it is truncated, damaged, of another tensor; positions outside of it, or twice; or the
                delta changes none of that name.
        """
        changed, where = self._changed(name), f"{self.where}: tensor {name!r}"
        wide = f"<i{dtypes.get(changed.indices.dtype).itemsize_bytes}"
        positions = np.frombuffer(self._read(changed.indices), wide).astype(np.int64)
        bits = np.frombuffer(self._read(changed.values), f"u{dtypes.get(dtype).itemsize_bytes}")
        if (np.diff(positions) < 0).any():
            order = np.argsort(positions, kind="stable")
            positions, bits = positions[order], bits[order]
        if len(positions) and not (positions[0] >= 0 and positions[-1] < prod(shape)):
            wrong = positions[0] if positions[0] < 0 else positions[-1]
            raise CheckpointError(f"{where}: positions lie from 0 to {prod(shape) - 1}, got {wrong}")
        twice = np.flatnonzero(np.diff(positions) == 0)
        if len(twice):
            raise CheckpointError(f"{where}: a position stands once, {positions[twice[0]]} stands twice")
        return Patch(tuple(shape), bits, positions)

    def _read(self, entry: TensorEntry) -> bytearray:
        fd, where = open_for_reading(self.where), f"{self.where}: tensor {entry.name!r}"
        try:
            if self.stamp not in (None, stamp_of(fd)):
                raise CheckpointError(
                    f"{where}: the file was replaced or changed since the delta was opened: start anew"
                )
            found = bytearray()
            while len(found) < entry.size_bytes:
                at = entry.start + len(found)
                piece = os.pread(fd, min(_PIECE_BYTES, entry.stop - at), at)
                if not piece:
                    raise CheckpointError(f"{where}: the file ends at byte {at}: it was cut short")
                found += piece
            return found
        except OSError as error:
            raise CheckpointError(f"{where}: reading failed: {error.strerror}") from error
        finally:
            os.close(fd)

    def _changed(self, name: str) -> ChangedTensor:
        instance(name, str, "a tensor's name is text", CheckpointError)
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self.where}: tensor {brief(name)}: the delta changes none of that name{nearest(name, self.tensors)}"
            )
        return found


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
    """Return those deltas that lead from a base to the newest version, one standing on the content another makes."""
    # Versions do not fall on the way; of several that stand on one content the one of the next version is taken. The
    # others are those that lead to the base.
    left, chain, at, contents = list(deltas), list[Delta](), base, {base}
    while found := [d for d in left if d.base_digest == at and d.version >= (chain or [d])[-1].version]:
        step = found[0]
        if [d.version for d in found].count(step.version) > 1:
            raise CheckpointError(
                f"{step.where} and {found[1].where} stand on the same version ({at}): one chain has one"
            )
        if step.digest in contents - {at} and step.version == chain[0].version:
            raise CheckpointError(
                f"{step.where} leads back to what {chain[0].where} changes, and versions do not say which comes first: "
                f"both have version {step.version}; give each its own"
            )
        chain.append(step)
        left.remove(step)
        at = step.digest
        contents.add(at)
    newest = {base: chain[0].version if chain else MOST_VERSION}  # by content, of what may have led to it
    while leading := [d for d in left if d.version <= newest.get(d.digest, -1)]:
        left = [d for d in left if d not in leading]
        for delta in leading:
            newest[delta.base_digest] = max(newest.get(delta.base_digest, -1), delta.version)
    if left and (chain or len(left) < len(deltas)):
        lost = left[0]
        raise CheckpointError(
            f"a link of the chain is missing, or two stand on the same version: {lost.where} (version {lost.version}) "
            f"stands on {lost.base_digest}, which neither leads to {base_where} nor comes from it"
        )
    if left:
        raise CheckpointError(
            f"{base_where}: holds {base}, and no delta stands on that: {left[0].where} stands on "
            f"{left[0].base_digest} (version {left[0].base_version}). Take the checkpoint that it was made from, or "
            "add the deltas that lead there"
        )
    if not chain:
        raise CheckpointError(f"{base_where}: is the newest version of the chain already: {deltas[-1].where}")
    return tuple(chain)


# ---- heads


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


def _changed_tensors(header: Header, facts: Facts) -> dict[str, ChangedTensor]:
    path, tensors = header.path, {}
    for name, known in facts.tensors.items():
        if not {name + INDICES, name + VALUES} & header.tensors.keys():
            raise CheckpointError(
                f"{path}: tensor {name!r}: the metadata has an entry for it, the file has no changes of it"
            )
        indices, values = header.entry(name + INDICES), header.entry(name + VALUES)
        if (
            indices.dtype not in ("int32", "int64")
            or len(indices.shape) != 1
            or indices.shape != values.shape
        ):
            raise CheckpointError(
                f"{path}: tensor {name!r}: indices are int32 or int64 of one dim, and there are as many values, got "
                f"{indices.dtype}{list(indices.shape)} and {values.dtype}{list(values.shape)}"
            )
        tensors[name] = ChangedTensor(
            name, indices, values, known.dtype, known.shape, known.base, known.digest
        )
    strange = set(header.tensors) - {name + end for name in tensors for end in (INDICES, VALUES)}
    if strange:
        raise CheckpointError(
            f"{path}: a delta has NAME{INDICES} and NAME{VALUES} of each tensor that its metadata has an entry for, "
            f"got {brief(min(strange))} by itself"
        )
    return tensors
