"""Move a key-value cache to servers with another tensor-parallel degree.

    lowshard run -n 4 examples/kv_cache.py

Ranks 0 and 1 prefill, each with half of the 8 heads; ranks 2 and 3 decode as one group with tp=1 that has 2 copies:
the planner that moves weights moves caches too.

Output of rank 0:

    rank 0 held heads 0 to 3 and sent 65536 bytes
    every decoding rank holds all 8 heads: True
"""

import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.reshard import build_reshard_plan, execute_reshard_plan, kv_cache_layout

LAYERS, HEADS, TOKENS, HEAD_DIM = 2, 8, 64, 16
inner = (TOKENS, HEAD_DIM)
prefill = {"kv": kv_cache_layout(LAYERS, HEADS, inner, "float32", tp=2)}
decode = {"kv": kv_cache_layout(LAYERS, HEADS, inner, "float32", tp=1, copies=2, offset=2)}
plan = build_reshard_plan(prefill, decode)
cache = np.random.default_rng(0).standard_normal((LAYERS, HEADS, *inner)).astype(np.float32)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    src, dst = {}, {}
    if comm.rank < 2:
        src["kv"] = np.ascontiguousarray(cache[:, 4 * comm.rank : 4 * comm.rank + 4])
    else:
        dst["kv"] = np.empty(cache.shape, np.float32)
    execute_reshard_plan(plan, src, dst, comm)
    right = np.array([all(np.array_equal(a, cache) for a in dst.values())], np.int64)
    everywhere = np.empty_like(right)
    comm.all_reduce(right, everywhere, op="min")
    if comm.rank == 0:
        print(f"rank 0 held heads 0 to 3 and sent {plan.sent_bytes(0)} bytes")
        print(f"every decoding rank holds all {HEADS} heads: {bool(everywhere[0])}")
