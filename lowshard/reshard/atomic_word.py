"""Compare-and-swap on one int64 in shared memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.emitted import emitted

_I64 = ir.IntType(64)


@emitted()
def _swap(builder: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Write an int64 if it is as expected, in one indivisible step, and return what it was."""
    pointer = builder.inttoptr(address, _I64.as_pointer())
    pair = builder.cmpxchg(pointer, expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def reshard_compare_swap(address: int, expected: int, value: int) -> int:
    """Write an int64 if it is as expected, in one indivisible step, and return what it was."""
    return _swap(address, expected, value)  # type: ignore[no-any-return]


@cache
def compare_swap() -> Any:
    """Return the compiled function."""
    name = f"compare_swap_{digest_of([Path(__file__)])}"
    return load_compiled(name, lambda: reshard_compare_swap, Signature((INT,) * 3))
