"""The tuned table: what is written is read, for its machine alone; what cannot be read is one warning."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from lowshard.comm import tuned
from lowshard.comm.tuned import Crossover, Machine

HERE = Machine("Open MPI 5.0.11", 2, 2)


def test_a_machine_is_named_by_its_library_its_ranks_and_the_cores_they_share() -> None:
    assert Machine.of(("Open MPI", (5, 0, 11)), [{0, 1}, {0, 1}]) == HERE
    assert Machine.of(("MPICH", (5, 0, 2)), [[0], [3], [3]]) == Machine("MPICH 5.0.2", 3, 2)
    assert str(HERE) == "Open MPI 5.0.11, 2 ranks, 2 cores"


def test_entries_of_several_machines_stand_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuned.json"
    there = Machine("MPICH 5.0.2", 4, 2)
    tuned.save(path, HERE, Crossover.of({"all_reduce": 16384, "all_gather": 0}))
    tuned.save(path, there, Crossover.of({"all_reduce": 5}))
    tuned.save(path, HERE, Crossover.of({"all_reduce": 8192}))
    assert tuned.load(path, HERE) == Crossover((("all_reduce", 8192),))
    assert tuned.load(path, there).below_bytes("all_reduce") == 5
    assert [entry.name for entry in path.parent.iterdir()] == ["tuned.json"]


def test_sizes_below_the_crossover_take_mpi_and_what_is_not_named_takes_the_engine() -> None:
    found = Crossover.of({"all_reduce": 8192})
    assert found.takes_mpi("all_reduce", 8191)
    assert not found.takes_mpi("all_reduce", 8192)
    assert not found.takes_mpi("broadcast", 0)
    assert found.below_bytes("broadcast") == 0


def test_no_file_or_no_entry_is_the_default_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    assert tuned.load(path, HERE) == Crossover()
    tuned.save(path, Machine("another", 2, 2), Crossover.of({"all_reduce": 5}))
    assert tuned.load(path, HERE) == Crossover()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        "\xff{",
        json.dumps({"schema": "other", "entries": {}}),
        json.dumps({"schema": tuned.SCHEMA}),
        json.dumps({"schema": tuned.SCHEMA, "entries": {"x": 5}}),
        *(json.dumps({"schema": tuned.SCHEMA, "entries": {str(HERE): {"all_reduce": bad}}})
          for bad in (-1, 1.5, "5", None, True)),
    ],
)  # fmt: skip
def test_a_malformed_table_is_one_warning_and_the_default_and_is_replaced_by_the_next(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(text.encode("latin-1"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert tuned.load(path, HERE) == Crossover()
    assert len(said) == 1
    assert str(path) in str(said[0].message)
    assert "lowshard bench tune" in str(said[0].message)
    tuned.save(path, HERE, Crossover.of({"all_reduce": 7}))
    assert tuned.load(path, HERE).below_bytes("all_reduce") == 7


def test_a_table_that_cannot_be_read_is_a_warning_too(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert tuned.load(tmp_path, HERE) == Crossover()


def test_a_table_that_others_may_write_to_or_that_waits_for_a_writer_is_a_warning_too(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tuned.save(path, HERE, Crossover.of({"all_reduce": 5}))
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="may be written to by others"):
        assert tuned.load(path, HERE) == Crossover()
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert tuned.load(path, HERE) == Crossover()


def test_the_table_lies_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.default_path() == tmp_path / "lowshard" / "tuned.json"
