"""Catalog: which boxes of which tensors lie where in a checkpoint's files, whatever its form.

One plain safetensors file, a Hugging Face folder (model.safetensors, or several with
model.safetensors.index.json), a sharded checkpoint of lowshard, or one file a rank from elsewhere, of
which tilings say what each holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowshard.argument import brief, instance, items, mapping
from lowshard.argument import path as check_path
from lowshard.box import Box, full_box, shape_of, volume
from lowshard.checkpoint.checkpoint_index import INDEX_NAME, Index, Part, read_index
from lowshard.checkpoint.crc import Key, crc32
from lowshard.checkpoint.header import TORCH, FilePath, Header, Stamp, TensorEntry, header_box, read_header
from lowshard.checkpoint.hf_index import DATA_NAME, HF_INDEX, files_of_set, is_sparse_delta, lies_beside
from lowshard.checkpoint.read_shares import disjoint
from lowshard.errors import CheckpointError
from lowshard.nearest import nearest
from lowshard.reading import parse_json, read_text, reader
from lowshard.tiling import Tiling

_ATTEMPTS = 10
Files = FilePath | Sequence[FilePath]
_FILES = "a checkpoint is the path of a file or a folder, or a list of files"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A box of a tensor that lies in one file, row-major, as a part of a stored array."""

    file: str
    entry: TensorEntry
    box: Box
    """In global coordinates."""
    origin: tuple[int, ...]
    """Where the stored array's first element lies, relative to the global array: box - origin is in the entry."""
    crc32: int | None
    """Of the whole stored array's bytes, where it is known."""

    @property
    def key(self) -> Key:
        """File and first byte of the stored array."""
        return self.file, self.entry.start

    def check(self, name: str, value: int) -> None:
        """Compare the checksum of the stored array, as it was read, with the index's."""
        if self.crc32 is not None and value != self.crc32:
            raise CheckpointError(
                f"{self.file}: tensor {name!r}: its data is damaged: the crc32 of bytes {self.entry.start} to "
                f"{self.entry.stop} is {value:08x}, the index says {self.crc32:08x}"
            )

    def local(self, box: Box) -> Box:
        """Return a box of this part in coordinates of the stored array."""
        return tuple((a - o, b - o) for (a, b), o in zip(box, self.origin, strict=True))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    """They cover the tensor once."""
    strategy: str | None = None
    tiling: Tiling | None = None
    """Which rank held what when a sharded checkpoint was saved; None where neither an index nor the caller says it."""
    digest: str | None = None
    """Of its content, as `lowshard.reshard.digest` has it; None where no index says it."""

    @property
    def said_shape(self) -> tuple[int, ...]:
        """The shape as a header has it, which counts elements of 4 and 6 bits where `shape` counts bytes."""
        return shape_of(header_box(self.dtype, full_box(self.shape)))

    def check_digest(self, found: str, where: str) -> None:
        """Compare the digest of what was read with the index's."""
        if self.digest not in (None, found):
            raise CheckpointError(
                f"{where}: tensor {self.name!r}: its data is damaged: its digest is {found}, the index says "
                f"{self.digest}"
            )


@dataclass(frozen=True)
class Catalog:
    """All tensors of a checkpoint. Every rank that opens the same files gets an equal one."""

    where: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    num_ranks: int | None
    """Ranks that a sharded checkpoint was saved by; None for plain files."""
    digest: str
    """32 hex digits of names, shapes, dtypes, places and sizes."""
    has_metadata: bool = False
    """Whether its files have a `__metadata__`, which may be empty."""
    stamps: Mapping[str, Stamp | None] = field(default_factory=dict, compare=False, repr=False)
    """Of each plain file, by path; data files of a sharded checkpoint are never replaced under their name."""
    copies: tuple[tuple[StoredTensor, StoredPart], ...] = field(default=(), compare=False, repr=False)
    """Of files of ranks: where else a part of a tensor lies, on ranks that hold the same. Nothing is read there."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all files that hold data, each once."""
        return tuple(dict.fromkeys(p.file for t in self.tensors.values() for p in t.parts))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(p.entry.size_bytes for t in self.tensors.values() for p in t.parts)

    @property
    def digests(self) -> dict[str, str] | None:
        """Digests of the content by tensor, as `lowshard.reshard.digest` has them; None where none were recorded."""
        found = {name: tensor.digest for name, tensor in self.tensors.items() if tensor.digest is not None}
        return found if len(found) == len(self.tensors) else None

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor.

        Raises:
            CheckpointError: the checkpoint has none of that name.
        """
        found = self.tensors.get(name) if isinstance(name, str) else None
        if found is None:
            instance(name, str, "a tensor's name is text", CheckpointError)
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is not in the checkpoint of {len(self.tensors)} tensors"
                f"{nearest(name, self.tensors)}"
            )
        return found

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes of a tensor that are stored, each by itself; errors as `tensor`."""
        return tuple(part.box for part in self.tensor(name).parts)

    @classmethod
    def open(cls, files: Files) -> Catalog:
        """Return the catalog of a checkpoint: a path of a file or folder, or several files.

        No tensor data is read.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged; the text names file and tensor.
        """
        if not isinstance(files, (str, bytes)) and isinstance(files, Sequence):
            return _of_plain([check_path(f, _FILES, CheckpointError) for f in files], f"{len(files)} files")
        path = check_path(files, _FILES, CheckpointError)
        if path.name == INDEX_NAME:
            path = path.parent
        if path.name.endswith(".json") and ".safetensors.index." in path.name:
            return _of_hugging_face(path)
        if not os.path.isdir(path):
            return _of_plain([path], str(path))
        if os.path.exists(path / INDEX_NAME):
            return _of_index(path)
        indexes = list(path.glob("*.safetensors.index.json"))  # that of diffusers has another name
        if path / HF_INDEX in indexes or len(indexes) == 1:
            return _of_hugging_face(path / HF_INDEX if path / HF_INDEX in indexes else indexes[0])
        if os.path.exists(path / "model.safetensors"):
            return _of_plain([path / "model.safetensors"], str(path))
        found = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
        # Before its index is in place a save has files of full size that do not hold their data yet.
        if any(DATA_NAME.fullmatch(p.name) for p in found):
            raise CheckpointError(
                f"{path}: files in it are parts of a sharded checkpoint, and {INDEX_NAME}, which says of what, is "
                "missing: put it back, or save anew where the save that wrote them did not end"
            )
        if len(found) == 1:
            if (count := files_of_set(found[0].name)) > 1:
                raise CheckpointError(
                    f"{path}: {found[0].name} is one of {count} files, and neither the others nor {HF_INDEX} are here: "
                    "fetch the rest"
                )
            return _of_plain(found, str(path))
        advice = "; what ranks hold, one file each: Catalog.of_rank_files, lowshard reshard --from"
        if not found:
            torch = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
            advice = f". {torch[0]} looks like torch's: {TORCH}" if torch else ""
        raise CheckpointError(
            f"{path}: a checkpoint's folder has {INDEX_NAME}, {HF_INDEX}, model.safetensors or one .safetensors "
            f"file; it has {len(found)} of those files and no index{advice}"
        )

    @classmethod
    def of_rank_files(cls, files: Sequence[FilePath], tilings: Mapping[str, Tiling]) -> Catalog:
        """Return the catalog of one file a rank, each with that rank's local arrays under the same names.

        Args:
            files: in rank order.
            tilings: what each rank holds, by name.

        Raises:
            CheckpointError: a file lacks a tensor, or has it in another shape or dtype than the tiling says.
        """
        headers = [
            read_header(f) for f in items(files, "files are a sequence of paths, one a rank", CheckpointError)
        ]
        if not headers:
            raise CheckpointError("a checkpoint has at least one file, got none")
        tensors = {}
        copies: list[tuple[StoredTensor, StoredPart]] = []
        rule = "tilings is a mapping of names to tilings"
        for name, tiling in mapping(tilings, rule, CheckpointError).items():
            instance(tiling, Tiling, rule, CheckpointError)
            if tiling.num_ranks != len(headers):
                raise CheckpointError(
                    f"{len(headers)} rank files were given, tensor {name!r} is cut over {tiling.num_ranks} ranks"
                )
            parts: list[StoredPart] = []
            others: list[StoredPart] = []
            owner = {box: min(holders) for box, holders in disjoint(tiling)}
            for rank in tiling.ranks:
                if name not in headers[rank].tensors and not tiling.local_elems(rank):
                    continue
                entry = headers[rank].entry(name)
                if entry.shape != tiling.local_shape(rank) or entry.dtype != tiling.dtype:
                    raise CheckpointError(
                        f"{headers[rank].path}: tensor {name!r} is {entry.dtype}{list(entry.shape)}, rank {rank} of "
                        f"{len(headers)} holds {tiling.dtype}{list(tiling.local_shape(rank))}: another strategy?"
                    )
                for tile in tiling.tiles(rank):
                    origin = tuple(g - lo for (g, _), (lo, _) in zip(tile.box, tile.local, strict=True))
                    for box, first in owner.items():
                        if all(a <= c and d <= b for (a, b), (c, d) in zip(tile.box, box, strict=True)):
                            held = StoredPart(headers[rank].path, entry, box, origin, None)
                            (parts if first == rank else others).append(held)
            if sum(volume(p.box) for p in parts) != tiling.size_elems:
                raise CheckpointError(f"tensor {name!r}: the rank files do not hold all of it")
            tensors[name] = StoredTensor(name, tiling.dtype, tiling.shape, tuple(parts), tiling=tiling)
            copies += [(tensors[name], part) for part in others]
        where = f"{len(headers)} rank files such as {headers[0].path}"
        return cls(where, tensors, {}, len(headers), _digest(tensors), False, _stamps(headers), tuple(copies))


def _of_plain(paths: Sequence[Path], where: str) -> Catalog:
    if not paths:
        raise CheckpointError("a checkpoint has at least one file, got none")
    headers = [read_header(path) for path in paths]
    for header in headers:
        if is_sparse_delta(header.metadata):
            raise CheckpointError(
                f"{header.path}: is a delta, which says what one version changes of another, and no checkpoint: "
                f"`lowshard reshard BASE --apply {header.path} -o OUT` makes one"
            )
    return plain_catalog(headers, where)


def plain_catalog(headers: Sequence[Header], where: str) -> Catalog:
    """Return the catalog of files that hold whole tensors, each name once."""
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for header in headers:
        metadata |= header.metadata
        for entry in header.tensors.values():
            if entry.name in tensors:
                other = next(h.path for h in headers if entry.name in h.tensors)
                raise CheckpointError(f"{header.path}: tensor {entry.name!r} is in {other} too")
            part = StoredPart(header.path, entry, full_box(entry.shape), (0,) * len(entry.shape), None)
            tensors[entry.name] = StoredTensor(
                entry.name, entry.dtype, entry.shape, (part,) if entry.size_elems else ()
            )
    has_metadata = any(header.has_metadata for header in headers)
    return Catalog(where, tensors, metadata, None, _digest(tensors), has_metadata, _stamps(headers))


def _stamps(headers: Iterable[Header]) -> dict[str, Stamp | None]:
    return {header.path: header.stamp for header in headers}


def _of_hugging_face(path: Path) -> Catalog:
    text = read_text(path, "index with a weight_map", CheckpointError)
    data = parse_json(text, f"{path} is not an index with a weight_map", CheckpointError)
    said = {k: v for k, v in data.items() if k in _HF_KEYS} if isinstance(data, dict) else data
    weight_map, metadata = _read_hugging_face(said, str(path))
    held: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not lies_beside(file):
            raise CheckpointError(
                f"{path}: tensor {brief(name)}: its file lies beside the index, got {brief(file)}"
            )
        held.setdefault(file, []).append(name)
    headers = []
    for file, names in sorted(held.items()):
        if not os.path.exists(path.parent / file):
            raise CheckpointError(_missing(path.parent / file, path.name, names))
        headers.append(read_header(path.parent / file))
        for name in (*headers[-1].tensors, *names):
            headers[-1].entry(name)
            if (other := weight_map.get(name)) != file:
                said = (
                    f"places it in {other}"
                    if other
                    else "does not list it: fetch both anew, or take the file alone"
                )
                raise CheckpointError(
                    f"{headers[-1].path}: tensor {name!r} is in the file, {path.name} {said}"
                )
    made = plain_catalog(headers, str(path.parent))
    return replace(made, metadata={**made.metadata, **metadata})


_HF_KEYS = ("weight_map", "metadata")
"""What is read of an index of Hugging Face's; what else there is, is theirs."""


@reader("index with a weight_map", CheckpointError)
def _read_hugging_face(
    weight_map: Mapping[str, str], metadata: Mapping[str, Any] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    return dict(weight_map), {key: str(value) for key, value in (metadata or {}).items()}


def _of_index(folder: Path) -> Catalog:
    index = read_index(folder / INDEX_NAME)
    for _ in range(_ATTEMPTS):
        try:
            headers = {name: checked_header(folder, name, index) for name in index.files}
            break
        except CheckpointError:
            before, index = index, read_index(folder / INDEX_NAME)
            if index.token == before.token:
                raise
            # a save has put a new checkpoint in place meanwhile, and removed the files of the one before
    else:
        raise CheckpointError(f"{folder}: new checkpoints are put in place faster than one can be opened")
    return index_catalog(folder, index, lambda name, part: part_entry(name, part, index, headers[part.file]))


def index_catalog(folder: Path, index: Index, entry_of: Callable[[str, Part], TensorEntry]) -> Catalog:
    """Return the catalog of a sharded checkpoint; `entry_of` says where a part of a tensor lies in its file."""
    tensors = {}
    for name, t in index.tensors.items():
        parts = tuple(
            StoredPart(
                str(folder / p.file), entry_of(name, p), p.box, tuple(start for start, _ in p.box), p.crc32
            )
            for p in t.parts
        )
        tensors[name] = StoredTensor(name, t.dtype, t.shape, parts, t.strategy, t.tiling, t.digest)
    said = index.metadata
    return Catalog(str(folder), tensors, said or {}, index.num_ranks, _digest(tensors), said is not None)


def part_entry(name: str, part: Part, index: Index, header: Header) -> TensorEntry:
    """Return the entry of a part in its file's header, compared with the index."""
    entry, dtype = header.entry(part.key), index.tensors[name].dtype
    if entry.dtype != dtype or entry.shape != shape_of(part.box):
        raise CheckpointError(
            f"{header.path}: tensor {name!r}: the index has {dtype}{list(shape_of(part.box))} there, the file "
            f"{entry.dtype}{list(entry.shape)}"
        )
    return entry


def _missing(path: Path, index: str, tensors: Sequence[str]) -> str:
    others = f" and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
    held = f": it holds {brief(tensors[0])}{others}, or parts of them" if tensors else ""
    return f"{path}: the file is missing, {index} names it{held}. Put it back, or save the checkpoint anew"


def checked_header(folder: Path, name: str, index: Index) -> Header:
    """Return the header of a data file of a sharded checkpoint, compared with what the index says of the file."""
    if not os.path.exists(folder / name):
        held = [n for n, tensor in index.tensors.items() if any(p.file == name for p in tensor.parts)]
        raise CheckpointError(_missing(folder / name, INDEX_NAME, held))
    header = read_header(folder / name)
    said = index.files[name]
    if header.file_bytes != said.size_bytes:
        raise CheckpointError(
            f"{header.path}: has {header.file_bytes} bytes, the index says {said.size_bytes}: truncated or replaced"
        )
    try:
        with open(header.path, "rb") as file:
            crc = crc32(file.read(header.data_start_bytes))
    except OSError as error:
        raise CheckpointError(f"{header.path}: cannot be read: {error.strerror}") from error
    if crc != said.header_crc32:
        raise CheckpointError(
            f"{header.path}: the header is damaged: its crc32 is {crc:08x}, the index says {said.header_crc32:08x}"
        )
    return header


def _digest(tensors: Mapping[str, StoredTensor]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        rows = [[p.entry.start, p.entry.stop, p.box, p.crc32] for p in tensor.parts]
        made.update(json.dumps([name, tensor.dtype, tensor.shape, rows]).encode())
    return made.hexdigest()
