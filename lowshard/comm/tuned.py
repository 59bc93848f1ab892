"""The tuned table: below which sizes MPI's own call beats the node engine, as `lowshard bench tune` found it.

A JSON file in the cache folder, with an entry for each MPI library, number of ranks on the node and number of cores:

    {"schema": "lowshard-tuned-1",
     "entries": {"Open MPI 5.0.11, 2 ranks, 2 cores": {"all_reduce": 16384, "all_gather": 65536}}}

A size is that of the larger of a rank's two buffers, in bytes, as the bench counts it. A collective that is not
named takes the node engine from the first byte.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowshard import owned
from lowshard.argument import brief
from lowshard.errors import ProfileError
from lowshard.reading import reader
from lowshard.settings import cache_root

__all__ = ["SCHEMA", "Crossover", "Machine", "default_path", "load", "save"]

SCHEMA = "lowshard-tuned-1"


@dataclass(frozen=True)
class Machine:
    """What a tuned entry holds for.

    Attributes:
        mpi: name and version of the MPI library, "Open MPI 5.0.11".
        ranks: ranks on the node.
        cores: cores that these ranks may use together.
    """

    mpi: str
    ranks: int
    cores: int

    @classmethod
    def of(cls, vendor: tuple[str, Sequence[int]], affinities: Sequence[Iterable[int]]) -> Machine:
        """Return the machine of the ranks of one node.

        Args:
            vendor: what `MPI.get_vendor()` gives.
            affinities: for each rank the numbers of the cores that it may run on.
        """
        name, version = vendor
        cores = {core for theirs in affinities for core in theirs}
        return cls(f"{name} {'.'.join(map(str, version))}", len(affinities), len(cores))

    def __str__(self) -> str:
        """Return the entry's key in the file."""
        return f"{self.mpi}, {self.ranks} ranks, {self.cores} cores"


@dataclass(frozen=True)
class Crossover:
    """Sizes below which MPI's own call is taken; the default takes the node engine from the first byte.

    Attributes:
        sizes: (collective, bytes), in order of names.
    """

    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Crossover:
        """Return the crossover of a mapping from collectives to bytes."""
        return cls(tuple(sorted((str(op), int(size)) for op, size in sizes.items())))

    def below_bytes(self, op: str) -> int:
        """Return the size below which a collective takes MPI's own call; 0 if it never does."""
        return dict(self.sizes).get(op, 0)

    def takes_mpi(self, op: str, size_bytes: int) -> bool:
        """Return whether a call with so many bytes in its larger buffer takes MPI's own."""
        return size_bytes < self.below_bytes(op)


def default_path() -> Path:
    """Return the table's place in lowshard's cache folder."""
    return cache_root() / "tuned.json"


def load(path: str | Path, machine: Machine) -> Crossover:
    """Return the entry of a machine, or the default where there is none.

    A file that is not there is no fault. One that cannot be read, that others may write to, or that is no such table,
    is one warning and the default. Ranks on several hosts may read different files: let one rank read, and share what
    it found.
    """
    try:
        text = owned.read_file(path).decode()
    except FileNotFoundError:
        return Crossover()
    except (OSError, ValueError) as error:
        return _ignored(path, error)
    try:
        return Crossover.of(_read.text(text).get(str(machine), {}))
    except ProfileError as error:
        return _ignored(path, error)


def save(path: str | Path, machine: Machine, crossover: Crossover) -> None:
    """Put a machine's entry into the table; the others stay. The file changes at once or not at all.

    A file that is no such table is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    try:
        entries = dict(_read.file(path))
    except ProfileError:
        entries = {}
    entries[str(machine)] = dict(crossover.sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tuned-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        part.write_text(json.dumps({"schema": SCHEMA, "entries": entries}, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o644)  # whatever the umask: `load` takes nothing that others may write to
        os.replace(part, path)


@reader("tuned table", ProfileError)
def _read(
    schema: Literal["lowshard-tuned-1"], entries: Mapping[str, Mapping[str, int]]
) -> Mapping[str, Mapping[str, int]]:
    for sizes in entries.values():
        if min(sizes.values(), default=0) < 0:
            raise ProfileError(f"sizes are whole numbers of bytes, 0 or more; got {brief(sizes)}")
    return entries


def _ignored(path: str | Path, error: Exception) -> Crossover:
    warnings.warn(
        f"the tuned table {path} cannot be used and is left aside ({type(error).__name__}: {error}); "
        "lowshard bench tune writes a new one",
        RuntimeWarning,
        stacklevel=3,
    )
    return Crossover()
