"""Refit in the background: servers answer all the time while new weights come, and training goes on after the push.

    lowshard run -n 2 examples/refit_background.py

Rank 1 trains, rank 0 serves. A thread of rank 0 answers one question after the other; each answer comes from one whole
version. `push` and `pull` with `wait=False` return at once, and a thread of theirs does the rest.

Output of rank 0:

    served versions [1, 2, 3, 4, 5]; answers that mixed two: 0
    readers could not read a whole version for ... s at most
"""

import threading
import time

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.reshard import Refit, TensorLayout, build_reshard_plan

SHAPE = (2048, 1024)
names = ("fc1", "fc2")
serve = {n: TensorLayout.sharded(SHAPE, "float32", {"rank": (1, 1)}) for n in names}
train = {n: TensorLayout.sharded(SHAPE, "float32", {"rank": (1, 1)}, offset=1) for n in names}
answers: dict[int, int] = {}
mixed = []
over = threading.Event()


def answer(refit: Refit) -> None:
    """Answer until told to stop; what is held in the block stays whole until its end, however long that takes."""
    while not over.is_set():
        with refit.reading() as (version, weights):
            if version is not None:
                if {float(w.min()) for w in weights.values()} | {
                    float(w.max()) for w in weights.values()
                } != {version}:
                    mixed.append(version)
                answers[version] = answers.get(version, 0) + 1
        time.sleep(0.001)


with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    held = serve if comm.rank == 0 else train
    arrays = {n: comm.empty(held[n].local_shape(comm.rank), "float32") for n in names}
    mine, out = ({}, arrays) if comm.rank == 0 else (arrays, {})
    with Refit(build_reshard_plan(train, serve), comm, mine, out) as refit:
        if comm.rank == 1:
            for version in range(1, 6):
                for array in arrays.values():
                    array[...] = version  # a training step would do this
                work = refit.push(version, wait=False)
                np.linalg.eigvalsh(
                    np.eye(200)
                )  # whatever leaves the weights alone: the next batch, the forward pass
                work.wait()  # the weights may change from here on
        else:
            server = threading.Thread(target=answer, args=(refit,))
            server.start()
            pauses = []
            for version in range(1, 6):
                refit.pull(wait=False).wait()
                pauses.append(refit.report()["pause_s"])
                while version not in answers:  # a server that is asked for one answer at least
                    time.sleep(0.001)
            over.set()
            server.join()
            print(f"served versions {sorted(answers)}; answers that mixed two: {len(mixed)}")
            print(f"readers could not read a whole version for {max(pauses):.6f} s at most")
