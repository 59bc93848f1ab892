"""Checkpoints of transformers' models: cut, merged, and loaded by transformers again with the same outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support import mode

from lowshard import cli
from lowshard.kernels import dequantize_mxfp8, quantize_mxfp8

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own are not ours

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {
    **MOE,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
DEEPSEEK = {
    **GROUPS, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 8,
}  # fmt: skip
LINEAR = {
    "shared_expert_intermediate_size": 48, "linear_num_value_heads": 8, "linear_num_key_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PLAIN = """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 olmo2 glm4 cohere2 granite starcoder2 stablelm
    smollm3 gpt_neox bert"""
FAMILIES: dict[str, dict[str, Any]] = {family: {} for family in PLAIN.split()} | {
    "qwen2_moe": {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**MOE, "num_experts": 8},
    "qwen3_next": {**MOE, **LINEAR, "num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": GROUPS,
    "deepseek_v3": DEEPSEEK,
    "gpt2": {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64},
}


def run(*arguments: object) -> None:
    assert cli.main(["reshard", *map(str, arguments)]) == 0


@pytest.mark.parametrize("shard_bytes", ["5GB", "50KB"])  # one file, or several with an index
@pytest.mark.parametrize("family", mode.sample(list(FAMILIES), 3, "families"))
def test_what_was_cut_by_model_type_and_merged_is_what_transformers_loads(
    family: str, shard_bytes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    kind.from_config(config).to(torch.bfloat16).save_pretrained("own", max_shard_size=shard_bytes)
    run("own", "tp2", "--to", "tp=2")
    run("tp2", "tp4", "--to", "tp=4,dp=2")
    run("tp4", "tp8", "--to", "tp=8")
    run("tp8", "merged", "--merged", "--file-size", shard_bytes)
    own, loaded = (kind.from_pretrained(place, dtype="auto").eval() for place in ("own", "merged"))
    ours, theirs = own.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert theirs[key].dtype == value.dtype, key
        assert torch.equal(theirs[key], value), key
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(own(tokens)[0], loaded(tokens)[0])


def test_mxfp8_is_loaded_right_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    own = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    own.save_pretrained("own")
    run("own", "m", "--to", "dp=2", "--mxfp8")
    run("m", "merged", "--merged")
    if importlib.util.find_spec("compressed_tensors") is None:
        with pytest.raises(ImportError, match="compressed-tensors"):
            transformers.AutoModelForCausalLM.from_pretrained("merged")
        return
    loaded = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    loaded(torch.arange(12).reshape(1, 12))  # which makes values of the codes
    for name, value in own.state_dict().items():
        q = quantize_mxfp8(value.float().numpy()) if "_proj" in name else None
        wanted = torch.from_numpy(dequantize_mxfp8(q, "float32")) if q else value.float()
        assert torch.equal(loaded.state_dict()[name].float(), wanted), name
