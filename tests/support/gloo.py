"""Starts rank programs that need a torch process group of real processes (gloo over this machine)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

LIMIT_S = 100


def start(program: Path, ranks: int, *args: str) -> None:
    """Run a program as so many ranks, with the arguments, and raise with their output unless all end well."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            with open(f"{folder}/out{rank}", "w") as out:
                command = [sys.executable, str(program), folder, str(rank), str(ranks), *args]
                env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env))
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = "\n".join(f"--- rank {r}\n{Path(folder, f'out{r}').read_text()}" for r in range(ranks))
        assert codes == [0] * ranks, said


def join() -> tuple[int, int, list[str]]:
    """Make the process group in a program that `start` started; returns rank, ranks and the arguments."""
    import torch.distributed as dist

    folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(f"{folder}/store", ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gloo says which interface it takes
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT_S)
        )
    return rank, ranks, sys.argv[4:]
