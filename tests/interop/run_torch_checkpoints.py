"""Random models that torch saves on ranks of gloo, in both of its forms: run by test_torch_checkpoints.py."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dt
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mpi4py import MPI
from support import gloo

TIED = "model.head.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def sharded_model(rng: random.Random, ranks: int) -> nn.Module:
    """Return a model with tied weights, of odd sizes, sharded in one of the ways that torch has."""
    rows, inner, width = rng.randint(1, 40), rng.randint(1, 30), rng.choice((3, 8, 20))
    model = nn.Module()
    model.embed, model.head = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
    model.up, model.norm, model.down = nn.Linear(width, inner), nn.LayerNorm(width), nn.Linear(inner, width)
    model.head.weight = model.embed.weight
    model.to(rng.choice((torch.float32, torch.bfloat16)))
    way = rng.choice(("fsdp", "hsdp", "fsdp and tp") if ranks % 2 == 0 else ("fsdp",))
    sizes = (ranks,) if way == "fsdp" else (ranks // 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    if way == "fsdp and tp":
        plan = {"up": RowwiseParallel(), "down": ColwiseParallel()}  # dims 0 and 1; and dim 0 twice
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    fully_shard([model.up, model.norm], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def state_of(rng: random.Random, ranks: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a state, and its tensors under the names that torch gives them in a checkpoint."""
    torch.manual_seed(rng.randrange(1 << 30))
    more: dict[str, Any] = {"count": torch.tensor(7)}
    mesh = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 else (1, ranks))
    for number in range(4):
        shape = [rng.choice((1, 2, 3, 5, 12, 130)) for _ in range(rng.randint(1, 3))]
        placed = [rng.choice((dt.Replicate(), *map(dt.Shard, range(len(shape))))) for _ in range(2)]
        whole = torch.randint(-100, 100, shape).to(rng.choice(DTYPES))
        more[f"{number}.w"] = dt.distribute_tensor(whole, mesh, placed)
    model = sharded_model(rng, ranks).state_dict()
    flat = {f"model.{n}": t for n, t in model.items()} | {f"more.{n}": t for n, t in more.items()}
    return {"model": model, "step": 3, "more": {**more, "lr": [0.1]}}, flat


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    gloo.join(str(folder), rank, ranks)
    for seed in map(int, sys.argv[2:]):
        (state, flat), place = state_of(random.Random(seed), ranks), folder / str(seed)
        dcp.save(state, checkpoint_id=place / "dcp")
        writer = dcp.HuggingFaceStorageWriter(str(place / "hf"), save_distributed=True)
        # safetensors refuses memory that two tensors share
        dcp.save({name: t for name, t in flat.items() if name != TIED}, storage_writer=writer)
        whole = {n: t.full_tensor() if isinstance(t, dt.DTensor) else t for n, t in flat.items()}
        if rank == 0:
            save_file(
                {n: t.detach().clone().contiguous() for n, t in whole.items()}, place / "whole.safetensors"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
