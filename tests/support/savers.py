"""Everything that saves a checkpoint, behind one face: for tests that let a save fail and look at what is left.

Each has versions 1 and 2 of its content. A case starts from version 1 (with leftovers of a killed save beside it) or
from nothing, tries to save version 2, and is judged by the inode of what the commit renames.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.checkpoints import attention_and_more, on_ranks, save_over, state_of, values_of
from support.save_steps import Steps, counted

from lowshard import Layout
from lowshard.checkpoint import Catalog, read_header, write_delta
from lowshard.checkpoint.checkpoint_index import HF_INDEX, INDEX_NAME, read_index
from lowshard.comm import Communicator
from lowshard.comm.work import Work
from lowshard.errors import LowshardError, NotDurable
from lowshard.fsdp import FSDP, Param
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load, plan_load, save
from lowshard.weights.checkpoint_convert import convert
from lowshard.weights.convert_plan import Settings
from lowshard.weights.shard_rules import Owned

RANKS = 4
_LEFT = "ab" * 6
_TILINGS = {n: t for n, t in attention_and_more(RANKS).items() if n in ("rows", "qkv", "norm", "step")}


class Saver(ABC):
    """One way to save; all of it lies in the folder `c` below its own.

    Attributes:
        waits: False where it saves in the background.
    """

    waits = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder / "c"
        self.has_place = False
        self._right: dict[int, dict[str, bytes]] = {}

    def prepare(self) -> Saver:
        """Make what is needed to save, and note what each version holds."""
        for version in (1, 2):
            self.clear()
            self.save_on_threads(version)
            self._right[version] = self.content()
        assert self._right[1] != self._right[2]
        return self

    @property
    @abstractmethod
    def target(self) -> Path:
        """What the commit puts in place."""

    @abstractmethod
    def save(self, version: int, comm: Communicator) -> None:
        """Save on all ranks."""

    @abstractmethod
    def content(self) -> dict[str, bytes]:
        """Return every byte of the checkpoint in place."""

    @abstractmethod
    def own_files(self) -> set[str]:
        """Return the names of the files that the checkpoint in place consists of."""

    def check(self) -> None:
        """Look at what other readers see, whatever the save came to."""
        assert self.folder.exists()

    def leftovers(self) -> list[str]:
        """Return names of files that a killed save may have left."""
        return [f".{self.target.name}.{_LEFT}.tmp"]

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.place, ignore_errors=True)

    def start(self, *, fresh: bool) -> None:
        """Make the place as a case finds it."""
        self.clear()
        self.has_place = self.place.exists() or not fresh
        if not fresh:
            self.save_on_threads(1)
            for name in self.leftovers():
                (self.place / name).write_bytes(b"left")

    def save_on_threads(self, version: int) -> None:
        """Save without a fault."""
        on_ranks(RANKS, lambda comm: self.save(version, comm))

    def files(self) -> set[str]:
        """Return the names of all files."""
        return {p.name for p in self.place.iterdir()} if self.place.exists() else set()

    def inode(self) -> int:
        """Return what tells one version in place from another; 0 where there is none."""
        return self.target.stat().st_ino if self.target.exists() else 0

    def holds(self, version: int) -> bool:
        """Return whether a version is in place, whole."""
        return self.content() == self._right[version]


class Sharded4(Saver):
    """`save`."""

    @property
    def target(self) -> Path:
        return self.place / INDEX_NAME

    def save(self, version: int, comm: Communicator) -> None:
        state = state_of(values_of(_TILINGS, version), _TILINGS, comm.rank)
        finish(save(self.place, state, comm, wait=self.waits), state)  # type: ignore[call-overload]

    def content(self) -> dict[str, bytes]:
        catalog = Catalog.open(self.place)
        whole = {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()}
        return {n: a.tobytes() for n, a in load(catalog, plan_load(catalog, whole)).items()}

    def own_files(self) -> set[str]:
        return {INDEX_NAME, *read_index(self.target).files}

    def leftovers(self) -> list[str]:
        return [*super().leftovers(), f"shard-{_LEFT}-00001-of-00004.safetensors"]


class Resharded(Sharded4):
    """`lowshard reshard`."""

    companion = "config.json"

    def prepare(self) -> Saver:
        for version in (1, 2):
            source = self.folder / f"in{version}"
            source.mkdir(exist_ok=True)
            values = {f"w{i}": np.full((8, 6 + i), version * 10 + i, np.float32) for i in range(3)}
            save_file(values, source / "model.safetensors")
            (source / self.companion).write_text(json.dumps({"num_attention_heads": version}))
        (self.folder / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
        return super().prepare()

    def save(self, version: int, comm: Communicator) -> None:
        source, cut = str(self.folder / f"in{version}"), str(self.folder / "s.yaml")
        convert(Settings(source, str(self.place), cut, f"tp={RANKS}", num_heads=8), comm)

    def own_files(self) -> set[str]:
        return {self.companion, *super().own_files()}


class WithHuggingFace(Sharded4):
    """Checkpoints of whole tensors, beside which an index of Hugging Face's stands."""

    def own_files(self) -> set[str]:
        return {HF_INDEX, *super().own_files()}

    def check(self) -> None:
        """An index of Hugging Face's names whole tensors in files that are there."""
        if (self.place / HF_INDEX).exists():
            named = json.loads((self.place / HF_INDEX).read_text())["weight_map"]
            for name, file in named.items():
                assert name in read_header(self.place / file).tensors
            assert len({file.split("-")[1] for file in named.values()}) == 1  # of one save


class WholeTensors(WithHuggingFace):
    """`save` where each tensor is on one rank, or whole on all."""

    def save(self, version: int, comm: Communicator) -> None:
        shapes = {f"w{i}": (3 + i, 2) for i in range(5)}
        tilings = {
            name: ShardingStrategy(RANKS, Owned(i % RANKS)).layout(shape)
            if i
            else Tiling.whole(shape, "float32", RANKS)
            for i, (name, shape) in enumerate(shapes.items())
        }
        save(self.place, state_of(values_of(tilings, version), tilings, comm.rank), comm)


class MergedFolder(WithHuggingFace, Resharded):
    """`lowshard reshard --merged` into a folder that is none of Hugging Face's."""

    companion = "tokenizer.json"

    def save(self, version: int, comm: Communicator) -> None:
        source = str(self.folder / f"in{version}")
        convert(Settings(source, str(self.place), None, "", merged=True, file_bytes=500), comm)


class Applied(Sharded4):
    """`lowshard reshard --apply` onto the checkpoint that the delta was made from, in its own place."""

    def prepare(self) -> Saver:
        for version in (0, 1, 2):
            save_over(self.folder / f"v{version}", values_of(_TILINGS, version), _TILINGS, RANKS)
        for base, version in ((0, 1), (0, 2), (1, 2)):
            made = self.folder / f"from{base}" / f"weight_v{version:06d}.safetensors"
            made.parent.mkdir(exist_ok=True)
            if not made.exists():  # a delta is never replaced
                write_delta(self.folder / f"v{base}", self.folder / f"v{version}", made, base_version=base)
        return super().prepare()

    def save(self, version: int, comm: Communicator) -> None:
        base, source = 0, self.folder / "v0"
        if version == 2 and self.target.exists():
            base, source = 1, self.place
        delta = self.folder / f"from{base}" / f"weight_v{version:06d}.safetensors"
        convert(Settings(str(source), str(self.place), None, "", deltas=(str(delta),)), comm)


class Merged(Saver):
    """`save(merged=True)`."""

    def clear(self) -> None:
        super().clear()
        self.place.mkdir()

    @property
    def target(self) -> Path:
        return self.place / "m.safetensors"

    def save(self, version: int, comm: Communicator) -> None:
        state = state_of(values_of(_TILINGS, version), _TILINGS, comm.rank)
        finish(save(self.target, state, comm, merged=True, wait=self.waits), state)  # type: ignore[call-overload]

    def content(self) -> dict[str, bytes]:
        return {"": self.target.read_bytes()}

    def own_files(self) -> set[str]:
        return {self.target.name}


class MergedFile(Merged):
    """`lowshard reshard --merged` into one file."""

    def prepare(self) -> Saver:
        for version in (1, 2):
            values = {f"w{i}": np.full((8, 6 + i), version * 10 + i, np.float32) for i in range(3)}
            save_file(values, self.folder / f"in{version}.safetensors")
        return super().prepare()

    def save(self, version: int, comm: Communicator) -> None:
        source = str(self.folder / f"in{version}.safetensors")
        convert(Settings(source, str(self.target), None, "", merged=True), comm)


class Trained(Merged):
    """`FSDP.save`."""

    def save(self, version: int, comm: Communicator) -> None:
        units = {"l0": [Param("w", (37, 3)), Param("b", (5,))], "l1": [Param("w", (2, 9))]}
        engine = FSDP(units, comm)
        engine.fill(lambda name, box: np.full([b - a for a, b in box], version + len(name), np.float32))
        work = engine.save(self.target, wait=self.waits)  # type: ignore[call-overload]
        if work is not None:
            for piece in engine.state().pieces.values():
                piece.param[...] = 99
        finish(work, {})


class Sharded4Beside(Sharded4):
    """`save(wait=False)`."""

    waits = False


class MergedBeside(Merged):
    """`save(merged=True, wait=False)`."""

    waits = False


class TrainedBeside(Trained):
    """`FSDP.save(wait=False)`."""

    waits = False


def finish(work: Work | None, state: Mapping[str, tuple[Tiling | Layout, np.ndarray | None]]) -> None:
    """Change the arrays of a save that was started, and wait for it."""
    if work is not None:
        for _, array in state.values():
            if array is not None:
                array[...] = 99
        work.wait(30)


SAVERS: Mapping[str, type[Saver]] = {
    "sharded": Sharded4, "merged": Merged, "FSDP": Trained, "reshard": Resharded,
    "applied": Applied, "whole": WholeTensors, "merged folder": MergedFolder, "merged file": MergedFile,
    "sharded beside": Sharded4Beside, "merged beside": MergedBeside,
    "FSDP beside": TrainedBeside,
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a save ended on one rank."""

    kind: str = ""
    """Class of the error; empty where there was none."""
    said: str = ""
    """Its text and notes."""

    @classmethod
    def of(cls, error: BaseException | None) -> Ended:
        """Return what is kept of an error."""
        if error is None:
            return cls()
        return cls(type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])]))


def attempt(saver: Saver, comm: Communicator, victim: int, steps: Steps) -> BaseException | None:
    """Save version 2; on one rank the steps count. Return the error."""
    if not saver.waits:
        assert comm.control.beside.idle  # made before the steps are counted
    try:
        if comm.rank == victim:
            with counted(steps):
                saver.save(2, comm)
        else:
            saver.save(2, comm)
    except (LowshardError, OSError, KeyboardInterrupt) as error:
        return error
    return None


def judge(saver: Saver, before: int, files: set[str], ended: Sequence[Ended | None], *, told: bool) -> bool:
    """Look at what a save that failed has left, then save again, without a fault; return whether it had committed.

    Args:
        saver: who saved.
        before: the inode of the target before.
        files: the names of all files before.
        ended: by rank; None for a rank that was killed.
        told: True where all ranks were told of the error, so that nothing of a version that is not in place stays.
    """
    committed = saver.inode() != before
    saver.check()
    if committed or before:
        assert saver.holds(2 if committed else 1)
    assert committed or not all(e is not None and not e.kind for e in ended), (
        "a save that returns has committed"
    )
    for end in ended:
        if end is not None and end.kind:
            assert ("the new checkpoint is in place and whole" in end.said) <= committed, end.said
            assert ("nothing has changed there" in end.said) <= (not committed), end.said
            assert (end.kind == NotDurable.__name__) <= committed, end.said
    if told and not committed:
        assert saver.files() <= files
        assert saver.place.exists() == saver.has_place
    saver.save_on_threads(1)
    saver.check()
    assert saver.holds(1)
    assert saver.files() == saver.own_files()
    return committed
