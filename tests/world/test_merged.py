"""Whole tensors for other readers: `reshard --merged`, the index of Hugging Face's, and the marks on slices."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors import safe_open
from safetensors.numpy import save_file
from support.checkpoints import Values, attention_and_more, on_ranks, same, save_over, values_of

from lowshard import DeviceMesh, Layout, Partial, dtypes
from lowshard.checkpoint import Catalog, read_header, write_delta
from lowshard.checkpoint.checkpoint_index import HF_INDEX, INDEX_NAME, read_index
from lowshard.checkpoint.header import encode_header
from lowshard.cli import main
from lowshard.errors import CheckpointError, DTypeError
from lowshard.fsdp import Param
from lowshard.kernels import quantize_mxfp8
from lowshard.reshard import digest
from lowshard.solver import pick
from lowshard.tiling import Tiling
from lowshard.weights import ShardingStrategy, load, load_sharded, plan_load, remove_leftovers, save
from lowshard.weights.checkpoint_convert import convert
from lowshard.weights.convert_plan import Settings
from lowshard.weights.shard_rules import Owned

S = ShardingStrategy
VALUES: Values = {
    "a.weight": np.random.default_rng(0).random((64, 96), np.float32),
    "b.weight": np.random.default_rng(1).random((32, 64), np.float32), "norm": np.arange(33.0),
    "step": np.array(7), "nothing": np.zeros((0, 3), np.int8),
}  # fmt: skip


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Return a checkpoint that is cut over four ranks; the plain file that it is of lies beside it."""
    save_file(VALUES, tmp_path / "in.safetensors", {"format": "pt"})
    (tmp_path / "s.yaml").write_text(
        "rules: [{pattern: '*.weight', strategy: columnwise}, {pattern: '{norm,nothing}', strategy: rowwise}, "
        "{pattern: step, strategy: replicate}]"
    )
    strategies = ["--strategies", tmp_path / "s.yaml"]
    assert run(tmp_path / "in.safetensors", tmp_path / "cut", "--to", "tp=4", *strategies) == 0
    return tmp_path / "cut"


def run(*arguments: object) -> int:
    return main(["reshard", *map(str, arguments)])


# ---- one plain file


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_plain_file_is_the_file_there_was_to_the_byte(cut: Path, tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "out.safetensors"
    reports = on_ranks(ranks, lambda c: convert(Settings(str(cut), str(out), None, "", merged=True), c))
    assert out.read_bytes() == (tmp_path / "in.safetensors").read_bytes()
    assert len(set(reports)) == 1
    assert (reports[0].files, reports[0].tensors) == (1, len(VALUES))
    assert reports[0].verified_bytes == reports[0].written_bytes == sum(v.nbytes for v in VALUES.values())
    assert reports[0].checksummed_bytes > 0
    assert not list(tmp_path.glob(".*"))


def test_a_folder_of_mxfp8_says_so_in_config_json_or_is_refused(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the form of compressed-tensors, whose scales are U8; without it other readers take codes for values."""
    config = cut.with_name("config.json")
    config.write_text('{"model_type": "x"}')
    assert run(cut.with_name("in.safetensors"), tmp_path / "m", "--to", "dp=2", "--mxfp8", "--strategies",
               cut.with_name("s.yaml")) == 0  # fmt: skip
    assert run(tmp_path / "m", tmp_path / "hf", "--merged") == 0
    assert "(2 as MXFP8)" in capsys.readouterr().out
    catalog = Catalog.open(tmp_path / "hf")
    held = load(
        catalog, plan_load(catalog, {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()})
    )
    for name in ("a.weight", "b.weight"):
        right = quantize_mxfp8(VALUES[name])
        assert same(held[f"{name}_scale"], right.scale)
        assert same(held[name].view(np.uint8), right.data)
    said = json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]
    assert (said["format"], said["ignore"]) == ("mxfp8-quantized", [])
    assert (
        run(tmp_path / "hf", tmp_path / "again", "--to", "dp=3", "--strategies", cut.with_name("s.yaml")) == 0
    )
    for target, text, more in (
        ("here.safetensors", '{"model_type": "x"}', "takes? codes for values"),
        ("hf2", '{"quantization_config": {"quant_method": "fp8"}}', "has a quantization_config already"),
    ):
        config.write_text(text)
        assert run(cut.with_name("in.safetensors"), tmp_path / target, "--merged", "--mxfp8") == 2
        assert re.search(more, capsys.readouterr().err)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    (stacked / "config.json").write_text("{}")
    save_file({"experts.up": np.ones((2, 32, 64), np.float32)}, stacked / "model.safetensors")
    assert run(stacked, tmp_path / "hf3", "--merged", "--mxfp8") == 2
    assert "no weight [out, in]" in capsys.readouterr().err


def test_codes_never_lie_beside_a_config_that_does_not_speak_of_them(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, out, seen = os.replace, tmp_path / "hf", list[bool]()
    out.mkdir()
    (out / "config.json").write_text("{}")

    def watched(source: Any, target: Any) -> None:
        replace(source, target)
        if list(out.glob("model*")):
            seen.append("mxfp8-quantized" in (out / "config.json").read_text())

    monkeypatch.setattr(os, "replace", watched)
    assert run(cut, out, "--merged", "--mxfp8", "--file-size", "1KB") == 0
    assert (len(seen) > 2, set(seen)) == (True, {True})


# ---- a folder for other readers


def read_as_others_do(folder: Path) -> Values:
    index = json.loads((folder / HF_INDEX).read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        with safe_open(folder / file, "np") as opened:
            assert opened.metadata() in (None, {"format": "pt"})  # else transformers refuses the file
            names = set(opened.keys())
            assert names == {n for n, f in index["weight_map"].items() if f == file}
            found |= {name: opened.get_tensor(name) for name in names}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    return found


@pytest.mark.parametrize(("size", "files"), [("1KB", 4), ("30KB", 2), ("1GB", 1)])
def test_a_folder_with_an_index_of_hugging_face_s(cut: Path, tmp_path: Path, size: str, files: int) -> None:
    (cut / "config.json").write_text("{}")
    for name in ("tokenizer.model", "chat_template.jinja"):
        (cut / name).write_text("t")
    assert run(cut, tmp_path / "hf", "--merged", "--file-size", size, "-n", "1") == 0
    found = read_as_others_do(tmp_path / "hf")
    assert set(found) == set(VALUES)
    assert all(same(found[n], v) for n, v in VALUES.items())
    names = [f"model-{n:05d}-of-{files:05d}.safetensors" for n in range(1, files + 1)]
    names = names if files > 1 else ["model.safetensors"]
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {
        HF_INDEX, "config.json", "tokenizer.model", "chat_template.jinja", *names,
    }  # fmt: skip
    for name in ("tokenizer.model", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_text() == "t"
    # Our own readers, and the library's own reader of such folders, take it again.
    again = Catalog.open(tmp_path / "hf" / HF_INDEX)
    assert set(again.tensors) == set(VALUES)
    alone = load_sharded(tmp_path / "hf")
    assert all(same(alone[n], v) for n, v in VALUES.items())
    out = tmp_path / "again.safetensors"
    assert run(tmp_path / "hf" / HF_INDEX, out, "--merged") == 0
    assert out.read_bytes() == (tmp_path / "in.safetensors").read_bytes()


@pytest.mark.parametrize("metadata", [None, {}, {"step": "5"}])
def test_order_and_metadata_of_a_file_stay_as_they_were(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    shapes = {
        "b": ("float16", (4,)),
        "a": ("float32", (2, 3)),
        "none": ("float64", (0,)),
        "c": ("float16", (1, 2)),
    }
    head, _ = encode_header(shapes, metadata, keep_order=True)
    (tmp_path / "in.safetensors").write_bytes(head + bytes(range(36)))
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
    cut = [tmp_path / "cut", "--to", "tp=2", "--strategies", tmp_path / "s.yaml"]
    assert (
        run(tmp_path / "in.safetensors", *cut) == run(cut[0], tmp_path / "out.safetensors", "--merged") == 0
    )
    assert (tmp_path / "out.safetensors").read_bytes() == head + bytes(range(36))
    odd = {"a": ("uint8", (3,)), "b": ("float32", (2,))}  # readers need aligned ones
    assert [e.name for e in encode_header(odd, keep_order=True)[1]] == ["b", "a"]


def test_a_folder_of_hugging_face_s_is_whole_or_none_where_any_rename_fails(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cut / "config.json").write_text("{}")
    replace, left = os.replace, [0]

    def fail(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(5, "disk")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    for number in range(1, 6):  # four files, then the index
        left[0] = number
        assert run(cut, tmp_path / "hf", "--merged", "--file-size", "1KB") == 1
        assert not (tmp_path / "hf").exists()
    assert run(cut, tmp_path / "hf", "--merged", "--file-size", "1KB") == 0
    assert run(cut, tmp_path / "hf", "--merged") == 2  # never one over another


def test_indexes_of_others(tmp_path: Path) -> None:
    save_file(
        {"a": np.ones(2), "b": np.zeros(3)}, tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors"
    )
    save_file({"c": np.ones(2)}, tmp_path / "diffusion_pytorch_model-00002-of-00002.safetensors")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    files = dict(zip("abc", sorted(p.name for p in tmp_path.iterdir() for _ in range(2)), strict=False))
    files["c"] = "diffusion_pytorch_model-00002-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": files}))
    assert [list(Catalog.open(path).tensors) for path in (tmp_path, index)] == [["a", "b", "c"]] * 2
    index.write_text(json.dumps({"weight_map": {n: f for n, f in files.items() if n != "b"}}))
    with pytest.raises(CheckpointError, match=r"tensor 'b' is in the file, .* does not list it: fetch"):
        Catalog.open(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin looks like torch's: .*save_file"):
        Catalog.open(tmp_path)


def test_a_folder_with_another_checkpoint_is_left_alone(
    cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("model.safetensors", ""), (HF_INDEX, '{"weight_map": {"a": "model-1.safetensors"}}')):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(text)
        assert run(cut, folder, "--merged") == 2
        assert "holds another checkpoint" in capsys.readouterr().err
        assert [p.name for p in folder.iterdir()] == [name]


def test_wrong_requests(cut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.safetensors").mkdir()
    bare = tmp_path / "bare"  # its index is gone
    bare.mkdir()
    for file in cut.glob("shard-*"):
        (bare / file.name).write_bytes(file.read_bytes())
    for arguments, said in (
        ((cut, tmp_path / "o", "--merged", "--to-rules", "default"), "needs the sizes of its mesh axes"),
        ((cut, tmp_path / "o"), "or --merged; one is missing"),
        ((cut, tmp_path / "no" / "o.safetensors", "--merged"), "make it first"),
        ((cut, tmp_path / "d.safetensors", "--merged"), "is a folder"),
        ((cut, next(cut.glob("shard-*")), "--merged"), "is a file of the input"),
        ((cut, tmp_path / "o", "--merged", "--file-size", "0"), "1 byte or more"),
    ):
        assert run(*arguments) == 2, arguments
        assert said in capsys.readouterr().err
    for arguments, said in (  # what is there is damaged
        (
            (bare, tmp_path / "o", "--merged", "--from", "tp=4", "--strategies", tmp_path / "s.yaml"),
            "is missing",
        ),
        ((bare, tmp_path / "o", "--merged"), "parts of a sharded checkpoint, and lowshard.index.json"),
    ):
        assert run(*arguments) == 1, arguments
        assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert run(cut, tmp_path / "o", "--merged", "--dry-run", "--json") == 0
    assert {t["strategy"] for t in json.loads(capsys.readouterr().out)["tensors"]} == {"whole in one file"}


# ---- the index of Hugging Face's beside our own


def owned(ranks: int, **shapes: tuple[int, ...]) -> dict[str, Tiling]:
    return {name: S(ranks, Owned(i % ranks)).layout(shape) for i, (name, shape) in enumerate(shapes.items())}


def test_it_stands_beside_ours_where_files_hold_whole_tensors_and_goes_where_they_do_not(
    tmp_path: Path,
) -> None:
    place = tmp_path / "c"
    whole = owned(3, a=(4, 2), b=(3, 3), c=(2,), d=(5, 5))
    save_over(place, values_of(whole), whole, 3)
    assert all(same(a, values_of(whole)[n]) for n, a in read_as_others_do(place).items())
    save_over(place, values_of(whole, 1), whole, 3)  # of the new save, not of the one before
    assert all(same(a, values_of(whole, 1)[n]) for n, a in read_as_others_do(place).items())
    rows = {name: S.rowwise(3).layout(tiling.shape) for name, tiling in whole.items()}
    save_over(place, values_of(rows), rows, 3)
    assert not (place / HF_INDEX).exists()
    empty = owned(3, a=(4, 2), b=(0, 3))  # a tensor that is in no file
    save_over(place, values_of(empty), empty, 3)
    assert not (place / HF_INDEX).exists()


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": "mine.safetensors"}}', "not JSON", "[]", '{"weight_map": {}}']
)
def test_one_that_is_not_of_a_save_stays(tmp_path: Path, text: str) -> None:
    place = tmp_path / "c"
    place.mkdir()
    (place / HF_INDEX).write_text(text)
    whole = owned(2, a=(4, 2), b=(3, 3))
    for tilings in (whole, {n: S.rowwise(2).layout(t.shape) for n, t in whole.items()}, whole):
        save_over(place, values_of(tilings), tilings, 2)
        assert (place / HF_INDEX).read_text() == text


def test_one_of_a_save_that_was_killed_is_taken_away_with_its_files(tmp_path: Path) -> None:
    place = tmp_path / "c"
    whole = owned(2, a=(4, 2), b=(3, 3))
    save_over(place, values_of(whole), whole, 2)
    old = (place / HF_INDEX).read_text()
    kept = {p.name: p.read_bytes() for p in place.glob("shard-*")}
    rows = {n: S.rowwise(2).layout(t.shape) for n, t in whole.items()}
    save_over(place, values_of(rows), rows, 2)
    # As a save leaves it that was killed right after its commit:
    (place / HF_INDEX).write_text(old)
    for name, raw in kept.items():
        (place / name).write_bytes(raw)
    assert set(remove_leftovers(place)) == set(kept)
    assert not (place / HF_INDEX).exists()
    assert not set(kept) & {p.name for p in place.iterdir()}


# ---- marks on slices


def test_no_slice_stands_under_the_name_of_its_tensor(tmp_path: Path) -> None:
    tilings = attention_and_more(4)
    values = values_of(tilings)
    save_over(tmp_path / "c", values, tilings, 4)
    index = read_index(tmp_path / "c" / INDEX_NAME)
    slices = 0
    for file in index.files:
        with safe_open(tmp_path / "c" / file, "np") as opened:
            names = list(opened.keys())
            for name in names:
                if name in tilings:
                    assert opened.get_slice(name).get_shape() == list(tilings[name].shape)
                    continue
                tensor, _, box = name.partition("[")
                cut = tuple(slice(*map(int, part.split(":"))) for part in box.removesuffix("]").split(", "))
                assert opened.get_slice(name).get_shape() == list(values[tensor][cut].shape)
                if values[tensor].dtype.kind in "fiu" and values[tensor].dtype.itemsize >= 2:
                    raw = opened.get_tensor(name)
                    assert raw.tobytes() == values[tensor][cut].tobytes()
                slices += 1
            if any("[" in name for name in names):
                assert "slices of tensors" in opened.metadata()["lowshard"]
                assert "format" not in opened.metadata()  # transformers refuses such a file
    assert slices > 20


# ---- dtypes that lowshard does not compute with

OPAQUE = {
    "c": ("C64", [4, 6], 192), "w": ("F32", [8, 64], 2048), "n2": ("F8_E5M2FNUZ", [8, 4], 32),
    "n1": ("F8_E4M3FNUZ", [8, 4], 32), "e": ("F6_E3M2", [8, 16], 96), "g": ("F6_E2M3", [4, 8], 24),
    "f": ("F4", [8, 64], 256), "none": ("F4", [0, 64], 0), "odd": ("F4", [3, 3], 5), "rows": ("F4", [2, 3], 3),
}  # fmt: skip
"""In the order of the library: dtype, shape and bytes as in a header."""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    fields, at = {}, 0
    for name, (dtype, shape, size) in OPAQUE.items():
        fields[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}, at + size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "in.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + np.random.default_rng(0).bytes(at))
    return path


def cut_over(source: Path, target: Path, tp: int, **strategies: str) -> int:
    rules = [
        {"pattern": n, "strategy": strategies.get(n, "replicate" if n in "none rows odd" else "rowwise")}
        for n in OPAQUE
    ]
    (source.parent / "p.yaml").write_text(json.dumps({"rules": rules}))
    patterns = ["--to", f"tp={tp}", "--strategies", str(source.parent / "p.yaml")]
    return main(["reshard", str(source), str(target), *patterns])


def said(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return what the library, which checks sizes, reads of a file; it refuses what does not fill whole bytes."""
    return {n: (t["dtype"], t["shape"]) for n, t in safetensors.deserialize(path.read_bytes())}


def test_they_are_inspected_cut_loaded_saved_and_put_together_again(plain: Path, capsys: Any) -> None:
    folder = plain.parent
    assert (
        cut_over(plain, folder / "two", 2)
        == cut_over(folder / "two", folder / "four", 2, f="columnwise", e="columnwise")
        == 0
    )
    capsys.readouterr()
    assert main(["inspect", str(folder / "four"), "--verify", "--json"]) == 0
    found = {t["name"]: t for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert {n: t["shape"] for n, t in found.items()} == {n: shape for n, (_, shape, _) in OPAQUE.items()}
    assert [p["box"] for p in found["e"]["parts"]] == [[[0, 8], [0, 8]], [[0, 8], [8, 16]]]
    assert main(["inspect", str(plain)]) == 0
    assert "F8_E4M3FNUZ [8, 4]  whole" in capsys.readouterr().out
    rank = said(next(f for f in (folder / "four").glob("shard-*") if "odd" not in read_header(f).tensors))
    assert rank["f[0:8, 0:32]"] == ("F4", [8, 32])
    assert main(["reshard", str(folder / "four"), str(folder / "out.safetensors"), "--merged"]) == 0
    state = load_sharded(folder / "four").state
    save(folder / "saved.safetensors", state, merged=True)
    for made in ("out.safetensors", "saved.safetensors"):
        assert (folder / made).read_bytes() == plain.read_bytes()
    assert digest(state) == Catalog.open(folder / "two").digests
    raw = bytearray(plain.read_bytes())
    raw[-20] ^= 1
    (folder / "next.safetensors").write_bytes(raw)
    assert write_delta(plain, folder / "next.safetensors", folder / "d.safetensors").changed_tensors == 1


@pytest.mark.parametrize(
    ("tp", "strategies"),
    [(4, {"g": "columnwise"}), (64, {"f": "columnwise"}), (2, {"odd": "rowwise"}), (3, {"e": "columnwise"})],
)  # fmt: skip
def test_a_cut_within_a_byte_names_the_tensor(
    plain: Path, capsys: Any, tp: int, strategies: dict[str, str]
) -> None:
    assert cut_over(plain, plain.parent / "out", tp, **strategies) == 2
    assert f"error: {next(iter(strategies))} [" in capsys.readouterr().err
    assert not (plain.parent / "out").exists()


def test_nothing_computes_with_them(plain: Path, capsys: Any) -> None:
    assert main(["reshard", str(plain), str(plain.parent / "o"), "--merged", "--mxfp8"]) == 2
    assert "does not compute with 'c', which is C64" in capsys.readouterr().err
    mesh = DeviceMesh((1,), ("x",))
    for call in (
        lambda: Layout(mesh, (4,), "opaque C64", (Partial(),)),
        lambda: pick("cast", [Layout.from_spec(mesh, (4,), "float32", (None,))], dtype="opaque F4"),
        lambda: dtypes.get("F4"),
        lambda: dtypes.get(np.complex64),
    ):
        with pytest.raises(DTypeError, match=r"opaque|carries"):
            call()
    with pytest.raises(Exception, match="got opaque F4"):
        Param("w", (4,), dtype="opaque F4")
