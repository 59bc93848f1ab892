"""Example files for `lowshard rules`: a rule file, a model as MaxText dumps it and as a checkpoint, golden files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lowshard.checkpoint.header import encode_header
from lowshard.errors import RulesError
from lowshard.rules.golden import FILE_NAMES, dump_text, named_shardings
from lowshard.rules.loading import load_rules

_LAYERS, _MODEL, _HEADS, _KV_HEADS, _HEAD, _MLP, _EXPERTS, _EXPERT_MLP, _VOCAB = (
    4,
    256,
    8,
    4,
    32,
    768,
    8,
    384,
    1024,
)

# MaxText's names of the dims, layers stacked, weights as [in, out].
_LOGICAL: Mapping[str, tuple[tuple[str | None, ...], tuple[int, ...]]] = {
    "token_embedder/embedding": (("vocab", "embed_vocab"), (_VOCAB, _MODEL)),
    "decoder/layers/self_attention/query/kernel": (
        ("embed", "layers", "q_heads", "kv"), (_MODEL, _LAYERS, _HEADS, _HEAD)),
    "decoder/layers/self_attention/key/kernel": (
        ("embed", "layers", "kv_heads", "kv"), (_MODEL, _LAYERS, _KV_HEADS, _HEAD)),
    "decoder/layers/self_attention/value/kernel": (
        ("embed", "layers", "kv_heads", "kv"), (_MODEL, _LAYERS, _KV_HEADS, _HEAD)),
    "decoder/layers/self_attention/out/kernel": (
        ("heads", "layers", "kv", "embed"), (_HEADS, _LAYERS, _HEAD, _MODEL)),
    "decoder/layers/mlp/wi/kernel": (("embed", "layers", "mlp"), (_MODEL, _LAYERS, _MLP)),
    "decoder/layers/mlp/wo/kernel": (("mlp", "layers", "embed"), (_MLP, _LAYERS, _MODEL)),
    "decoder/layers/moe/gate/kernel": (("embed_moe", "layers", None), (_MODEL, _LAYERS, _EXPERTS)),
    "decoder/layers/moe/wi_0": (
        ("exp", "layers", "embed_moe", "mlp_moe"), (_EXPERTS, _LAYERS, _MODEL, _EXPERT_MLP)),
    "decoder/layers/moe/wi_1": (
        ("exp", "layers", "embed_moe", "mlp_moe"), (_EXPERTS, _LAYERS, _MODEL, _EXPERT_MLP)),
    "decoder/layers/moe/wo": (("exp", "layers", "mlp_moe", "embed_moe"), (_EXPERTS, _LAYERS, _EXPERT_MLP, _MODEL)),
    "decoder/layers/pre_attention_norm/scale": (("norm", "layers"), (_MODEL, _LAYERS)),
    "decoder/decoder_norm/scale": (("norm",), (_MODEL,)),
}  # fmt: skip
_RULES = """\
# Rules of your own: three mesh axes. fsdp cuts model dims, expert holds experts and helps fsdp elsewhere.
mesh_axes: [data, fsdp, expert]
data_sharding: [[data, fsdp, expert]]

logical_axis_rules:
  - [activation_batch, [data, fsdp, expert]]
  - [vocab, []]
  - [embed_vocab, [fsdp, expert]]
  - [embed, [fsdp, expert]]
  - [embed_attn, [fsdp, expert]]
  - [heads, []]
  - [q_heads, []]
  - [kv_heads, []]
  - [kv, []]
  - [mlp, []]
  - [exp, [expert]]
  - [embed_moe, [fsdp]]
  - [mlp_moe, []]
  - [norm, []]
  - [layers, []]
"""


def write_examples(folder: Path) -> list[Path]:
    """Write the example files into a folder, which is made where it is missing; return their paths.

    Raises:
        RulesError: one of them is there already, or cannot be written. Nothing is overwritten.
    """
    logical = dump_text(logical_example())
    bound, mesh = load_rules("ep-as-cp", mode="strict").bind(8, {"expert": 2})
    golden = {
        FILE_NAMES["logical"]: logical,
        FILE_NAMES["named"]: dump_text(named_shardings(bound, mesh, logical_example())),
    }
    texts = {
        "my.yml": _RULES,
        FILE_NAMES["logical"]: logical,
        **{f"golden/{n}": t for n, t in golden.items()},
    }
    made: dict[Path, Callable[[Path], object]] = {
        folder / name: lambda path, text=text: path.write_text(text, encoding="utf-8")  # type: ignore[misc]
        for name, text in texts.items()
    }
    made[folder / "model.safetensors"] = _write_checkpoint
    there = [str(path) for path in made if path.exists()]
    if there:
        raise RulesError(
            f"example files overwrite nothing, and {', '.join(there)} is there: give another folder"
        )
    try:
        for path, write in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
    except OSError as error:
        raise RulesError(f"{folder}: example files cannot be written: {error}", path=str(folder)) from error
    return list(made)


def logical_example() -> dict[str, dict[str, object]]:
    """Return a small mixture of experts as MaxText dumps it: parameters and both moments of an optimizer."""
    found: dict[str, dict[str, object]] = {".step": {"partition_spec": [], "shape": []}}
    for above in (".params/['params']", ".opt_state/[0]/.mu/['params']", ".opt_state/[0]/.nu/['params']"):
        for name, (names, shape) in _LOGICAL.items():
            key = "/".join([above, *(f"['{part}']" for part in name.split("/"))])
            found[key] = {"partition_spec": list(names), "shape": list(shape)}
    return found


def _write_checkpoint(path: Path) -> None:
    """Write a checkpoint of Hugging Face's names, of which the commands read the header: its values are zeros."""
    tensors = {"model.embed_tokens.weight": (_VOCAB, _MODEL), "model.norm.weight": (_MODEL,)}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": (_MODEL,),
            f"{at}self_attn.q_proj.weight": (_HEADS * _HEAD, _MODEL),
            f"{at}self_attn.k_proj.weight": (_KV_HEADS * _HEAD, _MODEL),
            f"{at}self_attn.v_proj.weight": (_KV_HEADS * _HEAD, _MODEL),
            f"{at}self_attn.o_proj.weight": (_MODEL, _HEADS * _HEAD),
            f"{at}post_attention_layernorm.weight": (_MODEL,),
            f"{at}mlp.gate.weight": (_EXPERTS, _MODEL),
        }
        for expert in range(_EXPERTS):
            tensors |= {
                f"{at}mlp.experts.{expert}.gate_proj.weight": (_EXPERT_MLP, _MODEL),
                f"{at}mlp.experts.{expert}.up_proj.weight": (_EXPERT_MLP, _MODEL),
                f"{at}mlp.experts.{expert}.down_proj.weight": (_MODEL, _EXPERT_MLP),
            }
    head, entries = encode_header(
        {name: ("bfloat16", shape) for name, shape in tensors.items()}, {"format": "pt"}
    )
    with path.open("wb") as file:
        file.write(head)
        file.truncate(entries[-1].stop)
