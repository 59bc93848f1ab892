"""DTensors that ranks of gloo scatter, beside the boxes of their layouts: run by test_dtensors_on_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mpi4py import MPI
from support import gloo

from lowshard import DeviceMesh, Layout
from lowshard.interop import torch as lt

CASES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((7, 5), [dt.Shard(0), dt.Replicate()]),
    ((7, 5), [dt.Shard(1), dt.Shard(0)]),
    ((9, 2), [dt.Shard(0), dt.Shard(0)]),
    ((1, 3), [dt.Shard(0), dt.Shard(1)]),
    ((8, 3), [_StridedShard(0, split_factor=2), dt.Shard(0)]),
    ((10, 3), [_StridedShard(0, split_factor=2), dt.Shard(0)]),  # uneven, and one box a rank still
    ((3, 12), [_StridedShard(1, split_factor=2), dt.Shard(1)]),
    ((6, 4), [dt.Replicate(), dt.Replicate()]),
]


def main() -> None:
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    gloo.join(sys.argv[1], rank, ranks)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    for shape, placed in CASES:
        if ranks == 2 and any(isinstance(p, _StridedShard) for p in placed):
            placed = [dt.Replicate(), placed[1]]
        whole = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
        # torch cannot scatter uneven strided shards; with no source rank each cuts its own.
        uneven = isinstance(placed[0], _StridedShard) and shape[placed[0].dim] % ranks
        given = dt.distribute_tensor(whole, mesh, placed, src_data_rank=None if uneven else 0)
        layout = lt.layout(given)
        mine = whole[tuple(slice(*i) for i in layout.box(rank))]
        assert torch.equal(given.to_local(), mine), (shape, placed, layout)
        again = lt.dtensor(mine.clone(), layout, mesh)
        assert again.placements == given.placements
        assert torch.equal(again.full_tensor(), whole), (shape, placed)
        moved = again.redistribute(placements=[dt.Replicate(), dt.Shard(0)])
        box = lt.layout(moved).box(rank)
        assert torch.equal(moved.to_local(), whole[tuple(slice(*i) for i in box)])
    ours = DeviceMesh((ranks // 2, 2), ("dp", "tp"))
    for op, wanted in (("sum", 3.0), ("avg", 1.5), ("min", 1.0), ("max", 2.0), ("prod", 2.0)):
        terms = Layout.from_spec(ours, (4,), "float32", (), partial={"tp": op})  # type: ignore[dict-item]
        term = torch.full((4,), float(1 + rank % 2))
        whole = lt.dtensor(term, terms, mesh).full_tensor()
        assert torch.equal(whole, torch.full((4,), wanted)), (op, whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
