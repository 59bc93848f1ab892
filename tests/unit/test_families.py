"""The shipped name patterns, chosen by `model_type`: names and shapes of models as transformers saves them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from support.comm_kit import refused
from support.recorded import DATA

from lowshard.errors import ShardingError
from lowshard.weights import NamePatterns, ShardingStrategy, Sizes
from lowshard.weights.name_pattern import SHIPPED

FAMILIES: dict[str, Any] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_cut_by_its_model_type_alone(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]["config"]))
    shapes = {name: tuple(shape) for name, shape in FAMILIES[family]["shapes"].items()}
    patterns, sizes = NamePatterns.of_model(tmp_path), Sizes.from_config(tmp_path)
    for tp in (1, 2, 4, 8):
        made = patterns.strategies(shapes, tp, sizes)
        cuts = {name: made[name].layout(shape) for name, shape in shapes.items()}
        assert all(cut.is_cover for cut in cuts.values())
        assert tp == 1 or sum(cut.local_elems(0) for cut in cuts.values()) < 0.75 * sum(
            map(prod, shapes.values())
        )
        for name, shape in shapes.items():
            if (
                name.endswith("self_attn.q_proj.weight")
                and (keys := name.replace("q_proj", "k_proj")) in shapes
            ):
                out = name.replace("q_proj", "dense" if family == "phi" else "o_proj")
                for rank in range(tp):
                    queries = heads(made[name], shape, rank, 0, sizes.num_heads)
                    assert heads(made[out], shapes[out], rank, 1, sizes.num_heads) == queries
                    group = (sizes.num_heads or 1) // (sizes.num_kv_heads or 1)
                    held = heads(made[keys], shapes[keys], rank, 0, sizes.num_kv_heads)
                    assert {query // group for query in queries} == held


def test_packed_weights_of_compressed_tensors_are_cut_as_their_names_say() -> None:
    at = "model.layers.0.self_attn."
    shapes = {f"{at}{p}_proj.weight_{part}": shape for p in "qkvo" for part, shape in (
        ("packed", (64, 8)), ("scale", (64, 2)), ("shape", (2,)))}  # fmt: skip
    made = NamePatterns.load("llama").strategies(shapes, 2, Sizes(8, 8))
    for name, boxes in (("q_proj.weight_packed", (32, 8)), ("o_proj.weight_packed", (64, 4)),
                        ("o_proj.weight_scale", (64, 1)), ("o_proj.weight_shape", (2,))):  # fmt: skip
        assert made[at + name].layout(shapes[at + name]).local_shape(1) == boxes


def heads(made: ShardingStrategy, shape: tuple[int, ...], rank: int, axis: int, count: Any) -> set[int]:
    """Return the heads of which a rank has elements along an axis."""
    spans = [box[axis] for box in made.pieces(shape, rank)]
    return {at * count // shape[axis] for start, stop in spans for at in range(start, stop)}


def test_every_model_type_has_one_file_and_others_are_refused(tmp_path: Path) -> None:
    types = [model_type for name in SHIPPED for model_type in NamePatterns.load(name).model_types]
    assert len(types) == len(set(types)) >= len(FAMILIES)
    config = tmp_path / "config.json"
    for text in ('{"model_type": "falcon"}', "{}"):
        config.write_text(text)
        refused(
            lambda: NamePatterns.of_model(tmp_path),
            ShardingError,
            "model_type",
            "--strategies",
            "llama, qwen",
        )
    config.write_text('{"model_type": "seen", "text_config": {"model_type": "gemma3_text"}}')
    assert NamePatterns.of_model(config).where == "llama (model_type gemma3_text)"
