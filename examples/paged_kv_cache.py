"""Move sequences of a paged key-value cache to servers with other pages and another tensor-parallel degree.

    lowshard run -n 3 examples/paged_kv_cache.py

Ranks 0 and 1 prefill, each with half of the 8 heads, in pages of 4 tokens; rank 2 decodes with all heads, in pages of
16 with heads before tokens. Block tables say which page holds which tokens of which sequence.

Output of rank 0:

    bf16 kpthd: 32 pages of 4 tokens, 8 heads of 16 over 2 ranks
    bf16 kphtd: 8 pages of 16 tokens, 8 heads of 16 over 1 ranks
    2 sequences of 40 tokens
      rank 0 gives rank 2 heads 0 to 3: 10240 bytes
      rank 1 gives rank 2 heads 4 to 7: 10240 bytes
    rank 0 sent 1 message
    a reader with the wrong sender ids: nothing was written
    every sequence has arrived: True
"""

import ml_dtypes
import numpy as np
from mpi4py import MPI

from lowshard import comm as lc
from lowshard.errors import VerificationError
from lowshard.reshard import PagedLayout, digest_pages, move_pages, plan_pages

BF16 = ml_dtypes.bfloat16
prefill = PagedLayout(32, 4, heads=8, head_dim=16, dims="kpthd", ranks=(0, 1))
decode = PagedLayout(8, 16, heads=8, head_dim=16, dims="kphtd", ranks=(2,))
there = {"chat-7": ([9, 3, 27, 14, 0, 5, 30], 27), "chat-8": ([1, 2, 8, 4], 13)}  # pages and tokens
here = {"chat-7": [6, 1], "chat-8": [0]}
tables = {name: (pages, here[name], tokens) for name, (pages, tokens) in there.items()}
plan = plan_pages(prefill, decode, tables)

with lc.from_mpi(MPI.COMM_WORLD, device="cpu") as comm:
    rank = comm.rank
    rng = np.random.default_rng(rank)
    src = {"kv": rng.standard_normal(prefill.local_shape(rank)).astype(BF16)} if rank < 2 else None
    dst = {"kv": np.zeros(decode.local_shape(rank), BF16)} if rank == 2 else None
    digests = digest_pages(prefill, there, src, comm)
    swapped = plan_pages(PagedLayout(32, 4, heads=8, head_dim=16, dims="kpthd", ranks=(1, 0)), decode, tables)
    try:
        move_pages(swapped, src, dst, comm, digests)
        caught = "it came through"
    except VerificationError:
        caught = "nothing was written"
    report = move_pages(plan, src, dst, comm, digests)
    arrived = digest_pages(decode, {name: (here[name], there[name][1]) for name in there}, dst, comm)
    if rank == 0:
        print(plan.explain())
        print(f"rank 0 sent {report.messages} message")
        print(f"a reader with the wrong sender ids: {caught}")
        print(f"every sequence has arrived: {arrived == digests}")
