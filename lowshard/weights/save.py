"""`save`: a sharded checkpoint, one safetensors file a rank and an index; or a merged plain file.

The index alone says what a sharded checkpoint is: data files have names of their own, and become the checkpoint when
the index is put in place, by `lowshard.checkpoint.commit`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from lowshard.argument import brief, in_words, instance, is_text, mapping
from lowshard.argument import path as check_path
from lowshard.box import Box, box_text, full_box, shape_of, volume
from lowshard.checkpoint.catalog import crc32
from lowshard.checkpoint.checkpoint_index import (
    INDEX_NAME,
    Index,
    IndexedFile,
    IndexedTensor,
    Part,
    hf_index_text,
    write_hf_index,
)
from lowshard.checkpoint.commit import Commit
from lowshard.checkpoint.header import FilePath, encode_header, header_box
from lowshard.checkpoint.writer import (
    Parts,
    State,
    check_labels,
    check_state,
    check_turn,
    reserve,
    write_at,
    write_parts,
    write_state,
)
from lowshard.comm import Communicator, collective_step, loopback
from lowshard.comm.work import Work
from lowshard.content_hash import tensor_digest, text_digest
from lowshard.errors import CheckpointError
from lowshard.kernels.bit_sums import content_sum
from lowshard.kernels.unit_weights import SUMS
from lowshard.tiling import Tiling

_PIECE_BYTES = 8 << 20
_SLICES = (
    "This file holds slices of tensors: name[start:stop, ...] is that slice of the tensor called name. "
    f"{INDEX_NAME} beside it has all of them; `lowshard reshard --merged` makes plain files of it."
)
"""What the metadata of a file with slices says to other readers."""


@overload
def save(
    path: FilePath, state: State, comm: Communicator | None = None, *, merged: bool = False,
    strategies: Mapping[str, object] | None = None, metadata: Mapping[str, str] | None = None,
    wait: Literal[True] = True,
) -> None: ...  # fmt: skip


@overload
def save(
    path: FilePath, state: State, comm: Communicator | None = None, *, merged: bool = False,
    strategies: Mapping[str, object] | None = None, metadata: Mapping[str, str] | None = None,
    wait: Literal[False],
) -> Work: ...  # fmt: skip


def save(
    path: FilePath, state: State, comm: Communicator | None = None, *, merged: bool = False,
    strategies: Mapping[str, object] | None = None, metadata: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Work | None:  # fmt: skip
    """Write a checkpoint from the local arrays of all ranks.

    Collective: all ranks of the communicator call this, with the same path, names, tilings, metadata and `wait`. When
    it returns, the checkpoint is whole and synced, and what was there before is gone. What several ranks hold is
    written once, spread over them. No array travels between ranks.

    With `wait=False` it returns a `Work` when what this rank writes has been copied: the arrays may change from then
    on, and the communicator is free. What is wrong with the arguments is raised at once. A thread writes; the work's
    `wait()` returns when the checkpoint is whole and synced, or raises what went wrong, on every rank alike. One save
    at a time over a communicator (of a thread, where comm is None): the next one, with `wait=True` too, and `close` of
    the communicator wait for it. An error that no call has raised yet is raised on every rank by the next save, which
    then saves nothing, or by `close`. A process whose program ends meanwhile finishes the save first, and writes an
    error that no call has raised to stderr; its exit code does not tell, so wait for the last save. One that fails or
    is killed leaves the old checkpoint or the new one in place, whole, and what is left over is removed by the next
    save. The memory of the copy is kept for the next such save, until the communicator is closed.

    Args:
        path: the folder of a sharded checkpoint, made where it is missing (not where its name ends in .safetensors, as
            that of a file does); or the file of a merged one.
        state: by name, the tiling (or layout) and this rank's local array; None on a rank that takes no part.
        comm: the communicator; None for one rank.
        merged: write one plain safetensors file.
        strategies: how each tensor is sharded, noted in the index (`str()` of it).
        metadata: text by text.
        wait: False writes in the background.

    Every rank raises the same error. The old checkpoint is untouched then and what was written is removed, but for
    NotDurable.

    Raises:
        CheckpointError: the folder cannot be made or written, there is no room, a tensor is on no rank.
        BufferMismatchError: a local array is not the one its tiling says.
        LayoutError: a partial layout.
        MismatchError: ranks ask for different checkpoints.
        NotDurable: the new checkpoint is in place, but its folder could not be synced; the old one's files are kept.
        PeerFailed, TimedOut: a rank did not come. The old checkpoint or the new one is in place, whole; a note says
            which, where this rank knows.
    """
    if comm is None:
        comm = _alone()
    if merged is True:
        return write_state(path, state, comm, metadata, wait=wait)
    with collective_step(comm, "save", path=path) as step:
        check_turn(step, comm, wait)
        rule = "path is that of the checkpoint's folder"
        folder = check_path(path, rule, CheckpointError)
        if not os.path.isdir(folder) and (os.path.lexists(folder) or folder.suffix == ".safetensors"):
            raise CheckpointError(
                f"{rule}, got the file {brief(path)}; give a folder, or merged=True for one file"
            )
        instance(merged, bool, "merged is True or False", CheckpointError)
        noted, labels = (
            {} if given is None else mapping(given, f"{what} is a mapping by name, or None", CheckpointError)
            for what, given in (("strategies", strategies), ("metadata", metadata))
        )
        tensors = {
            name: (tiling, _strategy(folder, name, noted[name]) if name in noted else None)
            for name, tiling in check_state(folder, state, comm.rank, comm.size).items()
        }
        labels = check_labels(labels, str(folder))
        folder = folder if wait else folder.absolute()  # the program may change its folder meanwhile
        tilings = {name: tiling for name, (tiling, _) in tensors.items()}
        digests = sorted((n, t.digest()) for n, t in tilings.items())
        step.digest = text_digest(json.dumps([str(Path(path)), sorted(labels.items()), digests, wait]))
        step.said = lambda: f"{folder}, metadata {brief(labels)}, wait {wait}, {in_words(tilings)}"

    def write(over: Communicator, parts: Parts) -> None:
        with Commit(folder / INDEX_NAME, over, "save") as commit:
            with commit.step():
                rows = _write_own(commit, parts, tilings, labels)
            commit_index(commit, rows, tensors, over.size, labels or None)

    return write_parts(comm, path, tilings, state, wait=wait, is_copy=False, write=write)


def _write_own(
    commit: Commit, parts: Parts, tilings: Mapping[str, Tiling], metadata: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Write this rank's data file; return its row of the index."""
    boxes = ((share.name, tilings[share.name].dtype, share.box) for share, _ in parts)
    items = items_of(boxes, {n: t.shape for n, t in tilings.items()})
    if not items:
        return []
    with ShardFile(commit.data_file(commit.comm.rank, commit.comm.size), items, metadata) as file:
        for item, (_, array) in zip(items, parts, strict=True):
            for piece in _pieces(array):
                file.put(item.key, piece)
        return [file.finish()]


_here = threading.local()


def _alone() -> Communicator:
    """Return a communicator of one rank, this thread's own; a fork has no thread that saves, and gets a new one."""
    made: tuple[int, Communicator] | None = getattr(_here, "made", None)
    if made is None or made[0] != os.getpid():
        made = _here.made = os.getpid(), loopback(1)[0]
    return made[1]


@dataclass(frozen=True)
class Item:
    """One box of a tensor that goes into a rank's file."""

    key: str
    """Its name in the file."""
    name: str
    dtype: str
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""


def items_of(boxes: Iterable[tuple[str, str, Box]], shapes: Mapping[str, tuple[int, ...]]) -> list[Item]:
    """Return items for (name, dtype, box): whole tensors have their name in the file, slices say which they are."""
    made: dict[str, Item] = {}
    for name, dtype, box in boxes:
        key = marked = name if box == full_box(shapes[name]) else name + box_text(header_box(dtype, box))
        number = 1
        while key in made or (key != name and key in shapes):
            key, number = f"{marked}@{number}", number + 1
        made[key] = Item(key, name, dtype, box, shapes[name])
    return list(made.values())


class ShardFile:
    """A data file in the making, of full size from the start. Use it in a `with` block."""

    def __init__(
        self, path: Path, items: Iterable[Item], metadata: Mapping[str, str] | None, fd: int | None = None, *,
        as_is: bool = False,
    ) -> None:  # fmt: skip
        self.path, self._given = path, fd
        self._items = {item.key: item for item in items}
        if any(item.key != item.name for item in self._items.values()):
            metadata = {"lowshard": _SLICES}
        elif not as_is:  # readers of Hugging Face refuse a file that has metadata and names no format there
            metadata = {"format": "pt", **metadata} if metadata else None
        self._head, entries = encode_header(
            {k: (i.dtype, shape_of(i.box)) for k, i in self._items.items()}, metadata, as_is
        )
        self.entries = {e.name: e for e in entries}
        self.size_bytes = entries[-1].stop if entries else len(self._head)
        self._at = {e.name: e.start for e in entries}
        self._crc = dict.fromkeys(self._at, 0)
        self._sums = {key: np.zeros(SUMS, np.uint32) for key in self._at}
        self._fd = -1

    def __enter__(self) -> ShardFile:
        self._fd = (
            os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            if self._given is None
            else os.dup(self._given)
        )
        try:
            reserve(self._fd, self.size_bytes, self.path)
            write_at(self._fd, memoryview(self._head), 0)
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def put(self, key: str, array: np.ndarray) -> None:
        """Append a box of elements to an item; boxes come in row-major order."""
        array = np.ascontiguousarray(array).reshape(array.shape)  # which a 0-d array loses
        data = array.reshape(-1).view(np.uint8).data
        write_at(self._fd, data, self._at[key])
        self._crc[key] = crc32(data, self._crc[key])
        item, done_bytes = self._items[key], self._at[key] - self.entries[key].start
        if array.size:
            self._sums[key] += content_sum(
                array, _next_box(item.box, done_bytes // array.itemsize, array.shape), item.shape
            )
        self._at[key] += len(data)

    def sums(self, key: str) -> npt.NDArray[np.uint32]:
        """Return the sums of an item's bits (`kernels.content_sum`), so far."""
        return self._sums[key]

    def finish(self) -> dict[str, Any]:
        """Sync the file and return what the index says of it."""
        for key, entry in self.entries.items():
            if self._at[key] != entry.stop:
                raise CheckpointError(
                    f"{self.path}: tensor {key!r} got {self._at[key] - entry.start} bytes of {entry.size_bytes}"
                )
        os.fsync(self._fd)
        parts = [
            [i.name, i.key, i.box, self._crc[i.key], self._sums[i.key].tolist()] for i in self._items.values()
        ]
        return {"file": self.path.name, "bytes": self.size_bytes, "header": crc32(self._head), "parts": parts}


def _next_box(box: Box, done_elems: int, shape: Sequence[int]) -> Box:
    """Return where a part of a box lies, of which so many elements come before it, row-major."""
    start = np.unravel_index(done_elems, shape_of(box)) if box else ()
    return tuple((a + int(s), a + int(s) + n) for (a, _), s, n in zip(box, start, shape, strict=True))


def commit_index(
    commit: Commit, rows: Iterable[dict[str, Any]], tensors: Mapping[str, tuple[Tiling, str | None]], num_ranks: int,
    metadata: Mapping[str, str] | None, after: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Put an index in place that names the data files of all ranks: from then on they are the checkpoint."""

    whole: dict[str, str] = {}

    def write_index(texts: Sequence[str]) -> None:
        files: dict[str, IndexedFile] = {}
        parts: dict[str, list[Part]] = {name: [] for name in tensors}
        sums = {name: np.zeros(SUMS, np.uint32) for name in tensors}
        for row in sorted((r for text in texts for r in json.loads(text)), key=lambda r: str(r["file"])):
            files[row["file"]] = IndexedFile(row["bytes"], row["header"])
            for name, key, box, crc, part_sums in row["parts"]:
                if key == name:
                    whole[name] = row["file"]
                part = Part(row["file"], key, tuple((a, b) for a, b in box), crc)
                if volume(part.box):
                    parts[name].append(part)
                    sums[name] += np.array(part_sums, np.uint32)
        cut = {
            n: IndexedTensor(
                t.dtype, t.shape, said, tuple(parts[n]), t, tensor_digest(t.dtype, t.shape, sums[n])
            )
            for n, (t, said) in tensors.items()
        }
        index = Index(num_ranks, commit.token, files, cut, metadata)
        write_at(commit.fd, memoryview(index.encode()), 0)

    def finish() -> None:
        size_bytes = sum(tiling.size_bytes for tiling, _ in tensors.values())
        files = whole if len(whole) == len(tensors) else None
        with suppress(OSError):  # no index of Hugging Face's is in place then
            write_hf_index(commit.path, commit.claim, files, size_bytes, commit.is_in_place)
        after()

    commit.commit(json.dumps(list(rows)), write_index, finish)


def commit_plain(
    commit: Commit, rows: Iterable[dict[str, Any]], size_bytes: int, config: str | None, after: Callable[[], object]
) -> None:  # fmt: skip
    """Put files of whole tensors in place under the names that transformers gives them, and their index last."""

    def complete(texts: Sequence[str]) -> None:
        made = sorted((row for text in texts for row in json.loads(text)), key=lambda row: str(row["file"]))
        if config is not None:  # first: no codes lie beside a config.json that does not speak of them
            private, place = commit.data_file(len(made), len(made) + 1), commit.path / "config.json"
            private.write_text(config, encoding="utf-8")
            os.replace(private, place) if place.exists() else commit.rename(private.name, place.name)
        files: dict[str, str] = {}
        for number, row in enumerate(made, 1):
            name = f"model{f'-{number:05d}-of-{len(made):05d}' * (len(made) > 1)}.safetensors"
            commit.rename(row["file"], name)
            files |= {part[0]: name for part in row["parts"]}
        write_at(commit.fd, memoryview(hf_index_text(files, size_bytes).encode()), 0)

    commit.commit(json.dumps(list(rows)), complete, after)


def _strategy(folder: Path, name: str, given: object) -> str:
    """Return the text of a strategy for the index."""
    text = str(given)
    if not is_text(text):
        raise CheckpointError(
            f"{folder}: strategy of tensor {brief(name)}: str() of it is Unicode text, got {brief(text)}: pass another"
        )
    return text


def _pieces(view: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in row-major order, a few megabytes at a time."""
    rows = view.shape[0] if view.ndim else 1
    step = max(1, _PIECE_BYTES // max(view.nbytes // max(rows, 1), 1))
    for start in range(0, rows, step):
        yield view[start : start + step] if view.ndim else view
