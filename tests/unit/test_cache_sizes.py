"""The size of the last cache, by which ranks of a node choose their way, is read of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowshard.comm.node.node_memory import cached_result_bytes

MIB = 1 << 20


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
