"""`lowshard reshard`: checkpoints on disk, cut anew, quantised, verified, in bounded memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import mode
from support.checkpoints import local_of, on_ranks, same

from lowshard.checkpoint import Catalog, write_delta
from lowshard.cli import main
from lowshard.errors import CheckpointError, MismatchError, RulesError, ShardingError, VerificationError
from lowshard.kernels import quantize_mxfp8
from lowshard.tiling import Tiling
from lowshard.weights import NamePatterns, Sizes, load, plan_load
from lowshard.weights.checkpoint_convert import convert
from lowshard.weights.checkpoint_grid import Grid, RuledGrid
from lowshard.weights.convert_plan import ConvertPlan, Settings
from lowshard.weights.reshard_command import parse_size

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV, DIM, INNER, LAYERS = 9, 3, 32, 192, 2
HIDDEN = HEADS * DIM


def model(seed: int = 0) -> dict[str, np.ndarray]:
    """Return a small model of SmolLM2's build: 9 query heads, 3 key-value heads."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (101, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{at}self_attn.k_proj.weight": (KV * DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV * DIM, HIDDEN), f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN), f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER), f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(model(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": KV}))
    return folder


def whole(path: Path) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors."""
    catalog = Catalog.open(path)
    return load(
        catalog, plan_load(catalog, {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()})
    )


def equal(path: Path, right: dict[str, np.ndarray]) -> bool:
    found = whole(path)
    return set(found) == set(right) and all(same(found[n], a) for n, a in right.items())


def run(*arguments: object) -> int:
    return main(["reshard", *map(str, arguments)])


def test_from_plain_to_four_to_two_by_two_and_back(plain: Path, tmp_path: Path, capsys: Any) -> None:
    a, b, c = (tmp_path / n for n in "abc")
    assert run(plain, a, "--to", "tp=4", "--strategies", "llama.yaml") == 0
    assert "compared with the input, read a second time: all equal" in capsys.readouterr().out
    assert len(list(a.glob("*.safetensors"))) == 4
    assert "grouped_qkv" in str(Catalog.open(a).tensors["model.layers.0.self_attn.q_proj.weight"].strategy)
    assert run(a, b, "--from", "tp=4", "--to", "tp=2,dp=2", "--strategies", "llama", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 4
    assert report["verified_bytes"] == report["written_bytes"] == sum(v.nbytes for v in model().values())
    assert run(b, c, "--to", "dp=3", "--strategies", "llama") == 0
    assert all(equal(path, model()) for path in (a, b, c))
    sizes = [f.stat().st_size for f in c.glob("*.safetensors")]
    assert max(sizes) < 2.2 * min(sizes)  # three copies of everything: each rank writes a share
    # The files of `a` are what four ranks hold.
    tilings = Grid.parse("tp=4").tilings(
        {n: ("float32", v.shape) for n, v in model().items()}, NamePatterns.load("llama"), Sizes(HEADS, KV)
    )
    name = "model.layers.1.self_attn.o_proj.weight"
    parts = Catalog.open(a).tensors[name].parts
    assert [p.box for p in parts] == [t.box for r in range(4) for t in tilings[name][0].tiles(r)]


@pytest.mark.parametrize("was", ["tp=4", "tp=2", "tp=3", "dp=2,tp=2", "tp=2,dp=2"])
def test_files_of_ranks_without_an_index(plain: Path, tmp_path: Path, was: str) -> None:
    grid = Grid.parse(was)
    values = model()
    tilings = grid.tilings(
        {n: ("float32", v.shape) for n, v in values.items()}, NamePatterns.load("llama"), Sizes(HEADS, KV)
    )
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(grid.num_ranks):
        mine = {n: local_of(values[n], t, rank) for n, (t, _) in tilings.items()}
        save_file(
            {n: a for n, a in mine.items() if a is not None}, ranks / f"model-rank-{rank:02d}.safetensors"
        )
    how = f"--from {was} --to tp=3 --strategies llama --heads {HEADS} --kv-heads {KV}".split()
    assert run(ranks, tmp_path / "out", *how) == 0
    assert equal(tmp_path / "out", values)
    with pytest.raises(CheckpointError, match=r"what ranks hold, one file each: .* lowshard reshard --from"):
        convert_alone(Settings(str(ranks), str(tmp_path / "x"), "llama", "tp=1", num_heads=HEADS))
    with pytest.raises(CheckpointError, match=r"means 5 files"):
        convert_alone(Settings(str(ranks), str(tmp_path / "x"), "llama", "tp=1", "tp=5", num_heads=HEADS))
    with pytest.raises(CheckpointError, match=r"another strategy|do not hold|does not hold"):
        convert_alone(Settings(str(ranks), str(tmp_path / "x"), "llama", "tp=1",
                               ",".join(reversed(was.split(","))) if "," in was else f"dp={was[3:]}",
                               num_heads=HEADS, num_kv_heads=KV))  # fmt: skip
    assert not (tmp_path / "x" / "lowshard.index.json").exists()


@pytest.mark.parametrize(
    ("rule", "name", "was", "heads"),
    [
        ("{axiswise: {axis: -1}}", "w", "dp=2,tp=3", 1),
        ("rowwise", "w", "tp=11", 1),  # the file of rank 10 comes behind that of rank 9
        ("{heads: {axis: -1}}", "w", "tp=3", 12),
        ("{grouped_qkv: {section: kv, axis: 1, few_kv: empty}}", "w", "tp=5", 3),
        ("tensor_parallel", "mlp.down_proj.weight", "tp=3", 1),
        ("expert_parallel", "experts.up_proj", "ep=4,tp=2", 1),
    ],
)
def test_what_files_of_ranks_add_up_to(tmp_path: Path, rule: str, name: str, was: str, heads: int) -> None:
    values = {name: np.arange(11 * 12, dtype=np.float32).reshape(11, 12)}
    (tmp_path / "s.yaml").write_text(f"rules: [{{pattern: '**', strategy: {rule}}}]")
    grid, patterns = Grid.parse(was), NamePatterns.load(tmp_path / "s.yaml")
    tiling = grid.tilings({name: ("float32", (11, 12))}, patterns, Sizes(heads, heads))[name][0]
    assert tiling.local_shape(0) != (11, 12)
    (tmp_path / "ranks").mkdir()
    for rank in range(grid.num_ranks):
        mine = local_of(values[name], tiling, rank)
        save_file({} if mine is None else {name: mine}, tmp_path / "ranks" / f"rank-{rank}.safetensors")
    assert run(tmp_path / "ranks", tmp_path / "m.safetensors", "--merged", "--from", was, "--strategies",
               tmp_path / "s.yaml", "--heads", heads) == 0  # fmt: skip
    assert equal(tmp_path / "m.safetensors", values)


def test_deltas_leave_files_of_ranks_cut_as_they_were(plain: Path, tmp_path: Path) -> None:
    grid, values = Grid.parse("dp=2,tp=2"), model()
    made = grid.tilings(
        {n: ("float32", v.shape) for n, v in values.items()}, NamePatterns.load("llama"), Sizes(HEADS, KV)
    )
    (tmp_path / "ranks").mkdir()
    for rank in range(4):
        mine = {n: local_of(values[n], tiling, rank) for n, (tiling, _) in made.items()}
        save_file(
            {n: a for n, a in mine.items() if a is not None}, tmp_path / "ranks" / f"r{rank}.safetensors"
        )
    after = {n: v + 1 for n, v in values.items()}
    save_file(after, tmp_path / "next.safetensors")
    write_delta(plain, tmp_path / "next.safetensors", tmp_path / "weight_v000001.safetensors")
    assert run(tmp_path / "ranks", tmp_path / "out", "--from", grid, "--strategies", "llama", "--heads", HEADS,
               "--kv-heads", KV, "--apply", tmp_path / "weight_v000001.safetensors") == 0  # fmt: skip
    assert equal(tmp_path / "out", after)
    assert {n: t.tiling for n, t in Catalog.open(tmp_path / "out").tensors.items()} == {
        n: t for n, (t, _) in made.items()
    }


@pytest.mark.parametrize(
    ("was", "changed", "told"),
    [
        ("dp=2,tp=2", None, ""),
        ("dp=2,tp=2", (3, "w"), r"rank-3\.safetensors: tensor 'w': \[3:6, 0:2\] is not what .*rank-1"),
        ("dp=2,tp=2", (2, "s"), r"rank-2\.safetensors: tensor 's': \[0:5\] is not what .*rank-0"),
        ("tp=2,dp=2", None, r"rank-1\.safetensors: tensor 'w': \[0:3, 0:2\] is not what .*rank-0"),
    ],
)
def test_what_several_files_of_ranks_hold_is_compared(
    tmp_path: Path, capsys: Any, was: str, changed: tuple[int, str] | None, told: str
) -> None:
    (tmp_path / "s.yaml").write_text(
        "rules: [{pattern: w, strategy: rowwise}, {pattern: s, strategy: replicate}]"
    )
    (tmp_path / "ranks").mkdir()
    for rank in range(4):  # as dp=2,tp=2 has it
        mine = {"w": np.full((3, 2), rank % 2, np.float32), "s": np.ones(5, np.float32)}
        mine = {name: array + ((rank, name) == changed) for name, array in mine.items()}
        save_file(mine, tmp_path / "ranks" / f"rank-{rank}.safetensors")
    how = f"--to tp=1 --from {was} --strategies {tmp_path / 's.yaml'}".split()
    command = (tmp_path / "ranks", tmp_path / "out", *how)
    assert run(*command) == bool(told)
    assert re.search(told, capsys.readouterr().err)
    assert (tmp_path / "out").exists() != bool(told)
    assert run(*command, "--no-verify") == 0


def ruled_ranks(folder: Path, rules: str, sizes: str) -> Path:
    """Write one file a rank, without an index, cut as a rule file says."""
    folder.mkdir()
    values, grid = model(), RuledGrid.parse(rules, sizes)
    tilings = grid.tilings({n: ("float32", v.shape) for n, v in values.items()})
    for rank in range(grid.num_ranks):
        mine = {n: local_of(values[n], t, rank) for n, (t, _) in tilings.items()}
        save_file({n: a for n, a in mine.items() if a is not None}, folder / f"rank-{rank:02d}.safetensors")
    return folder


def test_from_the_cuts_of_one_rule_file_to_those_of_another(tmp_path: Path, capsys: Any) -> None:
    ranks = ruled_ranks(tmp_path / "ranks", "ep-as-cp", "fsdp=2,expert=2")
    was = ("--from-rules", "ep-as-cp", "--from", "fsdp=2,expert=2")
    assert run(ranks, tmp_path / "out", *was, "--to-rules", "pure-fsdp", "--to", "fsdp=3") == 0
    assert equal(tmp_path / "out", model())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    name = "model.layers.1.mlp.down_proj.weight"
    layout = RuledGrid.parse("pure-fsdp", "fsdp=3").tilings({name: ("float32", (HIDDEN, INNER))})[name][0]
    catalog = Catalog.open(tmp_path / "out")
    assert [p.box for p in catalog.tensors[name].parts] == [t.box for r in range(3) for t in layout.tiles(r)]
    assert len({p.box for p in catalog.tensors[name].parts}) == 3  # cut, not copied
    # From there to a grid of strategies, and the other way round.
    again, back = tmp_path / "again", tmp_path / "back"
    heads = ["--heads", 9, "--kv-heads", 3]
    assert run(tmp_path / "out", again, "--to", "tp=2", "--strategies", "llama", *heads) == 0
    assert run(again, back, "--to-rules", "default", "--to", "tensor=2,fsdp=2") == 0
    assert equal(back, model())
    capsys.readouterr()
    assert run(again, back, "--to-rules", "default", "--to", "tensor=2", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_rule_cuts_that_cannot_be_are_refused(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    ranks = ruled_ranks(tmp_path / "ranks", "pure-fsdp", "fsdp=2")
    for settings, error, match in (
        (Settings(str(plain), str(out), None, "fsdp=2", to_rules="nonesuch.yml"), RulesError, "nonesuch.yml"),
        (Settings(str(plain), str(out), None, "fsdp=0", to_rules="pure-fsdp"), RulesError, "fsdp=0"),
        (Settings(str(plain), str(out), None, "tp=2"), ShardingError, "model_type None: give --strategies"),
        (Settings(str(ranks), str(out), None, "fsdp=2", to_rules="pure-fsdp", from_rules="pure-fsdp"),
         ShardingError, "--from"),
        (Settings(str(ranks), str(out), None, "fsdp=2", "fsdp=3", to_rules="pure-fsdp", from_rules="pure-fsdp"),
         CheckpointError, "means 3 files"),
        # 288 columns by 5 are no whole blocks of 32.
        (Settings(str(plain), str(out), None, "fsdp=5", to_rules="pure-fsdp", mxfp8=True),
         ShardingError, "inside a block of 32"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            convert_alone(settings)
    assert not out.exists() or not list(out.glob("*.safetensors"))


def convert_alone(settings: Settings) -> Any:
    (report,) = on_ranks(1, lambda c: convert(settings, c))
    return report


@pytest.mark.parametrize(("ranks", "to"), [(1, "tp=2"), (3, "tp=4"), (2, "tp=2,dp=2")])
def test_mxfp8_codes_and_scales_are_those_of_the_whole_weight(
    plain: Path, tmp_path: Path, ranks: int, to: str
) -> None:
    settings = Settings(str(plain), str(tmp_path / "q"), "llama", to, mxfp8=True, memory_bytes=300_000_000)
    if to == "tp=4":  # 192 columns in blocks of 32 do not go into four equal parts
        with pytest.raises(
            ShardingError, match=r"down_proj.*inside a block of 32.*Segment\(192, num_heads=6\)"
        ):
            convert_alone(settings)
        return
    reports = on_ranks(ranks, lambda c: convert(settings, c))
    assert len(set(reports)) == 1
    assert reports[0].quantised == 7 * LAYERS
    found = whole(tmp_path / "q")
    for name, value in model().items():
        if "proj" not in name:
            assert same(found[name], value)
            continue
        right = quantize_mxfp8(value)
        assert found[name].view(np.uint8).tobytes() == right.data.tobytes()
        assert found[f"{name}_scale"].view(np.uint8).tobytes() == right.scale.tobytes()


def test_experts_over_an_axis_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    at = "model.layers.0."
    values = {"model.embed_tokens.weight": (40, 64), "lm_head.weight": (40, 64), "model.norm.weight": (64,),
              f"{at}input_layernorm.weight": (64,), f"{at}post_attention_layernorm.weight": (64,),
              f"{at}self_attn.q_proj.weight": (64, 64), f"{at}self_attn.k_proj.weight": (32, 64),
              f"{at}self_attn.v_proj.weight": (32, 64), f"{at}self_attn.o_proj.weight": (64, 64),
              f"{at}block_sparse_moe.gate.weight": (5, 64)}  # fmt: skip
    for e in range(5):
        for w, shape in (("w1", (48, 64)), ("w2", (64, 48)), ("w3", (48, 64))):
            values[f"{at}block_sparse_moe.experts.{e}.{w}.weight"] = shape
    arrays = {n: rng.random(s).astype(np.float32) for n, s in values.items()}
    save_file(arrays, tmp_path / "m.safetensors")
    for to in ("tp=2,ep=3", "ep=4", "tp=3"):
        settings = Settings(
            str(tmp_path / "m.safetensors"), str(tmp_path / to), "moe", to, num_heads=4, num_kv_heads=2
        )
        convert_alone(settings)
        assert equal(tmp_path / to, arrays)
    owners = [
        {int(p.file[-len("00000-of-00004.safetensors") :][:5]) for p in t.parts}
        for n, t in Catalog.open(tmp_path / "ep=4").tensors.items()
        if "experts.4." in n
    ]
    assert owners == [{4 * 4 // 5}] * 3


@pytest.mark.full_only
def test_the_memory_of_a_process_is_bounded(tmp_path: Path) -> None:
    """A checkpoint of 420 MB through a process that may hold 300 MB."""
    folder = tmp_path / "in"
    folder.mkdir()
    shape = (14_000, 7_500)
    head = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 420_000_000]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 420_000_000)
    (tmp_path / "s.yaml").write_text("rules: [{pattern: w, strategy: columnwise}]")
    command = [sys.executable, "-m", "lowshard", "reshard", str(folder), str(tmp_path / "out"), "--to", "tp=3",
               "--strategies", str(tmp_path / "s.yaml"), "--memory", "300MB"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    most = 0
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        most = max(
            most, sum(int(li.split()[1]) * 1024 for li in lines if li.startswith(("RssAnon", "RssShmem")))
        )
        time.sleep(0.005)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert 10_000_000 < most < 300_000_000
    tensor = Catalog.open(tmp_path / "out").tensors["w"]
    assert [p.box for p in tensor.parts] == [((0, 14_000), (i * 2500, (i + 1) * 2500)) for i in range(3)]


def test_the_report_says_what_was_compared_with_what(plain: Path, tmp_path: Path, capsys: Any) -> None:
    total = sum(v.nbytes for v in model().values())
    damaged = bytearray((plain / "model.safetensors").read_bytes())
    damaged[-1] ^= 1  # nothing in a plain file tells
    (plain / "model.safetensors").write_bytes(damaged)
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(plain, a, "--to", "tp=2", "--strategies", "llama") == 0
    said = capsys.readouterr().out
    assert f"input: {plain} has no checksums: not verified" in said
    assert f"output: {total / 1e6:.1f} MB read again and compared with the input" in said
    assert (
        run(a, b, "--to", "tp=3", "--strategies", "llama", "--heads", HEADS, "--kv-heads", KV, "--no-verify")
        == 0
    )
    said = capsys.readouterr().out
    assert f"input: {total / 1e6:.1f} of {total / 1e6:.1f} MB compared with the checksums of {a}" in said
    assert "output: not compared" in said
    shard = next(a.glob("shard-*"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert run(a, b, "--to", "tp=3", "--strategies", "llama", "--heads", HEADS, "--kv-heads", KV) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_tensor_that_has_the_name_of_scales_is_named_before_anything_is_written(tmp_path: Path) -> None:
    values = {"a.weight": np.ones((8, 64), np.float32), "a.weight_scale": np.ones((8, 2), np.float32)}
    save_file(values, tmp_path / "in.safetensors")
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
    settings = Settings(
        str(tmp_path / "in.safetensors"), str(tmp_path / "out"), str(tmp_path / "s.yaml"), "tp=2"
    )
    with pytest.raises(ShardingError, match=r"in.safetensors: the scales of 'a.weight' .* 'a.weight_scale'"):
        convert_alone(replace(settings, mxfp8=True))
    assert not (tmp_path / "out").exists()
    convert_alone(settings)
    assert equal(tmp_path / "out", values)


def test_wrong_requests_are_told_before_anything_is_written(plain: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    for arguments, said in (
        (("--to", "tp=0", "--strategies", "llama"), "reads like 'tp=2,dp=2'"),
        (("--to", "xp=2", "--strategies", "llama"), "axes tp, ep, dp"),
        (("--to", "tp=2", "--from", "tp=3", "--strategies", "llama"), "--from tp=3 means 3 files"),
        (("--strategies", "llama", "--to-rules", "pure-fsdp", "--to", "fsdp=2"), "--strategies goes with --to"),
        (("--to-rules", "pure-fsdp"), "--to-rules needs the sizes of its mesh axes"),
        (("--to", "tp=2", "--strategies", "bert"), "matches no pattern"),
        (("--to", "tp=2", "--strategies", "llama", "--memory", "10MB"), "at least 256MB"),
        (("--to", "tp=2", "--strategies", "llama", "--heads", "7"), "does not hold 7 heads"),
        (("--to", "tp=2", "--strategies", "llama", "-n", "0"), "at least 1"),
    ):  # fmt: skip
        assert run(plain, out, *arguments) == 2
        assert said in capsys.readouterr().err
    file = plain / "model.safetensors"
    assert run(file, out, "--to", "tp=2", "--from", "tp=3", "--strategies", "llama") == 2
    assert "holds whole tensors, --from tp=3 has 3 ranks: leave it out" in capsys.readouterr().err
    part = tmp_path / "model-00001-of-00003.safetensors"
    part.symlink_to(file)
    assert run(part, out, "--to", "tp=2", "--strategies", "llama") == 2
    assert "one of 3 files that hold a checkpoint together: pass their folder" in capsys.readouterr().err
    assert run(tmp_path / "gone", out, "--to", "tp=2", "--strategies", "llama") == 2
    assert run(plain, plain, "--to", "tp=2", "--strategies", "llama") == 2
    assert "another folder" in capsys.readouterr().err
    assert not out.exists()
    assert run(plain, out, "--to", "tp=2", "--strategies", "llama", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2
    assert not out.exists()
    assert (parse_size("1.5GiB"), parse_size("500 mb"), parse_size("7")) == (3 * 2**29, 500_000_000, 7)


def test_ranks_that_have_other_requests_or_files_are_told(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Settings(str(plain), str(tmp_path / "out"), "llama", "tp=2")
    said = r"ranks \[0\] have source .*, to 'tp=2', a checkpoint .*; ranks \[1\] have .*, to 'tp=3', verify False,"
    with pytest.raises(MismatchError, match=said):
        on_ranks(2, lambda c: convert(replace(asked, to="tp=3", verify=False) if c.rank else asked, c))
    lock, real = threading.Lock(), ConvertPlan.of

    def of(settings: Settings) -> ConvertPlan:  # another host has another file at the same path
        with lock:
            plan = real(settings)
            save_file(dict(list(model().items())[:3]), plain / "model.safetensors")
            return plan

    monkeypatch.setattr(ConvertPlan, "of", of)
    with pytest.raises(MismatchError, match=r"ranks .* have source .*, a checkpoint"):
        on_ranks(2, lambda c: convert(asked, c))
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_disk_gave_back_otherwise_is_not_published(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(str(plain), str(tmp_path / "out"), "llama", "tp=2")
    convert_alone(settings)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    real = os.fsync
    spoiled = []

    def spoil(fd: int) -> None:
        if not spoiled and os.fstat(fd).st_size > 10_000:
            spoiled.append(os.pwrite(fd, b"\xff", os.fstat(fd).st_size - 5))
        real(fd)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(VerificationError, match="is not what"):
        convert_alone(settings)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2] if mode.full() else [1])
def test_an_interrupt_leaves_no_file_and_no_new_folder(plain: Path, tmp_path: Path, ranks: int) -> None:
    big = tmp_path / "big"
    big.mkdir()
    rng = np.random.default_rng(0)
    # So many that they are not written before a launcher has ended its ranks, and few bytes to sync.
    save_file(
        {f"w{i}": rng.random((10, 2000), dtype=np.float32) for i in range(2000)}, big / "model.safetensors"
    )
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lowshard", "reshard", str(big), str(out), "--to", "tp=2", "--strategies",
               str(tmp_path / "s.yaml"), "-n", str(ranks)]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    limit = time.monotonic() + 60
    while not list(out.glob("shard-*")) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert not out.exists()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert sorted(p.suffix for p in out.iterdir()) == [".json", ".safetensors", ".safetensors"]
