"""Modules cut at once: markers, experts, and the shipped name patterns against the names of real models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import DATA

from lowshard.errors import ShardingError
from lowshard.weights import NamePatterns, ShardingStrategy, Sizes, Weight, shard_module

S = ShardingStrategy
FAMILIES = json.loads((DATA / "families.json").read_text(encoding="utf-8"))


# ---- shard_module


def test_a_strategy_for_each_weight_or_the_module_above() -> None:
    rng = np.random.default_rng(0)
    weights = {"a.w": rng.random((5, 4)), "a.v": rng.random((4, 5)), "b.n": rng.random(3)}
    parts = shard_module(weights, {"a": S.rowwise(3), "a.v": S.columnwise(3), "b.n": S.replicate(3)})
    assert np.array_equal(np.concatenate([p["a.w"].array for p in parts]), weights["a.w"])
    assert np.array_equal(np.concatenate([p["a.v"].array for p in parts], axis=1), weights["a.v"])
    assert all(np.array_equal(p["b.n"].array, weights["b.n"]) for p in parts)
    own = shard_module({"w": Weight("w", rng.random((4, 4)), S.rowwise(2))}, {})
    assert [p["w"].shape for p in own] == [(2, 4)] * 2


def test_what_shard_module_refuses() -> None:
    w = {"a.w": np.zeros((4, 4)), "a.q_proj.weight": np.zeros((4, 4))}
    with pytest.raises(ValueError, match=r"no strategy for 1 weights: a\.q_proj"):
        shard_module(w, {"a.w": S.rowwise(2)})
    with pytest.raises(ValueError, match="name no weight"):
        shard_module(w, {"a": S.rowwise(2), "b": S.rowwise(2)})
    with pytest.raises(ValueError, match=r"one number of devices, got \[2, 3\]"):
        shard_module(w, {"a": S.rowwise(2), "a.w": S.rowwise(3)})
    with pytest.raises(ValueError, match="grouped_qkv, which knows its heads"):
        shard_module({"a.q_proj.weight": np.zeros((4, 4))}, {"a": S.tensor_parallel(2)})
    with pytest.raises(ValueError, match="expert 1 of 3 is not there"):
        shard_module({f"m.experts.{e}.w": np.zeros((2, 2)) for e in (0, 2)}, {"m": S.expert_parallel(2)})
    for name in ("encoder.layer.0.attention.output.dense.weight", "layers.0.attention.wo.weight"):
        with pytest.raises(ShardingError, match="grouped_qkv, which knows its heads"):
            shard_module({name: np.zeros((4, 4))}, {"": S.tensor_parallel(2)})
    with pytest.raises(ShardingError, match=r"c_fc.weight \[4, 8\] with a bias of 8 is \[in, out\]"):
        shard_module({"c_fc.weight": np.zeros((4, 8)), "c_fc.bias": np.zeros(8)}, {"": S.tensor_parallel(2)})
    with pytest.raises(ShardingError, match=r"a.scale: .* inside a block of 128"):
        shard_module({"a.weight": np.zeros((576, 4)), "a.scale": np.zeros((5, 1))}, {"a": S.rowwise(2)})
    experts = {f"experts.{e}.w1{end}": np.zeros((2, 2)) for e in (0, 1) for end in (".weight", ".scale")}
    assert [len(part) for part in shard_module(experts, {"": S.expert_parallel(2)})] == [2, 2]
    part = Weight("w", np.zeros((4, 4)), S.rowwise(2)).shard()[0]
    with pytest.raises(ValueError, match="w is one device's part already"):
        shard_module({"w": part}, {"w": S.rowwise(2)})


@given(experts=st.integers(1, 11), k=st.integers(1, 6))
def test_experts_go_whole_to_their_device(experts: int, k: int) -> None:
    apart = {f"m.experts.{e}.w2.weight": np.full((2, 3), e) for e in range(experts)}
    stacked = {"s.experts.down_proj": np.arange(experts * 6).reshape(experts, 2, 3)}
    router = {"m.gate.weight": np.zeros((experts, 2))}
    parts = shard_module(apart | stacked | router, {"m": S.expert_parallel(k), "s": S.expert_parallel(k)})
    place = {e: e * k // experts for e in range(experts)}
    for device, part in enumerate(parts):
        mine = [e for e in range(experts) if place[e] == device]
        assert [n for n in part if "m.experts" in n] == [f"m.experts.{e}.w2.weight" for e in mine]
        assert np.array_equal(part["s.experts.down_proj"].array, stacked["s.experts.down_proj"][mine])
        assert part["m.gate.weight"].shape == (experts, 2)


@given(k=st.integers(1, 5), hidden=st.integers(1, 9), inner=st.integers(1, 9))
def test_tensor_parallel_of_a_gated_mlp_adds_up(k: int, hidden: int, inner: int) -> None:
    rng = np.random.default_rng([k, hidden, inner])
    weights = {
        "mlp.gate_proj.weight": rng.standard_normal((inner, hidden)),
        "mlp.gate_proj.bias": rng.standard_normal(inner),
        "mlp.up_proj.weight": rng.standard_normal((inner, hidden)),
        "mlp.down_proj.weight": rng.standard_normal((hidden, inner)),
        "mlp.down_proj.bias": rng.standard_normal(hidden),
        "mlp.norm.weight": rng.standard_normal(hidden),
    }
    x = rng.standard_normal((3, hidden))

    def forward(w: dict[str, np.ndarray]) -> np.ndarray:
        inside = np.tanh(x @ w["gate_proj.weight"].T + w["gate_proj.bias"]) * (x @ w["up_proj.weight"].T)
        out: np.ndarray = inside @ w["down_proj.weight"].T + w.get("down_proj.bias", 0)
        return out

    def plain(part: dict[str, Weight]) -> dict[str, np.ndarray]:
        return {n.removeprefix("mlp."): np.asarray(w) for n, w in part.items()}

    parts = shard_module(weights, {"mlp": S.tensor_parallel(k)})
    total = sum(forward(plain(part)) for part in parts)
    truth = forward({n.removeprefix("mlp."): w for n, w in weights.items()})
    assert np.allclose(total, truth)
    stacked = {
        "e.gate_up_proj": rng.standard_normal((2, 2 * inner, hidden)),
        "e.down_proj": rng.standard_normal((2, hidden, inner)),
    }
    sums = 0
    for part in shard_module(stacked, {"e": S.tensor_parallel(k)}):
        gate, up = np.split(part["e.gate_up_proj"].array, 2, axis=1)
        inside = np.tanh(np.einsum("th,eih->eti", x, gate)) * np.einsum("th,eih->eti", x, up)
        sums = sums + np.einsum("eti,ehi->eth", inside, part["e.down_proj"].array)
    gate, up = np.split(stacked["e.gate_up_proj"], 2, axis=1)
    inside = np.tanh(np.einsum("th,eih->eti", x, gate)) * np.einsum("th,eih->eti", x, up)
    assert np.allclose(sums, np.einsum("eti,ehi->eth", inside, stacked["e.down_proj"]))


# ---- name patterns: tests/unit/test_families.py cuts every model that they are for


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in FAMILIES[model]["shapes"].items()}


def test_a_number_of_key_value_heads_that_cuts_within_heads_is_refused() -> None:
    at = "model.layers.0.self_attn."
    shapes = {f"{at}q_proj.weight": (64, 64), f"{at}k_proj.weight": (16, 64)}
    said = r"k_proj.weight \(16, 64\): 8 key-value heads would have 2 elements each, those of queries have 8: give"
    with pytest.raises(ShardingError, match=said):
        NamePatterns.load("llama").strategies(shapes, 2, Sizes(8))


def test_names_without_a_rule_or_with_several_are_reported(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "rules:\n- {pattern: 'a.*.w', strategy: rowwise}\n- {pattern: 'a.{0,1}.{w,v}', strategy: columnwise}\n"
        "- {pattern: 'tail.**', strategy: {axiswise: {axis: -1}}}\n"
    )
    patterns = NamePatterns.load(own)
    matching = patterns.match(["a.0.w", "a.2.w", "a.1.v", "b", "a.2.x.w", "tail.x.y", "tail.x\ny"])
    assert matching.unmatched == ("b", "a.2.x.w")
    assert matching.doubly == {"a.0.w": ("a.*.w", "a.{0,1}.{w,v}")}
    with pytest.raises(ValueError, match=r"b matches no pattern; .*a\.0\.w matches a\.\*\.w and"):
        patterns.strategies({"a.0.w": (2, 2), "b": (2,), "a.2.x.w": (2,)}, 2)
    assert patterns.strategies({"tail.q": (2, 6)}, 3)["tail.q"] == S.axiswise(-1, 3)


def test_names_of_another_family_are_told_with_the_shipped_file_that_has_them() -> None:
    with pytest.raises(ValueError, match=r"experts.*; all match in the shipped qwen and moe$"):
        NamePatterns.load("llama").strategies(shapes_of("qwen3_moe"), 2, Sizes(9, 3))
    with pytest.raises(ValueError, match=r"matches no pattern$"):
        NamePatterns.load("moe").strategies({"nowhere.w": (2, 2)}, 2, Sizes(9, 3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"x\.yaml:1:1 .* at \$: "), ("rules: [", "is not YAML"),
        ("rules: [{pattern: a}]", r"x\.yaml:1:9 .* at \$\.rules\[0\]: .*strategy"),
        ("rules: [{pattern: a, strategy: sideways}]", "one of rowwise"),
        ("rules: [{pattern: a, strategy: {rowwise: {axis: 1}}}]", r"'a': rowwise takes no arguments, got .'axis': 1"),
        ("rules: [{pattern: a, strategy: axiswise}]", r"'a': axiswise takes axis, got \{\}"),
        ("rules: [{pattern: a, strategy: {heads: {dim: 1}}}]", r"heads takes axis \(may be left out\), got .'dim'"),
    ],
)  # fmt: skip
def test_files_that_are_no_patterns(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=said):
        NamePatterns.load(tmp_path / "x.yaml")


def test_what_the_words_for_fused_weights_do_and_refuse(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    shapes = {"e.gate_up_proj_blocks": (2, 12, 1, 16), "e.gate_up_proj_scales": (2, 12, 1)}
    own.write_text("rules: [{pattern: '**', strategy: {gate_up: {axis: 1, interleaved: true}}}]")
    made = NamePatterns.load(own).strategies(shapes, 4)
    assert [s.pieces(shapes[n], 1)[0][1] for n, s in made.items()] == [(4, 8), (4, 8)]
    own.write_text("rules: [{pattern: '**', strategy: stacked_qkv}]")
    with pytest.raises(ShardingError, match="this model has 2 and 8: use grouped_qkv"):
        NamePatterns.load(own).strategies({"qkv": (48, 4)}, 2, Sizes(8, 2))
    with pytest.raises(IndexError, match=r"\{gate_up: \{axis: 0\}\}"):
        S.gate_up(2).pieces((8, 4), 0)
    with pytest.raises(ShardingError, match="interleaved is True or False"):
        S.gate_up(2, interleaved="no")  # type: ignore[arg-type]


def test_missing_files_and_sizes() -> None:
    with pytest.raises(ValueError, match="shipped are llama"):
        NamePatterns.load("nonesuch.yaml")
    with pytest.raises(ValueError, match=r"config\.json beside"):
        NamePatterns.load("llama").strategies(shapes_of("llama"), 2)
    with pytest.raises(ValueError, match="does not hold 7 heads"):
        NamePatterns.load("llama").strategies(shapes_of("llama"), 2, Sizes(7, 7))
