"""What compiled waits and moves are made of: ordered loads and stores, naps, another process's memory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import Deferred, cgutils, njit, types
from lowshard.compiled.emitted import emitted

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_PAUSES = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint"}


def inner(function: Callable[..., Any]) -> Any:
    """Return a function for compiled code to call, compiled once whatever its arguments are.

    Numba by itself takes a constant in a call for a type of its own, and compiles the function anew for each.
    """

    def make() -> Any:
        made = njit(nogil=True)(function).real()
        template, free = made.get_call_template, types.unliteral

        def plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return template(tuple(map(free, args)), {k: free(v) for k, v in kwargs.items()})

        made.get_call_template = plain
        return made

    return Deferred(make, function)


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type = _I64) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _place(builder: ir.IRBuilder, address: ir.Value, place: ir.Value) -> ir.Value:
    return _pointer(builder, builder.add(address, builder.mul(place, _I64(8))))


def _external(builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    signature = ir.FunctionType(result, [value.type for value in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


@emitted()
def peek(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the int64 at an address that is a multiple of 8."""
    return builder.load(_pointer(builder, address), align=8)


@emitted("void")
def poke(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write an int64 to an address that is a multiple of 8."""
    builder.store(value, _pointer(builder, address), align=8)


@emitted()
def field(builder: ir.IRBuilder, address: ir.Value, place: ir.Value) -> ir.Value:
    """Return a field of a struct of int64 at an address; fields are named by their places, 0 and up."""
    return builder.load(_place(builder, address, place), align=8)


@emitted("void")
def set_field(builder: ir.IRBuilder, address: ir.Value, place: ir.Value, value: ir.Value) -> None:
    """Write a field of a struct of int64."""
    builder.store(value, _place(builder, address, place), align=8)


@emitted()
def acquire(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the int64 at an address; what its writer wrote before it is seen from here on."""
    return builder.load_atomic(_pointer(builder, address), "acquire", 8)


@emitted("void")
def release(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write an int64; who acquires it sees all that was written before."""
    builder.store_atomic(value, _pointer(builder, address), "release", 8)


@emitted("void")
def relax(builder: ir.IRBuilder) -> None:
    """Tell the core that this is a loop that waits."""
    name = _PAUSES.get(platform.machine())
    if name is not None:
        hints = [_I32(1)] if name.endswith("hint") else []  # 1 is YIELD
        _external(builder, name, ir.VoidType(), hints)


@emitted("int32")
def yield_core(builder: ir.IRBuilder) -> ir.Value:
    """Let another process run on this core: sched_yield."""
    return _external(builder, "sched_yield", _I32, [])


@emitted("int32")
def sleep_us(builder: ir.IRBuilder, microseconds: ir.Value) -> ir.Value:
    """Sleep for so many microseconds: usleep."""
    return _external(builder, "usleep", _I32, [builder.trunc(microseconds, _I32)])


@emitted("int32")
def read_clock(builder: ir.IRBuilder, clock: ir.Value, into: ir.Value) -> ir.Value:
    """Write seconds and nanoseconds of a clock to 16 bytes: clock_gettime."""
    which = builder.trunc(clock, _I32)
    return _external(builder, "clock_gettime", _I32, [which, _pointer(builder, into, _I8)])


@emitted()
def read_process(builder: ir.IRBuilder, pid: ir.Value, local: ir.Value, remote: ir.Value) -> ir.Value:
    """Copy out of another process's memory, from one iovec to one: process_vm_readv; the bytes copied or -1."""
    return _vm_call(builder, "process_vm_readv", pid, local, _I64(1), remote, _I64(1))


@emitted()
def write_process(builder: ir.IRBuilder, pid: ir.Value, local: ir.Value, remote: ir.Value) -> ir.Value:
    """Copy into another process's memory: process_vm_writev; the bytes copied or -1."""
    return _vm_call(builder, "process_vm_writev", pid, local, _I64(1), remote, _I64(1))


@emitted()
def read_process_into(
    builder: ir.IRBuilder, pid: ir.Value, local: ir.Value, remote: ir.Value, count: ir.Value
) -> ir.Value:
    """As `read_process`, from one iovec to `count` of them, filled one after the other; up to 1,024."""
    return _vm_call(builder, "process_vm_readv", pid, local, count, remote, _I64(1))


def _vm_call(
    builder: ir.IRBuilder, name: str, pid: ir.Value, local: ir.Value, places: ir.Value, remote: ir.Value,
    targets: ir.Value,
) -> ir.Value:  # fmt: skip
    vectors = [_pointer(builder, local, _I8), places, _pointer(builder, remote, _I8), targets]
    return _external(builder, name, _I64, [builder.trunc(pid, _I32), *vectors, _I64(0)])


@emitted("void")
def call_three(builder: ir.IRBuilder, function: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value) -> None:
    """Call a C function of three int64 by its address."""
    _call(builder, function, a, b, c)


@emitted("void")
def call_five(
    builder: ir.IRBuilder, function: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value, e: ir.Value
) -> None:
    """Call a C function of five int64 by its address."""
    _call(builder, function, a, b, c, d, e)


@emitted("void")
def call_row(builder: ir.IRBuilder, row: ir.Value) -> None:
    """Call a C function of five int64: its address and its arguments lie in a row."""
    _call(builder, *(builder.load(_place(builder, row, _I64(i)), align=8) for i in range(6)))


def _call(builder: ir.IRBuilder, function: ir.Value, *values: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * len(values))
    builder.call(_pointer(builder, function, kind), values)
