"""`lowshard reshard` as a command: which options go together, what it never replaces, exit codes, what it prints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from lowshard.checkpoint import Catalog, Delta, write_delta
from lowshard.checkpoint.checkpoint_index import HF_INDEX, INDEX_NAME
from lowshard.cli import main
from lowshard.errors import CheckpointError
from lowshard.launch import environment
from lowshard.tiling import Tiling
from lowshard.weights import apply_deltas, load_sharded, reshard_command, save

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*argv: object, code: int = 0) -> str:
        got = main(["reshard", *map(str, argv)])
        out, err = capsys.readouterr()
        assert got == code, out + err
        return out + err

    return run_command


@contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    def snapshot() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    before = snapshot()
    yield
    assert snapshot() == before


def values(number: float) -> dict[str, np.ndarray]:
    return {name: np.full((4, 6), number + i, np.float32) for i, name in enumerate("ab")}


def holds(path: Path, number: float) -> bool:
    found = load_sharded(path)
    return all(np.array_equal(found[name], value) for name, value in values(number).items())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two versions of a model in several forms, a delta, and rules."""
    for number in (0, 1):
        state = {n: (Tiling.whole(v.shape, "float32"), v) for n, v in values(number).items()}
        save(tmp_path / f"v{number}", state)
    save_file(values(0), tmp_path / "base.safetensors")
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    save_file(values(0), tmp_path / "one" / "model.safetensors", {"format": "pt"})
    for name, value in values(0).items():
        save_file({name: value}, tmp_path / "several" / f"model-{name}.safetensors")
    index = {"metadata": {"total_size": 192}, "weight_map": {n: f"model-{n}.safetensors" for n in values(0)}}
    (tmp_path / "several" / HF_INDEX).write_text(json.dumps(index))
    (tmp_path / "rules.yaml").write_text("rules: [{pattern: '**', strategy: replicate}]")
    (tmp_path / "rows.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
    write_delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d.safetensors")
    assert main(
        ["reshard", str(tmp_path / "v0"), str(tmp_path / "two"), "--to", "tp=2", "--strategies",
         str(tmp_path / "rows.yaml")]
    ) == 0  # fmt: skip
    return tmp_path


# ---- options


@pytest.mark.parametrize(
    "given",
    ["--ranks 2", "--memory 1GB", "--no-verify", "--strategies llama", "--dry-run", "--timeout 9", "--from tp=2",
     "--mxfp8", "--file-size 1GB", "--heads 3", "--apply d.safetensors", "--dry-run --no-verify"],
)  # fmt: skip
def test_options_that_a_delta_does_not_read_are_refused(place: Path, run: Run, given: str) -> None:
    with nothing_changes(place):
        told = run(
            "--delta", place / "v0", place / "v1", "-o", place / "new.safetensors", *given.split(), code=2
        )
    assert "does not read other options, got --" in told
    assert all(word in told for word in given.split() if word.startswith("--"))


def test_options_of_a_delta_are_refused_without_it(place: Path, run: Run) -> None:
    told = run(place / "v0", place / "out", "--merged", "--version", "3", code=2)
    assert "--version is that of the delta that --delta writes: leave it out" in told
    run("--delta", place / "v0", place / "v1", "-o", place / "new.safetensors", "--version", "3")
    assert Delta.open(place / "new.safetensors").version == 3


def test_one_rank_has_a_limit_too(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ranks that are started have one."""
    started: list[tuple[int, float | None]] = []

    def start(settings: object, ranks: int, path: Path, timeout_s: float | None) -> int:
        started.append((ranks, timeout_s))
        return 71

    monkeypatch.setattr(reshard_command, "_on_own_ranks", start)
    run(place / "v0", place / "out", "--merged", "--timeout", "9", code=71)
    assert started == [(1, 9.0)]
    run(place / "v0", place / "out", "--merged")
    assert len(started) == 1
    monkeypatch.setattr(environment, "find_rank", lambda _: environment.LaunchedRank(0, 2, 0, "mpiexec"))
    told = run(place / "v0", place / "out", "--merged", "-n", "3", code=2)
    assert "has started 2 ranks and has its own limit: leave -n and --timeout out" in told
    for rank in (0, 1):
        monkeypatch.setattr(
            environment, "find_rank", lambda _, r=rank: environment.LaunchedRank(r, 2, r, "mpiexec")
        )
        assert bool(run(place / "v0", place / "out", "--merged", "--dry-run")) == (rank == 0)
    assert "has its own limit: leave -n" in run(
        place / "v0", place / "out", "--merged", "--timeout", "9", code=2
    )


# ---- what is never replaced


def test_the_input_and_its_parts_are_not_replaced(place: Path, run: Run) -> None:
    cut = ("--to", "tp=2", "--strategies", place / "rules.yaml")
    shard = sorted((place / "two").glob("shard-*"))[0]
    (place / "link").symlink_to(place / "two")
    with nothing_changes(place):
        for words in (
            (place / "two" / INDEX_NAME, place / "two", *cut),
            (place / "link", place / "two", *cut), (place / "two", place / "link", *cut),
            (place / "several" / HF_INDEX, place / "several", *cut),
            (place / "one", place / "one" / "model.safetensors", "--merged"),
            (place / "base.safetensors", place / "base.safetensors", "--merged"),
            (place / "several", "--apply", place / "d.safetensors", "-o", place / "several" / "model-a.safetensors"),
        ):  # fmt: skip
            assert "the output is another folder or file than the input" in run(*words, code=2)
        for words in (
            (shard, place / "two", *cut),
            (shard, "--apply", place / "d.safetensors", "-o", place / "two"),
        ):
            assert "one of 2 files that hold a checkpoint together" in run(*words, code=2)


def test_a_delta_is_not_replaced(place: Path, run: Run) -> None:
    delta = place / "d.safetensors"
    with nothing_changes(place):
        for base in ("base.safetensors", "v0", "several"):
            told = run(place / base, "--apply", delta, "-o", delta, code=2)
            assert "is a delta that is applied" in told


def test_all_of_the_input_may_be_replaced_by_deltas(place: Path, run: Run) -> None:
    delta = place / "d.safetensors"
    run(place / "two" / INDEX_NAME, "--apply", delta, "-o", place / "two")
    run(place / "base.safetensors", "--apply", delta, "-o", place / "base.safetensors")
    assert all(holds(place / name, 1) for name in ("two", "base.safetensors"))
    for base, out, more in (
        (place / "two", "two", ()),
        (place / "base.safetensors", "other.safetensors", ("-n", "2")),
    ):
        # A second time is no error.
        assert "none applied" in run(base, "--apply", delta, "-o", place / out, *more)
        assert holds(place / out, 1)


def test_a_folder_of_another_program_with_one_file_stays_one(place: Path, run: Run) -> None:
    shutil.copytree(place / "one", place / "indexed")
    index = {"metadata": {"total_size": 192}, "weight_map": dict.fromkeys(values(0), "model.safetensors")}
    (place / "indexed" / HF_INDEX).write_text(json.dumps(index))
    shutil.copytree(place / "one", place / "other")
    (place / "other" / "model.safetensors").rename(place / "other" / "weights.safetensors")
    for name in ("one", "indexed", "other"):
        folder = place / name
        names = sorted(os.listdir(folder))
        report = apply_deltas(folder, [place / "d.safetensors"], folder)
        assert report.applied == 1
        assert sorted(os.listdir(folder)) == names
        assert holds(folder, 1)
        with safe_open(next(folder.glob("*.safetensors")), "np") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_folder_of_another_program_with_several_files_is_not_switched(place: Path, run: Run) -> None:
    with nothing_changes(place):
        told = run(place / "several", "--apply", place / "d.safetensors", "-o", place / "several", code=2)
    assert "has files of another program, which cannot be switched to a new version in one step" in told
    run(place / "several", "--apply", place / "d.safetensors", "-o", place / "new")
    assert holds(place / "new", 1)


# ---- exit codes and what is printed


def test_what_is_damaged_is_exit_code_1_and_what_is_not_there_2(place: Path, run: Run) -> None:
    (place / "cut.safetensors").write_bytes((place / "base.safetensors").read_bytes()[:60])
    (place / "cut_d.safetensors").write_bytes((place / "d.safetensors").read_bytes()[:60])
    for rest in ((), ("--dry-run",)):
        run(place / "cut.safetensors", place / "out", "--merged", *rest, code=1)
        run(place / "v0", "--apply", place / "cut_d.safetensors", "-o", place / "out", *rest, code=1)
        run(place / "gone", place / "out", "--merged", *rest, code=2)
        run(place / "v0", "--apply", place / "gone", "-o", place / "out", *rest, code=2)
    with pytest.raises(CheckpointError):
        apply_deltas(place / "v0", [place / "cut_d.safetensors"], place / "out")
    (file,) = (place / "v1").glob("shard-*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert "its data is damaged" in run(place / "v1", place / "out", "--merged", code=1)
    delta = ("--delta", place / "v0", place / "v1", "-o")
    run(*delta, place / "new.safetensors", "--version", "-1", code=2)
    assert "its name says version 7" in run(
        *delta, place / "weight_v000007.safetensors", "--version", "8", code=2
    )
    run("--delta", place / "cut.safetensors", place / "v0", "-o", place / "new.safetensors", code=1)
    run("--delta", place / "gone", place / "v1", "-o", place / "new.safetensors", code=2)
    assert not (place / "new.safetensors").exists()


@pytest.mark.parametrize(
    "config", ['{"num_attention_heads": [4, 8]}', "", '{"text_config": null}'], ids=["lists", "empty", "null"]
)
def test_a_config_is_read_when_a_strategy_asks(place: Path, run: Run, config: str) -> None:
    (place / "one" / "config.json").write_text(config)
    run(place / "one", place / "merged.safetensors", "--merged")
    run(place / "one", place / "out", "--to", "tp=2", "--strategies", place / "rules.yaml")
    assert Catalog.open(place / "out").num_ranks == 2
    (place / "heads.yaml").write_text("rules: [{pattern: '**', strategy: heads}]")
    told = run(place / "one", place / "out", "--to", "tp=2", "--strategies", place / "heads.yaml", code=2)
    assert "config.json" in told
    run(place / "one", place / "out", "--to", "tp=2", "--strategies", place / "heads.yaml", "--heads", 2)
