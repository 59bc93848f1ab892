"""Collectives on arrays of torch and JAX over MPI ranks, three times each: started by test_arrays_of_libraries.py."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import torch
from mpi4py import MPI
from run_arrays import (
    DTYPES,
    WRITEABLE,
    address,
    bits,
    collectives,
    given,
    numpy_dtype,
    random_values,
    some_of,
)

from lowshard import comm as lc


def main() -> None:
    with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
        for dtype in some_of(DTYPES, *map(int, sys.argv[1:])):
            wanted = collectives(comm, "numpy", "numpy", dtype, False, 1)
            for sender, receiver in product(("numpy", "torch", "jax"), WRITEABLE):
                assert collectives(comm, sender, receiver, dtype, receiver == "torch", 1) == wanted, dtype
        # A call that was made before, with the same arrays and with others.
        values = random_values(np.random.default_rng(comm.rank), (5,), "bfloat16")
        send, recv = given("torch", values), torch.zeros(5, dtype=torch.bfloat16)
        mine = np.zeros(5, numpy_dtype("bfloat16"))
        at = address(recv)
        for _ in range(5):
            send += 1
            comm.all_reduce(send, recv)
            comm.all_reduce(np.frombuffer(bits(send)[2], mine.dtype), mine)
            assert bits(recv) == bits(mine)
            comm.all_reduce(given("jax", mine), recv)
            recv.zero_()
        assert address(recv) == at
        read = comm.empty(5, torch.bfloat16)
        assert read.dtype == mine.dtype
        if comm.rank == 0:
            print("right", flush=True)


main()
