"""Vector code for Numba: LLVM vectors with Python operators, and the few memory steps kernels share.

LLVM turns a vector of 32 lanes into what the machine has: one 512-bit register, two of 256 bits or four of 128. Plain
loops leave that choice to the loop vectoriser, which takes four 64-bit lanes for these kernels and is 4 to 10
times slower.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types

CACHE_LINE_BYTES = 64

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))


class Lanes:
    """Integer lanes (or one integer) in an LLVM function under construction; ints are splat over the lanes.

    `>>` shifts in zeros; comparisons are signed and give lanes of one bit.
    """

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    @property
    def count(self) -> int:
        """Number of lanes; 0 for one plain integer."""
        return int(self.value.type.count) if isinstance(self.value.type, ir.VectorType) else 0

    @property
    def bits(self) -> int:
        """Bits of a lane."""
        return int((self.value.type.element if self.count else self.value.type).width)

    def like(self, bits: int) -> ir.Type:
        """Return the type of as many lanes of another width."""
        return ir.VectorType(ir.IntType(bits), self.count) if self.count else ir.IntType(bits)

    def _operand(self, other: Lanes | int) -> ir.Value:
        if isinstance(other, Lanes):
            return other.splat(self.count).value if self.count and not other.count else other.value
        wrapped = other & ((1 << self.bits) - 1)
        return ir.Constant(self.value.type, [wrapped] * self.count if self.count else wrapped)

    def _binary(self, name: str, other: Lanes | int) -> Lanes:
        return Lanes(self.builder, getattr(self.builder, name)(self.value, self._operand(other)))

    def __add__(self, other: Lanes | int) -> Lanes:
        return self._binary("add", other)

    def __sub__(self, other: Lanes | int) -> Lanes:
        return self._binary("sub", other)

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._binary("and_", other)

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._binary("or_", other)

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._binary("xor", other)

    def __lshift__(self, other: Lanes | int) -> Lanes:
        return self._binary("shl", other)

    def __rshift__(self, other: Lanes | int) -> Lanes:
        return self._binary("lshr", other)

    def arithmetic_shift(self, other: Lanes | int) -> Lanes:
        """Shift right, keeping the sign."""
        return self._binary("ashr", other)

    def compare(self, operator: str, other: Lanes | int, signed: bool = True) -> Lanes:
        """Compare each lane: "<", "<=", "==", ">=" or ">"."""
        make = self.builder.icmp_signed if signed else self.builder.icmp_unsigned
        return Lanes(self.builder, make(operator, self.value, self._operand(other)))

    def where(self, other: Lanes | int, otherwise: Lanes) -> Lanes:
        """Return `other` in the lanes of this mask that are set, and `otherwise` in the rest."""
        return Lanes(
            self.builder, self.builder.select(self.value, otherwise._operand(other), otherwise.value)
        )

    def minimum(self, other: Lanes | int, signed: bool = True) -> Lanes:
        """Minimum of each lane."""
        return self.compare("<", other, signed).where(self, Lanes(self.builder, self._operand(other)))

    def widen(self, bits: int) -> Lanes:
        """Zero-extend each lane."""
        return Lanes(self.builder, self.builder.zext(self.value, self.like(bits)))

    def narrow(self, bits: int) -> Lanes:
        """Keep the low bits of each lane."""
        return Lanes(self.builder, self.builder.trunc(self.value, self.like(bits)))

    def resize(self, bits: int) -> Lanes:
        """Widen or narrow as needed."""
        if bits == self.bits:
            return self
        return self.widen(bits) if bits > self.bits else self.narrow(bits)

    def splat(self, count: int) -> Lanes:
        """Return lanes that all hold this one integer."""
        vector = ir.VectorType(self.value.type, count)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), self.value, _I32(0))
        mask = ir.Constant(ir.VectorType(_I32, count), [0] * count)
        return Lanes(self.builder, self.builder.shuffle_vector(first, first, mask))

    def picked(self, indices: Sequence[int], other: Lanes | None = None) -> Lanes:
        """Return lanes by index; those of `other` are counted after these."""
        mask = ir.Constant(ir.VectorType(_I32, len(indices)), list(indices))
        second = self.value if other is None else other.value
        return Lanes(self.builder, self.builder.shuffle_vector(self.value, second, mask))

    def as_lanes(self, bits: int) -> Lanes:
        """Return the same bits as lanes of another width, low lanes first."""
        count = self.count * self.bits // bits
        return Lanes(self.builder, self.builder.bitcast(self.value, ir.VectorType(ir.IntType(bits), count)))

    def constant(self, number: int) -> Lanes:
        """Return as many lanes that all hold a constant."""
        return Lanes(self.builder, self._operand(number))

    def pinned(self) -> Lanes:
        """Return these 128 bits, made where the code says: LLVM moves what it can to where it is used.

        Only a matter of speed, and only done on x86: an empty piece of assembly that may have side effects.
        """
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return self
        signature = ir.FunctionType(self.value.type, [self.value.type])
        return Lanes(self.builder, self.builder.asm(signature, "", "=x,0", [self.value], side_effect=True))

    def smallest(self) -> Lanes:
        """Return the unsigned minimum of all lanes as one integer."""
        name = f"llvm.vector.reduce.umin.v{self.count}i{self.bits}"
        return Lanes(self.builder, self._call(name, self.value.type.element, [self.value]))

    def minus_or_zero(self, other: Lanes | int) -> Lanes:
        """Subtract unsigned lanes; zero where the result would be below zero."""
        name = f"llvm.usub.sat.v{self.count}i{self.bits}"
        return Lanes(self.builder, self._call(name, self.value.type, [self.value, self._operand(other)]))

    def any(self) -> ir.Value:
        """Return an i1: whether a lane of this mask is set."""
        packed = self.builder.bitcast(self.value, ir.IntType(self.count))
        return self.builder.icmp_unsigned("!=", packed, ir.Constant(packed.type, 0))

    def add_as_float(self, number: float, subtract: bool = False) -> Lanes:
        """Add (or subtract) a number to 32-bit lanes read as fp32, and return the bits; rounds to nearest even."""
        floats = ir.VectorType(ir.FloatType(), self.count)
        value = self.builder.bitcast(self.value, floats)
        constant = ir.Constant(floats, [number] * self.count)
        made = self.builder.fsub(value, constant) if subtract else self.builder.fadd(value, constant)
        return Lanes(self.builder, self.builder.bitcast(made, self.value.type))

    def plus_as_float(self, other: Lanes) -> Lanes:
        """Add 32-bit lanes read as fp32, and return the bits."""
        floats = ir.VectorType(ir.FloatType(), self.count)
        values = [self.builder.bitcast(lanes.value, floats) for lanes in (self, other)]
        return Lanes(self.builder, self.builder.bitcast(self.builder.fadd(*values), self.value.type))

    def _call(self, name: str, result: ir.Type, operands: Sequence[ir.Value]) -> ir.Value:
        signature = ir.FunctionType(result, [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return self.builder.call(function, operands)


def fp16_subnormals(magnitude: Lanes) -> Lanes:
    """Return the fp16 magnitudes of fp32 ones below 2^-14, to nearest, ties to even; other lanes hold anything.

    In integers, as a float addition would round as the process is told to.
    """
    field = magnitude >> 23
    # In units of 2^-24; from a field of 101 down, a quarter of a unit and less, the same nothing is left.
    field = field.compare("<", 101).where(101, field)
    shift = magnitude.constant(126) - field.compare(">", 125).where(125, field)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    half = magnitude.constant(1) << (shift - 1)
    return (significand + half - 1 + ((significand >> shift) & 1)) >> shift


@contextmanager
def only_if(builder: ir.IRBuilder, condition: ir.Value, values: Sequence[Lanes]) -> Iterator[list[Lanes]]:
    """Run code for new values only where a condition holds: append them to what this yields.

    After the block the yielded list holds the new values if the condition held, else the old ones.
    """
    changed: list[Lanes] = []
    before = builder.block
    with builder.if_then(condition, likely=False):
        yield changed
        inside = builder.block
    merged = []
    for old, new in zip(values, changed, strict=True):
        phi = builder.phi(old.value.type)
        phi.add_incoming(old.value, before)
        phi.add_incoming(new.value, inside)
        merged.append(Lanes(builder, phi))
    changed[:] = merged


def load(builder: ir.IRBuilder, address: ir.Value, bits: int, count: int, offset_bytes: int = 0) -> Lanes:
    """Load lanes, or one integer if `count` is 0, from any address, an i64."""
    kind = ir.VectorType(ir.IntType(bits), count) if count else ir.IntType(bits)
    pointer = _pointer(builder, address, kind, offset_bytes)
    return Lanes(builder, builder.load(pointer, align=1))


def store(
    builder: ir.IRBuilder, address: ir.Value, lanes: Lanes, streaming: bool, offset_bytes: int = 0
) -> None:
    """Store lanes: to any address, or past the caches to one that is a multiple of the store's size."""
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


def _memory_step(result: Any, emit: Callable[..., Any]) -> Any:
    """Return the pair that an intrinsic over int64 addresses gives to Numba."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        made = emit(builder, *args)
        return context.get_dummy_value() if made is None else made

    return result, codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order all stores before it, streaming ones too, before whatever comes next."""
    result, codegen = _memory_step(types.void, lambda builder: builder.fence("seq_cst") and None)
    return result(), codegen


@intrinsic
def load_u8(typingctx: Any, address: Any) -> Any:
    """Return the byte at an address."""
    return _loader(types.uint8, address)


@intrinsic
def load_u16(typingctx: Any, address: Any) -> Any:
    """Return the two bytes at an address, aligned or not."""
    return _loader(types.uint16, address)


@intrinsic
def load_u32(typingctx: Any, address: Any) -> Any:
    """Return the four bytes at an address, aligned or not."""
    return _loader(types.uint32, address)


@intrinsic
def load_u64(typingctx: Any, address: Any) -> Any:
    """Return the eight bytes at an address, aligned or not."""
    return _loader(types.uint64, address)


@intrinsic
def store_value(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an unsigned integer of its own width to an address, aligned or not."""
    result, codegen = _memory_step(
        types.void,
        lambda builder, at, bits: builder.store(bits, _pointer(builder, at, bits.type, 0), align=1) and None,
    )
    return result(types.int64, value), codegen


@intrinsic
def lowest_bit(typingctx: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a uint32, which is not zero."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.zext(builder.cttz(args[0], _I1(1)), _I64)

    return types.int64(types.uint32), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size_bytes: Any) -> Any:
    """Copy bytes between two stretches of memory that do not overlap, by the C library's memcpy."""

    def emit(builder: ir.IRBuilder, dst: ir.Value, src: ir.Value, size: ir.Value) -> None:
        pointers = [builder.inttoptr(address, _I8.as_pointer()) for address in (dst, src)]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], size, 1)

    result, codegen = _memory_step(types.void, emit)
    return result(types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, valid or not."""
    result, codegen = _memory_step(types.void, lambda builder, at: prefetch_at(builder, at))
    return result(types.int64), codegen


@intrinsic
def prefetch_to_write(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, valid or not, to write a part of it."""
    result, codegen = _memory_step(types.void, lambda builder, at: prefetch_at(builder, at, 3, write=1))
    return result(types.int64), codegen


def prefetch_at(builder: ir.IRBuilder, address: ir.Value, locality: int = 2, write: int = 0) -> None:
    """Ask for a cache line, into the second cache (locality 2) or the first (3)."""
    pointer_type = _I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    pointer = builder.inttoptr(address, pointer_type)
    builder.call(function, [pointer, _I32(write), _I32(locality), _I32(1)])


@intrinsic
def copy_line(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes between any two addresses."""

    def emit(builder: ir.IRBuilder, dst: ir.Value, src: ir.Value) -> None:
        store(builder, dst, load(builder, src, 8, CACHE_LINE_BYTES), False)

    result, codegen = _memory_step(types.void, emit)
    return result(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def stream_lines(typingctx: Any, target: Any, source: Any, lines: Any) -> Any:
    """Copy cache lines, a literal number, past the caches to a multiple of 64."""
    size_bytes = lines.literal_value * CACHE_LINE_BYTES

    def emit(builder: ir.IRBuilder, dst: ir.Value, src: ir.Value, count: ir.Value) -> None:
        parts = [load(builder, src, 8, CACHE_LINE_BYTES, at) for at in range(0, size_bytes, CACHE_LINE_BYTES)]
        for index, part in enumerate(parts):
            store(builder, dst, part, True, index * CACHE_LINE_BYTES)

    result, codegen = _memory_step(types.void, emit)
    return result(types.int64, types.int64, lines), codegen


@intrinsic(prefer_literal=True)
def move_lines(
    typingctx: Any, target: Any, source: Any, far: Any, mid: Any, near: Any, lines: Any, streaming: Any
) -> Any:  # fmt: skip
    """Copy cache lines one by one, a literal number, and ask for the lines that lie three distances on.

    The last argument is a literal: 1 writes past the caches, to a multiple of 64.
    """
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


def _loader(kind: Any, address: Any) -> Any:
    pointee = ir.IntType(kind.bitwidth)
    result, codegen = _memory_step(
        kind, lambda builder, at: builder.load(_pointer(builder, at, pointee, 0), align=1)
    )
    return result(types.int64), codegen
