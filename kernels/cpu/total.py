"""Sums of arrays in fp32: a tile is widened, added to source by source in cache, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.emitted import copy_bytes
from lowshard.kernels.cpu.cpu_cast import STEP_ELEMS, add_step, round_step
from lowshard.kernels.cpu.drive import source_digest
from lowshard.kernels.cpu.scalar import BFLOAT16, FLOAT16

TILE_ELEMS = 2048
"""Elements of a tile: 8 KiB as fp32, so that it and a stretch of a source stay in the first cache."""


@cache
def sum_kernel() -> Callable[..., None]:
    """Return `kernel(terms, dtypes, out, out_dtype, elems, scratch)`.

    `terms` and `dtypes` are int64 arrays of addresses and `scalar.DTYPE_CODES`, added from the first on; `scratch`
    is an address as in `drive.run_rows`: the tile, then room for the last elements of an array.
    """

    def sum_terms(terms: Any, dtypes: Any, out: int, out_dtype: int, elems: int, scratch: int) -> None:
        tail = scratch + 4 * TILE_ELEMS
        out_item = 4 if out_dtype > FLOAT16 else 2
        for start in range(0, elems, TILE_ELEMS):
            count = min(TILE_ELEMS, elems - start)
            for k in range(len(terms)):
                dtype = dtypes[k]
                item = 4 if dtype > FLOAT16 else 2
                for j in range(0, count, STEP_ELEMS):
                    at = terms[k] + (start + j) * item
                    if j + STEP_ELEMS > count:
                        copy_bytes(tail, at, (count - j) * item)
                        at = tail
                    to = scratch + 4 * j
                    if dtype == BFLOAT16:
                        if k:
                            add_step(to, at, "bfloat16", 0)
                        else:
                            add_step(to, at, "bfloat16", 1)
                    elif dtype == FLOAT16:
                        if k:
                            add_step(to, at, "float16", 0)
                        else:
                            add_step(to, at, "float16", 1)
                    elif k:
                        add_step(to, at, "float32", 0)
                    else:
                        add_step(to, at, "float32", 1)
            for j in range(0, count, STEP_ELEMS):
                to, part = out + (start + j) * out_item, j + STEP_ELEMS > count
                target = tail if part else to
                if out_dtype == BFLOAT16:
                    round_step(scratch + 4 * j, target, "bfloat16")
                elif out_dtype == FLOAT16:
                    round_step(scratch + 4 * j, target, "float16")
                else:
                    round_step(scratch + 4 * j, target, "float32")
                if part:
                    copy_bytes(to, tail, (count - j) * out_item)

    signature = Signature(("int64[1]", "int64[1]", INT, INT, INT, INT), "void")
    return load_compiled(f"sum_terms_{source_digest()}", lambda: sum_terms, signature)
