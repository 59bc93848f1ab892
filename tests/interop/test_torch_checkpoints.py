"""What torch saves on its ranks, read without torch: whole tensors, at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import mode
from support.starting import start_ranks

from lowshard.comm import run_loopback
from lowshard.errors import CheckpointError
from lowshard.weights import load_sharded
from lowshard.weights.checkpoint_convert import convert
from lowshard.weights.convert_plan import Settings

pytest.importorskip("torch", reason="torch is not installed: pip install torch")
RULES = """rules:
  - {pattern: more.count, strategy: replicate}
  - {pattern: "{model.**,more.*.w}", strategy: rowwise}
"""
MODELS = 8 if mode.full() else 3


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4] if mode.full() else [4])
def test_what_torch_saves_is_read(ranks: int, tmp_path: Path) -> None:
    seeds = [str(1000 * ranks + number + mode.seed()) for number in range(MODELS)]
    program = Path(__file__).with_name("run_torch_checkpoints.py")
    start_ranks(program, ranks, [str(tmp_path), *seeds], timeout_s=200).ok()
    (tmp_path / "all.yaml").write_text(RULES)
    for place in (tmp_path / seed for seed in seeds):
        saved = {name: array.tobytes() for name, array in load_sharded(place / "whole.safetensors").items()}
        for form in ("dcp", "hf"):
            if form == "hf" and ranks == 1:  # it could be the first of several as well
                (shard,) = (place / form).glob("shard-*")
                with pytest.raises(CheckpointError, match=r"call it model\.safetensors"):
                    load_sharded(place / form)
                shard.rename(shard.with_name("model.safetensors"))
            whole = {n: data for n, data in saved.items() if form == "dcp" or n != "model.head.weight"}
            assert {n: a.tobytes() for n, a in load_sharded(place / form).items()} == whole
            for tp in range(1, 5):
                cut = str(place / f"{form}{tp}")
                settings = Settings(str(place / form), cut, str(tmp_path / "all.yaml"), f"tp={tp}")
                run_loopback(1, lambda comm, settings=settings: convert(settings, comm))
                assert {n: a.tobytes() for n, a in load_sharded(cut).items()} == whole
