"""The encoder of the demo: how it is cut, tensor parallel against unsharded, bf16, erf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support import mode

from lowshard import DeviceMesh, Layout
from lowshard import comm as lc
from lowshard.demo import encoder
from lowshard.demo.demo_job import grid
from lowshard.demo.encoder import EncoderConfig
from lowshard.demo.source import SYNTHETIC_CONFIG, Source, cached_minilm, synthetic
from lowshard.demo.text import SENTENCES, tokenize
from lowshard.errors import CheckpointError, MeshError
from lowshard.kernels.erf import erf

Array = np.ndarray[Any, np.dtype[Any]]
TWELVE_HEADS = EncoderConfig(
    vocab_size=300, hidden_size=96, num_layers=2, num_heads=12, intermediate_size=203, max_positions=64
)


def load(source: Source) -> dict[str, Array]:
    from safetensors.numpy import load_file

    return dict(load_file(source.checkpoint))


def cut(weights: Mapping[str, Array], config: EncoderConfig, rank: int, size: int) -> dict[str, Array]:
    """This rank's part of every tensor."""
    mesh = DeviceMesh((size,), ("tp",))
    local = {}
    for name, whole in weights.items():
        spec = encoder.tensor_parallel_spec(name, whole.ndim, config)
        box = Layout.from_spec(mesh, whole.shape, whole.dtype.name, spec).box(rank)
        local[name] = np.ascontiguousarray(whole[tuple(slice(*interval) for interval in box)])
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

    def run(comm: lc.Communicator) -> encoder.F32:
        return encoder.embed(cut(weights, config, comm.rank, size), config, ids, mask, comm, compute)

    return lc.run_loopback(size, run)


@pytest.mark.parametrize("size", [1, *mode.sample([2, 3, 4, 6, 12], 2, "ranks of an encoder")])
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


@pytest.mark.parametrize("size", [1, 2, 6])
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
        encoder.embed(local, config, ids, mask, comm)
        return comm.traffic.calls["all_reduce"]

    assert lc.run_loopback(2, run) == [4, 4]


def test_a_serving_copy_has_whole_heads() -> None:
    assert [grid(n, None, TWELVE_HEADS) for n in (1, 3, 4, 5)] == [(1, 1), (1, 3), (2, 2), (5, 1)]
    assert grid(10, 5, None) == (2, 5)
    for ranks, tp, told in ((4, 3, "divide 4 ranks"), (10, 5, "divide the model's 12 attention heads")):
        with pytest.raises(MeshError, match=f"tp={tp} does not {told}"):
            grid(ranks, tp, TWELVE_HEADS)


def test_padding_does_not_change_an_embedding(twelve: tuple[dict[str, Array], Source]) -> None:
    weights, source = twelve
    assert source.config is not None
    together = encoder.embed(weights, source.config, *tokenize(source, SENTENCES))
    for i in (0, 8, 28):
        alone = encoder.embed(weights, source.config, *tokenize(source, SENTENCES[i : i + 1]))
        assert np.abs(alone[0] - together[i]).max() < 1e-6


def test_erf_agrees_with_the_math_module() -> None:
    x = np.concatenate([np.linspace(-7.0, 7.0, 40001), [0.0, 1e-300, 1e-8, 0.5 / 128, np.inf, -np.inf]])
    expected = np.array([math.erf(value) for value in x])
    assert np.abs(erf(x) - expected).max() < 1e-10
    assert np.isnan(erf(np.array([np.nan])))[0]
    assert np.signbit(erf(np.array([-0.0])))[0]


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
