"""The encoder of the demo: the cut by heads, tensor parallel against unsharded, bf16, erf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh, Layout
from lowshard import comm as lc
from lowshard.box import full_box
from lowshard.demo import encoder
from lowshard.demo.encoder import EncoderConfig
from lowshard.demo.source import SYNTHETIC_CONFIG, Source, cached_minilm, synthetic
from lowshard.demo.text import SENTENCES, tokenize
from lowshard.errors import BufferMismatchError, CheckpointError, MismatchError, ShardingError

Array = np.ndarray[Any, np.dtype[Any]]
TWELVE_HEADS = EncoderConfig(
    vocab_size=300, hidden_size=96, num_layers=2, num_heads=12, intermediate_size=203, max_positions=64
)


def load(source: Source) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(source.checkpoint))


def cut(weights: Mapping[str, Array], config: EncoderConfig, rank: int, size: int) -> dict[str, Array]:
    """This rank's part of every tensor, in the dims of its view."""
    mesh = DeviceMesh((size,), ("tp",))
    local = {}
    for name, spec in encoder.tensor_parallel_specs(config, {n: w.shape for n, w in weights.items()}).items():
        view = weights[name].reshape(encoder.shard_view(name, weights[name].shape, config))
        box = Layout.from_spec(mesh, view.shape, view.dtype.name, spec).box(rank)
        local[name] = np.ascontiguousarray(view[tuple(slice(*interval) for interval in box)])
    return local


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Array], Source]:
    source = synthetic(tmp_path_factory.mktemp("twelve"), 3, TWELVE_HEADS)
    return load(source), source


def forward_in_parallel(
    weights: Mapping[str, Array], source: Source, size: int, compute: encoder.Compute
) -> list[encoder.F32]:
    config = source.config
    assert config is not None
    ids, mask = tokenize(source, SENTENCES)
    return lc.run_loopback(
        size,
        lambda comm: encoder.embed_tensor_parallel(
            cut(weights, config, comm.rank, size), config, ids, mask, comm, compute
        ),
    )


@pytest.mark.parametrize("size", [1, *mode.sample([2, 3, 4, 5, 13], 2, "ranks of an encoder")])
def test_tensor_parallel_gives_the_unsharded_embeddings_on_every_rank(
    twelve: tuple[dict[str, Array], Source], size: int
) -> None:
    weights, source = twelve
    assert source.config is not None
    expected = encoder.embed(weights, source.config, *tokenize(source, SENTENCES))
    results = forward_in_parallel(weights, source, size, "float32")
    assert expected.shape == (len(SENTENCES), 96)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1.0, atol=1e-6)
    assert np.abs(results[0] - expected).max() <= (0.0 if size == 1 else 1e-5)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_bf16_stays_close_but_is_not_fp32(twelve: tuple[dict[str, Array], Source], size: int) -> None:
    weights, source = twelve
    assert source.config is not None
    expected = encoder.embed(weights, source.config, *tokenize(source, SENTENCES))
    result = forward_in_parallel(weights, source, size, "bfloat16")[0]
    assert (result * expected).sum(axis=1).min() >= 0.999
    assert np.abs(result - expected).max() > 1e-5


def test_two_all_reduces_a_layer_are_all_the_traffic(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    config = source.config
    assert config is not None
    ids, mask = tokenize(source, SENTENCES[:3])

    def run(comm: lc.Communicator) -> int:
        local = cut(weights, config, comm.rank, comm.size)
        encoder.embed_tensor_parallel(local, config, ids, mask, comm)
        return comm.traffic.calls["all_reduce"]

    assert lc.run_loopback(2, run) == [4, 4]


PARTS = [
    "attention.self.query.weight", "attention.self.value.bias", "attention.output.dense.weight",
    "intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight", "output.dense.bias",
]  # fmt: skip


@pytest.mark.parametrize("name", mode.sample(PARTS, 3, "parts in wrong places"))
def test_a_part_in_the_wrong_place_changes_the_embeddings(
    twelve: tuple[dict[str, Array], Source], name: str
) -> None:
    """Guards the comparisons above: they would notice one swapped half of one tensor of one layer."""
    weights, source = twelve
    assert source.config is not None
    ids, mask = tokenize(source, SENTENCES)
    full = f"encoder.layer.1.{name}"
    swapped = np.roll(weights[full], weights[full].shape[-1] // 2, axis=-1)
    expected = encoder.embed(weights, source.config, ids, mask)
    got = encoder.embed({**weights, full: swapped}, source.config, ids, mask)
    assert np.abs(got - expected).max() > 1e-3


def test_padding_does_not_change_an_embedding(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    assert source.config is not None
    together = encoder.embed(weights, source.config, *tokenize(source, SENTENCES))
    for i in (0, 8, 28):
        alone = encoder.embed(weights, source.config, *tokenize(source, SENTENCES[i : i + 1]))
        assert np.abs(alone[0] - together[i]).max() < 1e-6


def test_every_tensor_is_cut_as_megatron_cuts_it() -> None:
    shapes = encoder.expected_shapes(TWELVE_HEADS)
    specs = encoder.tensor_parallel_specs(TWELVE_HEADS, {**shapes, "pooler.dense.weight": (96, 96)})
    at = "encoder.layer.1."
    assert specs[f"{at}attention.self.query.weight"] == ("tp", None, None)
    assert specs[f"{at}attention.self.key.bias"] == ("tp", None)
    assert specs[f"{at}attention.output.dense.weight"] == (None, "tp", None)
    assert specs[f"{at}attention.output.dense.bias"] == (None,)
    assert specs[f"{at}intermediate.dense.weight"] == ("tp", None)
    assert specs[f"{at}intermediate.dense.bias"] == ("tp",)
    assert specs[f"{at}output.dense.weight"] == (None, "tp")
    assert specs[f"{at}output.dense.bias"] == (None,)
    assert specs["pooler.dense.weight"] == (None, None)
    cut_names = {name.removeprefix("encoder.layer.0.") for name, spec in specs.items() if "tp" in spec}
    assert not any(name.startswith(("embeddings", "pooler")) or "LayerNorm" in name for name in cut_names)
    assert encoder.tensor_parallel_specs(None, shapes) == {n: (None,) * len(s) for n, s in shapes.items()}


def test_views_keep_the_bytes_in_order_and_boxes_go_back_to_the_file() -> None:
    for name, shape in encoder.expected_shapes(TWELVE_HEADS).items():
        view = encoder.shard_view(name, shape, TWELVE_HEADS)
        whole = np.arange(math.prod(shape)).reshape(shape)
        spec = encoder.tensor_parallel_specs(TWELVE_HEADS, {name: shape})[name]
        layout = Layout.from_spec(DeviceMesh((5,), ("tp",)), view, "int64", spec)
        for rank in range(5):
            box = layout.box(rank)
            flat = encoder.flat_box(name, box, TWELVE_HEADS)
            expected = whole.reshape(view)[tuple(slice(*i) for i in box)]
            got = whole[tuple(slice(*i) for i in flat)]
            np.testing.assert_array_equal(got.ravel(), expected.ravel())
        assert encoder.shard_view(name, shape, None) == shape


def test_a_box_that_cuts_a_head_has_no_flat_form() -> None:
    name = "encoder.layer.0.attention.self.query.weight"
    with pytest.raises(ShardingError, match=r"whole heads.*\(0, 8\), it is \(0, 4\)"):
        encoder.flat_box(name, ((0, 3), (0, 4), (0, 96)), TWELVE_HEADS)
    assert encoder.flat_box(name, full_box((12, 8, 96)), TWELVE_HEADS) == ((0, 96), (0, 96))


def test_a_wrong_part_is_the_same_error_on_every_rank(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    config = source.config
    assert config is not None
    ids, mask = tokenize(source, SENTENCES[:2])

    def run(comm: lc.Communicator) -> str:
        local = cut(weights, config, comm.rank, comm.size)
        if comm.rank == 1:
            name = "encoder.layer.0.output.dense.weight"
            local[name] = local[name][:, :-1]
        with pytest.raises(BufferMismatchError) as caught:
            encoder.embed_tensor_parallel(local, config, ids, mask, comm)
        return str(caught.value)

    texts = lc.run_loopback(3, run)
    assert "rank 1 of 3 must have shape (96, 68)" in texts[0]
    assert texts == [texts[0]] * 3


def test_other_tokens_on_one_rank_are_a_mismatch(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    config = source.config
    assert config is not None

    def run(comm: lc.Communicator) -> None:
        ids, mask = tokenize(source, SENTENCES[:2])
        ids[0, 1] += comm.rank
        with pytest.raises(MismatchError):
            encoder.embed_tensor_parallel(cut(weights, config, comm.rank, 2), config, ids, mask, comm)

    lc.run_loopback(2, run)


def test_tokens_outside_the_model_are_refused(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    assert source.config is not None
    ones = np.ones((1, 4), np.int64)
    with pytest.raises(BufferMismatchError, match=r"0\.\.299.*another model"):
        encoder.embed(weights, source.config, ones * 300, ones)
    with pytest.raises(BufferMismatchError, match="1 to 64 tokens"):
        encoder.embed(weights, source.config, np.ones((1, 65), np.int64), np.ones((1, 65)))
    with pytest.raises(BufferMismatchError, match="same shape"):
        encoder.embed(weights, source.config, ones, ones[:, :2])
    missing = "encoder.layer.1.output.dense.bias"
    rest = {name: array for name, array in weights.items() if name != missing}
    with pytest.raises(CheckpointError, match=f"needs tensor {missing}"):
        encoder.embed(rest, source.config, ones, ones)


def test_erf_agrees_with_the_math_module() -> None:
    x = np.concatenate([np.linspace(-7.0, 7.0, 40001), [0.0, 1e-300, 1e-8, 0.5 / 128, np.inf, -np.inf]])
    expected = np.array([math.erf(value) for value in x])
    assert np.abs(encoder.erf(x) - expected).max() < 1e-10
    assert np.isnan(encoder.erf(np.array([np.nan])))[0]
    assert np.signbit(encoder.erf(np.array([-0.0])))[0]


def test_configs_state_their_sizes_and_refuse_other_models() -> None:
    values = SYNTHETIC_CONFIG.to_json()
    assert encoder.config_from_json(values) == SYNTHETIC_CONFIG
    for change, text in (
        ({"model_type": "llama"}, "model_type 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act 'gelu'"),
        ({"num_attention_heads": 5}, "multiple of the number of heads"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers as a number"),
    ):
        with pytest.raises(CheckpointError, match=text):
            encoder.config_from_json({**values, **change})
    del values["vocab_size"]
    with pytest.raises(CheckpointError, match="must state vocab_size"):
        encoder.config_from_json(values)


@pytest.fixture(scope="module")
def minilm() -> Source:
    source = cached_minilm()
    if source is None:
        pytest.skip("the real weights are not in the cache: `lowshard demo` fetches them")
    return source


@pytest.mark.weights
def test_minilm_embeds_as_the_original_does(minilm: Source) -> None:
    """The pinned cosines are those of Hugging Face transformers 5.23 on torch 2.13 in float64."""
    assert minilm.config is not None
    sentences = (SENTENCES[0], SENTENCES[1], SENTENCES[2])
    e = encoder.embed(load(minilm), minilm.config, *tokenize(minilm, sentences)).astype(np.float64)
    similar, unrelated = float(e[0] @ e[1]), float(e[0] @ e[2])
    assert similar > 0.5 > 0.2 > unrelated
    assert similar == pytest.approx(0.6178235, abs=2e-6)
    assert unrelated == pytest.approx(0.0157017, abs=2e-6)


@pytest.mark.weights
@pytest.mark.parametrize("size", mode.sample([2, 5], 1, "MiniLM ranks"))
def test_minilm_in_tensor_parallel_gives_the_unsharded_embeddings(minilm: Source, size: int) -> None:
    weights = load(minilm)
    assert minilm.config is not None
    ids, mask = tokenize(minilm, SENTENCES[:6])
    config = minilm.config
    expected = encoder.embed(weights, config, ids, mask)

    def run(comm: lc.Communicator) -> tuple[encoder.F32, encoder.F32]:
        local = cut(weights, config, comm.rank, size)
        return (
            encoder.embed_tensor_parallel(local, config, ids, mask, comm),
            encoder.embed_tensor_parallel(local, config, ids, mask, comm, "bfloat16"),
        )

    exact, rounded = lc.run_loopback(size, run)[0]
    assert np.abs(exact - expected).max() <= 1e-5
    assert (rounded * expected).sum(axis=1).min() >= 0.999


def test_synthetic_weights_are_deterministic(tmp_path: Path) -> None:
    one = synthetic(tmp_path / "a", 7, TWELVE_HEADS)
    two = synthetic(tmp_path / "b", 7, TWELVE_HEADS)
    other = synthetic(tmp_path / "c", 8, TWELVE_HEADS)
    assert one.checkpoint.read_bytes() == two.checkpoint.read_bytes() != other.checkpoint.read_bytes()
