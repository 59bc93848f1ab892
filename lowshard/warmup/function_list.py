"""Every function that lowshard compiles, in groups whose members share much of their code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Loader = Callable[[], Any]


def function_groups() -> dict[str, list[Loader]]:
    """Return what loads each function, by group; an installation comes without the groups whose names say rare."""
    import lowshard.kernels.cpu.cpu_engine  # noqa: F401  it has the rows of all kernels
    from lowshard.comm.node.calls import load_calls
    from lowshard.comm.node.combine import HALVES, NATIVE, OPS, recipe_of
    from lowshard.kernels.cpu import bit_digest, cpu_optimizer, drive, gather, scales, total
    from lowshard.kernels.cpu import cpu_changes as changes
    from lowshard.kernels.cpu.scalar import DTYPE_CODES
    from lowshard.kernels.reference import ELEMS
    from lowshard.reshard.atomic_word import compare_swap
    from lowshard.transfer import cross_memory, mover

    floats, find, write = tuple(DTYPE_CODES), changes.find_kernel, changes.write_kernel

    def kernels(*kinds: str) -> list[Loader]:
        return [partial(drive.compiled, kind) for kind in kinds]

    pairs = [(dtype, elem) for dtype in floats for elem in ELEMS]
    rare = [pair for pair in pairs if pair[0] == "float16" or pair[1] != "e4m3"]
    usual, often = (
        [pair for pair in pairs if pair not in rare],
        ("float32", "float64", "int32", "int64", *HALVES),
    )
    others = [dtype for dtype in (*NATIVE, *HALVES) if dtype not in often]
    return {
        "collectives": [load_calls],
        **{f"quantize {dtype}": kernels(f"quantize {dtype} {elem}") for dtype, elem in usual},
        "dequantize": kernels(*(f"dequantize {dtype} {elem}" for dtype, elem in usual)),
        "reductions": [partial(recipe_of, dtype, op) for op in OPS for dtype in often],
        **{f"rare: quantize {dtype} {elem}": kernels(f"quantize {dtype} {elem}") for dtype, elem in rare},
        "rare: dequantize": kernels(*(f"dequantize {dtype} {elem}" for dtype, elem in rare)),
        "rare: reductions": [partial(recipe_of, dtype, op) for op in OPS for dtype in others],
        "cast": kernels(*(f"cast {source} {to}" for source in floats for to in floats if source != to)),
        "rare: changes": [
            *(partial(find, width, in_blocks) for width in changes.WIDTHS for in_blocks in (False, True)),
            *(partial(write, width, False) for width in (0, *changes.WIDTHS)),
            *(partial(write, width, True) for width in changes.STEP_WIDTHS),
        ],
        "copy": [
            *kernels("copy", "fetch"),
            gather.gather_kernel,
            gather.scatter_kernel,
            total.sum_kernel,
            *(partial(scales.swizzle_kernel, reverse) for reverse in (False, True)),
            *(partial(bit_digest.bit_digest_kernel, unit_bytes) for unit_bytes in (1, 2)),
            cross_memory.compiled_read,
            mover.sums,
            compare_swap,
        ],
        "optimizer": [
            cpu_optimizer.adamw_kernel,
            cpu_optimizer.square_sums_kernel,
            *(partial(cpu_optimizer.sgd_kernel, mode) for mode in range(3)),
        ],
    }
