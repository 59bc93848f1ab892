"""A torch process group over the ranks of an MPI job."""

from __future__ import annotations

import warnings
from datetime import timedelta


def join(folder: str, rank: int, ranks: int) -> None:
    """Make torch's process group (gloo) of a job's ranks, which meet in a file of the folder."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gloo says which interface it takes
        store = dist.FileStore(f"{folder}/store", ranks)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
