"""The data in tests/data: what other systems answered, and the files they came with. README.md there says whence."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
MAXTEXT = DATA / "maxtext"


def oracle(name: str) -> Any:
    """Return the answers in `oracles/NAME.json`."""
    return json.loads((DATA / "oracles" / f"{name}.json").read_text(encoding="utf-8"))


def oracle_lines(name: str) -> list[dict[str, Any]]:
    """Return the rows of `oracles/NAME.jsonl`."""
    text = (DATA / "oracles" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def independent_mxfp8() -> Any:
    """Return the module `oracles/mxfp8_ref.py`: MXFP8 by searching tables, which shares nothing with ours."""
    spec = importlib.util.spec_from_file_location("mxfp8_ref", DATA / "oracles" / "mxfp8_ref.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
