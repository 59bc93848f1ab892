"""Walks: how many files of lowshard a call enters from the public function on. Fewer are easier to follow.

Of the whole walk and of what lies outside `comm/`, whose own part of a walk is the same for all that move something.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.starting import start_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(100)]

SCRIPT = Path(__file__).with_name("run_walks.py")
WANTED = {"execute": 12, "Refit.push": 14, "load": 10, "all_reduce": 10, "quantize": 12}
MOST = {"execute": 12, "Refit.push": 14, "load": 10, "quantize": 12}
"""Outside `comm/`."""


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    ended = start_ranks(SCRIPT, 2, [str(tmp_path_factory.mktemp("walks"))], 90).ok()
    found: dict[str, list[str]] = json.loads(ended.stdout)
    assert set(found) == set(WANTED)
    return found


@pytest.mark.parametrize("way", MOST)
def test_a_walk_outside_the_communicator_is_short(walks: dict[str, list[str]], way: str) -> None:
    found = [file for file in walks[way] if not file.startswith("lowshard/comm/")]
    assert len(found) <= MOST[way], found


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=[]
            if way == "quantize"
            else pytest.mark.xfail(
                strict=True,
                reason="the plan, its checks and compiled code are looked up in files of their own",
            ),
        )
        for way in WANTED
    ],
)
def test_a_walk_is_short(walks: dict[str, list[str]], way: str) -> None:
    assert len(walks[way]) <= WANTED[way], walks[way]
