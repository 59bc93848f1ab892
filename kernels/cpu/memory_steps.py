"""Memory operations shared by kernels: vector loads and stores, non-temporal too, and prefetching."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types
from lowshard.compiled.emitted import emitted
from lowshard.kernels.cpu.vector import Lanes

CACHE_LINE_BYTES = 64

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))


def load(builder: ir.IRBuilder, address: ir.Value, bits: int, count: int, offset_bytes: int = 0) -> Lanes:
    """Load lanes, or one integer if `count` is 0, from any address, an i64."""
    kind = ir.VectorType(ir.IntType(bits), count) if count else ir.IntType(bits)
    pointer = _pointer(builder, address, kind, offset_bytes)
    return Lanes(builder, builder.load(pointer, align=1))


def store(
    builder: ir.IRBuilder, address: ir.Value, lanes: Lanes, streaming: bool, offset_bytes: int = 0
) -> None:
    """Store lanes: to any address, or non-temporally to one that is a multiple of the store's size."""
    pointer = _pointer(builder, address, lanes.value.type, offset_bytes)
    size_bytes = lanes.bits * max(1, lanes.count) // 8
    made = builder.store(lanes.value, pointer, align=min(CACHE_LINE_BYTES, size_bytes) if streaming else 1)
    if streaming:
        made.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


def offset(builder: ir.IRBuilder, address: ir.Value, size_bytes: int) -> ir.Value:
    """Return an address some bytes on."""
    return builder.add(address, _I64(size_bytes)) if size_bytes else address


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type, offset_bytes: int) -> ir.Value:
    return builder.inttoptr(offset(builder, address, offset_bytes), pointee.as_pointer())


@intrinsic
def align_spills(typingctx: Any) -> Any:
    """Have LLVM keep vectors for which there are no registers in whole cache lines of the function's stack.

    It does so only where something else there wants it. Else such vectors lie across two pages in one process of ten,
    which then takes up to three times as long. The empty piece of assembly keeps LLVM from removing what is there.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        place = cgutils.alloca_once(builder, ir.VectorType(_I8, CACHE_LINE_BYTES))
        place.align = CACHE_LINE_BYTES
        builder.asm(ir.FunctionType(ir.VoidType(), [place.type]), "", "r", [place], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


@emitted("uint8")
def load_u8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the byte at an address."""
    return load(builder, address, 8, 0).value


@emitted("uint16")
def load_u16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the two bytes at an address, aligned or not."""
    return load(builder, address, 16, 0).value


@emitted("uint32")
def load_u32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the four bytes at an address, aligned or not."""
    return load(builder, address, 32, 0).value


@emitted("uint64")
def load_u64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the eight bytes at an address, aligned or not."""
    return load(builder, address, 64, 0).value


@intrinsic
def store_value(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an unsigned integer of its own width to an address, aligned or not."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at, bits = args
        builder.store(bits, _pointer(builder, at, bits.type, 0), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@emitted("void")
def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at an address, valid or not."""
    prefetch_at(builder, address)


@emitted("void")
def prefetch_to_write(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at an address, valid or not, for a partial write."""
    prefetch_at(builder, address, 3, write=1)


def prefetch_at(builder: ir.IRBuilder, address: ir.Value, locality: int = 2, write: int = 0) -> None:
    """Prefetch a cache line, into the second cache (locality 2) or the first (3)."""
    pointer_type = _I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    pointer = builder.inttoptr(address, pointer_type)
    builder.call(function, [pointer, _I32(write), _I32(locality), _I32(1)])


@emitted("void")
def copy_line(builder: ir.IRBuilder, target: ir.Value, source: ir.Value) -> None:
    """Copy 64 bytes between any two addresses."""
    store(builder, target, load(builder, source, 8, CACHE_LINE_BYTES), False)


@intrinsic(prefer_literal=True)
def stream_lines(typingctx: Any, target: Any, source: Any, lines: Any) -> Any:
    """Copy cache lines, a literal number, by non-temporal stores to a multiple of 64."""
    size_bytes = lines.literal_value * CACHE_LINE_BYTES

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        dst, src = args[:2]
        parts = [load(builder, src, 8, CACHE_LINE_BYTES, at) for at in range(0, size_bytes, CACHE_LINE_BYTES)]
        for index, part in enumerate(parts):
            store(builder, dst, part, True, index * CACHE_LINE_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, lines), codegen


@intrinsic(prefer_literal=True)
def move_lines(
    typingctx: Any, target: Any, source: Any, far: Any, mid: Any, near: Any, lines: Any, streaming: Any
) -> Any:  # fmt: skip
    """Copy cache lines one by one, a literal number, and ask for the lines that lie three distances on."""
    size_bytes, past_caches = lines.literal_value * CACHE_LINE_BYTES, bool(streaming.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        dst, src = args[:2]
        ahead = [builder.add(src, distance) for distance in args[2:5]]
        for at in range(0, size_bytes, CACHE_LINE_BYTES):
            for address in ahead:
                prefetch_at(builder, offset(builder, address, at))
            store(builder, dst, load(builder, src, 8, CACHE_LINE_BYTES, at), past_caches, at)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, lines, streaming), codegen
