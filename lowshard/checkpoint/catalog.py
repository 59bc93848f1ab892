"""Catalog: which boxes of which tensors lie where in a checkpoint's files, whatever its form.

One plain safetensors file, a Hugging Face folder (model.safetensors, or several with
model.safetensors.index.json), a sharded checkpoint of lowshard, what torch's ranks saved (safetensors that say
which part they hold, or a folder of torch.distributed.checkpoint), or one file a rank from elsewhere, of
which tilings say what each holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowshard.argument import brief, in_words, instance, items, mapping
from lowshard.argument import path as check_path
from lowshard.box import Box, box_text, full_box, shape_of, subtract, volume
from lowshard.checkpoint.checkpoint_index import (
    DATA_NAME,
    HF_INDEX,
    INDEX_NAME,
    Index,
    Part,
    files_of_set,
    is_sparse_delta,
    lies_beside,
    read_index,
)
from lowshard.checkpoint.header import TORCH, FilePath, Header, Stamp, TensorEntry, header_box, read_header
from lowshard.checkpoint.read_shares import disjoint
from lowshard.checkpoint.torch_files import METADATA, OFFSETS, OWN_KEYS, Placed, read_folder, saved_offsets
from lowshard.errors import CheckpointError
from lowshard.nearest import nearest
from lowshard.reading import parse_json, read_text, reader
from lowshard.tiling import Tiling

_ATTEMPTS = 10
Files = FilePath | Sequence[FilePath]
_FILES = "a checkpoint is the path of a file or a folder, or a list of files"


Piece = tuple[int, int, int]
"""First byte in the file, the byte behind the last, and the CRC-32 of the bytes between them."""
Key = tuple[str, int]
"""File and first byte of a stored array."""


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
    form: str = field(default="plain checkpoint", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What its reader is to know: what is left out, and what cannot be seen."""

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
        if path.name in (INDEX_NAME, METADATA):
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
        if os.path.exists(path / METADATA):
            return _of_torch_folder(path)
        if any(path.glob("*.distcp")):
            raise CheckpointError(
                f"{path}: files in it are of torch.distributed.checkpoint, and {METADATA}, which says of what, is "
                "missing: put it back, or save anew where the save that wrote them did not end"
            )
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
        if found and all(OFFSETS in read_header(p).metadata for p in found):
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
        said = [saved_offsets(header) or {} for header in headers]
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
                    if said[rank].get(name, origin) != origin:
                        raise CheckpointError(
                            f"{headers[rank].path}: tensor {name!r}: the file says that its part begins at "
                            f"{list(said[rank][name])}, rank {rank} holds {box_text(tile.box)}: another strategy? The "
                            "files say themselves what they hold: Catalog.open of all of them"
                        )
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
    if any(OFFSETS in header.metadata for header in headers):
        _check_is_all(headers)
    return plain_catalog(headers, where)


def plain_catalog(headers: Sequence[Header], where: str) -> Catalog:
    """Return the catalog of files that hold whole tensors, each name once, or parts and say of what."""
    placed: list[Placed] = []
    found: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for header in headers:
        metadata |= {key: text for key, text in header.metadata.items() if key not in OWN_KEYS}
        starts = saved_offsets(header)
        for name, entry in header.tensors.items():
            if starts is None and name in found:
                raise CheckpointError(f"{header.path}: tensor {name!r} is in {found[name]} too")
            found[name] = header.path
            start = (0,) * len(entry.shape) if starts is None else starts[name]
            placed.append(Placed(header.path, entry, start))
    tensors, copies = _assembled(where, placed)
    parts = any(len(t.parts) > 1 for t in tensors.values()) or any(map(_shard_of, headers))
    has_metadata = any(header.has_metadata for header in headers)
    return Catalog(
        where, tensors, metadata, None, _digest(tensors), has_metadata, _stamps(headers), copies,
        *(("torch's sharded safetensors", (_UNSEEN,)) if parts else ()),
    )  # fmt: skip


_SHARD = re.compile(r"shard-\d{5}-model-(\d{5})-of-(\d{5})\.safetensors")
_UNSEEN = "these files do not say how many they are: a last one that is missing cannot be seen"


def _shard_of(header: Header) -> re.Match[str] | None:
    return _SHARD.fullmatch(Path(header.path).name) if OFFSETS in header.metadata else None


def _check_is_all(headers: Sequence[Header]) -> None:
    """Raise CheckpointError where files beside some of torch's hold the rest, or are known to be missing."""
    own = {(name, start) for header in headers for name, start in (saved_offsets(header) or {}).items()}
    names, paths = {name for name, _ in own}, {os.path.realpath(header.path) for header in headers}
    shards = [found for found in map(_shard_of, headers) if found]
    beside = {path for header in headers for path in Path(header.path).parent.glob("*.safetensors")}
    for path in sorted(path for path in beside if os.path.realpath(path) not in paths):
        other = read_header(path)
        rest = {
            name: box_text(_placed_box(start, other.tensors[name].shape))
            for name, start in (saved_offsets(other) or {}).items()
            if (name, start) not in own and (name in names or (shards and _shard_of(other)))
        }
        if rest:
            raise CheckpointError(
                f"{headers[0].path}: is a part of a checkpoint, whose rest is missing: {path.name} holds "
                f"{in_words(rest)}. Give their folder, or all of them"
            )
    if shards and len(headers) == 1 and not any(any(start) for _, start in own):
        raise CheckpointError(
            f"{headers[0].path}: is the first of torch's shards, which do not say how many there are, and no other is "
            "here: fetch the rest. If one rank has saved all of it, call it model.safetensors"
        )
    numbers = {int(found[1]) for found in shards}
    if len(numbers) < max((int(found[2]) for found in shards), default=0):
        raise CheckpointError(
            f"{headers[0].path}: files of {shards[0][2]} numbers hold the checkpoint, only {brief(numbers)} are here"
        )


def _placed_box(start: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((a, a + n) for a, n in zip(start, shape, strict=True))


def _assembled(
    where: str, placed: Iterable[Placed], shapes: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
) -> tuple[dict[str, StoredTensor], tuple[tuple[StoredTensor, StoredPart], ...]]:
    """Return tensors (without shapes: as far as their parts reach), and the parts that are held once more."""
    parts: dict[str, list[Placed]] = {name: [] for name in shapes or ()}
    for p in placed:
        parts.setdefault(p.entry.name, []).append(p)
    tensors: dict[str, StoredTensor] = {}
    copies: list[tuple[StoredTensor, StoredPart]] = []
    for name, own in parts.items():
        if len({(p.entry.dtype, len(p.start)) for p in own}) > 1:
            raise CheckpointError(f"{where}: tensor {name!r}: its parts differ in dtype or number of dims")
        boxes = [_placed_box(p.start, p.entry.shape) for p in own]
        reach = tuple(max(stop for _, stop in dim) for dim in zip(*boxes, strict=True))
        dtype, shape = (own[0].entry.dtype, reach) if shapes is None else shapes[name]
        held: dict[Box, StoredPart] = {}
        others = []
        for p, box in sorted(zip(own, boxes, strict=True), key=lambda one: one[1]):
            part = StoredPart(p.file, p.entry, box, p.start, p.crc32)
            if volume(box) and held.setdefault(box, part) is not part:
                others.append(part)
        left = [full_box(shape)] if volume(full_box(shape)) else []
        for box in held:
            left = [rest for one in left for rest in subtract(one, box)]
        if left:
            raise CheckpointError(
                f"{where}: tensor {name!r} {list(shape)}: {box_text(left[0])} of it lies in none of the files "
                f"{brief(sorted({Path(p.file).name for p in own}))}: fetch the rest"
            )
        if sum(map(volume, held)) != volume(full_box(shape)):
            raise CheckpointError(
                f"{where}: tensor {name!r} {list(shape)}: parts of it overlap or lie outside of it, "
                f"{brief(list(map(box_text, held)))}: files of two checkpoints?"
            )
        tensors[name] = StoredTensor(name, dtype, shape, tuple(held.values()))
        copies += [(tensors[name], part) for part in others]
    return tensors, tuple(copies)


def _of_torch_folder(path: Path) -> Catalog:
    placed, shapes, left_out, stamps = read_folder(path)
    tensors, copies = _assembled(str(path), placed, shapes)
    note = f"{len(left_out)} entries are no tensors, and left out: {brief(left_out)}"
    return Catalog(
        str(path), tensors, {}, None, _digest(tensors), False, stamps, copies, "torch's distributed checkpoint",
        (note,) if left_out else (),
    )  # fmt: skip


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
    return Catalog(
        str(folder), tensors, said or {}, index.num_ranks, _digest(tensors), said is not None,
        form="sharded checkpoint",
    )  # fmt: skip


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


# ---- checksums of stored arrays, taken from what is read while it is read; by ISA-L, ten times as fast as zlib


def crc32(data: memoryview | bytes, value: int = 0) -> int:
    """Return the CRC-32 of bytes; `value` is that of the bytes before them."""
    from isal import isal_zlib

    return isal_zlib.crc32(data, value)


def joined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two runs of bytes, one behind the other, from the sum of each."""
    from isal import isal_zlib

    found: int = isal_zlib.crc32_combine(first, second, second_bytes)
    return found


class Tally:
    """The sums of what one rank has read of stored arrays."""

    def __init__(self) -> None:
        self._pieces: dict[Key, list[Piece]] = {}

    def add(self, key: Key, at: int, data: memoryview) -> None:
        """Add bytes of a stored array, which lie at `at` in its file."""
        pieces = self._pieces.setdefault(key, [])
        if pieces and pieces[-1][1] == at:  # goes on where the last one ended
            start, _, value = pieces[-1]
            pieces[-1] = start, at + len(data), crc32(data, value)
        else:
            pieces.append((at, at + len(data), crc32(data)))

    def pieces(self, key: Key) -> list[Piece]:
        """Return what was read of a stored array."""
        return self._pieces.get(key, [])


def chain(start: int, stop: int, pieces: Iterable[Piece]) -> list[Piece] | None:
    """Return those pieces that, one behind the other, make up bytes start to stop; None where they do not."""
    by_start: dict[int, Piece] = {}
    for piece in pieces:
        if piece[1] > by_start.get(piece[0], piece)[1] or piece[0] not in by_start:
            by_start[piece[0]] = piece
    found, at = [], start
    while at < stop:
        if at not in by_start:
            return None
        found.append(by_start[at])
        at = by_start[at][1]
    return found if at == stop else None


def sum_of(pieces: Iterable[Piece]) -> int:
    """Return the CRC-32 of pieces one behind the other."""
    value = 0
    for i, (first, end, own) in enumerate(pieces):
        value = joined(value, own, end - first) if i else own
    return value
