"""What is in a checkpoint and who holds it, from headers and the index; also of one that is damaged or lacks files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard import dtypes
from lowshard.argument import path as check_path
from lowshard.box import Box, full_box, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog, StoredPart, checked_header, stored_part
from lowshard.checkpoint.checkpoint_index import INDEX_NAME, Index, IndexedTensor, Part, read_index
from lowshard.checkpoint.header import FilePath, Header
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.unit_weights import SUMS
from lowshard.nearest import nearest
from lowshard.tiling import Tiling

_RANK_FILE = re.compile(r"shard-[0-9a-f]{12}-(\d{5})-of-\d{5}\.safetensors")
SHARDED, PLAIN = "sharded checkpoint", "plain checkpoint"


@dataclass(frozen=True)
class FileView:
    """One file."""

    name: str
    size_bytes: int
    """As the index says; of a plain file, its own."""
    problem: str = ""
    """What is wrong with it; empty where nothing was found."""


@dataclass(frozen=True)
class PartView:
    """One box of a tensor, in one file."""

    file: str
    key: str
    """Its name in the file."""
    box: Box
    size_bytes: int
    crc32: int | None
    problem: str = ""
    stored: StoredPart | None = None
    """Where it is read; None where its file cannot be."""


@dataclass(frozen=True)
class TensorView:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strategy: str | None
    parts: tuple[PartView, ...]
    tiling: Tiling | None = None
    digest: str | None = None
    """Of its content, as `lowshard.reshard.digest` has it: as the index says, or as it was found."""
    problem: str = ""
    """What is wrong with its content as a whole."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return prod(self.shape) * dtypes.get(self.dtype).itemsize_bytes

    @property
    def held(self) -> tuple[tuple[int, tuple[Box, ...]], ...]:
        """Each rank that held a part when the checkpoint was saved, and its boxes."""
        if self.tiling is None:
            return ()
        return tuple(
            (rank, tuple(tile.box for tile in self.tiling.tiles(rank)))
            for rank in self.tiling.ranks
            if self.tiling.local_elems(rank) or not prod(self.shape)
        )

    @property
    def cut(self) -> str:
        """How it lies over ranks (over files, where no index says who held what), in a few words."""
        held = self.held
        rows = [boxes for _, boxes in held] or [(part.box,) for part in self.parts]
        whole = full_box(self.shape)
        dims = sorted({d for row in rows for box in row for d, part in enumerate(box) if part != whole[d]})
        distinct = len(set(rows))
        copies = f" x{len(rows) // distinct}" if distinct and len(rows) > distinct else ""
        if dims:
            return f"dim {'+'.join(map(str, dims))} by {distinct}{copies}"
        alone = self.tiling is not None and len(held) == 1 < self.tiling.num_ranks
        return f"whole, rank {held[0][0]}" if alone else f"whole{copies}"


@dataclass(frozen=True)
class Overview:
    """A checkpoint."""

    where: str
    form: str
    num_ranks: int | None
    metadata: Mapping[str, str]
    files: tuple[FileView, ...]
    tensors: tuple[TensorView, ...]
    verified_bytes: int | None = None
    """Bytes that were compared with their checksums; None where nobody asked."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, one line each."""
        return (
            *(file.problem for file in self.files if file.problem),
            *(part.problem for tensor in self.tensors for part in tensor.parts if part.problem),
            *(tensor.problem for tensor in self.tensors if tensor.problem),
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def checksummed_bytes(self) -> int:
        """Bytes of tensors that have checksums."""
        return sum(p.size_bytes for t in self.tensors for p in t.parts if p.crc32 is not None)

    @property
    def digest(self) -> str | None:
        """One value for all tensors, `lowshard.reshard.model_digest`; None where the digest of one is not known."""
        found = {t.name: t.digest for t in self.tensors if t.digest is not None}
        return model_digest(found) if len(found) == len(self.tensors) else None

    def tensor(self, name: str) -> TensorView:
        """Return one tensor."""
        found = next((t for t in self.tensors if t.name == name), None)
        if found is None:
            hint = nearest(name, (t.name for t in self.tensors))
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is not in the checkpoint of {len(self.tensors)} tensors{hint}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "path": self.where,
            "form": self.form,
            "ranks": self.num_ranks,
            "bytes": self.size_bytes,
            "checksummed_bytes": self.checksummed_bytes,
            "verified_bytes": self.verified_bytes,
            "digest": self.digest,
            "problems": list(self.problems),
            "metadata": dict(self.metadata),
            "files": [
                {"name": f.name, "bytes": f.size_bytes, "problem": f.problem or None} for f in self.files
            ],
            "tensors": [tensor_json(tensor) for tensor in self.tensors],
        }


def tensor_json(tensor: TensorView) -> dict[str, Any]:
    """Return a tensor as plain data."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.size_bytes,
        "strategy": tensor.strategy,
        "cut": tensor.cut,
        "digest": tensor.digest,
        "parts": [
            {
                "file": p.file, "key": p.key, "box": [list(i) for i in p.box], "bytes": p.size_bytes,
                "crc32": None if p.crc32 is None else f"{p.crc32:08x}", "problem": p.problem or None,
            }
            for p in tensor.parts
        ],
        "held": [{"rank": r, "boxes": [[list(i) for i in box] for box in boxes]} for r, boxes in tensor.held],
    }  # fmt: skip


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a data file of a sharded checkpoint."""
    found = _RANK_FILE.fullmatch(file)
    return int(found[1]) if found else None


def look_at(path: FilePath) -> Overview:
    """Return what is in a checkpoint. No tensor data is read."""
    given = check_path(path, "a checkpoint is the path of a file or a folder", CheckpointError)
    folder = given.parent if given.name == INDEX_NAME else given
    if os.path.exists(folder / INDEX_NAME):
        return _of_index(folder, read_index(folder / INDEX_NAME))
    catalog = Catalog.open(given)
    files = tuple(FileView(Path(name).name, Path(name).stat().st_size) for name in catalog.files)
    tensors = tuple(
        TensorView(
            t.name, t.dtype, t.shape, None,
            tuple(PartView(Path(p.file).name, t.name, p.box, p.entry.size_bytes, None, "", p) for p in t.parts),
        )
        for t in catalog.tensors.values()
    )  # fmt: skip
    return Overview(catalog.where, PLAIN, None, catalog.metadata, files, tensors)


def _of_index(folder: Path, index: Index) -> Overview:
    headers: dict[str, Header] = {}
    files = []
    for name, said in index.files.items():
        problem = ""
        try:
            headers[name] = checked_header(folder, name, index)
        except CheckpointError as error:
            problem = str(error)
        files.append(FileView(name, said.size_bytes, problem))
    tensors = []
    for name, tensor in index.tensors.items():
        parts = tuple(_part(name, tensor, part, headers.get(part.file)) for part in tensor.parts)
        tensors.append(
            TensorView(name, tensor.dtype, tensor.shape, tensor.strategy, parts, tensor.tiling, tensor.digest)
        )
    return Overview(str(folder), SHARDED, index.num_ranks, index.metadata, tuple(files), tuple(tensors))


def _part(name: str, tensor: IndexedTensor, part: Part, header: Header | None) -> PartView:
    size_bytes = volume(part.box) * dtypes.get(tensor.dtype).itemsize_bytes
    stored, problem = None, ""
    if header is not None:
        try:
            stored = stored_part(name, tensor, part, header)
        except CheckpointError as error:
            problem = str(error)
    return PartView(part.file, part.key, part.box, size_bytes, part.crc32, problem, stored)


def verified(overview: Overview, names: Collection[str], progress: Callable[[int], object]) -> Overview:
    """Return an overview for which the data of tensors was read and compared with its checksums and digests."""
    done, summed, made = 0, 0, []
    with ByteSource(Catalog(overview.where, {}, {}, None, "")) as source:
        for view in overview.tensors:
            if view.name not in names:
                made.append(view)
                continue
            sums, parts = np.zeros(SUMS, np.uint32), []
            for part in view.parts:
                found = part
                if part.stored is not None:
                    try:
                        sums += source.verify_content(view.name, part.stored, view.shape)
                    except CheckpointError as error:
                        found = replace(part, problem=str(error))
                    done += part.size_bytes
                    summed += part.size_bytes if part.crc32 is not None else 0
                    progress(done)
                parts.append(found)
            whole = all(part.stored is not None and not part.problem for part in parts)
            made.append(_with_digest(replace(view, parts=tuple(parts)), sums if whole else None))
    return replace(overview, tensors=tuple(made), verified_bytes=summed)


def _with_digest(view: TensorView, sums: npt.NDArray[np.uint32] | None) -> TensorView:
    """Return a view with the digest of what was read of it, compared with the one that it is to have."""
    if sums is None:
        return view
    found = tensor_digest(view.dtype, view.shape, sums)
    if view.digest in (None, found):
        return replace(view, digest=found)
    return replace(
        view,
        problem=f"tensor {view.name!r}: its content has the digest {found}, the index says {view.digest}",
    )
