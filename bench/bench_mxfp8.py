"""`lowshard bench mxfp8`: quantise and dequantise whole arrays, each row beside a copy of the same traffic."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench.bench_device import Device, Yardstick, require_memory
from lowshard.bench.limit import ratio_limit
from lowshard.bench.turn_timing import Case, Copy, Work, Workload
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.buffer import Array
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode

QUANTIZE: tuple[tuple[str, Elem, Mode], ...] = (
    ("bf16", "e4m3", "rceil"),
    ("bf16", "e4m3", "floor"),
    ("bf16", "e4m3", "even"),
    ("bf16", "e4m3", "ceil"),
    ("bf16", "e5m2", "rceil"),
    ("fp16", "e4m3", "rceil"),
    ("fp16", "e5m2", "rceil"),
    ("fp32", "e4m3", "rceil"),
    ("fp32", "e5m2", "rceil"),
)
"""Rows that quantise: source, element type, mode."""

DEQUANTIZE: tuple[tuple[Elem, str], ...] = (
    ("e4m3", "bf16"),
    ("e4m3", "fp16"),
    ("e4m3", "fp32"),
    ("e5m2", "bf16"),
)
"""Rows that dequantise: element type, target."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WEIGHT_STD = 0.02

FRESH_ELEMS = 1 << 24
"""Random values that are drawn; longer arrays repeat them."""

# Sources in three dtypes, two quantised tensors, one target of fp32; and the copies beside each source, and beside
# the target, with as many bytes in their two buffers as the work reads and writes.
_BYTES_PER_ELEM = (2 + 2 + 4) + 2 * (1 + 1 / BLOCK_ELEMS) + 4 + (3 + 3 + 5 + 5 + 4 / BLOCK_ELEMS)


def quantize_name(source: str, elem: str, mode: str) -> str:
    """Return the name of a row that quantises."""
    return f"quantize {source} -> {elem} {mode}"


def dequantize_name(elem: str, target: str) -> str:
    """Return the name of a row that dequantises."""
    return f"dequantize {elem} -> {target}"


_QUANTIZE_NAMES = tuple(quantize_name(*row) for row in QUANTIZE)
NAMES = (*_QUANTIZE_NAMES, *(dequantize_name(*row) for row in DEQUANTIZE))
"""Every row, in the order of measurement."""


def moved_bytes(elems: int, itemsize_bytes: int) -> int:
    """Return what quantising or dequantising moves: the floats, a code each, a scale byte for every 32."""
    return elems * itemsize_bytes + elems + elems // BLOCK_ELEMS


def weights(elems: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return N(0, 0.02) in float32 [elems], what weights of trained models look like; repeated after 16 Mi."""
    fresh = min(elems, FRESH_ELEMS)
    values = np.random.default_rng(seed).standard_normal(fresh, dtype=np.float32)
    values *= np.float32(_WEIGHT_STD)
    return values if fresh == elems else np.resize(values, elems)


def build(device: Device, elems: int, names: Collection[str]) -> Workload:
    """Return the rows of these names over arrays of `elems` elements, a multiple of 32."""
    require_memory(device, int(elems * _BYTES_PER_ELEM))
    buffers = _Buffers(device, elems)
    cases: list[Case] = []
    for source, elem, mode in QUANTIZE:
        name = quantize_name(source, elem, mode)
        if name in names:
            work = _quantize(buffers.source(source), buffers.tensor(elem), mode)
            cases.append(buffers.case(name, work, source))
    for elem, target in DEQUANTIZE:
        name = dequantize_name(elem, target)
        if name in names:
            q = buffers.tensor(elem)
            fill = _quantize(buffers.source("bf16"), q, "rceil")
            cases.append(buffers.case(name, _dequantize(q, buffers.target(target)), target, fill))
    title = f"{elems:,} elements ({2 * elems / 1e6:,.1f} MB as bf16), N(0, {_WEIGHT_STD})"
    return Workload(title, (("elems", elems),), tuple(cases))


class _Buffers:
    """The arrays of one size, made when first asked for; targets share one buffer."""

    def __init__(self, device: Device, elems: int) -> None:
        self._device, self._elems = device, elems
        self._made: dict[str, Any] = {}

    @cached_property
    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values in float32 on the host."""
        return weights(self._elems)

    def copy(self, name: str, floats: str) -> Copy:
        """Return the copy with the traffic of a row; rows that read the same floats, or write any, share buffers."""
        moved = moved_bytes(self._elems, _itemsize(floats))
        quantizes = name in _QUANTIZE_NAMES
        key = f"copy {floats}" if quantizes else "copy target"
        if key not in self._made:
            most = moved if quantizes else moved_bytes(self._elems, 4)
            self._made[key] = Yardstick(self._device, -(-most // 2))
        found: Yardstick = self._made[key]
        return found.copy(moved)

    def source(self, short: str) -> Array:
        """Return the values in a dtype."""
        if short not in self._made:
            dtype = dtypes.get(_DTYPES[short]).numpy
            self._made[short] = self._device.put(self.values.astype(dtype, copy=False))
        return self._made[short]

    def tensor(self, elem: Elem) -> MXFP8Tensor:
        """Return the tensor that rows of this element type write, and read."""
        if elem not in self._made:
            byte = np.dtype(np.uint8)
            data = self._device.empty((self._elems,), byte)
            scale = self._device.empty((self._elems // BLOCK_ELEMS,), byte)
            self._made[elem] = MXFP8Tensor(data, scale, elem)
        found: MXFP8Tensor = self._made[elem]
        return found

    def target(self, short: str) -> Array:
        """Return an array to dequantise into."""
        dtype = dtypes.get(_DTYPES[short]).numpy
        if "target" not in self._made:
            self._made["target"] = self._device.empty((self._elems * 4,), np.dtype(np.uint8))
        return self._made["target"][: self._elems * dtype.itemsize].view(dtype)

    def case(self, name: str, work: Work, floats: str, prepare: Work | None = None) -> Case:
        """Return the case of a row between some floats and MXFP8."""
        moved, copy = moved_bytes(self._elems, _itemsize(floats)), self.copy(name, floats)
        limit = ratio_limit(name, self._device.kind)
        return Case(name, work, moved, copy, ratio_limit=limit, prepare=prepare)


def _quantize(x: Array, out: MXFP8Tensor, mode: Mode) -> Work:
    return lambda: quantize_mxfp8(x, out.elem, mode, out)


def _dequantize(q: MXFP8Tensor, out: Array) -> Work:
    dtype = out.dtype
    return lambda: dequantize_mxfp8(q, dtype, out)


def _itemsize(short: str) -> int:
    return dtypes.get(_DTYPES[short]).itemsize_bytes
