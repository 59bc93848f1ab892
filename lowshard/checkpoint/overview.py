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

from lowshard import dtypes
from lowshard.argument import path as check_path
from lowshard.box import Box, full_box, shape_of, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import (
    Catalog,
    StoredPart,
    StoredTensor,
    checked_header,
    index_catalog,
    part_entry,
)
from lowshard.checkpoint.checkpoint_index import INDEX_NAME, Part, read_index
from lowshard.checkpoint.header import FilePath, Header, TensorEntry, header_box
from lowshard.content_hash import model_digest, tensor_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.unit_weights import SUMS

_RANK_FILE = re.compile(r"shard-[0-9a-f]{12}-(\d{5})-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Overview:
    """A checkpoint and what is wrong with it."""

    catalog: Catalog
    """All that the index names; a part whose file cannot be read has an entry of its size at byte 0."""
    files: Mapping[str, int]
    """Bytes of each file by path: as the index says, else its own."""
    problems: Mapping[tuple[str, str], str]
    """By (path, "") of a file, (path, name in the file) of a part, and ("", name) of a tensor's content."""
    verified_bytes: int | None = None
    """Bytes that were compared with their checksums; None where nobody asked."""

    @property
    def form(self) -> str:
        """Whether ranks saved it, each a part."""
        return "plain checkpoint" if self.catalog.num_ranks is None else "sharded checkpoint"

    @property
    def checksummed_bytes(self) -> int:
        """Bytes of tensors that have checksums."""
        parts = (p for t in self.catalog.tensors.values() for p in t.parts)
        return sum(p.entry.size_bytes for p in parts if p.crc32 is not None)

    @property
    def digest(self) -> str | None:
        """One value for all tensors, `lowshard.reshard.model_digest`; None where the digest of one is not known."""
        found = self.catalog.digests
        return None if found is None else model_digest(found)

    def problem(self, part: StoredPart) -> str | None:
        """Return what is wrong with a part."""
        return self.problems.get((part.file, part.entry.name))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "path": self.catalog.where,
            "form": self.form,
            "ranks": self.catalog.num_ranks,
            "bytes": self.catalog.size_bytes,
            "checksummed_bytes": self.checksummed_bytes,
            "verified_bytes": self.verified_bytes,
            "digest": self.digest,
            "problems": list(self.problems.values()),
            "metadata": dict(self.catalog.metadata),
            "files": [
                {"name": Path(path).name, "bytes": size, "problem": self.problems.get((path, ""))}
                for path, size in self.files.items()
            ],
            "tensors": [self.tensor_json(tensor) for tensor in self.catalog.tensors.values()],
        }

    def tensor_json(self, tensor: StoredTensor) -> dict[str, Any]:
        """Return a tensor as plain data."""
        return {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.said_shape),
            "bytes": sum(p.entry.size_bytes for p in tensor.parts),
            "strategy": tensor.strategy,
            "cut": split_text(tensor),
            "digest": tensor.digest,
            "parts": [
                {
                    "file": Path(p.file).name, "key": p.entry.name,
                    "box": [list(i) for i in header_box(tensor.dtype, p.box)],
                    "bytes": p.entry.size_bytes, "crc32": None if p.crc32 is None else f"{p.crc32:08x}",
                    "problem": self.problem(p),
                }
                for p in tensor.parts
            ],
            "held": [
                {"rank": rank, "boxes": [[list(i) for i in header_box(tensor.dtype, box)] for box in boxes]}
                for rank, boxes in held(tensor).items()
            ],
        }  # fmt: skip


def held(tensor: StoredTensor) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of each rank that held a part when the checkpoint was saved."""
    tiling = tensor.tiling
    return {
        rank: tuple(tile.box for tile in tiling.tiles(rank))
        for rank in (() if tiling is None else tiling.ranks)
        if tiling is not None and (tiling.local_elems(rank) or not prod(tensor.shape))
    }


def split_text(tensor: StoredTensor) -> str:
    """Return in a few words how a tensor is sharded over ranks (over files, where no index says who held what)."""
    ranks = held(tensor)
    rows = list(ranks.values()) or [(part.box,) for part in tensor.parts]
    whole = full_box(tensor.shape)
    dims = sorted({d for row in rows for box in row for d, part in enumerate(box) if part != whole[d]})
    distinct = len(set(rows))
    copies = f" x{len(rows) // distinct}" if distinct and len(rows) > distinct else ""
    if dims:
        return f"dim {'+'.join(map(str, dims))} by {distinct}{copies}"
    alone = tensor.tiling is not None and len(ranks) == 1 < tensor.tiling.num_ranks
    return f"whole, rank {next(iter(ranks))}" if alone else f"whole{copies}"


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a data file of a sharded checkpoint."""
    found = _RANK_FILE.fullmatch(Path(file).name)
    return int(found[1]) if found else None


def look_at(path: FilePath) -> Overview:
    """Return what is in a checkpoint. No tensor data is read."""
    given = check_path(path, "a checkpoint is the path of a file or a folder", CheckpointError)
    folder = given.parent if given.name == INDEX_NAME else given
    if not os.path.exists(folder / INDEX_NAME):
        catalog = Catalog.open(given)
        return Overview(catalog, {file: os.stat(file).st_size for file in catalog.stamps}, {})
    index = read_index(folder / INDEX_NAME)
    problems: dict[tuple[str, str], str] = {}
    headers: dict[str, Header] = {}
    for name in index.files:
        try:
            headers[name] = checked_header(folder, name, index)
        except CheckpointError as error:
            problems[str(folder / name), ""] = str(error)

    def entry_of(name: str, part: Part) -> TensorEntry:
        dtype = index.tensors[name].dtype
        try:
            if part.file in headers:
                return part_entry(name, part, index, headers[part.file])
        except CheckpointError as error:
            problems[str(folder / part.file), part.key] = str(error)
        return TensorEntry(
            part.key, dtype, shape_of(part.box), 0, volume(part.box) * dtypes.get(dtype).itemsize_bytes
        )

    catalog = index_catalog(folder, index, entry_of)
    return Overview(catalog, {str(folder / n): f.size_bytes for n, f in index.files.items()}, problems)


def verified(overview: Overview, names: Collection[str], progress: Callable[[int], object]) -> Overview:
    """Return an overview for which the data of tensors was read and compared with its checksums and digests."""
    done, summed, problems, tensors = 0, 0, dict(overview.problems), dict(overview.catalog.tensors)
    with ByteSource(overview.catalog) as source:
        for name in names:
            tensor, sums, is_whole = tensors[name], np.zeros(SUMS, np.uint32), True
            for part in tensor.parts:
                if (part.file, "") in problems or overview.problem(part):
                    is_whole = False
                    continue
                try:
                    sums += source.verify_content(name, part, tensor.shape)
                except CheckpointError as error:
                    problems[part.file, part.entry.name], is_whole = str(error), False
                done += part.entry.size_bytes
                summed += part.entry.size_bytes if part.crc32 is not None else 0
                progress(done)
            if not is_whole:
                continue
            found = tensor_digest(tensor.dtype, tensor.shape, sums)
            try:
                tensor.check_digest(found, overview.catalog.where)
                tensors[name] = replace(tensor, digest=found)
            except CheckpointError as error:
                problems["", name] = str(error)
    return replace(
        overview, catalog=replace(overview.catalog, tensors=tensors), problems=problems, verified_bytes=summed
    )
