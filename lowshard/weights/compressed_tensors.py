"""MXFP8 in a folder that transformers and vLLM read: what its config.json says, and what it cannot say.

The form is `mxfp8-quantized` of the library compressed-tensors: codes `X.weight` in F8_E4M3 `[out, in]`, scales
`X.weight_scale` in U8 `[out, in / 32]`, the bits of E8M0, and in config.json a `quantization_config` with the layers
that are left out. Sources: `compressed_tensors/compressors/mxfp8` of compressed-tensors 0.20, vLLM's
`compressed_tensors_w8a8_mxfp8.py` (109f2f21).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lowshard.block_format import MXFP8
from lowshard.errors import CheckpointError
from lowshard.weights.name_pattern import read_config

_FORM, _NAME = MXFP8["e4m3"], "mxfp8-quantized"
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def mxfp8_scales(shapes: Shapes) -> dict[str, str]:
    """Return, of tensors by dtype and shape, the names of MXFP8 weights by those of their scales."""
    found = {}
    for name, (dtype, shape) in shapes.items():
        if dtype == _FORM.element and shape and shape[-1] % _FORM.block[-1] == 0:
            scale = name + _FORM.suffix
            held = shapes.get(scale, ("", ()))
            if held[0] in (_FORM.scale, "uint8") and held[1] == _FORM.stored(name, shape)[scale].shape:
                found[scale] = name
    return found


def check_config(
    path: Path, scales: Mapping[str, str], shapes: Shapes, where: str, is_new: bool
) -> dict[str, str]:
    """Return the scales that the config.json at `path` has to speak of: none where it says another quantisation.

    Raises:
        CheckpointError: there are some, and the form cannot have them.
    """
    said = read_config(path)[1].get("quantization_config") if scales else None
    has_own = said is not None and not (isinstance(said, dict) and said.get("format") == _NAME)
    if not scales or (has_own and not is_new):
        return {}
    other = next((w for w in scales.values() if not w.endswith(".weight") or len(shapes[w][1]) != 2), None)
    if has_own or other is not None:
        why = (
            f"{path} has a quantization_config already"
            if has_own
            else f"{other} {list(shapes[other or ''][1])} is no weight [out, in] of a linear layer"
        )
        raise CheckpointError(
            f"{where}: a folder for transformers says of MXFP8 weights what they are by compressed-tensors' "
            f"quantization_config, and here that cannot be: {why}; write one file instead (OUT.safetensors), or "
            "leave --merged out"
        )
    return dict(scales)


def config_text(path: Path, scales: Mapping[str, str], shapes: Shapes) -> str:
    """Return the text of the config.json at `path` with what the MXFP8 weights are, and which layers are none."""
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
               "dynamic": False, "scale_dtype": "torch.uint8"}  # fmt: skip
    quantised = set(scales.values())
    plain = [n for n in shapes if n.endswith(".weight") and n not in quantised and len(shapes[n][1]) == 2]
    group = {"targets": ["Linear"], "format": _NAME, "weights": weights,
             "input_activations": weights | {"dynamic": True}}  # fmt: skip
    made = {
        "quant_method": "compressed-tensors", "format": _NAME, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [name.removesuffix(".weight") for name in plain],
    }  # fmt: skip
    return json.dumps(read_config(path)[1] | {"quantization_config": made}, indent=2) + "\n"
