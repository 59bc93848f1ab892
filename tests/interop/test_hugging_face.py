"""Checkpoints of transformers' models: cut, merged, and loaded by transformers again with the same outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mode

from lowshard import cli

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own are not ours

DENSE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DENSE, **more))


def qwen3_moe() -> Any:
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**DENSE, **experts))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DENSE, num_local_experts=4))


def deepseek() -> Any:
    latent = {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**DENSE, **latent}))


def bert() -> Any:
    few = {name: DENSE[name] for name in list(DENSE)[:5]}
    return transformers.BertModel(transformers.BertConfig(**few))


def tied() -> Any:
    """One whose output weights are the embedding, stored once, in bf16 and with biases."""
    return llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True).to(torch.bfloat16)


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", llama),
    "tied": ("llama", tied),
    "qwen2": ("qwen", lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DENSE))),
    "qwen3-moe": ("qwen", qwen3_moe),
    "mixtral": ("moe", mixtral),
    "deepseek": ("moe", deepseek),
    "bert": ("bert", bert),
}


def run(*arguments: object) -> None:
    assert cli.main(["reshard", *map(str, arguments)]) == 0


CASES = list(itertools.product(MODELS, ("5GB", "100KB")))  # one file, or several with an index


@pytest.mark.parametrize(("name", "shard_size"), mode.sample(CASES, 3, "models"))
def test_what_was_cut_and_merged_is_what_transformers_loads(
    name: str, shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patterns, make = MODELS[name]
    torch.manual_seed(0)
    make().save_pretrained("own", max_shard_size=shard_size)
    run("own", "cut", "--to", "tp=2,dp=2", "--strategies", patterns)
    run("cut", "again", "--to", "tp=4", "--strategies", patterns)
    run("again", "merged", "--merged", "--file-size", shard_size.replace("5GB", "1GB"))
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    own, loaded = (kind.from_pretrained(place, dtype="auto").eval() for place in ("own", "merged"))
    ours, theirs = own.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert theirs[key].dtype == value.dtype, key
        assert torch.equal(theirs[key], value), key
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(own(tokens)[0], loaded(tokens)[0])
