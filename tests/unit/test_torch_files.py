"""Torch's checkpoints read without torch: whole, or refused by name. The files in tests/data/torch are torch's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.recorded import DATA

from lowshard import dtypes
from lowshard.checkpoint import Catalog, CheckpointReader
from lowshard.checkpoint.overview import look_at, verified
from lowshard.cli import main
from lowshard.errors import CheckpointError
from lowshard.weights import ShardingStrategy, load_sharded

TORCH = DATA / "torch"
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"


def counted(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtypes.get(dtype).numpy)


@pytest.mark.parametrize(("form", "tensors"), [("dcp", 6), ("shards", 4)])
def test_every_command_reads_what_torch_has_written(
    form: str, tensors: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rules.yaml").write_text("rules:\n  - {pattern: '**t', strategy: replicate}\n"
                                         "  - {pattern: '**.bias', strategy: rowwise}\n")  # fmt: skip
    catalog = Catalog.open(TORCH / form)
    assert (catalog.tensors["model.embed.weight"].shape, len(catalog.tensors)) == ((11, 4), tensors)
    whole = {n: counted(t.shape, t.dtype) for n, t in catalog.tensors.items()}
    assert main(["inspect", str(TORCH / form), "--verify"]) == 0
    told = capsys.readouterr().out
    assert ("no tensors" in told, "last one that is missing" in told) == (form == "dcp", form != "dcp")
    patterns = ["--strategies", str(tmp_path / "rules.yaml")]
    for name, aim in (("cut", ["--to", "tp=2", *patterns]), ("one.safetensors", ["--merged"])):
        out = str(tmp_path / name)
        assert main(["reshard", str(TORCH / form), out, *aim]) == 0
        assert Catalog.open(out).metadata == ({} if form == "dcp" else {"format": "pt"})
        for place in (out, catalog):
            found = load_sharded(place)
            assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in whole.items()}


def test_damage_to_an_archive_is_seen(tmp_path: Path) -> None:
    shutil.copytree(TORCH / "dcp", tmp_path / "dcp")
    part = Catalog.open(tmp_path / "dcp").tensor("model.up.weight").parts[1]
    raw = bytearray(Path(part.file).read_bytes())
    raw[part.entry.start] ^= 1
    Path(part.file).write_bytes(raw)
    problems = verified(look_at(tmp_path / "dcp"), ["model.up.weight"], lambda done: None).problems
    assert list(problems) == [(part.file, "model.up.weight")]
    with pytest.raises(CheckpointError, match=r"up\.weight.*damaged"):
        load_sharded(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("form", "gone", "said"),
    [
        ("dcp", "__2_0.distcp", r"__2_0\.distcp: the file is missing.*embed\.weight"),
        ("dcp", ".metadata", r"\.metadata, which says of what, is missing"),
        ("shards", SHARD.format(1), r"'model\.embed\.weight' \[11, 4\]: \[0:3, 0:4\] of it"),
        ("shards", SHARD.format(3), r"\[6:9, 0:4\] of it lies in none of the files"),
        ("shards", SHARD.format(4), r"up\.weight' \[7, 9\]: \[4:7, 5:9\] of it"),
    ],
)
def test_a_part_that_is_missing_is_named(form: str, gone: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(TORCH / form, tmp_path / form)
    (tmp_path / form / gone).unlink()
    with pytest.raises(CheckpointError, match=said):
        Catalog.open(tmp_path / form)


def put(path: Path, array: np.ndarray, start: Sequence[int] | None) -> str:
    """Write a file as torch does, with the place of its part of w."""
    said = {} if start is None else {"w": {"saved_offsets": start}}
    save_file({"w": array}, path, {"DCP_SHARDING_INFO": json.dumps(said)})
    return str(path)


W = counted((5, 4), "float32")


@pytest.mark.parametrize("read", [Catalog.open, CheckpointReader, load_sharded, look_at])
def test_one_file_of_several_is_refused_with_what_it_lacks(
    read: Callable[[str], object], tmp_path: Path
) -> None:
    for name, rows in (("a", slice(0, 3)), ("b", slice(3, 5)), ("c", slice(0, 3))):
        put(tmp_path / f"{name}.safetensors", W[rows], [rows.start, 0])
    for name, rest in (("a", "b.*3:5"), ("b", "a.*0:3")):
        with pytest.raises(CheckpointError, match=rf"{rest[0]}\.safetensors holds 'w': \[{rest[3:]}, 0:4\]"):
            read(str(tmp_path / f"{name}.safetensors"))
    assert np.array_equal(load_sharded(tmp_path)["w"], W)
    assert len(Catalog.open(sorted(tmp_path.iterdir(), reverse=True)).copies) == 1
    (tmp_path / "alone").mkdir()
    with pytest.raises(CheckpointError, match="the first of torch's shards"):
        read(put(tmp_path / "alone" / SHARD.format(1), W[:3], [0, 0]))


@pytest.mark.parametrize(
    ("part", "start", "said"),
    [
        (W[2:], [2, 0], "overlap"),
        (W[3:], [3], "saved_offsets of tensor 'w' are 2 integers"),
        (W[3:], [3, -1], "saved_offsets"),
        (W[3:], None, "saved_offsets"),
        (W[3:].astype("int32"), [3, 0], "differ in dtype"),
        (W[4:], [4, 0], r"\[3:4, 0:4\] of it lies in none"),
        (W[3:], [3, 0], "files of 00002 numbers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    part: np.ndarray, start: list[int] | None, said: str, tmp_path: Path
) -> None:
    count = "of-00002" if "00002" in said else "of-00001"
    put(tmp_path / SHARD.format(1).replace("of-00001", count), W[:3], [0, 0])
    put(tmp_path / SHARD.format(2).replace("of-00001", count), part, start)
    with pytest.raises(CheckpointError, match=said):
        Catalog.open(tmp_path)


def test_tilings_that_contradict_the_files_are_refused(tmp_path: Path) -> None:
    files = [put(tmp_path / f"{start}.safetensors", W[:2], [start, 0]) for start in (2, 0)]
    rows = ShardingStrategy.rowwise(2).layout((4, 4), "float32")
    with pytest.raises(CheckpointError, match=r"begins at \[2, 0\], rank 0 holds \[0:2, 0:4\]"):
        Catalog.of_rank_files(files, {"w": rows})
    both = Catalog.of_rank_files(files[::-1], {"w": rows})
    assert both.tensors["w"].parts == Catalog.open(files).tensors["w"].parts
