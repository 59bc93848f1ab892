"""Prints the lowest versions that pyproject.toml allows, as constraints for pip; CONTRIBUTING.md has their use."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("openmpi", "plot", "solve", "test")

for line in sorted(
    {*PROJECT["dependencies"], *(one for e in EXTRAS for one in PROJECT["optional-dependencies"][e])}
):
    bound = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", line)
    if bound:
        print(f"{bound[1]}=={bound[2]}")
