"""The decoder of the demo: tensor parallel equals one process, GGUF files are decoded, tokens turn back to text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mode
from support.checkpoints import local_of, on_ranks, same

from lowshard.checkpoint import Catalog
from lowshard.demo import smollm2
from lowshard.demo.generate import GenerateReport, run_rank, settings_json
from lowshard.demo.llama import (
    SMOLLM2_135M,
    Decoder,
    LlamaConfig,
    expected_shapes,
    heads_of,
    tensor_parallel_strategies,
)
from lowshard.errors import BufferMismatchError, CheckpointError
from lowshard.tiling import Tiling
from lowshard.weights import load, plan_load

# Each layer as SmolLM2-135M has it; a full run has all of its layers and words too.
SMALL = replace(SMOLLM2_135M, num_layers=2, vocab_size=1001)
TINY = LlamaConfig(97, 54, 2, 9, 3, 40)


def weights_of(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in expected_shapes(config).items():
        spread = 1 / np.sqrt(shape[-1])
        found[name] = (rng.standard_normal(shape) * (spread if len(shape) > 1 else 0.1)).astype(np.float32)
        if len(shape) == 1:
            found[name] += 1
    return found


@pytest.mark.time_limit(600)
def test_a_model_of_smollm2s_shapes_in_tensor_parallel_equals_one_process(tmp_path: Path) -> None:
    config = SMOLLM2_135M if mode.full() else SMALL
    model = smollm2.generated(tmp_path, config, seed=1)  # some seeds make a model that repeats one word
    for ranks in mode.sample([2, 3, 4], 1, "generated decoder"):
        settings = settings_json(model)
        reports = on_ranks(ranks, lambda c, s=settings: run_rank(s, c), 500)  # type: ignore[misc]
        report = reports[0]
        assert len(report.tokens) == 64
        assert report.ok
        assert report.tokens == report.reference_tokens
        assert 0 < report.logits_difference <= 1e-4
        assert all(r.tokens == report.tokens for r in reports)
        assert sum(b - a for r in report.ranks for a, b in [r.query_heads]) == 9
        group = 3
        for row in report.ranks:
            assert row.kv_heads == (row.query_heads[0] // group, -(-row.query_heads[1] // group))
        assert GenerateReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert len(set(report.tokens)) > 3  # it does not say one word again and again


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_logits_are_equal_on_any_number_of_ranks_also_where_some_have_no_head(ranks: int) -> None:
    weights = weights_of(TINY)
    prompt = [5, 3, 96, 0, 17]
    truth = Decoder(TINY, weights).step(prompt)
    cut = tensor_parallel_strategies(TINY, ranks)

    def job(comm: Any) -> np.ndarray:
        local = {}
        for name, value in weights.items():
            held = local_of(value, cut[name].layout(value.shape), comm.rank)
            assert held is not None
            local[name] = held
        decoder = Decoder(TINY, local, comm)
        decoder.step(prompt[:2])
        return decoder.step(prompt[2:])  # in two steps, by the cache

    for logits in on_ranks(ranks, job):
        assert np.abs(logits - truth).max() <= 1e-5 * np.abs(truth).max()
    assert sum(b - a for r in range(ranks) for a, b in [heads_of(TINY, ranks, r)[0]]) == 9


def test_the_forward_follows_the_published_formulas() -> None:
    """Against a second forward, in float64 and written head by head, without cache or batches."""
    weights, ids = weights_of(TINY), [1, 50, 2, 9]
    w = {n: a.astype(np.float64) for n, a in weights.items()}

    def norm(v: np.ndarray, scale: np.ndarray) -> np.ndarray:
        out: np.ndarray = v / np.sqrt((v**2).mean() + TINY.rms_eps) * scale
        return out

    def turn(v: np.ndarray, position: int) -> np.ndarray:
        half = len(v) // 2
        z = (v[:half] + 1j * v[half:]) * np.exp(1j * position * TINY.rope_theta ** (-np.arange(half) / half))
        return np.concatenate([z.real, z.imag])

    rows = [w["model.embed_tokens.weight"][i] for i in ids]
    dim = TINY.head_dim
    for layer in range(TINY.num_layers):
        at = f"model.layers.{layer}."
        q, k, v = ([w[f"{at}self_attn.{p}_proj.weight"] @ norm(x, w[f"{at}input_layernorm.weight"]) for x in rows]
                   for p in "qkv")  # fmt: skip
        for t in reversed(range(len(rows))):
            parts = []
            for h in range(TINY.num_heads):
                s = slice(h // 3 * dim, (h // 3 + 1) * dim)
                query = turn(q[t][h * dim : (h + 1) * dim], t)
                scores = np.array([query @ turn(k[u][s], u) for u in range(t + 1)]) / np.sqrt(dim)
                p = np.exp(scores) / np.exp(scores).sum()
                parts.append(sum(p[u] * v[u][s] for u in range(t + 1)))
            rows[t] = rows[t] + w[f"{at}self_attn.o_proj.weight"] @ np.concatenate(parts)
        for t, x in enumerate(rows):
            h = norm(x, w[f"{at}post_attention_layernorm.weight"])
            gate, up = w[f"{at}mlp.gate_proj.weight"] @ h, w[f"{at}mlp.up_proj.weight"] @ h
            rows[t] = x + w[f"{at}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    truth = w["model.embed_tokens.weight"] @ norm(rows[-1], w["model.norm.weight"])
    found = Decoder(TINY, weights).step(ids)
    assert np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max()


def test_a_weight_of_another_shape_is_refused() -> None:
    weights = weights_of(TINY)
    weights["model.norm.weight"] = np.ones(3, np.float32)
    with pytest.raises(BufferMismatchError, match=r"model\.norm\.weight: rank 0 of 1"):
        Decoder(TINY, weights)


# ---- GGUF


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter orders them: the two halves of a head in turn."""
    rows, inputs = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, inputs)
    return np.ascontiguousarray(np.stack([halves[:, 0], halves[:, 1]], axis=2)).reshape(rows, inputs)


def test_a_gguf_file_is_decoded_to_the_values_of_its_blocks(tmp_path: Path) -> None:
    import gguf

    config = LlamaConfig(300, 64, 2, 4, 2, 96, 50000.0)
    weights = weights_of(config, 3)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(96)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = ["<|end|>", *sorted(gguf_bytes().values())]
    words = letters + [f"w{i}" for i in range(300 - len(letters))]
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * 299)
    writer.add_token_merges(["w 1"])
    theirs = {v: k for k, v in smollm2._NAMES.items()}
    right = {}
    for name, value in weights.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if "proj" in name else gguf.GGMLQuantizationType.F32
        if "embed" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        stored = permuted(value, heads) if heads else value
        data = gguf.quants.quantize(stored, kind)
        plain = np.asarray(gguf.quants.dequantize(data, kind), np.float32).reshape(value.shape)
        right[name] = smollm2.unpermuted(plain, heads) if heads else plain
        assert not heads or same(smollm2.unpermuted(stored, heads), value)
        parts = name.split(".")
        short = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }.get(name)
        writer.add_tensor(
            short or f"blk.{parts[2]}.{theirs['.'.join(parts[3:-1])]}.weight", data, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    smollm2.decode(tmp_path / "m.gguf", tmp_path / "out")
    catalog = Catalog.open(tmp_path / "out")
    found = load(
        catalog, plan_load(catalog, {n: Tiling.whole(t.shape, t.dtype) for n, t in catalog.tensors.items()})
    )
    assert set(found) == set(right)
    assert all(same(found[n], a) for n, a in right.items())
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert smollm2._config_from_json(values) == replace(config, rms_eps=values["rms_norm_eps"])
    model = smollm2.Model(
        tmp_path / "out" / "model.safetensors", config, tmp_path / "out" / "tokenizer.json", "m"
    )
    tokens = smollm2._tokenizer(model.tokenizer).encode("w1 x").ids  # type: ignore[arg-type]
    assert smollm2.text_of(model, tokens) == "w1 x"
    with pytest.raises(CheckpointError, match="none of a Llama"):
        smollm2.hugging_face_name("blk.0.ssm_a.weight")


def gguf_bytes() -> dict[int, str]:
    """Return the character that stands for each byte in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


@pytest.mark.weights
@pytest.mark.time_limit(300)
def test_smollm2_itself() -> None:
    """SmolLM2-135M-Instruct over two, three and four ranks (a default run: one of them, fewer tokens)."""
    count = 64 if mode.full() else 8
    model = smollm2.cached()
    if model is None:
        pytest.skip("SmolLM2 is not in the cache: `lowshard demo --model smollm2` fetches it")
    for ranks in mode.sample([2, 3, 4], 1, "smollm2"):
        report = on_ranks(ranks, lambda c: run_rank(settings_json(model, count), c), 250)[0]
        assert report.ok, report
        assert len(report.tokens) == count
        assert report.text.startswith("The answer to this question lies in")
