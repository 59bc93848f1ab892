"""What compiled waits and moves need of the machine: ordered loads and stores, futexes, another process's memory.

Each operation takes int64 values, among them addresses. Calls of the C library return what it returns: -1 where they
fail, and then `last_error` tells why.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types

_I8, _I32, _I64, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
_ZERO, _ONE = _I64(0), _I64(1)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", _I32(1))}  # 1 is YIELD

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
"""Number of the futex system call by machine; elsewhere waits only yield."""


def _operation(returns: str, emit: Callable[..., Any]) -> Any:
    """Return an operation for compiled code.

    Args:
        returns: the type of its result: "int64", "int32" or "void".
        emit: is given a builder and the values, as many int64 as its other arguments, and returns the result's.
    """
    signature = inspect.signature(emit)  # Numba asks for it; that of `typed` has no number of arguments
    args = len(signature.parameters) - 1

    def typed(typingctx: Any, *given: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            made = emit(builder, *values)
            return context.get_dummy_value() if returns == "void" else made

        return getattr(types, returns)(*(types.int64,) * args), codegen

    typed.__dict__["__signature__"] = signature
    return intrinsic(typed)


def _bytes_at(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, _I8.as_pointer())


def _word_at(b: ir.IRBuilder, address: ir.Value, place: ir.Value = _ZERO) -> ir.Value:
    return b.inttoptr(b.add(address, b.mul(place, _I64(8))), _I64.as_pointer())


def _int(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return a value as an int of the C library."""
    return b.trunc(value, _I32)


def _c(b: ir.IRBuilder, name: str, returns: ir.Type, *args: ir.Value, fixed: int | None = None) -> ir.Value:
    """Call a function of the C library; of `syscall` only one argument is `fixed`."""
    kinds = [value.type for value in args[:fixed]]
    signature = ir.FunctionType(returns, kinds, var_arg=fixed is not None)
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def _call_at(b: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_VOID, [_I64] * len(args))
    return b.call(b.inttoptr(function, kind.as_pointer()), args)


def _pause(b: ir.IRBuilder) -> None:
    if platform.machine() in _PAUSES:
        name, *hint = _PAUSES[platform.machine()]
        _c(b, name, _VOID, *hint)


# ---- words: addresses are multiples of 8

peek = _operation("int64", lambda b, at: b.load(_word_at(b, at), align=8))
"""peek(address): the int64 there."""

poke = _operation("void", lambda b, at, value: b.store(value, _word_at(b, at), align=8))
"""poke(address, value): write an int64."""

field = _operation("int64", lambda b, at, place: b.load(_word_at(b, at, place), align=8))
"""field(address, place): a field of a struct of int64; fields are named by their places, 0 and up."""

set_field = _operation("void", lambda b, at, place, value: b.store(value, _word_at(b, at, place), align=8))
"""set_field(address, place, value): write a field of a struct of int64."""

acquire = _operation("int64", lambda b, at: b.load_atomic(_word_at(b, at), "acquire", 8))
"""acquire(address): the int64 there; what its writer wrote before it is seen from here on."""

release = _operation("void", lambda b, at, value: b.store_atomic(value, _word_at(b, at), "release", 8))
"""release(address, value): write an int64; who acquires it sees all that was written before."""

add_to = _operation("int64", lambda b, at, value: b.atomic_rmw("add", _word_at(b, at), value, "seq_cst"))
"""add_to(address, value): add to an int64 in one indivisible step, in one order for all; what it was before."""

fence = _operation("void", lambda b: b.fence("seq_cst"))
"""fence(): order all stores before it before all loads after it."""

# ---- waits

relax = _operation("void", _pause)
"""relax(): tell the core that this is a loop that waits."""

yield_core = _operation("int32", lambda b: _c(b, "sched_yield", _I32))
"""yield_core(): let another process run on this core."""

system_call = _operation(
    "int64", lambda b, n, p, q, r, s, t, u: _c(b, "syscall", _I64, n, p, q, r, s, t, u, fixed=1)
)
"""system_call(number, a, b, c, d, e, f): make a system call."""

read_clock = _operation(
    "int32", lambda b, clock, into: _c(b, "clock_gettime", _I32, _int(b, clock), _bytes_at(b, into))
)
"""read_clock(clock, into): write seconds and nanoseconds of a clock to 16 bytes."""

last_error = _operation("int64", lambda b: b.sext(b.load(_c(b, "__errno_location", _I32.as_pointer())), _I64))
"""last_error(): errno of this thread."""

# ---- memory, of this process and of others; an iovec is an address and a size, both int64


def _across(name: str, b: ir.IRBuilder, pid: ir.Value, *vectors: ir.Value) -> ir.Value:
    """Call what copies between iovecs here and there."""
    here, count_here, there, count_there = vectors
    here, there = _bytes_at(b, here), _bytes_at(b, there)
    return _c(b, name, _I64, _int(b, pid), here, count_here, there, count_there, _ZERO)


read_process = _operation(
    "int64", lambda b, pid, here, there: _across("process_vm_readv", b, pid, here, _ONE, there, _ONE)
)
"""read_process(pid, local, remote): copy out of another process's memory, from one iovec to one; the bytes copied."""

read_process_into = _operation(
    "int64", lambda b, pid, here, there, n: _across("process_vm_readv", b, pid, here, n, there, _ONE)
)
"""read_process_into(pid, local, remote, count): to `count` iovecs, filled one after the other; up to 1,024."""

write_process = _operation(
    "int64", lambda b, pid, here, there: _across("process_vm_writev", b, pid, here, _ONE, there, _ONE)
)
"""write_process(pid, local, remote): copy into another process's memory; the bytes copied."""

write_process_from = _operation(
    "int64", lambda b, pid, here, n, there, m: _across("process_vm_writev", b, pid, here, n, there, m)
)
"""write_process_from(pid, local, places, remote, targets): from `places` iovecs to `targets`; up to 1,024 each."""

give_pages = _operation(
    "int64",
    lambda b, pipe, vector, flags: _c(
        b, "vmsplice", _I64, _int(b, pipe), _bytes_at(b, vector), _ONE, _int(b, flags)
    ),
)
"""give_pages(pipe, vector, flags): put the pages of one iovec into a pipe, not copied; the bytes put."""

read_file = _operation(
    "int64", lambda b, file, into, size: _c(b, "read", _I64, _int(b, file), _bytes_at(b, into), size)
)
"""read_file(file, into, size_bytes): read from a file descriptor; the bytes read."""

copy_bytes = _operation(
    "void", lambda b, to, of, size: cgutils.raw_memcpy(b, _bytes_at(b, to), _bytes_at(b, of), size, 1)
)
"""copy_bytes(target, source, size_bytes): copy between two stretches of memory that do not overlap."""


@intrinsic(prefer_literal=True)
def elements_at(typingctx: Any, address: Any, kind: Any) -> Any:
    """Return an address as a pointer to elements of a dtype, for numba.carray."""
    pointer = types.CPointer(kind.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), codegen


# ---- C functions

call_three = _operation("void", lambda b, to, x, y, z: _call_at(b, to, x, y, z))
"""call_three(function, a, b, c): call a C function by its address."""

call_five = _operation("void", lambda b, to, v, w, x, y, z: _call_at(b, to, v, w, x, y, z))
"""call_five(function, a, b, c, d, e): call a C function by its address."""
