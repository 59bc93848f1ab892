"""The plain engine: every kernel in NumPy, on the integer rules of `reference`.

The fast engines are compared with it byte for byte, and it runs without Numba. It is written to be read: each box of
a run table becomes a pair of strided views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.kernels import reference, unit_weights
from lowshard.kernels.buffer import Array, address
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET, RunTable, whole_array_runs

# 64 Ki elements: small enough for the 4-byte and 8-byte temporaries of a tile to stay in cache, large
# enough to spread the Python cost of some thirty NumPy calls.
_TILE_ELEMS = 1 << 16


class PlainEngine:
    """Every kernel as plain NumPy on host arrays."""

    name = "plain"

    def copy(self, src: Array, dst: Array, runs: RunTable, streaming: bool | None = None) -> None:
        """Copy every run of `src` to its place in `dst`."""
        for source, target in _views(src, dst, runs):
            target[...] = source

    def rows_copier(
        self, src: Array, dst: Array, runs: RunTable, streaming: bool, fetching: bool = False
    ) -> Callable[[], None]:
        """Return a function that copies every run of `src` to `dst`; NumPy has one way to write."""
        return partial(self.copy, src, dst, runs)

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
        fmt = reference.element_format(elem)
        for source, (codes, scales) in zip(
            _boxes(src, _bits_of(src.dtype), runs, SRC_OFFSET),
            _quantised_boxes(data, scale, runs, DST_OFFSET),
            strict=True,
        ):
            bits = reference.widen_to_fp32_bits(source, src.dtype.name).reshape(-1, BLOCK_ELEMS)
            code, byte = reference.quantize_bits(bits, fmt, mode, min_scale_byte)
            codes[...] = code.reshape(codes.shape)
            scales[...] = byte.reshape(scales.shape)

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
        """Quantise a matrix, then write its scales in the 128x4 layout."""
        rowwise = np.empty((src.shape[0], src.shape[1] // BLOCK_ELEMS), np.uint8)
        runs = whole_array_runs(src.shape, src.strides, data.strides, src.dtype.itemsize, 1)
        self.quantize(src, data, rowwise, runs, elem, mode, min_scale_byte)
        self.swizzle(rowwise, scale)

    def dequantize(self, data: Array, scale: Array, elem: Elem, dst: Array, runs: RunTable) -> None:
        """Dequantise every run, whole blocks."""
        table = reference.value_table(elem, dst.dtype.name)
        for (codes, scales), target in zip(
            _quantised_boxes(data, scale, runs, SRC_OFFSET),
            _boxes(dst, table.dtype, runs, DST_OFFSET),
            strict=True,
        ):
            index = np.repeat(scales.astype(np.intp) << 8, BLOCK_ELEMS, axis=-1)
            target[...] = table[index | codes]

    def cast(self, src: Array, dst: Array, runs: RunTable) -> None:
        """Convert every run from src's dtype to dst's."""
        for source, target in zip(
            _boxes(src, _bits_of(src.dtype), runs, SRC_OFFSET),
            _boxes(dst, _bits_of(dst.dtype), runs, DST_OFFSET),
            strict=True,
        ):
            bits = reference.widen_to_fp32_bits(source, src.dtype.name)
            target[...] = reference.round_fp32_bits(bits, dst.dtype.name)

    def sum_into(self, out: Array, sources: Sequence[Array], accumulate: bool) -> None:
        """Sum contiguous arrays of one size in fp32, from left to right, and round once."""
        target = out.reshape(-1)
        parts = [source.reshape(-1) for source in sources]
        for start in range(0, target.size, _TILE_ELEMS):
            tile = slice(start, start + _TILE_ELEMS)
            with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are results here
                if accumulate:
                    total = _fp32_bits(target[tile]).view(np.float32)
                else:
                    total = _fp32_bits(parts[0][tile]).view(np.float32)
                for part in parts if accumulate else parts[1:]:
                    total += _fp32_bits(part[tile]).view(np.float32)
            bits = total.view(np.uint32)
            target[tile].view(_bits_of(out.dtype))[...] = reference.round_fp32_bits(bits, out.dtype.name)

    def adamw(
        self, param: Array, grad: Array, first: Array, second: Array, scalars: Sequence[float]
    ) -> None:  # fmt: skip
        """Run one step of AdamW in float32, tile by tile."""
        keep, beta1, rest1, beta2, rest2, scale, root, eps = (np.float32(s) for s in scalars)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # Inf and NaN are results here
            for start in range(0, param.size, _TILE_ELEMS):
                tile = slice(start, start + _TILE_ELEMS)
                p, g, m, v = param[tile], grad[tile], first[tile], second[tile]
                m[...] = m * beta1 + g * rest1
                v[...] = v * beta2 + (g * g) * rest2
                p[...] = p * keep - (m / (np.sqrt(v) / root + eps)) * scale

    def sgd(self, param: Array, grad: Array, buffer: Array, mode: int, scalars: Sequence[float]) -> None:
        """Run one step of SGD in float32, tile by tile."""
        lr, momentum, decay = (np.float32(s) for s in scalars)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, param.size, _TILE_ELEMS):
                tile = slice(start, start + _TILE_ELEMS)
                p, b = param[tile], buffer[tile]
                d = grad[tile] + p * decay
                if mode == 2:
                    d = b * momentum + d
                if mode:
                    b[...] = d
                p[...] = p - d * lr

    def bit_digest(self, src: Array, runs: RunTable, first: int = 0) -> npt.NDArray[np.uint32]:
        """Return the weighted sums of a source's bits."""
        width = unit_weights.unit_bytes(runs.src_itemsize)
        units = runs.src_itemsize // width
        total = np.zeros(unit_weights.SUMS, np.uint32)
        raw = np.dtype((np.void, runs.src_itemsize))
        for tile, elems in zip(_boxes(src, raw, runs, SRC_OFFSET), _places(runs), strict=True):
            places = (first + elems.reshape(-1, 1)) * units + np.arange(units)
            values = np.ascontiguousarray(tile).reshape(-1).view(np.uint8 if width == 1 else np.int16)
            weights = unit_weights.table()[:, places.reshape(-1) % unit_weights.BLOCK_UNITS].astype(np.uint32)
            factors = unit_weights.factors(places.reshape(-1) // unit_weights.BLOCK_UNITS)
            weighed = values.astype(np.int32).astype(np.uint32) * weights * factors.T
            total += weighed.sum(axis=1, dtype=np.uint32)
        return total

    def swizzle(self, scale: Array, out: Array) -> None:
        """Write uint8 [rows, cols] in the 128x4 layout."""
        rows, cols = scale.shape
        tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
        padded = np.zeros((tile_rows * 128, tile_cols * 4), np.uint8)
        padded[:rows, :cols] = scale
        tiles = padded.reshape(tile_rows, 4, 32, tile_cols, 4)
        out.reshape(tile_rows, tile_cols, 32, 4, 4)[...] = tiles.transpose(0, 3, 2, 1, 4)

    def unswizzle(self, swizzled: Array, out: Array) -> None:
        """Write a flat array in the 128x4 layout to uint8 [rows, cols]."""
        rows, cols = out.shape
        tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
        tiles = swizzled.reshape(tile_rows, tile_cols, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        out[...] = tiles.reshape(tile_rows * 128, tile_cols * 4)[:rows, :cols]


class _Window:
    """A strided view of memory, as NumPy's array interface."""

    def __init__(
        self, base: Array, start: int, typestr: str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.base = base  # keeps the memory alive
        self.__array_interface__ = {
            "version": 3,
            "typestr": typestr,
            "shape": shape,
            "strides": strides,
            "data": (start, not base.flags.writeable),
        }


def _views(src: Array, dst: Array, runs: RunTable) -> Iterator[tuple[Array, Array]]:
    """Yield both sides of every box as raw bytes."""
    raw = np.dtype((np.void, runs.src_itemsize))
    return zip(_boxes(src, raw, runs, SRC_OFFSET), _boxes(dst, raw, runs, DST_OFFSET), strict=True)


def _quantised_boxes(data: Array, scale: Array, runs: RunTable, side: int) -> Iterator[tuple[Array, Array]]:
    """Yield the element codes and the scale bytes of every box."""
    byte = np.dtype(np.uint8)
    return zip(_boxes(data, byte, runs, side), _boxes(scale, byte, runs, side, per=BLOCK_ELEMS), strict=True)


def _boxes(array: Array, dtype: np.dtype[Any], runs: RunTable, side: int, per: int = 1) -> Iterator[Array]:
    """Yield one side of every box as arrays [outer dims, outermost first, run], `per` elements as one."""
    start_address, itemsize = address(array), dtype.itemsize
    item = (runs.src_itemsize, runs.dst_itemsize)[side]
    for column in runs.columns.T.tolist():
        dims = [column[i : i + 3] for i in range(FIRST_DIM, len(column), 3)][::-1]
        counts = [*(dim[0] for dim in dims), column[RUN]]
        strides = [*(dim[1 + side] for dim in dims), item]
        for begin, extents in _tiles(counts):
            offset = column[side] + sum(i * stride for i, stride in zip(begin, strides, strict=True))
            shape = (*extents[:-1], extents[-1] // per)
            steps = (*(stride // per for stride in strides[:-1]), itemsize)
            yield np.asarray(_Window(array, start_address + offset // per, dtype.str, shape, steps))


def _places(runs: RunTable) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the positions of the elements of every box on the target side, in elements, split as `_boxes` does."""
    for column in runs.columns.T.tolist():
        dims = [column[i : i + 3] for i in range(FIRST_DIM, len(column), 3)][::-1]
        counts, steps = [*(dim[0] for dim in dims), column[RUN]], [*(dim[2] for dim in dims), 1]
        for begin, extents in _tiles(counts):
            places = np.array(column[DST_OFFSET], np.int64)
            for first, extent, step in zip(begin, extents, steps, strict=True):
                places = places[..., None] + np.arange(first, first + extent) * step
            yield places


def _tiles(counts: list[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the first index and the extents of the tiles of a grid, none above `_TILE_ELEMS`."""
    cut = len(counts) - 1
    inner = 1
    while cut > 0 and inner * counts[cut] <= _TILE_ELEMS:
        inner *= counts[cut]
        cut -= 1
    step = max(1, _TILE_ELEMS // inner)
    for index in np.ndindex(*counts[:cut]):
        for begin in range(0, counts[cut], step):
            extent = min(step, counts[cut] - begin)
            rest = len(counts) - cut - 1
            yield (*index, begin, *(0,) * rest), (*(1,) * cut, extent, *counts[cut + 1 :])


def _bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint32 if dtype.itemsize == 4 else np.uint16)


def _fp32_bits(tile: Array) -> npt.NDArray[np.uint32]:
    """Return the bit patterns of a tile after exact widening to fp32, in a new contiguous array."""
    return reference.widen_to_fp32_bits(tile.view(_bits_of(tile.dtype)), tile.dtype.name)
