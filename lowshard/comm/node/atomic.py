"""What compiled waits and moves need of the machine: ordered loads and stores, futexes, another process's memory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_PAUSES = {"x86_64": "llvm.x86.sse2.pause", "aarch64": "llvm.aarch64.hint"}

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
"""Number of the futex system call by machine; elsewhere waits only yield."""


def _step(result: Any, args: Sequence[Any], emit: Callable[..., Any]) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if made is None else made

    return result(*args), codegen


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _place(builder: ir.IRBuilder, address: ir.Value, place: ir.Value) -> ir.Value:
    return _pointer(builder, builder.add(address, builder.mul(place, _I64(8))), _I64)


def _external(
    builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value], variadic: int | None = None
) -> ir.Value:
    fixed = [value.type for value in (args if variadic is None else args[:variadic])]
    signature = ir.FunctionType(result, fixed, var_arg=variadic is not None)
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


@intrinsic
def peek(typingctx: Any, address: Any) -> Any:
    """Return the int64 at an address that is a multiple of 8."""
    return _step(types.int64, (types.int64,), lambda b, at: b.load(_pointer(b, at, _I64), align=8))


@intrinsic
def poke(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address that is a multiple of 8."""
    return _step(
        types.void,
        (types.int64, types.int64),
        lambda b, at, v: b.store(v, _pointer(b, at, _I64), align=8) and None,
    )


@intrinsic
def field(typingctx: Any, address: Any, place: Any) -> Any:
    """Return a field of a struct of int64 at an address; fields are named by their places, 0 and up."""
    return _step(
        types.int64,
        (types.int64, types.int64),
        lambda b, at, n: b.load(_place(b, at, n), align=8),
    )


@intrinsic
def set_field(typingctx: Any, address: Any, place: Any, value: Any) -> Any:
    """Write a field of a struct of int64."""
    return _step(
        types.void,
        (types.int64, types.int64, types.int64),
        lambda b, at, n, v: b.store(v, _place(b, at, n), align=8) and None,
    )


@intrinsic
def acquire(typingctx: Any, address: Any) -> Any:
    """Return the int64 at an address; what its writer wrote before it is seen from here on."""
    return _step(
        types.int64, (types.int64,), lambda b, at: b.load_atomic(_pointer(b, at, _I64), "acquire", 8)
    )


@intrinsic
def release(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64; who acquires it sees all that was written before."""
    return _step(
        types.void,
        (types.int64, types.int64),
        lambda b, at, v: b.store_atomic(v, _pointer(b, at, _I64), "release", 8) and None,
    )


@intrinsic
def add_to(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 in one indivisible step, in one order for all, and return what it was before."""
    return _step(
        types.int64,
        (types.int64, types.int64),
        lambda b, at, v: b.atomic_rmw("add", _pointer(b, at, _I64), v, "seq_cst"),
    )


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order all stores before it before all loads after it."""
    return _step(types.void, (), lambda b: b.fence("seq_cst") and None)


@intrinsic
def relax(typingctx: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def emit(builder: ir.IRBuilder) -> None:
        name = _PAUSES.get(platform.machine())
        if name is not None:
            hints = [_I32(1)] if name.endswith("hint") else []  # 1 is YIELD
            _external(builder, name, ir.VoidType(), hints)

    return _step(types.void, (), emit)


@intrinsic
def yield_core(typingctx: Any) -> Any:
    """Let another process run on this core: sched_yield."""
    return _step(types.int32, (), lambda b: _external(b, "sched_yield", _I32, []))


@intrinsic
def system_call(
    typingctx: Any, number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any
) -> Any:  # fmt: skip
    """Make a system call with six arguments, by the C library's `syscall`."""
    return _step(
        types.int64,
        (types.int64,) * 7,
        lambda builder, *values: _external(builder, "syscall", _I64, values, variadic=1),
    )


@intrinsic
def read_clock(typingctx: Any, clock: Any, into: Any) -> Any:
    """Write seconds and nanoseconds of a clock to 16 bytes: clock_gettime."""

    def emit(builder: ir.IRBuilder, which: ir.Value, at: ir.Value) -> ir.Value:
        which = builder.trunc(which, _I32)
        return _external(builder, "clock_gettime", _I32, [which, _pointer(builder, at, _I8)])

    return _step(types.int32, (types.int64, types.int64), emit)


@intrinsic
def read_process(typingctx: Any, pid: Any, local: Any, remote: Any) -> Any:
    """Copy out of another process's memory, from one iovec to one: process_vm_readv; the bytes copied or -1."""
    return _vm_call("process_vm_readv", pid, local, remote)


@intrinsic
def write_process(typingctx: Any, pid: Any, local: Any, remote: Any) -> Any:
    """Copy into another process's memory: process_vm_writev; the bytes copied or -1."""
    return _vm_call("process_vm_writev", pid, local, remote)


@intrinsic
def read_process_into(typingctx: Any, pid: Any, local: Any, remote: Any, count: Any) -> Any:
    """As `read_process`, from one iovec to `count` of them, filled one after the other; up to 1,024."""
    return _vm_call("process_vm_readv", pid, local, remote, (types.int64,))


@intrinsic
def write_process_from(typingctx: Any, pid: Any, local: Any, places: Any, remote: Any, targets: Any) -> Any:
    """As `write_process`, from `places` iovecs to `targets` of them; up to 1,024 each."""

    def emit(builder: ir.IRBuilder, who: ir.Value, *values: ir.Value) -> ir.Value:
        here, places, there, targets = values
        vectors = [_pointer(builder, here, _I8), places, _pointer(builder, there, _I8), targets]
        return _external(builder, "process_vm_writev", _I64, [builder.trunc(who, _I32), *vectors, _I64(0)])

    return _step(types.int64, (types.int64,) * 5, emit)


@intrinsic
def give_pages(typingctx: Any, pipe: Any, vector: Any, flags: Any) -> Any:
    """Put the pages of one iovec into a pipe, not copied: vmsplice; the bytes put or -1."""

    def emit(builder: ir.IRBuilder, fd: ir.Value, at: ir.Value, flags: ir.Value) -> ir.Value:
        args = [builder.trunc(fd, _I32), _pointer(builder, at, _I8), _I64(1), builder.trunc(flags, _I32)]
        return _external(builder, "vmsplice", _I64, args)

    return _step(types.int64, (types.int64, types.int64, types.int64), emit)


@intrinsic
def read_file(typingctx: Any, file: Any, into: Any, size_bytes: Any) -> Any:
    """Read from a file descriptor: the bytes read, or -1."""

    def emit(builder: ir.IRBuilder, fd: ir.Value, at: ir.Value, size: ir.Value) -> ir.Value:
        return _external(builder, "read", _I64, [builder.trunc(fd, _I32), _pointer(builder, at, _I8), size])

    return _step(types.int64, (types.int64, types.int64, types.int64), emit)


@intrinsic
def last_error(typingctx: Any) -> Any:
    """Return the C library's errno of this thread."""

    def emit(builder: ir.IRBuilder) -> ir.Value:
        at = _external(builder, "__errno_location", _I32.as_pointer(), [])
        return builder.sext(builder.load(at), _I64)

    return _step(types.int64, (), emit)


def _vm_call(name: str, pid: Any, local: Any, remote: Any, more: tuple[Any, ...] = ()) -> Any:
    def emit(
        builder: ir.IRBuilder, who: ir.Value, here: ir.Value, there: ir.Value, *counts: ir.Value
    ) -> ir.Value:
        who = builder.trunc(who, _I32)
        count = counts[0] if counts else _I64(1)
        vectors = [_pointer(builder, here, _I8), count, _pointer(builder, there, _I8), _I64(1)]
        return _external(builder, name, _I64, [who, *vectors, _I64(0)])

    return _step(types.int64, (types.int64, types.int64, types.int64, *more), emit)


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size_bytes: Any) -> Any:
    """Copy bytes between two stretches of memory that do not overlap, by the C library's memcpy."""

    def emit(builder: ir.IRBuilder, dst: ir.Value, src: ir.Value, size: ir.Value) -> None:
        cgutils.raw_memcpy(builder, _pointer(builder, dst, _I8), _pointer(builder, src, _I8), size, 1)

    return _step(types.void, (types.int64, types.int64, types.int64), emit)


@intrinsic(prefer_literal=True)
def elements_at(typingctx: Any, address: Any, kind: Any) -> Any:
    """Return an address as a pointer to elements of a dtype, for numba.carray."""
    pointer = types.CPointer(kind.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), codegen


@intrinsic
def call_three(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call a C function of three int64 by its address."""
    return _step(types.void, (types.int64,) * 4, _call)


@intrinsic
def call_five(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call a C function of five int64 by its address."""
    return _step(types.void, (types.int64,) * 6, _call)


def _call(builder: ir.IRBuilder, function: ir.Value, *values: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I64] * len(values))
    builder.call(_pointer(builder, function, kind), values)
