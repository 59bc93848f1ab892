"""Scales of quantised weights are cut as their weights are, by rule: what `lowshard reshard` writes is read again."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.checkpoints import local_of, on_ranks, same

from lowshard.box import contains, volume
from lowshard.checkpoint import Catalog
from lowshard.cli import main
from lowshard.errors import ShardingError
from lowshard.kernels import quantize_mxfp8
from lowshard.tiling import Tiling
from lowshard.weights import NamePatterns, ShardingStrategy, Sizes, load, plan_load, saved_tilings
from lowshard.weights.checkpoint_grid import Grid, RuledGrid
from lowshard.weights.name_pattern import Align, NameRule
from lowshard.weights.scale_rules import (
    all_scales,
    blocks_of,
    scales_box,
    scales_strategy,
    weights_of_scales,
)

HEADS, KV, DIM = 4, 2, 32
HIDDEN, INNER = HEADS * DIM, 256
Values = dict[str, np.ndarray]
Shape = tuple[int, ...]


def llama(experts: int = 0) -> Values:
    """Return a small model of Llama's names, or with that many experts of Mixtral's."""
    rng = np.random.default_rng(0)
    at = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (48, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (48, HIDDEN),
        f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{at}self_attn.k_proj.weight": (KV * DIM, HIDDEN),
        f"{at}self_attn.v_proj.weight": (KV * DIM, HIDDEN), f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{at}input_layernorm.weight": (HIDDEN,), f"{at}post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    if experts:
        shapes[f"{at}block_sparse_moe.gate.weight"] = (experts, HIDDEN)
        for e in range(experts):
            for w, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                shapes[f"{at}block_sparse_moe.experts.{e}.{w}.weight"] = shape
    else:
        shapes |= {f"{at}mlp.{n}_proj.weight": (INNER, HIDDEN) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def bert() -> Values:
    rng = np.random.default_rng(0)
    at = "encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (48, HIDDEN),
        f"{at}intermediate.dense.weight": (INNER, HIDDEN), f"{at}output.dense.weight": (HIDDEN, INNER),
        f"{at}attention.output.dense.weight": (HIDDEN, HIDDEN),
    }  # fmt: skip
    shapes |= {f"{at}attention.self.{n}.weight": (HIDDEN, HIDDEN) for n in ("query", "key", "value")}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def written(folder: Path, values: Values) -> Path:
    folder.mkdir(parents=True)
    save_file(values, folder / "model.safetensors")
    config = {"num_attention_heads": HEADS, "num_key_value_heads": KV}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whole(path: Path) -> Values:
    catalog = Catalog.open(path)
    tilings = {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()}
    return load(catalog, plan_load(catalog, tilings))


def in_mxfp8(values: Values) -> Values:
    """Return what `--mxfp8` makes of values."""
    made = {}
    for name, value in values.items():
        if value.ndim == 2 and any(p in name for p in ("proj", "dense", ".w1.", ".w2.", ".w3.", "self.")):
            q = quantize_mxfp8(value)
            made[name] = q.data.view(ml_dtypes.float8_e4m3fn)
            made[f"{name}_scale"] = q.scale.view(ml_dtypes.float8_e8m0fnu)
        else:
            made[name] = value
    return made


@pytest.mark.parametrize(
    ("patterns", "values", "grids"),
    [
        ("llama", llama(), ("tp=2,dp=2", "tp=1", "tp=4", "dp=3")), ("qwen", llama(), ("tp=2", "tp=1")),
        ("moe", llama(3), ("tp=2,ep=3", "ep=2", "tp=1")), ("bert", bert(), ("tp=2,dp=2", "tp=4", "tp=1")),
    ],
)  # fmt: skip
def test_what_reshard_writes_in_mxfp8_is_resharded_and_loaded_again(
    tmp_path: Path, patterns: str, values: Values, grids: tuple[str, ...]
) -> None:
    right, source, quantise = in_mxfp8(values), written(tmp_path / "in", values), ["--mxfp8"]
    for grid in grids:
        out = tmp_path / grid
        command = ["reshard", str(source), str(out), "--to", grid, "--strategies", patterns, *quantise]
        assert main(command) == 0
        found = whole(out)
        assert set(found) == set(right)
        assert all(same(found[n], a) for n, a in right.items())
        source, quantise = out, []
    # By patterns in a program, as any other checkpoint: every rank has the scales of its codes.
    catalog = Catalog.open(tmp_path / grids[0])
    shapes = {name: t.shape for name, t in catalog.tensors.items()}
    cut = NamePatterns.load(patterns).strategies(shapes, 2, Sizes(HEADS, KV))
    assert list(cut) == list(shapes)
    tilings = {name: cut[name].layout(shapes[name], t.dtype) for name, t in catalog.tensors.items()}
    held = on_ranks(2, lambda c: load(catalog, plan_load(catalog, tilings), c))
    for rank, local in enumerate(held):
        for name, value in right.items():
            assert same(local[name], local_of(value, tilings[name], rank))
        for name, weight in weights_of_scales(shapes).items():
            for tile in tilings[weight].tiles(rank):
                found = [(t.box[0], tuple(32 * at for at in t.box[1])) for t in tilings[name].tiles(rank)]
                assert any(contains(box, tile.box) for box in found)  # type: ignore[arg-type]
    assert len(weights_of_scales(shapes)) == sum(n.endswith("_scale") for n in right) > 3


@pytest.mark.parametrize("rules", ["pure-fsdp", "ep-as-dp", "default"])
def test_rule_files_cut_scales_as_their_weights(tmp_path: Path, rules: str) -> None:
    source = written(tmp_path / "in", in_mxfp8(llama()))
    assert main(["reshard", str(source), str(tmp_path / "out"), "--to-rules", rules, "--to", "fsdp=2"]) == 0
    found = whole(tmp_path / "out")
    assert all(same(found[n], a) for n, a in in_mxfp8(llama()).items())
    parts = Catalog.open(tmp_path / "out").tensors
    name = "model.layers.0.self_attn.q_proj.weight"
    assert len(parts[name].parts) == len(parts[f"{name}_scale"].parts) == 2
    with pytest.raises(ShardingError, match=r"q_proj.weight_scale .* inside a block of 32"):
        RuledGrid.parse(rules, "fsdp=8").tilings(
            {n: (str(a.dtype), a.shape) for n, a in in_mxfp8(llama()).items()}
        )


@pytest.mark.parametrize("was", ["tp=2", "tp=4", "dp=2,tp=2"])
def test_files_of_ranks_without_an_index_hold_scales(tmp_path: Path, was: str) -> None:
    values, grid = in_mxfp8(llama()), Grid.parse(was)
    given = {n: (str(a.dtype), a.shape) for n, a in values.items()}
    tilings = grid.tilings(given, NamePatterns.load("llama"), Sizes(HEADS, KV))
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(grid.num_ranks):
        mine = {n: local_of(values[n], t, rank) for n, (t, _) in tilings.items()}
        save_file({n: a for n, a in mine.items() if a is not None}, ranks / f"rank-{rank}.safetensors")
    (ranks / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": KV}))
    command = f"reshard {ranks} {tmp_path / 'out'} --from {was} --to tp=1 --strategies llama"
    assert main(command.split()) == 0
    assert all(same(a, values[n]) for n, a in whole(tmp_path / "out").items())


def test_scales_of_which_files_of_ranks_do_not_tell_the_blocks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '*', strategy: rowwise}]")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):  # one scale a rank: of 128 x 128 blocks, or of all of the weight?
        codes = np.full((128, 128), rank, np.int8)
        save_file(
            {"w": codes, "w_scale_inv": np.full((1, 1), 1.0 + rank, np.float32)},
            ranks / f"{rank}.safetensors",
        )
    command = ["reshard", str(ranks), str(tmp_path / "out"), "--from", "tp=2", "--to", "tp=1", "--strategies",
               str(tmp_path / "s.yaml")]  # fmt: skip
    assert main(command) == 2
    assert "the blocks that share a scale cannot be told" in capsys.readouterr().err
    save_file({"w": codes, "w_scale_inv": np.full((1, 1), 1.0, np.float32)}, ranks / "1.safetensors")
    assert main(command) == 0
    assert Catalog.open(tmp_path / "out").tensors["w_scale_inv"].shape == (1, 1)


S = ShardingStrategy


@pytest.mark.parametrize(
    ("weight", "scales", "dtype", "blocks"),
    [
        ((64, 96), (64, 3), None, (1, 32)), ((64, 96), (64, 1), None, (1, None)), ((64, 96), (64,), None, (1,)),
        ((64, 96), (), None, ()), ((64, 96), (1, 1), None, (None, None)), ((64, 96), (1,), None, (None,)),
        ((300, 576), (3, 5), None, (128, 128)), ((8, 64, 96), (8, 64, 3), None, (1, 1, 32)),
        ((64, 32), (64, 1), "float8_e8m0fnu", (1, 32)), ((1, 32), (1, 1), "float8_e8m0fnu", (1, 32)),
        ((64, 60), (64, 3), None, (1, 20)), ((64, 300), (64, 7), None, (1, 43)),
        ((64, 300), (64, 299), None, None), ((64, 96), (64, 97), None, None),
        ((64, 96), (96,), None, None), ((64, 96), (64, 3, 1), None, None), ((64, 96), (64, 96), None, (1, 1)),
        ((0, 96), (0, 3), None, (1, 32)), ((64, 50), (64, 2), None, (1, 32)), ((7,), (7,), None, (1,)),
    ],
)  # fmt: skip
def test_blocks_follow_from_shapes(
    weight: tuple[int, ...], scales: tuple[int, ...], dtype: str | None, blocks: tuple[int | None, ...] | None
) -> None:
    assert blocks_of(weight, scales, dtype) == blocks


@pytest.mark.parametrize(
    ("strategy", "weight", "scales"),
    [
        (S.rowwise(4), (128, 64), (128, 2)), (S.columnwise(2), (128, 64), (128, 2)), (S.rowwise(3), (96, 64), (96, 1)),
        (S.columnwise(4), (96, 64), (96, 1)), (S.columnwise(4), (96, 64), (96,)), (S.rowwise(4), (96, 64), ()),
        (S.stacked_qkv(2, 4, 32), (384, 64), (384, 2)), (S.stacked_qkv(2, 4, 32), (384, 64), (12, 2)),
        (S.stacked_qkv(2, 4, 32), (384, 64), (1,)), (S.gate_up(2, 1), (8, 256, 64), (8, 8, 2)),
        (S.grouped_qkv(4, 4, 2, 32), (256, 64), (256, 2)), (S.axiswise(-1, 2), (8, 64), (8, 2)),
        (S.replicate(3), (96, 64), (96, 2)), (S.rowwise(5), (3, 64), (3, 2)), (S.rowwise(2), (512, 384), (4, 3)),
    ],
)  # fmt: skip
def test_a_device_has_the_scales_of_its_blocks_and_no_others(
    strategy: ShardingStrategy, weight: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    """Codes multiplied by the scales that a device has are the device's part of the whole product."""
    made = scales_strategy(strategy, weight, scales)
    blocks = blocks_of(weight, scales)
    assert blocks is not None
    numbers = np.arange(1, int(np.prod(scales)) + 1, dtype=np.float64).reshape(scales)
    spread = numbers.reshape(*scales, *[1] * (len(weight) - len(scales)))
    for dim, block in enumerate(blocks):
        spread = spread.repeat(weight[dim] if block is None else block, axis=dim)
        spread = spread.take(range(weight[dim]), axis=dim)
    spread = np.broadcast_to(spread, weight)
    for index in range(strategy.num_devices):
        mine = made(numbers, index)
        part = strategy(spread, index)
        assert set(np.unique(part)) == (set(np.unique(mine)) if part.size else set())
        assert made.layout(scales, "float32").local_shape(index) == mine.shape
    assert str(made).startswith("scales, as their weight: ")


def test_a_cut_inside_a_block_is_refused_with_the_name() -> None:
    with pytest.raises(ShardingError, match="inside a block of 32 values that share a scale"):
        scales_box(((0, 8), (0, 16)), (8, 64), (1, 32))
    assert scales_box(((0, 8), (32, 50)), (8, 50), (1, 32)) == ((0, 8), (1, 2))
    assert volume(scales_box(((0, 0), (0, 50)), (8, 50), (1, 32))) == 0
    shapes = {"w": ("float8_e4m3fn", (8, 64)), "w_scale": ("float8_e8m0fnu", (8, 2))}
    patterns = NamePatterns("p.yaml", (NameRule("*", "columnwise"),))
    with pytest.raises(ShardingError, match=r"p.yaml: w_scale \[8, 2\]: .* inside a block of 32"):
        Grid.parse("tp=4").tilings(shapes, patterns, Sizes())


@pytest.mark.parametrize(
    ("weight", "scale", "shapes", "block"),
    [
        ("a.weight", "a.scale", ((576, 256), (5, 2)), 128), ("a.weight", "a.weight_scale_inv", ((576, 9), (5, 1)), 128),
        ("a.weight_packed", "a.weight_scale", ((576, 64), (5, 8)), 128), ("w", "w_scale_2", ((576, 64), (9, 1)), 64),
        ("a.weight", "a.weight_scale", ((300, 64), (7, 64)), 300),  # 43 to 49 rows share one
        ("a_blocks", "a_scales", ((576, 4, 16), (576, 4)), 1), ("a.qweight", "a.qzeros", ((576, 64), (9, 8)), 64),
    ],
)  # fmt: skip
def test_scales_of_every_known_name_are_not_cut_apart_from_their_weight(
    tmp_path: Path, weight: str, scale: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], block: int
) -> None:
    patterns, given = (
        NamePatterns("p.yaml", (NameRule("**", "rowwise"),)),
        {weight: shapes[0], scale: shapes[1]},
    )
    assert all_scales(given) == {scale: weight}
    refused = pytest.raises(ShardingError, match=f"{scale} .*blocks? of")
    with nullcontext() if block == 1 else refused:
        Grid.parse("tp=2").tilings({n: ("float32", s) for n, s in given.items()}, patterns, Sizes())
    save_file({n: np.zeros(s, np.float32) for n, s in given.items()}, tmp_path / "in.safetensors")
    cut = saved_tilings(Catalog.open(tmp_path / "in.safetensors"), 2)
    rows, entries = (cut[name].local_shape(0)[0] for name in (weight, scale))
    assert (rows % block, entries) == (0, 7 if block == 300 else rows // block)


def dequantised(values: np.ndarray, scales: np.ndarray, block: int) -> np.ndarray:
    for dim, (extent, entries) in enumerate(
        zip(values.shape, scales.shape, strict=True) if values.size else ()
    ):
        scales = scales.repeat(extent if entries == 1 else block, dim).take(range(extent), dim)
    return np.multiply(values, scales) if values.size else values


@given(
    file=st.sampled_from(["llama", "qwen", "moe", "bert"]), end=st.sampled_from([".scale", ".weight_scale_inv"]),
    kv=st.integers(1, 3), group=st.sampled_from([1, 2, 4]), dim=st.sampled_from([16, 64, 96, 128]),
    hidden=st.sampled_from([64, 192, 384]), inner=st.sampled_from([96, 192, 320, 384, 576]), k=st.integers(1, 4),
    block=st.sampled_from([128, 96]), align=st.booleans(),
)  # fmt: skip
def test_each_device_has_the_scales_of_its_blocks_and_whole_heads_or_it_is_refused(
    file: str,
    end: str,
    kv: int,
    group: int,
    dim: int,
    hidden: int,
    inner: int,
    k: int,
    block: int,
    align: bool,
) -> None:
    at = "encoder.layer.0." if file == "bert" else "model.layers.0."
    names = [f"{at}self_attn.{n}_proj" for n in "qkvo"] + [
        f"{at}mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    if file == "bert":
        ends = "attention.self.query attention.self.key attention.self.value attention.output.dense"
        names, group = (
            [at + n for n in f"{ends} intermediate.dense intermediate.dense output.dense".split()],
            1,
        )
    heads, rng = kv * group, np.random.default_rng(0)
    q, key, up = (heads * dim, hidden), (kv * dim, hidden), (inner, hidden)
    parts = dict(zip(names, (q, key, key, q[::-1], up, up, up[::-1]), strict=True))
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in parts.items()}
    shapes |= {name + end: tuple(-(-n // block) for n in shape) for name, shape in parts.items()}
    shapes |= {} if file == "moe" else {f"{names[0]}.bias": q[:1]}
    sizes = Sizes(heads, kv, (block, block))
    try:
        made = NamePatterns.load(file).strategies(shapes, k, sizes, "blocks" if align else None)
        tilings = {name: strategy.layout(shapes[name]) for name, strategy in made.items()}
    except ShardingError as error:
        if align or "--align blocks" not in str(error):
            raise
        return
    values = {name: rng.uniform(1, 2, shape) for name, shape in shapes.items()}
    for device in range(k):
        mine, spans = {name: made[name](value, device) for name, value in values.items()}, []
        for number, name in enumerate(names):
            weight, scales = f"{name}.weight", name + end
            whole = dequantised(values[weight], values[scales], block)
            assert np.array_equal(dequantised(mine[weight], mine[scales], block), made[weight](whole, device))
            spans.append([tile.box[number in (3, 6)] for tile in tilings[weight].tiles(device)])
        assert (spans[0], spans[1], spans[4], spans[5]) == (spans[3], spans[2], spans[5], spans[6])
        assert file == "moe" or [t.box[0] for t in tilings[f"{names[0]}.bias"].tiles(device)] == spans[0]
        queries, keys = ({x // dim for a, b in spans[i] for x in range(a, b)} for i in (0, 1))
        assert {head // group for head in queries} == keys


ROWS, HALVES = NameRule("**", "rowwise"), NameRule("**", "gate_up", (("axis", 0),))


@pytest.mark.parametrize(
    ("rule", "name", "weight", "scales", "block", "align", "found"),
    [
        # Names that are not known, and shapes that do not fit known ones
        (ROWS, "a.qs", (576, 256), (5, 2), (), None, "a.qs .* as scales have: .* inside a block of 128"),
        (ROWS, "a.qs", (576, 256), (5, 2), (), "blocks", [3, 2]), (ROWS, "a.qs", (512, 9), (4, 1), (), None, [2, 2]),
        (ROWS, "a.qs", (512, 64), (1, 2), (), None, "a.qs .* cuts it apart: replicate it, or call it a.weight_scale"),
        (ROWS, "a.scale", (512, 64), (640, 2), (), None, "a.scale is cut apart from its weight .*no entry for each"),
        # What the config says, and what has to be asked for
        (ROWS, "a.scale", (192, 256), (2, 3), (96, 96), None, [1, 1]),
        (ROWS, "a.scale", (384, 256), (3, 2), (), None, "a.scale .* --align blocks"),
        (ROWS, "a.scale", (384, 256), (3, 2), (), "blocks", [2, 1]),
        # Two parts of 192 rows, whose scales begin anew: 96 or 128 rows share one
        (HALVES, "a.scale", (384, 256), (4, 2), (), "blocks", "neither the shapes nor weight_block_size"),
        (ROWS, "a.scale", (384, 256), (4, 2), (128, 128), None, "neither the shapes nor weight_block_size"),
        (HALVES, "a.scale", (384, 256), (4, 2), (128, 128), None, "inside a block of 128"),
        (HALVES, "a.scale", (384, 256), (4, 2), (128, 128), "blocks", [2, 2]),
        (HALVES, "a.scale", (384, 256), (3, 2), (128, 128), "blocks", "inside a block of 128"),
    ],
)  # fmt: skip
def test_scales_by_shape_by_config_and_of_fused_parts(
    rule: NameRule, name: str, weight: Shape, scales: Shape, block: Shape, align: Align, found: Any
) -> None:
    patterns, sizes = NamePatterns("p", (rule,)), Sizes(None, None, block)
    shapes = {"a.weight": ("F32", weight), name: ("F32", scales)}
    with pytest.raises(ShardingError, match=found) if isinstance(found, str) else nullcontext():
        made, _ = Grid.parse("tp=2").tilings(shapes, patterns, sizes, align)[name]
        assert [made.local_shape(rank)[0] for rank in (0, 1)] == found
    made, _ = Grid.parse("tp=1").tilings(shapes, patterns, sizes)[name]
    assert made.local_shape(0) == scales


def test_align_blocks_and_the_block_of_a_config_on_the_command_line(tmp_path: Path) -> None:
    codes, scales = np.ones((192, 8), np.int8), np.ones((2, 1), np.float32)
    values = {"a.weight": codes, "a.scale": scales, "a.qs": scales, "b": np.ones((480, 96), np.float32)}
    source, out, patterns = written(tmp_path / "in", values), tmp_path / "out", tmp_path / "s.yaml"
    (source / "config.json").write_text('{"quantization_config": {"weight_block_size": [96, 96]}}')
    patterns.write_text("""rules: [{pattern: a.weight, strategy: rowwise}, {pattern: b, strategy: columnwise},
                           {pattern: a.qs, strategy: replicate}]""")
    command = f"reshard {source} {out} --to tp=2 --mxfp8 --strategies {patterns}".split()
    assert [main(command), main([*command[:3], "--merged", "--align", "blocks"])] == [2, 2]
    assert main([*command, "--align", "blocks"]) == 0
    first = {name: tensor.parts[0].box for name, tensor in Catalog.open(out).tensors.items()}
    assert (first["a.weight"], first["a.scale"]) == (((0, 96), (0, 8)), ((0, 1), (0, 1)))
    assert (first["b"], first["b_scale"]) == (((0, 480), (0, 64)), ((0, 480), (0, 2)))
    assert saved_tilings(Catalog.open(source), 2)["a.weight"].local_shape(0) == (96, 8)
    assert saved_tilings(Catalog.open(out), 4)["a.qs"].local_shape(3) == (2, 1)


def test_scales_of_all_of_a_weight_are_on_every_rank_that_has_a_part() -> None:
    patterns = NamePatterns("p.yaml", (NameRule("**", "rowwise"),))
    given = {"a.weight_packed": (8, 64), "a.weight_global_scale": (1,), "a.input_global_scale": (1,)}
    made = patterns.strategies(given, 2)
    assert all(made[name].layout((1,)).local_shape(1) == (1,) for name in given if "global" in name)
    assert weights_of_scales({"norm.scale": (8,), "norm.bias": (8,)}) == {}


def test_scales_without_their_weight_and_weights_without_their_scales(tmp_path: Path) -> None:
    patterns = NamePatterns.load("llama")
    q = "model.layers.0.self_attn.q_proj.weight"
    sizes = Sizes(HEADS, KV)
    with pytest.raises(
        ShardingError, match=r"q_proj.weight_scale matches no pattern \(it reads as the scales of"
    ):
        patterns.strategies({f"{q}_scale": (HIDDEN, 4)}, 2, sizes)
    with pytest.raises(ShardingError, match=r"\(its shape \[128, 77\] has no entry for each block of model"):
        patterns.strategies({q: (HIDDEN, HIDDEN), f"{q}_scale": (HIDDEN, 77)}, 2, sizes)
    assert set(patterns.strategies({q: (HIDDEN, HIDDEN)}, 2, sizes)) == {q}  # codes alone are a weight
    stem = q.removesuffix("weight")
    made = patterns.strategies(
        {q: (HIDDEN, HIDDEN), f"{stem}input_scale": (), f"{q}_scale_2": (1,)}, 2, sizes
    )
    assert made[f"{stem}input_scale"].layout(()).local_shape(1) == ()
    assert made[f"{q}_scale_2"].layout((1,)).local_shape(1) == (1,)
    # A tensor of that name which is no scales of it has its own pattern.
    (tmp_path / "s.yaml").write_text(
        "rules: [{pattern: a, strategy: rowwise}, {pattern: a_scale, strategy: replicate}]"
    )
    made = NamePatterns.load(tmp_path / "s.yaml").strategies({"a": (8, 64), "a_scale": (5, 5)}, 2)
    assert made["a_scale"].is_replicate


def test_scales_are_not_quantised(tmp_path: Path) -> None:
    """A matrix of FP8 block scales looks like a linear weight."""
    values = {"a.weight": np.zeros((4096, 4096), np.int8), "a.weight_scale_inv": np.ones((32, 32), np.float32),
              "b.weight": np.ones((32, 32), np.float32)}  # fmt: skip
    source = written(tmp_path / "in", values)
    (tmp_path / "s.yaml").write_text("rules: [{pattern: '**', strategy: rowwise}]")
    command = ["reshard", str(source), str(tmp_path / "out"), "--to", "tp=2", "--mxfp8", "--strategies"]
    assert main([*command, str(tmp_path / "s.yaml")]) == 0
    assert set(Catalog.open(tmp_path / "out").tensors) == {*values, "b.weight_scale"}
