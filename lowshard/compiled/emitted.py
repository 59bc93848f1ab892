"""Functions for compiled code to call, written as Python that emits their instructions; those that all packages use."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types


def emitted(result: str = "int64") -> Callable[[Callable[..., Any]], Any]:
    """Make a function for compiled code to call, of int64 alone, out of one that emits its instructions."""

    def decorate(emit: Callable[..., Any]) -> Any:
        args = emit.__code__.co_argcount - 1  # the builder comes first

        @intrinsic
        @wraps(emit)  # Numba asks for the names of the parameters
        def typed(typingctx: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result == "void" else made

            return getattr(types, result)(*(types.int64,) * args), codegen

        return typed

    return decorate


@emitted("void")
def fence(builder: ir.IRBuilder) -> None:
    """Order what was read and written before it, streaming stores too, before whatever comes next."""
    builder.fence("seq_cst")


@emitted("void")
def copy_bytes(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, size_bytes: ir.Value) -> None:
    """Copy bytes between two stretches of memory that do not overlap, by the C library's memcpy."""
    to, at = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (target, source))
    cgutils.raw_memcpy(builder, to, at, size_bytes, 1)


@intrinsic(prefer_literal=True)
def elements_at(typingctx: Any, address: Any, kind: Any) -> Any:
    """Return an address as a pointer to elements of a dtype, for numba.carray."""
    pointer = types.CPointer(kind.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), codegen
