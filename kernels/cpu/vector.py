"""Vector code for Numba: LLVM vectors with Python operators.

LLVM turns a vector of 32 lanes into what the machine has: one 512-bit register, two of 256 bits or four of 128. Plain
loops leave that choice to the loop vectoriser, which takes four 64-bit lanes for these kernels and is 4 to 10
times slower.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from lowshard.compiled.deferred import cgutils, intrinsic, types

_I1, _I32, _I64 = (ir.IntType(bits) for bits in (1, 32, 64))


class Lanes:
    """Integer lanes (or one integer) in an LLVM function under construction; ints are splat over the lanes."""

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
        """Return these 128 bits, made where the code says: LLVM moves what it can to where it is used."""
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

    def in_table(self, table: Sequence[int]) -> Lanes:
        """Return a table's entry at the low seven bits of each byte: of 64, on machines with AVX-512 VBMI."""
        low, high = (ir.Constant(self.value.type, list(table[i : i + 64])) for i in (0, 64))
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return Lanes(self.builder, self._call(name, self.value.type, [low, self.value, high]))

    def bytes_from(self, first: Lanes, other: Lanes) -> Lanes:
        """Return 64 bytes of these and of `other` from `first` on, one integer: on machines with AVX-512 VBMI."""
        places = Lanes(self.builder, ir.Constant(self.value.type, list(range(64)))) + first
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return Lanes(self.builder, self._call(name, self.value.type, [self.value, places.value, other.value]))

    def any(self) -> ir.Value:
        """Return an i1: whether a lane of this mask is set."""
        packed = self.builder.bitcast(self.value, ir.IntType(self.count))
        return self.builder.icmp_unsigned("!=", packed, ir.Constant(packed.type, 0))

    def not_all(self) -> ir.Value:
        """Return an i1: whether a lane of this mask is not set."""
        packed = self.builder.bitcast(self.value, ir.IntType(self.count))
        return self.builder.icmp_unsigned("!=", packed, ir.Constant(packed.type, -1))

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
    """Return the fp16 magnitudes of fp32 ones below 2^-14, to nearest, ties to even; other lanes hold anything."""
    field = magnitude >> 23
    # In units of 2^-24; from a field of 101 down, a quarter of a unit and less, the same nothing is left.
    field = field.compare("<", 101).where(101, field)
    shift = magnitude.constant(126) - field.compare(">", 125).where(125, field)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    half = magnitude.constant(1) << (shift - 1)
    return (significand + half - 1 + ((significand >> shift) & 1)) >> shift


@contextmanager
def only_if(builder: ir.IRBuilder, condition: ir.Value, values: Sequence[Lanes]) -> Iterator[list[Lanes]]:
    """Run code for new values only where a condition holds: append them to what this yields."""
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


@intrinsic
def lowest_bit(typingctx: Any, mask: Any) -> Any:
    """Return the number of the lowest bit that is set in a uint32, which is not zero."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.zext(builder.cttz(args[0], _I1(1)), _I64)

    return types.int64(types.uint32), codegen
