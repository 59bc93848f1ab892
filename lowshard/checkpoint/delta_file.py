"""Deltas as files: what one version of a model changes of the one before, and the chains that they make.

Two forms, both of other projects, so that those read what is written here and are read here:

- a folder `weight_v000123` shaped like a Hugging Face checkpoint. A tensor of its files is the compressed change of
  the tensor of that name: "xor", the bytes of both versions combined, or "overwrite", a count, positions of bytes (both
  uint32) and their new values. `__metadata__` of a file has the checksum of each new tensor; `metadata` of the index
  has `version`, `base_version`, `delta_encoding`, `compression_format` and `checksum_format`.
- one safetensors file, "sparse": for each changed tensor `<name>.indices`, flat int32 positions of elements, and
  `<name>.values`; metadata `sparse`, `model_version` and `changed_params`.

What is written here also names the version it stands on and the one it makes by digest (`model_digest`), and both
contents of each tensor, under `lowshard` in the index or in the metadata; readers that do not know it pass it over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, instance, items, one_of
from lowshard.argument import path as check_path
from lowshard.checkpoint.catalog import headers_of
from lowshard.checkpoint.delta_codec import CHECKSUMS, COMPRESSIONS, PIECE_BYTES, inflated
from lowshard.checkpoint.header import (
    FilePath,
    Header,
    Stamp,
    TensorEntry,
    open_for_reading,
    read_header,
    stamp_of,
)
from lowshard.checkpoint.hf_index import HF_INDEX, is_sparse_delta
from lowshard.checkpoint.tensor_patch import Patch, flipped_bits
from lowshard.errors import CheckpointError, DTypeError
from lowshard.nearest import nearest
from lowshard.reading import parse_json, read_text, reader

FOLDER_NAME = re.compile(r"weight_v(\d{1,18})")
"""What versions are called where several lie side by side; writers give them six digits or more."""
ENCODINGS = ("xor", "overwrite")
INDICES, VALUES = ".indices", ".values"
_KEYS = (
    "version", "base_version", "delta_encoding", "compression_format", "checksum_format", "total_size",
)  # fmt: skip


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor that a delta changes; what foreign deltas do not say is None."""

    name: str
    parts: tuple[tuple[str, TensorEntry], ...]
    """File and entry of what the delta holds of it."""
    checksum: str | None
    """Of the new tensor's bytes."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    base: str | None = None
    """Digest of the content that it stands on."""
    digest: str | None = None
    """Of the new content."""


@dataclass(frozen=True)
class Delta:
    """What one version of a model changes of another: the facts, read from the files' heads."""

    where: str
    version: int
    base_version: int | None
    base_digest: str | None
    """Of the model it stands on, as `model_digest` has it; None where a foreign writer did not say."""
    digest: str | None
    """Of the model it makes."""
    encoding: str
    """xor, overwrite or sparse."""
    compression: str
    checksum: str | None
    tensors: Mapping[str, ChangedTensor]
    stamps: Mapping[str, Stamp | None] = field(default_factory=dict, compare=False, repr=False)
    """Of each file, by path."""

    @property
    def is_empty(self) -> bool:
        """Whether it names the version that it stands on and the one that it makes, and both have one content."""
        return self.digest is not None and self.digest == self.base_digest

    @property
    def size_bytes(self) -> int:
        """Bytes of what it holds of all tensors."""
        return sum(entry.size_bytes for t in self.tensors.values() for _, entry in t.parts)

    @classmethod
    def open(cls, path: FilePath) -> Delta:
        """Return a delta, given by its folder or its file. Tensors are not read.

        Raises:
            CheckpointError: there is no delta, or it is damaged; the text names file and tensor.
        """
        given = check_path(path, "a delta is the path of a folder or of a file", CheckpointError)
        if given.name == HF_INDEX:
            given = given.parent
        return _of_folder(given) if os.path.isdir(given) else _of_sparse_file(given)

    def check_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Compare what the delta says of a tensor with what it is to change.

        Raises:
            CheckpointError: it is of another dtype or shape, or the delta changes none of that name.
        """
        changed = self._changed(name)
        where = f"{self.where}: tensor {name!r}"
        if (changed.dtype or dtype, changed.shape or shape) != (dtype, shape):
            is_model = (changed.shape or shape) != shape
            advice = (
                "they are of different models"
                if is_model
                else "one was quantised or converted: apply deltas to what they were made from, and quantise what "
                "comes out (`lowshard reshard --apply` with --mxfp8)"
            )
            raise CheckpointError(
                f"{where}: the delta changes {changed.dtype}{list(changed.shape or ())}, the base has "
                f"{dtype}{list(shape)}: {advice}"
            )
        if self.encoding == "sparse":
            held = changed.parts[1][1]
            if held.dtype != dtype:
                raise CheckpointError(f"{where}: the delta has values of {held.dtype}, the base has {dtype}")
            if held.size_elems > prod(shape):
                raise CheckpointError(
                    f"{where}: the delta changes {held.size_elems} elements, the base has {prod(shape)}: they are of "
                    "different models"
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
        itemsize = dtypes.get(dtype).itemsize_bytes
        if self.encoding == "sparse":
            (file, indices), (_, values) = changed.parts
            positions = np.frombuffer(b"".join(self._pieces(file, indices)), "<i4").astype(np.int64)
            bits = np.frombuffer(b"".join(self._pieces(file, values)), f"u{itemsize}")
            return _in_order(positions, bits, shape, where)
        file, entry = changed.parts[0]
        size_bytes = prod(shape) * itemsize
        if self.encoding == "xor":
            return flipped_bits(
                inflated(self.compression, self._pieces(file, entry), size_bytes, where), shape, itemsize
            )
        most_bytes = 4 + 5 * size_bytes
        pieces = inflated(self.compression, self._pieces(file, entry), most_bytes, where, is_exact=False)
        data = b"".join(pieces)
        count = int.from_bytes(data[:4], "little")
        if len(data) != 4 + 5 * count:
            raise CheckpointError(
                f"{where}: overwritten bytes are a count, as many positions and as many values, got {len(data)} bytes "
                f"for a count of {count}: it is truncated or damaged"
            )
        positions = np.frombuffer(data, "<u4", count, 4).astype(np.int64)
        return _in_order(
            positions, np.frombuffer(data, np.uint8, count, 4 + 4 * count), (*shape, itemsize), where
        )

    def _pieces(self, path: str, entry: TensorEntry) -> Iterator[bytes]:
        fd, where = open_for_reading(path), f"{path}: tensor {entry.name!r}"
        try:
            if self.stamps.get(path) not in (None, stamp_of(fd)):
                raise CheckpointError(
                    f"{where}: the file was replaced or changed since the delta was opened: start anew"
                )
            at = entry.start
            while at < entry.stop:
                piece = os.pread(fd, min(PIECE_BYTES, entry.stop - at), at)
                if not piece:
                    raise CheckpointError(f"{where}: the file ends at byte {at}: it was cut short")
                yield piece
                at += len(piece)
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
    """Return deltas in the order of their versions; a folder that holds folders `weight_v...` gives all of its deltas.

    Raises:
        CheckpointError: one is missing or damaged, or a folder has none.
    """
    found: list[Delta] = []
    for path in items(paths, "deltas are a sequence of paths", CheckpointError):
        given = check_path(path, "a delta is the path of a folder or of a file", CheckpointError)
        if not os.path.isdir(given) or os.path.exists(given / HF_INDEX):
            found.append(Delta.open(given))
            continue
        try:
            names = sorted(given / name for name in os.listdir(given))
        except OSError as error:
            raise CheckpointError(
                f"{given}: this folder of deltas cannot be read: {error.strerror}; give its user the right to, or "
                "another folder"
            ) from error
        inner = [p for p in names if FOLDER_NAME.fullmatch(p.name) and os.path.exists(p / HF_INDEX)]
        files = [p for p in names if p.suffix == ".safetensors" and is_sparse_delta(read_header(p).metadata)]
        if not inner and not files:
            raise CheckpointError(
                f"{given}: deltas are folders weight_v... with {HF_INDEX}, or sparse safetensors files; there is none"
            )
        found += [Delta.open(p) for p in (*inner, *files)]
    return tuple(sorted(found, key=lambda d: d.version))


def chain_of(deltas: Sequence[Delta], base: str | None, base_where: str) -> tuple[Delta, ...]:
    """Return those deltas that lead from a base to the newest version, one standing on the other.

    Links are compared by digest; where a foreign delta names none, by version. A delta is left out only where the
    others show that the base has it already; every other one is in the chain. Content may come back: of several deltas
    that stand on one content the one of the next version is taken. Versions may fall where content does not come back.

    Args:
        deltas: in the order of their versions.
        base: digest of the model that the first is to stand on; None where it is not known.
        base_where: what it is called, for errors.

    Raises:
        CheckpointError: none stands on the base, a link is missing, or two stand on the same version.
    """
    links = _Links(deltas)
    first = links.first(base, base_where)
    had = links.leading_to(
        [first, *(i for i, d in enumerate(deltas) if base is not None and d.digest == base)]
    )
    chain, left, contents = [first], set(range(len(deltas))) - {first}, {base, deltas[first].digest}
    while True:
        last = deltas[chain[-1]]
        found = []
        for i in left.intersection(links.after(last)):
            delta = deltas[i]
            leads_back = i in had and not delta.is_empty
            if leads_back and delta.version == deltas[first].version:
                raise CheckpointError(
                    f"{delta.where} leads back to {base_where}, and versions do not say whether that has it already: "
                    f"it and {deltas[first].where} have version {delta.version}; give each its own"
                )
            is_older = (leads_back and delta.version < deltas[first].version) or (
                delta.version < last.version and delta.digest in contents
            )
            if not is_older:
                found.append((delta.version <= last.version, delta.version, not delta.is_empty, i))
        if not found:
            break
        chain.append(min(found)[-1])
        left.remove(chain[-1])
        contents.add(deltas[chain[-1]].digest)
    had |= {i for i in left if deltas[i].is_empty and deltas[i].digest in contents}
    links.check_left(left, chain, had)
    return tuple(deltas[i] for i in chain)


class _Links:
    """Which deltas stand on which, by their numbers in a sequence."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas
        self._on_digest: dict[str | None, list[int]] = {}
        self._on_version: dict[int, list[int]] = {}
        for i, delta in enumerate(deltas):
            self._on_digest.setdefault(delta.base_digest, []).append(i)
            self._on_version.setdefault(_stands_on(delta), []).append(i)

    def after(self, last: Delta) -> list[int]:
        """Return what stands on what a delta makes: by digest where both name one, else by version."""
        on_version = self._on_version.get(last.version, [])
        if last.digest is None:
            return on_version
        foreign = [i for i in on_version if self._deltas[i].base_digest is None]
        return [*self._on_digest.get(last.digest, []), *foreign]

    def leading_to(self, ends: Iterable[int]) -> set[int]:
        """Return the deltas of which others, one standing on the other, lead to some, which are among them."""
        before: dict[int, list[int]] = {}
        for i, delta in enumerate(self._deltas):
            for following in self.after(delta):
                before.setdefault(following, []).append(i)
        found, ahead = set(), list(ends)
        while ahead:
            i = ahead.pop()
            if i not in found:
                found.add(i)
                ahead += before.get(i, [])
        return found

    def first(self, base: str | None, base_where: str) -> int:
        """Return what the chain begins with.

        Raises:
            CheckpointError: nothing stands on the base.
        """
        deltas = self._deltas
        fitting = [] if base is None else self._on_digest.get(base, [])
        makers = [i for i, delta in enumerate(deltas) if base is not None and delta.digest == base]
        if not fitting:
            fitting = [i for maker in makers for i in self.after(deltas[maker])]
        if fitting:
            return min(fitting, key=lambda i: (deltas[i].version, not deltas[i].is_empty))
        if makers:
            self.check_left(set(range(len(deltas))), makers, self.leading_to(makers))
            raise CheckpointError(
                f"{base_where}: is the newest version of the chain already: {deltas[-1].where}"
            )
        if base is None or deltas[0].base_digest is None:
            return 0
        raise CheckpointError(
            f"{base_where}: holds {base}, and no delta stands on that: {deltas[0].where} stands on "
            f"{deltas[0].base_digest} (version {deltas[0].base_version}). Take the checkpoint that it was made from, "
            "or add the deltas that lead there"
        )

    def check_left(self, left: Collection[int], chain: Sequence[int], had: Collection[int]) -> None:
        """Compare what is left out with what a base is known to have, which is older than the newest of the chain.

        Raises:
            CheckpointError: the base is not known to have one; the text says whether a link is missing.
        """
        newest = max(chain, key=lambda j: self._deltas[j].version)
        for i in sorted(left):
            if i not in had or self._deltas[i].version > self._deltas[newest].version:
                self._refuse(i, chain, had)

    def _refuse(self, i: int, chain: Sequence[int], had: Collection[int]) -> NoReturn:
        delta, last = self._deltas[i], self._deltas[chain[-1]]
        for other in (self._deltas[j] for j in sorted({*chain, *had} - {i})):
            by_digest = delta.base_digest is not None and other.base_digest is not None
            is_beside = (
                delta.base_digest == other.base_digest
                if by_digest
                else _stands_on(delta) == _stands_on(other)
            )
            if is_beside:
                raise CheckpointError(
                    f"{other.where} and {delta.where} stand on the same version ({_base_of(delta)}): one chain has one"
                )
        raise CheckpointError(
            f"a link of the chain is missing: {delta.where} (version {delta.version}) stands on {_base_of(delta)}, and "
            f"what comes before, {last.where} (version {last.version}), makes "
            f"{last.digest or f'version {last.version}'}"
        )


def _stands_on(delta: Delta) -> int:
    """Return the version that a delta stands on; one that does not say stands on the one before."""
    return delta.version - 1 if delta.base_version is None else delta.base_version


def _base_of(delta: Delta) -> str:
    return delta.base_digest or f"version {_stands_on(delta)}"


# ---- heads


@dataclass(frozen=True)
class _TensorFacts:
    dtype: str
    shape: tuple[int, ...]
    base: str
    digest: str


@dataclass(frozen=True)
class Facts:
    """What is written here beside what other writers say."""

    base: str
    digest: str
    base_version: int
    tensors: Mapping[str, _TensorFacts]


@reader("head of a delta", CheckpointError)
def read_facts(base: str, digest: str, base_version: int, tensors: Mapping[str, _TensorFacts]) -> Facts:
    """Return what a delta of ours says of itself."""
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


@dataclass(frozen=True)
class FolderHead:
    """What the index of a delta folder says."""

    metadata: Mapping[str, str]
    weight_map: Mapping[str, str]
    facts: Facts | None


@reader("index of a delta folder", CheckpointError)
def read_folder_head(
    metadata: Mapping[str, Any], weight_map: Mapping[str, str], lowshard: Facts | None = None
) -> FolderHead:
    """Return what an index says; keys of the metadata that are not of a delta are theirs."""
    known = {key: str(value) for key, value in metadata.items() if key in _KEYS}
    return FolderHead(known, dict(weight_map), lowshard)


def _of_folder(folder: Path) -> Delta:
    path = folder / HF_INDEX
    if not os.path.exists(path):
        raise CheckpointError(f"{folder}: a delta's folder has {HF_INDEX}, this has none")
    data = parse_json(read_text(path, "index of a delta folder", CheckpointError), str(path), CheckpointError)
    if isinstance(data, dict):  # keys of other writers are theirs
        data = {key: value for key, value in data.items() if key in ("metadata", "weight_map", "lowshard")}
    head = read_folder_head(data, str(path))
    said = head.metadata
    if "delta_encoding" not in said:
        raise CheckpointError(
            f"{path}: is the index of a whole checkpoint, not of a delta: it has no delta_encoding"
        )
    one_of(said.get("delta_encoding"), ENCODINGS, f"{path}: delta_encoding", CheckpointError)
    one_of(said.get("compression_format"), COMPRESSIONS, f"{path}: compression_format", CheckpointError)
    if "checksum_format" in said:
        one_of(said["checksum_format"], CHECKSUMS, f"{path}: checksum_format", CheckpointError)
    headers = headers_of(path, head.weight_map)
    tensors = {}
    for name, file in head.weight_map.items():
        header = headers[file]
        entry = header.entry(name)
        if entry.dtype != "uint8" or len(entry.shape) != 1:
            raise CheckpointError(
                f"{header.path}: tensor {name!r}: a delta holds compressed bytes, uint8 of one dim, got "
                f"{entry.dtype}{list(entry.shape)}"
            )
        tensors[name] = _changed(name, ((header.path, entry),), header.metadata.get(name), head.facts, path)
    version = _number(said.get("version"), f"{path}: version")
    base_version = _number(said.get("base_version"), f"{path}: base_version")
    facts = _checked_facts(head.facts, tensors, base_version, path)
    return Delta(
        str(folder), version, base_version, facts[0], facts[1], said["delta_encoding"], said["compression_format"],
        said.get("checksum_format"), tensors, {header.path: header.stamp for header in headers.values()},
    )  # fmt: skip


def _of_sparse_file(path: Path) -> Delta:
    header = read_header(path)
    said = header.metadata
    if not is_sparse_delta(said):
        raise CheckpointError(
            f"{path}: is not a sparse delta: its metadata has sparse and model_version, got {brief(dict(said))}"
        )
    facts = None
    if "lowshard" in said:
        facts = read_facts(parse_json(said["lowshard"], f"{path}: lowshard", CheckpointError), str(path))
    tensors = {}
    for name in _sparse_names(header):
        indices, values = header.entry(name + INDICES), header.entry(name + VALUES)
        if indices.dtype != "int32" or len(indices.shape) != 1 or indices.shape != values.shape:
            raise CheckpointError(
                f"{path}: tensor {name!r}: indices are int32 of one dim, and there are as many values, got "
                f"{indices.dtype}{list(indices.shape)} and {values.dtype}{list(values.shape)}"
            )
        parts = (header.path, indices), (header.path, values)
        tensors[name] = _changed(name, parts, None, facts, path)
    version = _number(said["model_version"], f"{path}: model_version")
    base_version = None if facts is None else facts.base_version
    base, digest = _checked_facts(facts, tensors, base_version, path)
    stamps = {header.path: header.stamp}
    return Delta(str(path), version, base_version, base, digest, "sparse", "none", None, tensors, stamps)


def _sparse_names(header: Header) -> list[str]:
    names = [key.removesuffix(INDICES) for key in header.tensors if key.endswith(INDICES)]
    strange = set(header.tensors) - {name + end for name in names for end in (INDICES, VALUES)}
    if strange:
        raise CheckpointError(
            f"{header.path}: a sparse delta has NAME{INDICES} and NAME{VALUES} for each tensor, got "
            f"{brief(min(strange))} by itself"
        )
    return names


def _changed(
    name: str,
    parts: tuple[tuple[str, TensorEntry], ...],
    checksum: str | None,
    facts: Facts | None,
    path: Path,
) -> ChangedTensor:
    if facts is None:
        return ChangedTensor(name, parts, checksum)
    known = facts.tensors.get(name)
    if known is None:
        raise CheckpointError(
            f"{path}: tensor {name!r}: the file has changes of it, its metadata has no entry for it"
        )
    return ChangedTensor(name, parts, checksum, known.dtype, known.shape, known.base, known.digest)


def _checked_facts(
    facts: Facts | None, tensors: Mapping[str, ChangedTensor], base_version: int | None, path: Path
) -> tuple[str | None, str | None]:
    if facts is None:
        return None, None
    gone = sorted(facts.tensors.keys() - tensors.keys())
    if gone:
        raise CheckpointError(
            f"{path}: tensor {gone[0]!r}: the metadata has an entry for it, the file has no changes of it"
        )
    if facts.base_version != base_version:
        raise CheckpointError(
            f"{path}: a delta stands on one version, got {base_version} and {facts.base_version}"
        )
    return facts.base, facts.digest


def _number(value: object, what: str) -> int:
    text = instance(value, str, f"{what} is a number of 0 or more", CheckpointError)
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise CheckpointError(f"{what} is a number of 0 or more, got {brief(text)}")
    return int(text)


# ---- data


def _in_order(positions: np.ndarray, bits: np.ndarray, units: tuple[int, ...], where: str) -> Patch:
    """Return the patch that writes bits at positions.

    Raises:
        CheckpointError: a position lies outside of the tensor, or stands twice.
    """
    size = prod(units)
    if (np.diff(positions) < 0).any():
        order = np.argsort(positions, kind="stable")
        positions, bits = positions[order], bits[order]
    if len(positions) and not (positions[0] >= 0 and positions[-1] < size):
        wrong = positions[0] if positions[0] < 0 else positions[-1]
        raise CheckpointError(f"{where}: positions lie from 0 to {size - 1}, got {wrong}")
    twice = np.flatnonzero(np.diff(positions) == 0)
    if len(twice):
        raise CheckpointError(f"{where}: a position stands once, {positions[twice[0]]} stands twice")
    return Patch(units, bits, positions, is_xor=False)
