"""Walks: how many files of lowshard a call enters from the public function on, and by which functions it goes.

Fewer files are easier to follow. What is entered is compared with "Six ways, walked" in ARCHITECTURE.md.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.starting import start_bare, start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(100)]

SCRIPT = Path(__file__).with_name("run_walks.py")
ROOT = Path(__file__).resolve().parents[2]
MOST = {"all_reduce": 6, "execute": 8, "Refit.push": 10, "load": 8, "quantize": 10, "death": 5}
"""Files that each way enters today: a walk may get shorter, and no longer."""
LINES = 14
"""Of a walk that is written down, at most."""
_LINE = re.compile(r"(\d+)\. `([^`]+\.py)` `([^`]+)`(, compiled)?: \S.*")

Walk = list[tuple[str, str]]
"""Files and functions, in the order they were entered."""


class Step(NamedTuple):
    """A line of a walk that is written down."""

    number: int
    file: str
    function: str
    is_compiled: bool


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    folder = tmp_path_factory.mktemp("walks")
    ended = start_ranks(SCRIPT, 2, [str(folder)], 90).ok()
    start_bare([sys.executable, str(SCRIPT), str(folder), "death"], 2, 60)
    ranks, death = json.loads((folder / "death").read_text())
    assert ranks == [1]
    walks = json.loads(ended.stdout) | {"death": death}
    found = {way: [(f, n) for f, n in walk] for way, walk in walks.items()}
    assert set(found) == set(MOST)
    return found


@pytest.fixture(scope="module")
def written() -> dict[str, list[Step]]:
    """Return the walks of ARCHITECTURE.md by the titles of their sections."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("\n## Six ways, walked\n")[2].partition("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        lines = [line for line in rest.splitlines() if line[:1].isdigit()]
        steps = [_LINE.fullmatch(line) for line in lines]
        assert all(steps), [line for line, step in zip(lines, steps, strict=True) if step is None]
        found[title] = [Step(int(s[1]), s[2], s[3], s[4] is not None) for s in steps if s is not None]
    return found


def files_of(walk: Walk) -> list[str]:
    return list(dict.fromkeys(file for file, _ in walk))


@pytest.mark.parametrize("way", MOST)
def test_a_walk_does_not_grow(walks: dict[str, Walk], way: str) -> None:
    found = files_of(walks[way])
    assert len(found) <= MOST[way], found


@pytest.mark.parametrize("way", MOST)
def test_a_walk_is_written_down_as_it_goes(
    walks: dict[str, Walk], written: dict[str, list[Step]], way: str
) -> None:
    steps = written[way]
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert 0 < len(steps) <= LINES
    entered = iter(walks[way])
    for step in steps:
        if step.is_compiled:  # which no profile of Python sees
            assert _function(step) is not None
        else:
            assert (step.file, step.function) in entered, f"step {step.number}, {step.function}, in its turn"


def test_no_other_walk_is_written_down(written: dict[str, list[Step]]) -> None:
    assert set(written) == set(MOST)


def _function(step: Step) -> Any:
    module = importlib.import_module(f"lowshard.{step.file.removesuffix('.py').replace('/', '.')}")
    return getattr(module, step.function)
