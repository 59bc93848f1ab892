"""Resharding a checkpoint on disk: from one cut to another, larger than memory, by any number of processes.

Each process makes some of the output files: it reads boxes of the input a few megabytes at a time and writes
them where they belong. Nothing travels between processes; the input's files are its only source.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief, in_words
from lowshard.block_format import MXFP8, BlockFormat
from lowshard.box import Box, box_text, full_box, row_major_parts, shape_of, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.catalog import Catalog
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.commit import Commit, together
from lowshard.checkpoint.delta_file import Delta, open_deltas
from lowshard.checkpoint.header import read_header
from lowshard.checkpoint.hf_index import SIZES, files_of_set
from lowshard.checkpoint.read_shares import Share, shares
from lowshard.comm import Communicator, agree
from lowshard.comm.agreement import control_of
from lowshard.content_hash import model_digest, tensor_digest, text_digest
from lowshard.errors import CheckpointError, ShardingError, VerificationError
from lowshard.kernels.unit_weights import SUMS
from lowshard.tiling import Tile, Tiling
from lowshard.weights.checkpoint_grid import Grid, in_rank_order, rank_tilings
from lowshard.weights.convert_place import check_target, own_file
from lowshard.weights.name_pattern import NamePatterns, Sizes
from lowshard.weights.patched_source import PatchedSource, check_deltas
from lowshard.weights.quantization import Quantization
from lowshard.weights.ruled import RuledGrid
from lowshard.weights.save import Item, ShardFile, commit_index, items_of
from lowshard.weights.scale_cut import weights_of_scales
from lowshard.weights.sharded_load import saved_tilings

MIN_MEMORY_BYTES = 256_000_000
_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "preprocessor_config.json",
)  # fmt: skip
FORMAT = MXFP8["e4m3"]
"""What `mxfp8` stores linear weights as."""


@dataclass(frozen=True)
class Settings:
    """One conversion. Values that a rank started elsewhere can be told as JSON."""

    source: str
    target: str
    strategies: str | None
    to: str
    was: str | None = None
    mxfp8: bool = False
    memory_bytes: int = 2_000_000_000
    num_heads: int | None = None
    num_kv_heads: int | None = None
    verify: bool = True
    to_rules: str | None = None
    from_rules: str | None = None
    merged: bool = False
    """Whole tensors: one plain file where the target ends in .safetensors, else files of at most file_bytes and
    an index of Hugging Face's."""
    file_bytes: int = 5_000_000_000
    deltas: tuple[str, ...] = ()
    """Deltas that are applied on the way. Without `to` and `merged` the target then lies as the source does, whose
    place it may take."""

    @property
    def into_one_file(self) -> bool:
        """Whether the target is one plain file."""
        return self.merged and self.target.endswith(".safetensors")

    @property
    def keeps_cut(self) -> bool:
        """Whether the target lies as the source does."""
        return bool(self.deltas) and not self.to and not self.merged

    def to_json(self) -> str:
        """Return one line that `from_json` reads."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        given = ((f, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{f.name} {brief(v)}" for f, v in given if v not in (f.default, None, ""))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        given = json.loads(text)
        return cls(**given | {"deltas": tuple(given["deltas"])})


@dataclass(frozen=True)
class ConvertReport:
    """What was done, equal on all ranks."""

    tensors: int
    quantised: int
    files: int
    input_bytes: int
    """Of the input's tensors."""
    checksummed_bytes: int
    """Of the input's tensors that were compared with checksums of the input. A plain safetensors file has none."""
    read_bytes: int
    """Of the input, to write it and once more to compare."""
    written_bytes: int
    verified_bytes: int
    """Of the output that was read again and compared with the input, read a second time."""
    digest: str
    """Of the output's tensors, `model_digest`."""
    equal_digests: int
    """Tensors whose digest was compared with what the input, or the last delta, says of it."""
    applied: int = 0
    """Deltas."""
    version: int | None = None
    """Of the last of them."""


@dataclass(frozen=True)
class ConvertPlan:
    """Which boxes go into which output file."""

    catalog: Catalog
    num_ranks: int
    tilings: Mapping[str, Tiling]
    strategies: Mapping[str, str]
    quantised: Mapping[str, BlockFormat]
    """Of the tensors that are quantised, how they are stored."""
    merged: bool = False
    """Whole tensors in each file, those without elements too."""
    deltas: tuple[Delta, ...] = ()
    place: str = ""
    """The folder or file that is put in place: the settings' target, or the one file of a plain folder that is that."""

    @classmethod
    def of(cls, settings: Settings) -> ConvertPlan:
        """Return the plan of a conversion. No tensor data is read."""
        sizes = _sizes(settings)
        catalog = _source(settings, sizes)
        with _as_damage(*settings.deltas):
            deltas = open_deltas(settings.deltas) if settings.deltas else ()
        if settings.keeps_cut and _is_of_whole_tensors(catalog):
            target_path = own_file(settings.source, settings.target, catalog, settings.mxfp8)
            settings = replace(settings, merged=True, target=target_path)
        check_target(
            settings.source, settings.target, catalog, deltas, is_file=settings.into_one_file,
            merged_bytes=settings.file_bytes if settings.merged else None, mxfp8=settings.mxfp8,
        )  # fmt: skip
        if settings.memory_bytes < MIN_MEMORY_BYTES:
            raise CheckpointError(
                f"--memory is at least {MIN_MEMORY_BYTES // 10**6}MB (Python and its libraries need half of it), got "
                f"{settings.memory_bytes / 1e6:g}MB"
            )
        check_deltas(deltas, catalog, settings.memory_bytes)
        shapes = {name: (t.dtype, t.shape) for name, t in catalog.tensors.items()}
        quantised: dict[str, BlockFormat] = {}
        if settings.mxfp8:
            scales = weights_of_scales({name: shape for name, (_, shape) in shapes.items()})
            linear = [n for n, (dtype, shape) in sorted(shapes.items()) if _is_linear(n, dtype, shape)]
            linear = [n for n in linear if n not in scales]
            block = FORMAT.block[-1]
            quantised = {n: FORMAT for n in linear if shapes[n][1][-1] % block == 0}
            if linear and not quantised:
                raise ShardingError(
                    f"{catalog.where}: --mxfp8 quantises linear weights whose last dim is a multiple of {block}, and "
                    f"none is: {linear[0]} is {list(shapes[linear[0]][1])}; pad them, or leave --mxfp8 out"
                )
        for name, form in quantised.items():
            if name + form.suffix in shapes:
                raise ShardingError(
                    f"{catalog.where}: the scales of {name!r} as MXFP8 are called {name + form.suffix!r}, and the "
                    "checkpoint has another tensor of that name: rename that one, or reshard without --mxfp8"
                )
        made: Mapping[str, tuple[Tiling, object]]
        target: Grid | RuledGrid
        if settings.merged:
            made = _whole_files(shapes, quantised, settings)
            count = 1 + max((min(t.ranks) for t, _ in made.values()), default=0)
            tilings = {name: tiling.widened(count) for name, (tiling, _) in made.items()}
            said = {name: str(note) for name, (_, note) in made.items()}
            return cls(
                catalog, count, tilings, said, quantised, merged=True, deltas=deltas, place=settings.target
            )
        if settings.keeps_cut:
            assert catalog.num_ranks is not None  # else it is merged
            kept = saved_tilings(catalog, catalog.num_ranks)
            said = {name: tensor.strategy or "as before" for name, tensor in catalog.tensors.items()}
            for name, form in quantised.items():
                kept[name].stored(name, form)  # no cut goes through a block
            return cls(
                catalog, catalog.num_ranks, kept, said, quantised, deltas=deltas, place=settings.target
            )
        if settings.to_rules is not None:
            target = RuledGrid.parse(settings.to_rules, settings.to)
            made = target.tilings(shapes)
            for name, form in quantised.items():
                made[name][0].stored(name, form)  # no cut goes through a block
        else:
            target = Grid.parse(settings.to)
            made = by_strategy = target.tilings(shapes, _patterns(settings), sizes)
            for name, form in quantised.items():
                strategy, shape = by_strategy[name][1], shapes[name][1]
                for index in range(strategy.num_devices):
                    try:
                        Quantization.of(form).pieces(strategy, shape, index)
                    except ShardingError as error:
                        raise ShardingError(f"{name} {list(shape)}: {error}") from error
        return cls(
            catalog, target.num_ranks, {n: t for n, (t, _) in made.items()},
            {n: str(s) for n, (_, s) in made.items()}, quantised, deltas=deltas, place=settings.target,
        )  # fmt: skip

    def items(self, rank: int) -> list[Item]:
        """Return what goes into the output file of a rank; a quantised tensor's codes are followed by its scales."""
        boxes: list[tuple[str, str, Box]] = []
        for share in self._shares.get(rank, ()):
            form, tiling = self.quantised.get(share.name), self.tilings[share.name]
            if form is None:
                boxes.append((share.name, tiling.dtype, share.box))
                continue
            stored = form.stored(share.name, tiling.shape)
            for part, box in form.boxes(share.name, share.box, tiling.shape).items():
                boxes.append((part, stored[part].dtype, box))
        if self.merged:
            boxes += [
                (name, tiling.dtype, full_box(tiling.shape))
                for name, (tiling, _) in self.saved.items()
                if rank in tiling and not tiling.size_elems
            ]
        return items_of(boxes, {name: tiling.shape for name, (tiling, _) in self.saved.items()})

    def values(self, item: Item) -> Box:
        """Return the box of the input that an item is made of; of a quantised tensor, from its codes."""
        form = self.quantised.get(item.name)
        return item.box if form is None else form.code_values(item.box)

    @cached_property
    def _shares(self) -> dict[int, list[Share]]:
        """By rank, what it writes of each tensor; of quantised ones whole blocks, as their scales are shared out."""
        grids = {
            name: tiling.stored(name, form)[name + form.suffix]
            if (form := self.quantised.get(name))
            else tiling
            for name, tiling in self.tilings.items()
        }
        found: dict[int, list[Share]] = {}
        for share in shares(grids):
            if form := self.quantised.get(share.name):
                share = replace(share, box=form.values(share.box, self.tilings[share.name].shape))
            found.setdefault(share.rank, []).append(share)
        return found

    @cached_property
    def saved(self) -> dict[str, tuple[Tiling, str]]:
        """Which rank holds what of every output tensor, and its strategy, by name."""
        found: dict[str, tuple[Tiling, str]] = {}
        for name, tiling in self.tilings.items():
            said = self.strategies[name]
            form = self.quantised.get(name)
            if form is None:
                found[name] = (tiling, said)
                continue
            for part, stored in tiling.stored(name, form).items():
                found[part] = (stored, said if part == name else f"scales of {name}")
        return found

    def held(self, tiling: Tiling) -> Tiling:
        """Return which ranks hold a tensor; files of whole tensors are no ranks."""
        return Tiling.whole(tiling.shape, tiling.dtype) if self.merged else tiling

    def in_words(self, settings: Settings) -> str:
        """Return what tells a conversion from another one, for a message."""
        return f"{settings}, a checkpoint {self.catalog.digest[:8]}, {in_words(self.strategies)}"

    @property
    def metadata(self) -> dict[str, str]:
        """Text by text, as the input has it."""
        return {key: value for key, value in self.catalog.metadata.items() if key not in SIZES}

    @property
    def total_bytes(self) -> int:
        """Bytes of the input."""
        return self.catalog.size_bytes


def convert(
    settings: Settings, comm: Communicator, progress: Callable[[int, int], None] | None = None
) -> ConvertReport:
    """Reshard a checkpoint on disk and put the result in place as a whole."""
    comm = control_of(comm)
    plan = together(comm, settings.target, lambda: ConvertPlan.of(settings), "reshard")
    # Hosts may have other files under the same paths: a checkpoint, patterns, a config.json.
    asked = [settings.to_json(), plan.catalog.digest, plan.num_ranks, dict(plan.strategies)]
    agree(comm, text_digest(json.dumps(asked)), None, "reshard", lambda: plan.in_words(settings))
    worker = together(comm, plan.place, lambda: _Worker(plan, settings, comm, progress), "reshard")
    try:
        target = Path(plan.place)
        together(comm, target, worker.verify_input, "reshard")
        if plan.deltas:
            worker.patched.check(comm, lambda step: together(comm, target, step, "reshard"))
        single = plan.merged and plan.place.endswith(".safetensors")
        with Commit(target if single else target / INDEX_NAME, comm, "reshard") as commit:
            rows = commit.step(lambda: worker.write(commit))
            digests = worker.shared_digests()
            compared = commit.step(lambda: _compare_digests(plan, worker.patched, digests))
            if settings.verify:
                commit.step(worker.verify_output)
            if commit.path == commit.target:
                commit.commit()
            else:
                saved = {n: (plan.held(tiling), said) for n, (tiling, said) in plan.saved.items()}
                commit_index(
                    commit, rows, saved, 1 if plan.merged else plan.num_ranks, plan.metadata,
                    lambda: _copy_companions(Path(settings.source), target, commit.claim),
                )  # fmt: skip
    finally:
        worker.source.close()
    mine = [
        len(rows),
        worker.checksummed_bytes,
        worker.read_bytes,
        worker.written_bytes,
        worker.verified_bytes,
    ]
    sums = np.array(mine, np.int64)
    comm.all_reduce(sums, sums)
    files, checksummed, read, written, verified = map(int, sums)
    chain = worker.patched.chain
    return ConvertReport(
        len(plan.saved), len(plan.quantised), files, plan.total_bytes, checksummed, read, written, verified,
        model_digest(digests), compared, len(chain), chain[-1].version if chain else None,
    )  # fmt: skip


class _Worker:
    """One process's output files."""

    def __init__(
        self,
        plan: ConvertPlan,
        settings: Settings,
        comm: Communicator,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.plan, self.comm = plan, comm
        self.source = ByteSource(plan.catalog)
        self.checksummed_bytes = self.read_bytes = self.written_bytes = self.verified_bytes = 0
        # Values, their float32 form and codes of a chunk are alive at once.
        spare = settings.memory_bytes - MIN_MEMORY_BYTES // 2
        self._chunk_bytes = max(1 << 16, min(spare // 16, 32 << 20))
        self.patched = PatchedSource(self.source, plan.deltas, spare // 4, self._advance)
        self._sums: dict[str, np.ndarray] = {name: np.zeros(SUMS, np.uint32) for name in plan.saved}
        self._files: list[tuple[Path, list[Item], Mapping[str, Any]]] = []
        ranks = range(comm.rank, plan.num_ranks, comm.size)
        self._work = [(rank, items) for rank in ranks if (items := plan.items(rank))]
        stored = {
            p.key: (n, p) for n, t in plan.catalog.tensors.items() for p in t.parts if p.crc32 is not None
        }
        self._checked = list(stored.values())[comm.rank :: comm.size]
        self._copies = plan.catalog.copies[comm.rank :: comm.size] if settings.verify else ()
        self._progress = progress if comm.rank == 0 else None
        self._done = 0
        self._total = (
            sum(part.entry.size_bytes for _, part in self._checked)
            + 2 * sum(volume(part.box) * self._width(tensor.name) for tensor, part in self._copies)
            + self.patched.most_checked_bytes(comm.rank, comm.size)
            + (2 if settings.verify else 1)
            * sum(
                volume(plan.values(item)) * self._width(item.name)
                for _, items in self._work
                for item in items
                if self._is_base(item)
            )
        )

    def _advance(self, done_bytes: int) -> None:
        self._done += done_bytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def verify_input(self) -> None:
        """Compare this process's part of the input's checksums, and of what several files of ranks hold."""
        for name, part in self._checked:
            self.checksummed_bytes += self.source.verify(name, part)
            self._advance(part.entry.size_bytes)
        for tensor, part in self._copies:
            for box in row_major_parts(part.box, self._chunk_bytes // self._width(tensor.name)):
                first, other = (np.empty(shape_of(box), dtypes.get(tensor.dtype).numpy) for _ in range(2))
                self.source.read(tensor.name, box, first)
                self.source.read_part(tensor.name, part, part.local(box), other)
                if first.tobytes() != other.tobytes():
                    taken = next(p.file for p in tensor.parts if p.box == part.box)
                    raise CheckpointError(
                        f"{part.file}: tensor {tensor.name!r}: {box_text(box)} is not what {taken} has, and --from and "
                        "the strategy say that both hold it: give others, or --no-verify to take it from the latter"
                    )
                self._advance(2 * first.nbytes)

    def write(self, commit: Commit) -> list[dict[str, Any]]:
        """Write this process's files and return their rows of the index."""
        work, rows = self._work, []
        single = commit.claim if commit.path == commit.target else None
        if single is not None and self.comm.rank == 0:
            work = work or [(0, [])]  # a checkpoint without tensors is a file too
        for rank, items in work:
            path = single or commit.data_file(rank, self.plan.num_ranks)
            with ShardFile(path, items, self.plan.metadata, commit.fd if single else None) as file:
                for key, _, array in self._content(items):
                    file.put(key, array)
                    self.written_bytes += array.nbytes
                rows.append(file.finish())
                for item in items:
                    self._sums[item.name] += file.sums(item.key)
            self._files.append((file.path, items, file.entries))
        return rows

    def shared_digests(self) -> dict[str, str]:
        """Return the digests of all that was written."""
        sums = np.array(list(self._sums.values()), np.uint32).reshape(-1)
        if sums.size:
            self.comm.all_reduce(sums, sums)
        rows = sums.reshape(-1, SUMS)
        return {
            name: tensor_digest(tiling.dtype, tiling.shape, row)
            for (name, (tiling, _)), row in zip(self.plan.saved.items(), rows, strict=True)
        }

    def verify_output(self) -> None:
        """Read every file again and compare it with the input."""
        for path, items, entries in self._files:
            with path.open("rb") as file:
                # From the disk, not from memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                at = {item.key: entries[item.key].start for item in items}
                for key, box, array in self._content(items):
                    file.seek(at[key])
                    raw = array.reshape(-1).view(np.uint8)
                    if file.read(raw.size) != raw.tobytes():
                        raise VerificationError(
                            f"{path}: tensor {key!r}: box {box} is not what {self.plan.catalog.where} holds"
                        )
                    at[key] += raw.size
                    self.verified_bytes += raw.size

    def _is_base(self, item: Item) -> bool:
        return item.name in self.plan.tilings

    def _width(self, name: str) -> int:
        return self.plan.tilings[name].itemsize_bytes

    def _content(self, items: Sequence[Item]) -> Iterator[tuple[str, Box, np.ndarray]]:
        """Yield what items of a file hold, made of the input: key, box of the input, and array, each small enough."""
        for number, item in enumerate(items):
            if not self._is_base(item):
                continue
            limit = max(1, self._chunk_bytes // self._width(item.name))
            for box in row_major_parts(self.plan.values(item), limit, int(item.name in self.plan.quantised)):
                for place, array in enumerate(self._converted(item, box)):
                    yield items[number + place].key, box, array

    def _converted(self, item: Item, box: Box) -> list[np.ndarray]:
        """Return a box of the input as it goes into the output: itself, or MXFP8 codes and scales."""
        tiling = self.plan.tilings[item.name]
        values = np.empty(shape_of(box), dtypes.get(tiling.dtype).numpy)
        self.source.read(item.name, box, values)
        self.patched.apply(item.name, box, values)
        self.read_bytes += values.nbytes
        self._advance(values.nbytes)
        if item.name not in self.plan.quantised:
            return [values]
        from lowshard.kernels import quantize_mxfp8

        made = quantize_mxfp8(values)
        return [made.data, made.scale]


def _is_of_whole_tensors(catalog: Catalog) -> bool:
    """Return whether each tensor lies whole in a file, of ranks that are none: files, then, of a size that is given."""
    return catalog.num_ranks is None or (
        catalog.num_ranks == 1 and all(len(tensor.parts) < 2 for tensor in catalog.tensors.values())
    )


def _compare_digests(plan: ConvertPlan, patched: PatchedSource, digests: Mapping[str, str]) -> int:
    """Compare what was written with what the input, or its deltas, say of it; return of how many tensors."""
    compared = 0
    for name, tensor in plan.catalog.tensors.items():
        said = patched.digests.get(name, tensor.digest)
        if said is None or name in plan.quantised:
            continue
        if digests[name] != said:
            raise VerificationError(
                f"{plan.catalog.where}: tensor {name!r}: was written with the digest {digests[name]}, the input's is "
                f"{said}: its data is damaged, or changed meanwhile"
            )
        compared += 1
    return compared


def _whole_files(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    quantised: Mapping[str, BlockFormat],
    settings: Settings,
) -> dict[str, tuple[Tiling, object]]:
    """Return tilings over as many "ranks" as there are files, each tensor whole on one, in the order of the input."""
    found: dict[str, tuple[Tiling, object]] = {}
    number, filled_bytes = 0, 0
    for name, (dtype, shape) in shapes.items():
        form = quantised.get(name)
        stored = {name: (dtype, shape)} if form is None else form.stored(name, shape)
        size_bytes = sum(prod(s) * dtypes.get(d).itemsize_bytes for d, s in stored.values())
        if filled_bytes and filled_bytes + size_bytes > settings.file_bytes and not settings.into_one_file:
            number, filled_bytes = number + 1, 0
        filled_bytes += size_bytes
        tile = Tile(full_box(shape), full_box(shape))
        tiles = (*[()] * number, (tile,))
        found[name] = (Tiling(shape, dtype, tiles, (*[None] * number, shape)), "whole in one file")
    return found


def _copy_companions(source: Path, target: Path, private: Path) -> None:
    """Copy the model's description along, which the next reshard asks for the number of heads."""
    # Each file is whole at once: it is written under a private name, which the next save clears away if it is left.
    folder = source if os.path.isdir(source) else source.parent
    for name in _COMPANIONS:
        if os.path.isfile(folder / name):
            with suppress(OSError):  # the weights are what counts
                shutil.copyfile(folder / name, private)
                os.replace(private, target / name)


def _is_linear(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a linear weight: a float matrix (or stacked ones), no embedding, head or router."""
    parts = name.split(".")
    whole = {"embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "embeddings", "pooler"}
    return (
        len(shape) >= 2
        and dtype in ("float32", "bfloat16", "float16")
        and parts[-1] != "bias"
        and not whole & set(parts)
    )


class _SizesBeside(Sizes):
    """Sizes of the config.json beside a checkpoint, which is read when a strategy asks for one."""

    def __init__(self, folder: Path) -> None:
        object.__setattr__(self, "_folder", folder)

    @cached_property
    def _said(self) -> Sizes:
        folder: Path = self.__dict__["_folder"]
        return Sizes.from_config(folder) if os.path.exists(folder / "config.json") else Sizes()

    @property
    def num_heads(self) -> int | None:
        """Query heads."""
        return self._said.num_heads

    @property
    def num_kv_heads(self) -> int | None:
        """Key-value heads."""
        return self._said.num_kv_heads


def _sizes(settings: Settings) -> Sizes:
    if settings.num_heads is None and settings.num_kv_heads is not None:
        raise ShardingError("--kv-heads goes with --heads; without both, config.json beside IN has them")
    if settings.num_heads is not None:
        return Sizes(settings.num_heads, settings.num_kv_heads)
    source = Path(settings.source)
    return _SizesBeside(source if os.path.isdir(source) else source.parent)


@contextmanager
def _as_damage(*paths: str) -> Iterator[None]:
    """Have the command end with exit code 1 where what is there cannot be read, as `lowshard inspect` does."""
    try:
        yield
    except CheckpointError as error:
        if all(map(os.path.exists, paths)):
            error.exit_code = 1
        raise


def _patterns(settings: Settings) -> NamePatterns:
    if settings.strategies is None:
        raise ShardingError(
            "cuts come from name patterns (--strategies llama.yaml) or from a mesh-and-rule file (--to-rules, and "
            "--from-rules for files of ranks without an index); neither was given"
        )
    return NamePatterns.load(settings.strategies)


def _source(settings: Settings, sizes: Sizes) -> Catalog:
    """Return the input's catalog; files of ranks without an index are understood by `was`."""
    path = Path(settings.source)
    was: Grid | RuledGrid | None = None
    if settings.from_rules is not None:
        if settings.was is None:
            raise ShardingError("--from-rules needs the sizes of its mesh axes: --from fsdp=4,expert=2")
        was = RuledGrid.parse(settings.from_rules, settings.was)
    elif settings.was is not None:
        was = Grid.parse(settings.was)
    files = (
        in_rank_order(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
        if os.path.isdir(path)
        else []
    )
    if (count := files_of_set(path.name)) > 1 and os.path.isfile(path):
        raise CheckpointError(
            f"{path}: this is one of {count} files that hold a checkpoint together: pass their folder"
        )
    indexed = os.path.isdir(path) and any(path.glob("*.index.json"))
    if was is None or was.num_ranks == 1 or indexed or not files:
        with _as_damage(settings.source):
            catalog = Catalog.open(path)
        if was is not None and was.num_ranks != (catalog.num_ranks or 1):
            found = f"was saved by {catalog.num_ranks} ranks" if catalog.num_ranks else "holds whole tensors"
            raise CheckpointError(f"{path}: {found}, --from {was} has {was.num_ranks} ranks: leave it out")
        return catalog
    if len(files) != was.num_ranks:
        raise CheckpointError(
            f"{path}: --from {was} means {was.num_ranks} files, one a rank, or an index; there are {len(files)}"
        )
    with _as_damage(settings.source):
        if any("lowshard" in read_header(file).metadata for file in files):
            raise CheckpointError(
                f"{path}: the files hold slices of a sharded checkpoint, and {INDEX_NAME}, which says of what, is "
                "missing: put it back"
            )
    if isinstance(was, RuledGrid):
        return Catalog.of_rank_files(files, was.rank_tilings(files))
    return Catalog.of_rank_files(files, rank_tilings(files, was, _patterns(settings), sizes))
