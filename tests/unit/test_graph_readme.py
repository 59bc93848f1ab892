"""The README's program on graphs does what the README says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lowshard import DeviceMesh

ROOT = Path(__file__).resolve().parents[2]


def test_the_graph_program_in_the_readme_runs(capsys: Any) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = [p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "GraphSolver" in p]
    assert len(programs) == 1
    names: dict[str, Any] = {"mesh": DeviceMesh((2, 4), ("dp", "tp"))}
    exec(programs[0], names)
    shown = capsys.readouterr().out
    assert names["plan"].peak_bytes <= 4e6
    for tensor in ("up", "down", "y"):
        assert re.search(rf"^{tensor} ", shown, re.MULTILINE)
