"""The data in tests/data: what other systems answered, and the files they came with. README.md there says whence."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lowshard.rules.golden import ACTIVATIONS_KEY, FILE_NAMES

DATA = Path(__file__).resolve().parents[1] / "data"
MAXTEXT = DATA / "maxtext"
GOLDENS = DATA / "goldens"


def oracle(name: str) -> Any:
    """Return the answers in `oracles/NAME.json`."""
    return json.loads((DATA / "oracles" / f"{name}.json").read_text(encoding="utf-8"))


def oracle_lines(name: str) -> list[dict[str, Any]]:
    """Return the rows of `oracles/NAME.jsonl`."""
    text = (DATA / "oracles" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@dataclass(frozen=True)
class Golden:
    """A case of `goldens/index.json`: what made its files, the digest of each, and those that are kept whole."""

    theirs: bool
    id: str
    rules: str
    sizes: dict[str, Any]
    sha256: dict[str, str]
    model: str
    attention_embed: str
    activations: str
    whole: Path | None

    def input(self, kind: str) -> Any:
        """Return the logical names, or the activations with an empty spec, as the data of a dump file."""
        if self.theirs:
            found = json.loads((MAXTEXT / "inputs.json").read_text(encoding="utf-8"))[kind]
            if kind == "logical":
                logical = {k: {"partition_spec": n, "shape": s} for k, (n, s) in found[self.model].items()}
                for key in (k for k in logical if "['self_attention']" in k):
                    names = logical[key]["partition_spec"]
                    logical[key]["partition_spec"] = [
                        self.attention_embed if n == "embed" else n for n in names
                    ]
                return logical
            named = found[self.activations]
        else:
            data = json.loads((GOLDENS / "ep-as-cp-8" / FILE_NAMES[kind]).read_text(encoding="utf-8"))
            if kind == "logical":
                return data
            named = [(key, e["logic_axes"]) for one in data[ACTIVATIONS_KEY] for key, e in one.items()]
        return {ACTIVATIONS_KEY: [{key: {"logic_axes": axes, "PartitionSpec": "P()"}} for key, axes in named]}


def goldens(whose: str) -> list[Golden]:
    """Return the cases of "maxtext", or "ours"."""
    found = json.loads((GOLDENS / "index.json").read_text(encoding="utf-8"))[whose]
    return [
        Golden(
            whose == "maxtext",
            case["id"],
            case["rules"],
            {name: case[name] for name in ("devices", "slices", "ici", "dcn")},
            case["sha256"],
            case.get("model", ""),
            case.get("attention_embed", "embed"),
            case.get("activations", ""),
            DATA / case["whole"] if "whole" in case else None,
        )
        for case in found
    ]


@cache
def independent_mxfp8() -> Any:
    """Return the module `oracles/mxfp8_ref.py`: MXFP8 by searching tables, which shares nothing with ours."""
    spec = importlib.util.spec_from_file_location("mxfp8_ref", DATA / "oracles" / "mxfp8_ref.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
