"""Resharding a checkpoint on disk: from one sharding to another, larger than memory, by any number of processes.

Each process makes some of the output files: it reads boxes of the input a few megabytes at a time and writes
them where they belong. Nothing travels between processes; the input's files are its only source.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import in_words, whole
from lowshard.argument import items as as_items
from lowshard.argument import path as check_path
from lowshard.box import Box, box_text, row_major_parts, shape_of, volume
from lowshard.checkpoint.bytesource import ByteSource
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.commit import Commit
from lowshard.checkpoint.delta_file import DeltaChain
from lowshard.checkpoint.header import FilePath
from lowshard.comm import Communicator, collective_step, loopback
from lowshard.comm.agreement import control_of
from lowshard.content_hash import model_digest, tensor_digest, text_digest
from lowshard.errors import CheckpointError, VerificationError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS
from lowshard.tiling import Tiling
from lowshard.weights.convert_plan import (
    MIN_MEMORY_BYTES,
    ConvertPlan,
    Settings,
    as_damage,
    config_of,
    config_text,
    mxfp8_scales,
)
from lowshard.weights.save import Item, ShardFile, commit_index, commit_plain

_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class ConvertReport:
    """What was done, equal on all ranks."""

    tensors: int
    quantised: int
    """Tensors of the output that are MXFP8."""
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
    notes: tuple[str, ...] = ()
    """What is to be known of the input, such as what is left out."""


def apply_deltas(
    base: FilePath, deltas: Iterable[FilePath], path: FilePath, comm: Communicator | None = None, *,
    memory_bytes: int = 2_000_000_000,
) -> ConvertReport:  # fmt: skip
    """Put a checkpoint in place that a chain of deltas makes of a base: all of them are applied, or none is.

    Collective: all ranks of the communicator call this, with the same arguments. The base is compared with what the
    first delta stands on, each delta with the one before it, and what was written with the last digest of each tensor,
    before it is put in place; it is also read again. Deltas that the base has already are left out. The new checkpoint
    lies as the base does (sharded alike, or whole tensors in one file or a folder).

    Args:
        base: a checkpoint of any form.
        deltas: paths of deltas, or of folders of them.
        path: the folder or file of the new checkpoint; it may be the base's.
        comm: the processes that share the work; None for this one.
        memory_bytes: the most memory of a process.

    Raises:
        CheckpointError: the base is another, a link is missing, a delta is damaged or of another model; nothing has
            changed then. Or the target cannot be written.
        VerificationError: what was written is not what was read.
        NotDurable: the new checkpoint is in place, but its folder could not be synced.
    """
    if comm is None:
        with loopback(1)[0] as alone:
            return apply_deltas(base, deltas, path, alone, memory_bytes=memory_bytes)
    with collective_step(comm, "apply_deltas", path=path):
        rule = "deltas are a sequence of paths, at least one"
        given = tuple(
            os.fspath(check_path(d, rule, CheckpointError)) for d in as_items(deltas, rule, CheckpointError)
        )
        if not given:
            raise CheckpointError(f"{rule}, got none")
        source, target = (
            os.fspath(check_path(p, "a checkpoint is the path of a file or a folder", CheckpointError))
            for p in (base, path)
        )
        number = whole(memory_bytes, "memory_bytes is a number of bytes", CheckpointError)
        settings = Settings(source, target, None, "", memory_bytes=number, deltas=given)
    return convert(settings, comm)


def convert(
    settings: Settings, comm: Communicator, progress: Callable[[int, int], None] | None = None
) -> ConvertReport:
    """Reshard a checkpoint on disk and put the result in place as a whole.

    Collective: all ranks of the communicator call this, with the same settings. `progress` is called on rank 0 with the
    bytes of its part that it has read, and all that it will read.
    """
    comm = control_of(comm)
    with collective_step(comm, "reshard", path=settings.target) as step:
        plan = ConvertPlan.of(settings)
        # Hosts may have other files under the same paths: a checkpoint, patterns, a config.json.
        asked = [settings.to_json(), plan.catalog.digest, plan.num_ranks, dict(plan.strategies)]
        step.digest = text_digest(json.dumps(asked))
        step.said = lambda: f"{settings}, a checkpoint {plan.catalog.digest[:8]}, {in_words(plan.strategies)}"
    with as_damage(), ByteSource(plan.catalog) as source:  # the request was right
        return _Worker(plan, settings, comm, source, progress).run()


class _Worker:
    """One process's output files."""

    def __init__(
        self, plan: ConvertPlan, settings: Settings, comm: Communicator, source: ByteSource,
        progress: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        self._plan, self._settings, self._comm, self._source = plan, settings, comm, source
        self._counts = dict.fromkeys(("files", "checksummed", "read", "written", "verified"), 0)
        # Values, their float32 form and codes of a chunk are alive at once.
        self._spare_bytes = settings.memory_bytes - MIN_MEMORY_BYTES // 2
        self._chunk_bytes = max(1 << 16, min(self._spare_bytes // 16, 32 << 20))
        self._chain = DeltaChain()
        self._sums = {name: np.zeros(SUMS, np.uint32) for name in plan.saved}
        self._input_sums = {name: np.zeros(SUMS, np.uint32) for name in plan.quantised}
        self._files: list[tuple[Path, list[Item], Mapping[str, Any]]] = []
        ranks = range(comm.rank, plan.num_ranks, comm.size)
        self._work = [(rank, items) for rank in ranks if (items := plan.items(rank))]
        tensors = plan.catalog.tensors
        stored = {p.key: (n, p) for n, t in tensors.items() for p in t.parts if p.crc32 is not None}
        self._checked = list(stored.values())[comm.rank :: comm.size]
        self._copies = plan.catalog.copies[comm.rank :: comm.size] if settings.verify else ()
        self._config: str | None = None
        if plan.told_scales:
            shapes = {name: (t.dtype, t.shape) for name, (t, _) in plan.saved.items()}
            self._config = config_text(config_of(settings), plan.told_scales, shapes)
        has_no_digests = bool(plan.deltas) and plan.catalog.digests is None
        self._summed = list(tensors)[comm.rank :: comm.size] if has_no_digests else []
        self._progress = progress if comm.rank == 0 else None
        self._done_bytes = 0
        own = [item for _, items in self._work for item in items if item.name in plan.tilings]
        read_bytes = sum(volume(plan.values(item)) * self._itemsize(item.name) for item in own)
        self._all_bytes = (
            sum(part.entry.size_bytes for _, part in self._checked)
            + 2 * sum(volume(part.box) * self._itemsize(tensor.name) for tensor, part in self._copies)
            + sum(plan.tilings[name].size_bytes for name in self._summed)
            + (2 if settings.verify else 1) * read_bytes
        )

    def run(self) -> ConvertReport:
        """Compare the input, write and compare the output, and put it in place."""
        plan, settings, comm = self._plan, self._settings, self._comm
        target = Path(plan.place)
        inputs = {n: (t.dtype, t.shape) for n, t in plan.catalog.tensors.items()}
        outputs = {n: (t.dtype, t.shape) for n, (t, _) in plan.saved.items()}
        with collective_step(comm, "reshard", path=target):
            self._verify_input()
        if plan.deltas:
            base = plan.catalog.digests or self._base_digests()
            with collective_step(comm, "reshard", path=target):
                self._chain = DeltaChain.of(plan.deltas, base, plan.catalog.where, self._spare_bytes)
        place = target if plan.is_one_file else target / INDEX_NAME
        with Commit(place, comm, "reshard", final=plan.final) as commit:
            after = partial(
                _copy_companions, Path(settings.source), target, commit.claim, self._config is None
            )
            with commit.step():
                rows = self._write(commit)
            digests = self._all_digests(outputs, self._sums)
            read = self._all_digests(inputs, self._input_sums)
            # Of scales that are stored under another dtype the digest is known under the one that they had.
            known = {name: inputs[name] for name in plan.told_scales if name in inputs}
            as_read = self._all_digests(known, {name: self._sums[name] for name in known})
            with commit.step():
                compared = self._compare_digests(digests | as_read, read)
                if settings.verify:
                    self._verify_output()
            if plan.is_one_file:
                commit.commit()
            elif plan.is_hugging_face:
                commit_plain(
                    commit, rows, sum(t.size_bytes for t, _ in plan.saved.values()), self._config, after
                )
            else:
                saved = plan.saved
                if plan.merged:  # files of whole tensors are no ranks
                    saved = {n: (Tiling.whole(t.shape, t.dtype), said) for n, (t, said) in saved.items()}
                commit_index(commit, rows, saved, 1 if plan.merged else plan.num_ranks, plan.metadata, after)
        sums = np.array(list(self._counts.values()), np.int64)
        comm.all_reduce(sums, sums)
        files, checksummed, read_bytes, written, verified = map(int, sums)
        chain = self._chain.deltas
        mxfp8 = {*plan.quantised, *mxfp8_scales(inputs).values()}
        return ConvertReport(
            len(plan.saved), len(mxfp8), files, plan.catalog.size_bytes, checksummed, read_bytes, written,
            verified, model_digest(digests), compared, len(chain), chain[-1].version if chain else None,
            plan.catalog.notes,
        )  # fmt: skip

    def _advance(self, done_bytes: int) -> None:
        self._done_bytes += done_bytes
        if self._progress is not None:
            self._progress(min(self._done_bytes, self._all_bytes), self._all_bytes)

    def _verify_input(self) -> None:
        """Compare this process's part of the input's checksums, and of what several files of ranks hold."""
        for name, part in self._checked:
            self._counts["checksummed"] += self._source.verify(name, part)
            self._advance(part.entry.size_bytes)
        for tensor, part in self._copies:
            for box in row_major_parts(part.box, self._chunk_bytes // self._itemsize(tensor.name)):
                first, other = (np.empty(shape_of(box), dtypes.get(tensor.dtype).numpy) for _ in range(2))
                self._source.read(tensor.name, box, first)
                self._source.read_part(tensor.name, part, part.local(box), other)
                if first.tobytes() != other.tobytes():
                    taken = next(p.file for p in tensor.parts if p.box == part.box)
                    raise CheckpointError(
                        f"{part.file}: tensor {tensor.name!r}: {box_text(box)} is not what {taken} has, and both are "
                        "said to hold it: give another --from or strategy, or --no-verify to take it from the latter"
                    )
                self._advance(2 * first.nbytes)

    def _base_digests(self) -> dict[str, str]:
        """Return the digests of an input that has none recorded, each tensor read by one process."""
        tensors = self._plan.catalog.tensors
        sums = {name: np.zeros(SUMS, np.uint32) for name in tensors}
        with collective_step(self._comm, "reshard", path=self._plan.catalog.where):
            for name in self._summed:
                for box, values in self._source.boxes(name):
                    sums[name] += content_sum(values, box, tensors[name].shape)
                    self._advance(values.nbytes)
        return self._all_digests({n: (t.dtype, t.shape) for n, t in tensors.items()}, sums)

    def _all_digests(
        self, tensors: Mapping[str, tuple[str, tuple[int, ...]]], sums: Mapping[str, np.ndarray]
    ) -> dict[str, str]:
        """Return the digests of tensors (dtype and shape by name) of whose content each process has summed a part."""
        rows = np.array(list(sums.values()), np.uint32).reshape(-1)
        if rows.size:
            self._comm.all_reduce(rows, rows)
        return {
            name: tensor_digest(*tensors[name], row)
            for name, row in zip(sums, rows.reshape(-1, SUMS), strict=True)
        }

    def _write(self, commit: Commit) -> list[dict[str, Any]]:
        """Write this process's files and return their rows of the index."""
        plan, rows = self._plan, []
        single = commit.claim if plan.is_one_file else None
        work = self._work
        if single is not None and self._comm.rank == 0:
            work = work or [(0, [])]  # a checkpoint without tensors is a file too
        for rank, items in work:
            path = single or commit.data_file(rank, plan.num_ranks)
            with ShardFile(
                path, items, plan.metadata, commit.fd if single else None, as_is=plan.merged
            ) as file:
                for key, _, array in self._content(items, self._input_sums):
                    file.put(key, array)
                    self._counts["written"] += array.nbytes
                rows.append(file.finish())
                for item in items:
                    self._sums[item.name] += file.sums(item.key)
            self._files.append((file.path, items, file.entries))
        self._counts["files"] = len(rows)
        return rows

    def _compare_digests(self, written: Mapping[str, str], read: Mapping[str, str]) -> int:
        """Compare what was written, or read and quantised, with what is known of it; return of how many tensors."""
        compared = 0
        for name, tensor in self._plan.catalog.tensors.items():
            known, found = (
                self._chain.digests.get(name, tensor.digest),
                (read if name in read else written)[name],
            )
            if known is None:
                continue
            if found != known:
                if (delta := self._chain.last(name)) is not None:
                    raise CheckpointError(
                        f"{delta.where}: tensor {name!r}: the delta makes a content of the digest {known}, and what "
                        f"comes out has {found}: the delta is damaged, or the base is"
                    )
                raise VerificationError(
                    f"{self._plan.catalog.where}: tensor {name!r}: has the digest {found} as it was read, and is to "
                    f"have {known}: its data is damaged, or changed meanwhile"
                )
            compared += 1
        return compared

    def _verify_output(self) -> None:
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
                            f"{path}: tensor {key!r}: box {box} is not what {self._plan.catalog.where} holds"
                        )
                    at[key] += raw.size
                    self._counts["verified"] += raw.size

    def _itemsize(self, name: str) -> int:
        return self._plan.tilings[name].itemsize_bytes

    def _content(
        self, items: Sequence[Item], sums: Mapping[str, np.ndarray] | None = None
    ) -> Iterator[tuple[str, Box, np.ndarray]]:
        """Yield what items of a file hold, made of the input: key, box of the input, and array, each small enough."""
        for number, item in enumerate(items):
            if item.name not in self._plan.tilings:  # scales, which come with their codes
                continue
            limit = max(1, self._chunk_bytes // self._itemsize(item.name))
            is_quantised = item.name in self._plan.quantised
            for box in row_major_parts(self._plan.values(item), limit, int(is_quantised)):
                tiling = self._plan.tilings[item.name]
                values = np.empty(shape_of(box), dtypes.get(tiling.dtype).numpy)
                self._source.read(item.name, box, values)
                self._chain.apply(item.name, box, values)
                self._counts["read"] += values.nbytes
                self._advance(values.nbytes)
                if not is_quantised:
                    yield (
                        item.key,
                        box,
                        values.view(np.uint8) if item.name in self._plan.told_scales else values,
                    )
                    continue
                from lowshard.kernels import quantize_mxfp8

                if sums is not None and values.size:
                    sums[item.name] += content_sum(values, box, tiling.shape)
                made = quantize_mxfp8(values)
                yield item.key, box, made.data
                yield items[number + 1].key, box, made.scale


def _copy_companions(source: Path, target: Path, private: Path, has_config: bool) -> None:
    """Copy the model's description along, which the next reshard asks for the number of heads."""
    # Each file is whole at once: it is written under a private name, which the next save clears away if it is left.
    folder = source if os.path.isdir(source) else source.parent
    for name in _COMPANIONS if has_config else _COMPANIONS[1:]:  # config.json is the first
        if os.path.isfile(folder / name):
            with suppress(OSError):  # the weights are what counts
                shutil.copyfile(folder / name, private)
                os.replace(private, target / name)
