"""`lowshard inspect`: what is in a checkpoint, who holds it, and what is wrong with a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.checkpoints import Values, save_over, values_of

from lowshard.checkpoint.checkpoint_index import INDEX_NAME
from lowshard.checkpoint.overview import look_at
from lowshard.cli import main
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy
from lowshard.weights.shard_rules import Owned

S = ShardingStrategy


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run_command(*argv: object, code: int = 0) -> str:
        got = main(["inspect", *map(str, argv)])
        out, err = capsys.readouterr()
        assert got == code, out + err
        if "--json" not in argv:
            assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("BROKEN")), out
        return out + err if code else out

    return run_command


TILINGS = {
    **{f"model.layers.{i}.mlp.up_proj.weight": S.rowwise(4).layout((64, 32)) for i in range(3)},
    "columns": S.columnwise(4).layout((9, 35), "bfloat16"), "norm": S.replicate(4).layout((32,)),
    "expert": S(4, Owned(2)).layout((6, 4)), "qkv": S.stacked_qkv(4, 4, 4).layout((48, 8)),
    "step": Tiling.whole((), "int64", 4), "nothing": S.rowwise(4).layout((0, 3)),
    "a.very.long.name." + "x" * 70: S.replicate(4).layout((1, 2, 3, 4, 5, 6, 7, 8)),
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_over(tmp_path / "c", values_of(TILINGS), TILINGS, 4, metadata={"run": "7"})
    return tmp_path / "c"


def test_a_sharded_checkpoint_is_shown(saved: Path, run: Callable[..., str]) -> None:
    shown = run(saved)
    assert "sharded checkpoint of 4 ranks" in shown
    assert "10 tensors" in shown
    assert "in 4 files" in shown
    assert "metadata run: 7" in shown
    for text in (
        "model.layers.*.mlp.up_proj.weight (3)", "dim 0 by 4", "dim 1 by 4", "whole x4", "whole, rank 2", "BF16",
        "not compared (--verify)",
    ):  # fmt: skip
        assert text in shown
    assert "model.layers.1.mlp.up_proj.weight" in run(saved, "--all")
    assert run(saved / INDEX_NAME).splitlines()[1:] == shown.splitlines()[1:]
    total = look_at(saved).checksummed_bytes
    assert f"checksums: {total / 1e6:,.3f} MB compared, all equal" in run(saved, "--verify")


def test_json_has_everything(saved: Path, run: Callable[..., str]) -> None:
    data = json.loads(run(saved, "--json", "--verify"))
    assert (data["form"], data["ranks"], data["problems"]) == ("sharded checkpoint", 4, [])
    assert data["verified_bytes"] == data["checksummed_bytes"] == data["bytes"]
    tensors = {t["name"]: t for t in data["tensors"]}
    assert set(tensors) == set(TILINGS)
    assert tensors["expert"]["held"] == [{"rank": 2, "boxes": [[[0, 6], [0, 4]]]}]
    for name, tensor in tensors.items():
        covered = np.zeros(tensor["shape"], int)
        for part in tensor["parts"]:
            covered[tuple(slice(*i) for i in part["box"])] += 1
            assert part["key"] == name or part["key"].startswith(f"{name}[")
            assert int(part["crc32"], 16) >= 0
        assert (covered == 1).all()
        for held in tensor["held"]:
            boxes = [tuple(map(tuple, box)) for box in held["boxes"]]
            assert boxes == [t.box for t in TILINGS[name].tiles(held["rank"])]
    assert json.loads(run(saved, "norm", "--json")) == tensors["norm"]


def test_plain_files_and_folders_are_shown(tmp_path: Path, run: Callable[..., str]) -> None:
    values: Values = {"a": np.zeros((3, 4), np.float32), "b": np.zeros((0, 2), np.int8)}
    save_file(values, tmp_path / "m.safetensors", {"format": "pt"})
    shown = run(tmp_path / "m.safetensors", "--verify")
    assert "plain checkpoint" in shown
    assert "checksums: none in plain files" in shown
    assert "metadata format: pt" in shown
    hf = tmp_path / "hf"
    hf.mkdir()
    for name, value in values.items():
        save_file({name: value}, hf / f"{name}.safetensors")
    index = {"metadata": {"total_size": 48}, "weight_map": {n: f"{n}.safetensors" for n in values}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 tensors" in run(hf)
    (hf / "a.safetensors").unlink()
    said = run(hf, code=1)
    assert "a.safetensors: the file is missing, model.safetensors.index.json names it: it holds 'a'" in said


def test_broken_checkpoints_are_shown_with_what_is_wrong(saved: Path, run: Callable[..., str]) -> None:
    files = sorted(saved.glob("shard-*"))
    raw = [f.read_bytes() for f in files]
    files[1].unlink()  # missing
    files[2].write_bytes(raw[2][:60])  # truncated within its header
    damaged = bytearray(raw[3])
    damaged[-1] ^= 1  # data
    files[3].write_bytes(damaged)
    shown = run(saved, code=1)
    assert f"BROKEN: {files[1]}: the file is missing, lowshard.index.json names it: it holds " in shown
    assert (
        f"BROKEN: {files[2]}: the header's length is" in shown or f"BROKEN: {files[2]}: has 60 bytes" in shown
    )
    assert shown.count("  BROKEN") == 2
    assert "model.layers.*.mlp.up_proj.weight (3)" in shown  # the index still says what there was
    shown = run(saved, "--verify", code=1)
    assert "1 parts differ" in shown
    assert f"BROKEN: {files[3]}: tensor" in shown
    text = run(saved, "--json", "--verify", code=1)
    data = json.loads(text[: text.rindex("}") + 1])  # progress goes to stderr
    assert len(data["problems"]) == 3
    files[3].write_bytes(raw[3])
    assert "  BROKEN" in run(saved, "columns", code=1)
    for file, old in zip(files, raw, strict=True):
        file.write_bytes(old)
    run(saved, "--verify")


def test_a_file_that_holds_something_else_is_named(saved: Path, run: Callable[..., str]) -> None:
    files = sorted(saved.glob("shard-*"))
    files[0].write_bytes(files[1].read_bytes())
    assert f"BROKEN: {files[0]}: " in run(saved, code=1)


def test_no_checkpoint_and_damaged_indexes(saved: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    assert "there is no such file or folder" in run(tmp_path / "gone", code=2)
    index = saved / INDEX_NAME
    text = index.read_text()
    index.write_text(text.replace('"ranks": 4', '"ranks": 5'))
    assert "the index is damaged" in run(saved, code=1)
    body = json.loads(text)
    twice = json.dumps(body).replace('"tensors": {', '"tensors": {"norm": {}, ', 1)
    index.write_text(twice)  # an index that names a tensor twice
    assert "the key 'norm' stands twice" in run(saved, code=1)
    index.unlink()
    assert "parts of a sharded checkpoint, and lowshard.index.json" in run(saved, code=1)
    (tmp_path / "cut.safetensors").write_bytes(b"\x05\x00\x00")
    assert "8 bytes" in run(tmp_path / "cut.safetensors", code=1)
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", code=1)


def test_names_of_others_forge_no_line_and_reach_no_terminal(tmp_path: Path, run: Callable[..., str]) -> None:
    names = ["esc\x1b[31m\nBROKEN: no", "\u200e\x07" * 30 + "\n", "umlaut \xe4"]
    save_file(
        {n: np.zeros((2, 2), np.float32) for n in names}, tmp_path / "m.safetensors", {"k\ny": "v\x1bw"}
    )
    shown = run(tmp_path / "m.safetensors", "--all") + run(tmp_path / "m.safetensors", names[0])
    assert r"esc\x1b[31m\nBROKEN: no" in shown
    assert r"metadata k\ny: v\x1bw" in shown
    assert "umlaut \xe4" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert not any(line.startswith("BROKEN") for line in shown.splitlines())
    beside = "lies beside the index"
    for file, told in (("a\x1b[2J", r"a\x1b[2J: the file is missing"), ("a\nb", beside), ("..", beside)):
        index = {"metadata": {}, "weight_map": {"w": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        said = run(tmp_path, code=1)
        assert told in said
        assert all(c.isprintable() for c in said.removesuffix("\n"))
