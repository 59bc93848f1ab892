"""The engine of NumPy arrays: picks the compiled kernel of a job and gives it addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from lowshard.compiled import numba_fault, prepared
from lowshard.kernels import reference, unit_weights
from lowshard.kernels.buffer import STREAM_FROM_BYTES, Array, address, dtype_name
from lowshard.kernels.cpu import copy, cpu_cast, dequantize, quantize  # noqa: F401  their overloads
from lowshard.kernels.cpu.bit_digest import (
    LANES,
    SCRATCH_ELEMS,
    bit_digest_kernel,
    edge_masks,
    padded_weights,
)
from lowshard.kernels.cpu.cpu_optimizer import adamw_kernel, sgd_kernel
from lowshard.kernels.cpu.drive import SCRATCH_BYTES, compiled
from lowshard.kernels.cpu.gather import (
    SHORT_RUN_BYTES,
    STAGED,
    THROUGH_CACHES,
    WHOLE_LINES,
    gather_kernel,
    scatter_kernel,
)
from lowshard.kernels.cpu.scalar import DTYPE_CODES
from lowshard.kernels.cpu.scales import swizzle_kernel
from lowshard.kernels.cpu.total import sum_kernel
from lowshard.kernels.mxfp8_tensor import TILE_ROWS, swizzled_bytes
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.runs import DST_OFFSET, SRC_OFFSET, RunTable, whole_array_runs
from lowshard.kernels.unit_weights import SUMS

# Scale bytes that go to their 128x4 tiles at a time: few enough to stay in a second cache, and enough that the start of
# a compiled call is little beside their 32 times as many elements.
BAND_BYTES = 512 << 10

# Shorter rows are copied by memcpy: a row pays for two part lines when it is streamed.
_STREAMED_ROW_BYTES = 512


class NumbaEngine:
    """Every kernel as one call of compiled code on host arrays; the GIL is released meanwhile."""

    name = "numba"

    def __init__(self) -> None:
        """Raise ImportError where kernels cannot be compiled."""
        fault = numba_fault()
        if fault:
            raise ImportError(fault)
        self._threads = threading.local()
        self.stream_from_bytes = STREAM_FROM_BYTES

    def _scratch(self) -> int:
        """Return the address of this thread's scratch memory, on a cache line."""
        found = getattr(self._threads, "scratch", None)
        if found is None:
            buffer = np.zeros(SCRATCH_BYTES + 64, np.uint8)
            found = self._threads.scratch = buffer[-address(buffer) % 64 :]
        return address(found)

    def copy(self, src: Array, dst: Array, runs: RunTable, streaming: bool | None = None) -> None:
        """Copy every run of `src` to its place in `dst`."""
        if streaming is None:
            streaming = runs.total_elems * runs.dst_itemsize >= self.stream_from_bytes
        if _is_short(runs):
            target = address(dst)
            if runs.dst_is_gapless:
                way = STAGED if (target | runs.dst_divisor_bytes) % 64 else WHOLE_LINES
                way = way if streaming else THROUGH_CACHES
                gather_kernel()(runs.columns, address(src), target, self._scratch(), runs.src_itemsize, way)
                return
            if streaming and runs.src_is_gapless:
                scatter_kernel()(runs.columns, address(src), target, runs.src_itemsize)
                return
        kernel = compiled("copy")
        kernel(
            runs.columns,
            address(src),
            address(dst),
            0,
            self._scratch(),
            runs.src_itemsize,
            _STREAMED_ROW_BYTES,
            streaming,
        )

    def rows_copier(
        self, src: Array, dst: Array, runs: RunTable, streaming: bool, fetching: bool = False
    ) -> Callable[[], None]:
        """Return a function that copies every run separately; it needs no scratch, so any thread may call it."""
        first, second = runs.src_itemsize, _STREAMED_ROW_BYTES
        fetching = fetching and not streaming
        if fetching and _is_short(runs) and runs.dst_is_gapless:
            return prepared(
                gather_kernel(), runs.columns, address(src), address(dst), 0, first, THROUGH_CACHES
            )
        kernel = compiled("fetch" if fetching else "copy")
        return prepared(kernel, runs.columns, address(src), address(dst), 0, 0, first, second, streaming)

    def quantize(
        self,
        src: Array,
        data: Array,
        scale: Array,
        runs: RunTable,
        elem: Elem,
        mode: Mode,
        min_scale_byte: int,
        streaming: bool | None = None,
    ) -> None:
        """Quantise every run, whole blocks, of a bf16, fp16 or fp32 array."""
        kernel = compiled(f"quantize {dtype_name(src.dtype)} {elem}")
        round_up = reference.scale_round_up(reference.element_format(elem), mode)
        if streaming is None:
            streaming = runs.total_elems >= self.stream_from_bytes
        kernel(
            runs.columns,
            address(src),
            address(data),
            address(scale),
            self._scratch(),
            round_up,
            min_scale_byte,
            streaming,
        )

    def quantize_swizzled(
        self,
        src: Array,
        data: Array,
        scale: Array,
        elem: Elem,
        mode: Mode,
        min_scale_byte: int,
        streaming: bool | None = None,
    ) -> None:
        """Quantise a matrix band by band; the scales of a band go to their tiles while they are in the cache."""
        rows, columns = src.shape[0], src.shape[1] // BLOCK_ELEMS
        if streaming is None:
            streaming = src.size >= self.stream_from_bytes
        band_rows = max(1, BAND_BYTES // (TILE_ROWS * columns)) * TILE_ROWS
        rowwise = np.empty((min(rows, band_rows), columns), np.uint8)
        for row in range(0, rows, band_rows):
            x, codes = src[row : row + band_rows], data[row : row + band_rows]
            scales = rowwise[: len(x)]
            runs = whole_array_runs(x.shape, x.strides, codes.strides, x.dtype.itemsize, 1)
            self.quantize(x, codes, scales, runs, elem, mode, min_scale_byte, streaming)
            self.swizzle(scales, scale[swizzled_bytes(row, columns) :])

    def dequantize(self, data: Array, scale: Array, elem: Elem, dst: Array, runs: RunTable) -> None:
        """Dequantise every run, whole blocks."""
        kernel = compiled(f"dequantize {dtype_name(dst.dtype)} {elem}")
        table = reference.value_table(elem, dtype_name(dst.dtype))
        streaming = runs.total_elems * runs.dst_itemsize >= self.stream_from_bytes
        kernel(
            runs.columns,
            address(data),
            address(dst),
            address(scale),
            self._scratch(),
            address(table),
            0,
            streaming,
        )

    def cast(self, src: Array, dst: Array, runs: RunTable) -> None:
        """Convert every run from src's dtype to dst's."""
        kernel = compiled(f"cast {dtype_name(src.dtype)} {dtype_name(dst.dtype)}")
        streaming = runs.total_elems * runs.dst_itemsize >= self.stream_from_bytes
        kernel(runs.columns, address(src), address(dst), 0, self._scratch(), 0, 0, streaming)

    def sum_into(self, out: Array, sources: Sequence[Array], accumulate: bool) -> None:
        """Sum contiguous arrays of one size in fp32, from left to right, and round once."""
        terms = [out, *sources] if accumulate else sources
        addresses = np.array([address(term) for term in terms], np.int64)
        dtypes = np.array([DTYPE_CODES[dtype_name(term.dtype)] for term in terms], np.int64)
        sum_kernel()(
            addresses, dtypes, address(out), DTYPE_CODES[dtype_name(out.dtype)], out.size, self._scratch()
        )

    def adamw(
        self, param: Array, grad: Array, first: Array, second: Array, scalars: Sequence[float]
    ) -> None:  # fmt: skip
        """Run one step of AdamW in one pass."""
        adamw_kernel()(param, grad, first, second, np.array(scalars, np.float32))

    def sgd(self, param: Array, grad: Array, buffer: Array, mode: int, scalars: Sequence[float]) -> None:
        """Run one step of SGD in one pass."""
        sgd_kernel(mode)(param, grad, buffer, np.array(scalars, np.float32))

    def bit_digest(self, src: Array, runs: RunTable, first: int = 0) -> npt.NDArray[np.uint32]:
        """Return the weighted sums of a source's bits."""
        width, begin = unit_weights.unit_bytes(runs.src_itemsize), address(src)
        if not runs.boxes or begin % width or runs.src_divisor_bytes % width:
            return PlainEngine().bit_digest(src, runs, first)
        units = runs.src_itemsize // width
        lead = units * (first + int(runs.columns[DST_OFFSET, 0]))
        lead -= (begin + int(runs.columns[SRC_OFFSET, 0])) // width
        weights, masks = padded_weights(width, lead % 64), edge_masks()
        scratch = np.zeros(SCRATCH_ELEMS, np.uint32)
        bit_digest_kernel(width)(
            runs.columns, begin, first, units, weights[1], address(masks), address(scratch)
        )
        sums: npt.NDArray[np.uint32] = scratch[: SUMS * LANES].reshape(SUMS, LANES).sum(1, dtype=np.uint32)
        return sums

    def swizzle(self, scale: Array, out: Array) -> None:
        """Write uint8 [rows, cols] in the 128x4 layout."""
        swizzle_kernel(False)(address(scale), address(out), *scale.shape, *scale.strides)

    def unswizzle(self, swizzled: Array, out: Array) -> None:
        """Write a flat array in the 128x4 layout to uint8 [rows, cols]."""
        swizzle_kernel(True)(address(out), address(swizzled), *out.shape, *out.strides)


def _is_short(runs: RunTable) -> bool:
    shortest_bytes, longest_bytes = runs.run_limits_bytes
    return runs.outer_dims <= 1 and 64 <= shortest_bytes <= longest_bytes <= SHORT_RUN_BYTES


@cache
def vector_bits() -> int:
    """Return the width of the widest vector register that the compiled kernels use here, in bits."""
    import llvmlite.binding as llvm

    from lowshard.compiled.compiler import target

    triple, cpu, features = target()
    lanes = "<32 x i16>"
    module = llvm.parse_assembly(
        f"define void @probe(ptr %a, ptr %b) {{\n%x = load {lanes}, ptr %a\n%y = load {lanes}, ptr %b\n"
        f"%z = add {lanes} %x, %y\nstore {lanes} %z, ptr %a\nret void\n}}"
    )
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    assembly = machine.emit_assembly(module)
    return next((bits for name, bits in (("zmm", 512), ("ymm", 256)) if name in assembly), 128)
