"""State dicts, clipping and optimizers of a ShardedModule are those of torch's FSDP2, on the same ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

pytest.importorskip("torch", reason="torch is not installed: pip install torch")


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("ranks", [1, 2, 4] if mode.full() else [2])
def test_a_sharded_module_is_as_fsdp2(ranks: int, tmp_path: Path) -> None:
    ran = start_ranks(Path(__file__).with_name("run_beside_fsdp2.py"), ranks, [str(tmp_path)], timeout_s=180)
    assert f"as FSDP2 on {ranks} ranks" in ran.ok().stdout
