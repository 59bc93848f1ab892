"""Ranks of one machine that are told different sizes of its last cache take one way together all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.starting import start_ranks

from lowshard.comm.node.node_memory import cached_result_bytes

MIB = 1 << 20


@pytest.mark.mpi
@pytest.mark.time_limit(100)
def test_ranks_with_different_caches_give_one_result() -> None:
    script = Path(__file__).with_name("run_cache_sizes.py")
    assert start_ranks(script, 4, [], 90).ok().stdout == "right\n" * 4


@pytest.mark.parametrize(
    ("told", "result_bytes"),
    [({"index2": "512K\n", "index3": "32768K\n"}, 16 * MIB), ({"index2": "512K\n"}, 4 * MIB), ({}, 16 * MIB),
     ({"index3": "much"}, 16 * MIB)],
)  # fmt: skip
def test_the_last_cache_is_what_the_system_tells(
    told: dict[str, str], result_bytes: int, tmp_path: Path
) -> None:
    for index, text in told.items():
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(text)
    assert cached_result_bytes(tmp_path) == result_bytes
    assert cached_result_bytes(tmp_path / "none") == 16 * MIB
