"""Compute while a collective runs: started calls.

    lowshard run -n 2 examples/overlap.py

`comm.start` has every collective; each returns a `Work` at once. Its buffers belong to it until `wait()` returns.
Started calls run in the order in which they were started.

Output of rank 0:

    gradient of layer 2: 9.0 everywhere
    gradient of layer 1: 6.0 everywhere
    gradient of layer 0: 3.0 everywhere
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc

LAYERS, ELEMS = 3, 1 << 20


def backward(layer: int, rank: int) -> np.ndarray:
    """Compute the gradient of a layer."""
    return np.full(ELEMS, (layer + 1) * (rank + 1), np.float32)


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    started = []
    for layer in reversed(range(LAYERS)):
        gradient = backward(layer, comm.rank)
        started.append((layer, gradient, comm.start.all_reduce(gradient, gradient)))
        # the next layer is computed meanwhile
    for layer, gradient, work in started:
        work.wait()
        assert (gradient == (layer + 1) * 3).all()
        if comm.rank == 0:
            print(f"gradient of layer {layer}: {gradient[0]} everywhere")
