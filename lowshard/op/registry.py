"""The kernel of every op: what a rank computes from its shards. The unsharded op is the same kernel on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowshard.errors import LayoutError
from lowshard.op.part import Part

Array = Any
Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}


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
    """Return the local results of an op."""
    found = find_kernel(part.op)(part, *arrays)
    many = found if isinstance(found, tuple) else (found,)
    return tuple(part.xp.asarray(x) for x in many)  # NumPy's 0-d results are scalars
