"""Saves that come between two steps of a load or of another save, what they find at the place, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoints import on_ranks

from lowshard.checkpoint import Catalog
from lowshard.checkpoint import checkpoint_index as hf
from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.comm import Communicator
from lowshard.errors import CheckpointError, LowshardError
from lowshard.tiling import Tiling
from lowshard.weights import load, plan_load, remove_leftovers, save

WHOLE = Tiling.whole((8,), "float32")
HALVES = Tiling.from_pieces((8,), "float32", [[((0, 4),)], [((4, 8),)]])


def state(**values: float) -> dict[str, tuple[Tiling, np.ndarray]]:
    return {name: (WHOLE, np.full(8, value, np.float32)) for name, value in values.items()}


def loaded(path: Path) -> dict[str, float]:
    plan = plan_load(path, dict.fromkeys(Catalog.open(path).tensors, WHOLE))
    return {name: float(array[0]) for name, array in load(path, plan).items()}


def seen_by_others(folder: Path) -> dict[str, float] | None:
    """Return what a reader of the Hugging Face index finds; None where there is none."""
    index = folder / hf.HF_INDEX
    if not index.exists():
        return None
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return {name: float(load_file(folder / file)[name][0]) for name, file in files.items()}


# ---- a load


def of_one_file(folder: Path) -> tuple[Path, Catalog]:
    path = folder / "m.safetensors"
    save(path, state(a=1, b=2), merged=True)
    return path, Catalog.open(path)


def of_hugging_face(folder: Path) -> tuple[Path, Catalog]:
    path, _ = of_one_file(folder)
    (folder / hf.HF_INDEX).write_text(json.dumps({"weight_map": dict.fromkeys("ab", path.name)}))
    return path, Catalog.open(folder)


def of_rank_files(folder: Path) -> tuple[Path, Catalog]:
    path, _ = of_one_file(folder)
    return path, Catalog.of_rank_files([path], dict.fromkeys("ab", WHOLE))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("made", [of_one_file, of_hugging_face, of_rank_files])
def test_a_plain_file_that_is_replaced_after_it_was_opened_is_not_read(
    tmp_path: Path, made: Any, mapped: bool
) -> None:
    path, catalog = made(tmp_path)
    plan = plan_load(catalog, dict.fromkeys("ab", WHOLE))
    assert load(catalog, plan, mapped=mapped)["b"][0] == 2
    save(path, state(b=20, zz=99), merged=True)  # of the same size, and its tensors lie otherwise
    with pytest.raises(CheckpointError, match=r"m\.safetensors.*was replaced .*open the checkpoint anew"):
        load(catalog, plan, mapped=mapped)


def test_a_plain_file_that_is_written_anew_in_place_is_not_read(tmp_path: Path) -> None:
    path, catalog = of_one_file(tmp_path)
    plan = plan_load(catalog, {"a": WHOLE})
    with path.open("r+b") as file:
        file.write(path.read_bytes())
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="was replaced or changed"):
        load(catalog, plan)


def test_ranks_between_whose_opens_a_file_was_replaced_load_no_mix(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(path, state(w=1), merged=True)
    plan = plan_load(path, {"w": HALVES})
    opened = threading.Event()

    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            catalog = Catalog.open(path)
            opened.set()
        else:
            assert opened.wait(30)
            save(path, state(w=2), merged=True)
            catalog = Catalog.open(path)
        with pytest.raises(CheckpointError, match="was replaced") as caught:
            load(catalog, plan, comm)
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1


# ---- the index for other readers


def test_a_save_that_comes_before_the_index_of_another_is_the_one_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("lowshard.weights.save")
    real = module.write_hf_index

    def late(*args: Any) -> None:
        monkeypatch.setattr(module, "write_hf_index", real)
        save(tmp_path / "c", state(w=2))
        real(*args)

    monkeypatch.setattr(module, "write_hf_index", late)
    save(tmp_path / "c", state(w=1))
    assert seen_by_others(tmp_path / "c") == loaded(tmp_path / "c") == {"w": 2}


def test_a_save_that_comes_before_the_rename_of_the_index_of_another_leaves_no_index_without_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def late(source: Any, target: Any) -> None:
        if Path(target).name == hf.HF_INDEX:
            monkeypatch.setattr(os, "replace", real)
            save(tmp_path / "c", state(w=2))
        real(source, target)

    monkeypatch.setattr(os, "replace", late)
    save(tmp_path / "c", state(w=1))
    assert seen_by_others(tmp_path / "c") in (None, {"w": 2})
    save(tmp_path / "c", state(w=3))
    assert seen_by_others(tmp_path / "c") == loaded(tmp_path / "c") == {"w": 3}
    assert len(list((tmp_path / "c").iterdir())) == 3


def test_where_the_index_cannot_be_written_others_find_none_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", state(w=1))
    real = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name == hf.HF_INDEX:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    save(tmp_path / "c", state(w=2))
    monkeypatch.undo()
    assert loaded(tmp_path / "c") == {"w": 2}
    assert seen_by_others(tmp_path / "c") is None
    assert sorted(p.name.split("-")[0] for p in (tmp_path / "c").iterdir()) == [INDEX_NAME, "shard"]


def test_data_stays_where_the_index_is_a_link_whose_file_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, away = tmp_path / "c", tmp_path / "away.json"
    save(folder, state(w=1))
    (folder / INDEX_NAME).rename(away)
    (folder / INDEX_NAME).symlink_to(away.with_name("other.json"))
    assert remove_leftovers(folder) == []
    module = import_module("lowshard.weights.save")

    def full(*args: Any) -> None:
        raise CheckpointError("no room")

    monkeypatch.setattr(module, "reserve", full)
    with pytest.raises(CheckpointError, match="no room"):
        save(folder, state(w=2))
    monkeypatch.undo()
    away.rename(away.with_name("other.json"))
    assert loaded(folder) == {"w": 1}
    save(folder, state(w=3))
    assert loaded(folder) == {"w": 3}
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(("gone", "said"), [("folder", "No such file"), ("claim", "another save removed")])
def test_who_removes_a_save_before_its_rename_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str, said: str
) -> None:
    rename = os.replace

    def late(claim: Path, target: Path) -> None:
        shutil.rmtree(target.parent) if gone == "folder" else claim.unlink()
        rename(claim, target)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path / "c", state(w=1))
    assert not (tmp_path / "c").exists()


# ---- what is refused


@pytest.mark.parametrize(
    ("tensors", "options", "said"),
    [
        ({"__metadata__": (Tiling.whole((0, 3), "float32"), np.zeros((0, 3), np.float32))}, {}, "Unicode text other"),
        ({"\ud800": (Tiling.whole((0, 3), "float32"), np.zeros((0, 3), np.float32))}, {}, "Unicode text other"),
        (state(w=1), {"metadata": {"a": "\ud800"}}, "maps text to text"),
        (state(w=1), {"metadata": {"a": 1}}, "maps text to text"),
        (state(w=1), {"metadata": {"sparse": "True", "model_version": "1"}}, "makes a delta of a file"),
        (state(w=1), {"strategies": {"w": "\ud800"}}, "is Unicode text"),
    ],
)  # fmt: skip
def test_what_cannot_stand_in_the_index_is_refused_on_all_ranks_at_once(
    tmp_path: Path, tensors: Any, options: Any, said: str
) -> None:
    def work(comm: Communicator) -> list[str]:
        mine = {
            name: (tiling.widened(2), array if comm.rank == 0 else None)
            for name, (tiling, array) in tensors.items()
        }
        found = []
        for alone in (False, True):  # on both ranks, or on rank 1 alone
            given = {} if alone and comm.rank == 0 and options.keys() == {"strategies"} else options
            with pytest.raises(LowshardError, match=said) as caught:
                save(tmp_path / "c", mine, comm, **given)
            assert type(caught.value) is CheckpointError
            found.append(str(caught.value))
        return found

    first, second = on_ranks(2, work)
    assert first == second
    assert not (tmp_path / "c").exists()
    if not options.keys() & {"strategies"}:
        with pytest.raises(CheckpointError, match=said):
            on_ranks(1, lambda c: save(tmp_path / "m", tensors, c, merged=True, **options))


def test_where_the_system_does_not_say_what_a_path_is_leftovers_are_not_removed() -> None:
    with pytest.raises(CheckpointError, match="leftovers of saves cannot be removed"):
        remove_leftovers(Path("a" * 300))


def test_an_error_in_the_background_that_nobody_was_told_of_is_shown_at_the_end(tmp_path: Path) -> None:
    code = """
import atexit
import numpy as np
from lowshard.comm import loopback
from lowshard.errors import CheckpointError
from lowshard.tiling import Tiling
from lowshard.weights import save

state = {"w": (Tiling.whole((8,), "float32"), np.ones(8, np.float32))}
open("file", "w").close()
try:
    save("file/told", state, wait=False).wait()
except CheckpointError:
    pass
save("file/next", state, wait=False)
try:
    save("good", state, wait=False)
except CheckpointError:
    pass
save("good", state, wait=False)
save("file/untold", state, wait=False)
atexit.register(lambda: save("late", state, loopback(1)[0], wait=False))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowshard: a call that was started failed, and nobody waited for it: ")
    assert "CheckpointError" in line
    assert "Not a directory" in line
    assert loaded(tmp_path / "good") == loaded(tmp_path / "late") == {"w": 1}
