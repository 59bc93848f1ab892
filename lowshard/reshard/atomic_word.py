"""One word of shared memory that is written once: the first to write it decides, and all who look see the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.deferred import intrinsic, types

_I64 = ir.IntType(64)


@intrinsic
def _swap(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write an int64 if it is as expected, in one indivisible step, and return what it was."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        at, old, new = values
        pointer = builder.inttoptr(at, _I64.as_pointer())
        pair = builder.cmpxchg(pointer, old, new, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


def reshard_compare_swap(address: int, expected: int, value: int) -> int:
    """Write an int64 if it is as expected, in one indivisible step, and return what it was."""
    return _swap(address, expected, value)  # type: ignore[no-any-return]


@cache
def compare_swap() -> Any:
    """Return the compiled function."""
    name = f"compare_swap_{digest_of([Path(__file__)])}"
    return load_compiled(name, lambda: reshard_compare_swap, Signature((INT,) * 3))
