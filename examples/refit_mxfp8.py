"""Refit into MXFP8: bf16 weights are quantised on their way, into buffers that stay where they are.

    lowshard run -n 4 examples/refit_mxfp8.py

Two ranks train in bf16, two serve in MXFP8. With convert_on_send the sender quantises and half the bytes travel. With
buffering="double", the default, the versions alternate between your buffers and a second set: take what is served from
`refit.weights`, and take it again after each refit. With buffering="in_place" your own buffers are always the ones.

Output of rank 0:

    version 1 is what ranks 2 and 3 serve: True
    version 2 is what ranks 2 and 3 serve: True
    version 3 is what ranks 2 and 3 serve: True
    0.52 of the bytes of bf16 travelled
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8
from lowshard.reshard import MXFP8ReshardTransform, Refit, TensorLayout, build_reshard_plan

SHAPE = (512, 256)
two_ranks = {"tp": (2, 1)}
train = {"fc1": TensorLayout.sharded(SHAPE, "bfloat16", two_ranks, {0: "tp"})}
serve = {"fc1": TensorLayout.sharded(SHAPE, "bfloat16", two_ranks, {1: "tp"}, offset=2)}
plan = build_reshard_plan(train, serve)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    trains = comm.rank in train["fc1"]
    mine, buffers = {}, {}
    if trains:
        mine["fc1"] = comm.empty(train["fc1"].local_shape(comm.rank), "bfloat16")
    else:
        rows, cols = serve["fc1"].local_shape(comm.rank)
        buffers["fc1"] = MXFP8Tensor(np.empty((rows, cols), np.uint8), np.empty((rows, cols // 32), np.uint8))
    transform = MXFP8ReshardTransform(["fc1"], buffers, convert_on_send=True)
    with Refit(plan, comm, mine, {}, transform) as refit:
        for version in (1, 2, 3):
            for array in mine.values():
                array[...] = version  # a training step would do this
            report = refit.push(version) if trains else refit.pull()

            right, everywhere = np.ones(1, np.int64), np.empty(1, np.int64)
            for served in refit.weights.values():  # MXFP8Tensor: data, scale
                values = dequantize_mxfp8(served, "float32")
                right[0] = (values == version).all()
            comm.all_reduce(right, everywhere, op="min")
            if comm.rank == 0:
                print(f"version {refit.version} is what ranks 2 and 3 serve: {bool(everywhere[0])}")
    if comm.rank == 0:
        print(f"{report.sent_bytes / mine['fc1'].nbytes:.2f} of the bytes of bf16 travelled")
