"""The kernel of every op: what a rank computes from its shards. The unsharded op is the same kernel on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.argument import brief
from lowshard.errors import LayoutError, LowshardError
from lowshard.op.op_part import Part
from lowshard.solver.table.op_rule import NOT_TAKEN

Array = Any
Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}


def in_accumulator(x: Array) -> Array:
    """Return an array in the dtype that its elements are added up in; itself where that is its own."""
    return x.astype(dtypes.get(x.dtype).accumulator.numpy, copy=False)


def converted(xp: Any, x: Array, dtype: dtypes.DType) -> Array:
    """Return an array in a dtype, row-major; itself where it is so."""
    came = dtypes.get(x.dtype)
    # By way of int64: of what a narrower one does not hold NumPy's vector code makes other values than its scalar code.
    if came.kind == "float" and dtype.kind in ("int", "uint") and dtype.bits < 64:
        x = x.astype(np.int64)
    return xp.asarray(x, dtype.in_memory(xp), order="C")


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register `function(part, *local arrays) -> array or tuple of arrays` for ops."""

    def register(function: Kernel) -> Kernel:
        for name in names:
            KERNELS[name] = function
        return function

    return register


def find_kernel(op: str) -> Kernel:
    """Return an op's kernel, or raise LayoutError with the ops that have one."""
    if op not in KERNELS:
        raise LayoutError(
            f"op {op!r} has no kernel here: its rule can be picked from, but it runs in the caller's own code; "
            f"there are kernels for {', '.join(sorted(KERNELS))}"
        )
    return KERNELS[op]


def run_kernel(part: Part, *arrays: Array) -> tuple[Array, ...]:
    """Return the local results of an op, row-major, perhaps views of operands.

    NaN and infinities are results, about which NumPy does not warn here.

    Raises:
        LayoutError: the kernel does not take the arguments, or such operands.
    """
    try:
        with np.errstate(all="ignore"):
            found = find_kernel(part.op)(part, *arrays)
    except LowshardError:
        raise
    except NOT_TAKEN as error:
        came = ", ".join(map(str, part.action.sources))
        said = ", ".join(f"{name}={brief(value)}" for name, value in part.args.items())
        raise LayoutError(
            f"{part.op} does not take operands {came}{f' and {said}' if said else ''}: {error}"
        ) from error
    many = found if isinstance(found, tuple) else (found,)
    results = [part.xp.asarray(x) for x in many]  # NumPy's 0-d results are scalars
    outputs = part.action.outputs
    shapes = [layout.local_shape(part.rank) for layout in outputs]
    if [x.shape for x in results] != shapes:
        raise LayoutError(
            f"{part.op}: its rule gives results of shapes {shapes} on rank {part.rank}, its kernel "
            f"{[x.shape for x in results]}: the operands do not go together"
        )
    with np.errstate(all="ignore"):
        return tuple(
            converted(part.xp, x, dtypes.get(layout.dtype))
            for x, layout in zip(results, outputs, strict=True)
        )
