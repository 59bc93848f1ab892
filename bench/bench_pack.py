"""`lowshard bench pack`: boxes and slices packed, unpacked, quantised, each row beside a copy of the same traffic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench import bench_mxfp8
from lowshard.bench.bench_device import Device, Yardstick, require_memory
from lowshard.bench.limit import ratio_limit, speed_up_limit
from lowshard.bench.turn_timing import Case, Copy, Pair, Work, Workload
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    pack,
    pack_quantize,
    quantize_mxfp8,
    unpack,
    unpack_dequantize,
)
from lowshard.kernels.buffer import Array

BIG, SMALL, AGAIN = "boxes of 4 KB", "boxes of 512 B", "boxes of 512 B (same table)"
SLICE = "slice of 1 KB rows"
FUSED, UNFUSED = f"pack_quantize {SLICE}", f"pack then quantize {SLICE}"

NAMES = (
    f"pack {BIG}",
    f"pack {SMALL}",
    f"pack {AGAIN}",
    f"unpack {BIG}",
    f"unpack {SMALL}",
    f"unpack {AGAIN}",
    f"pack {SLICE}",
    f"unpack {SLICE}",
    FUSED,
    UNFUSED,
    f"unpack_dequantize {SLICE}",
    f"pack_quantize {BIG}",
)
"""Every row, in the order of measurement."""

BOX_BYTES = {BIG: 4096, SMALL: 512, AGAIN: 512}
SPREAD = 4
"""The array that boxes come from is as many times larger than they are."""
ROW_ELEMS = 512
"""Elements of a row of the slice: 1 KB of bf16. Its matrix has `SPREAD` times as many columns."""

_ITEMSIZE = 2  # bf16
_PLACE_ELEMS = 32  # boxes begin at multiples of 64 bytes


def box_table(boxes: int, box_elems: int, seed: int = 0) -> BoxTable:
    """Return boxes of one size, disjoint, at random places of a 1-D array `SPREAD` times as large as all of them."""
    rng = np.random.default_rng(seed)
    stretch = SPREAD * box_elems
    inside = rng.integers(0, (stretch - box_elems) // _PLACE_ELEMS + 1, boxes) * _PLACE_ELEMS
    starts = (rng.permutation(boxes) * stretch + inside).tolist()
    return BoxTable((boxes * stretch,), tuple(((start, start + box_elems),) for start in starts))


def tables_a_round(moved_bytes_each: int, round_bytes: int) -> int:
    """Return how many tables a round goes through to move at least `round_bytes`."""
    return max(1, -(-round_bytes // moved_bytes_each))


def slice_rows(round_bytes: int) -> int:
    """Return the rows of the slice: quantising them moves at least `round_bytes`."""
    return max(1, -(-round_bytes // bench_mxfp8.moved_bytes(ROW_ELEMS, _ITEMSIZE)))


def build(device: Device, boxes: int, round_bytes: int, names: Collection[str]) -> Workload:
    """Return the rows of these names over tables of so many boxes, each round moving at least `round_bytes`."""
    buffers = _Buffers(device, boxes, round_bytes)
    require_memory(device, buffers.need_bytes)
    makers: dict[str, Callable[[], Case]] = {
        f"pack_quantize {BIG}": partial(_quantized_boxes, buffers),
        f"pack {SLICE}": partial(_packed_slice, buffers),
        f"unpack {SLICE}": partial(_unpacked_slice, buffers),
        FUSED: partial(_fused, buffers),
        UNFUSED: partial(_unfused, buffers),
        f"unpack_dequantize {SLICE}": partial(_dequantized_slice, buffers),
    }
    for what in (BIG, SMALL, AGAIN):
        makers[f"pack {what}"] = partial(_packed_boxes, buffers, what)
        makers[f"unpack {what}"] = partial(_unpacked_boxes, buffers, what)
    cases = [makers[name]() for name in NAMES if name in names]
    pairs = [Pair(FUSED, UNFUSED, speed_up_limit(FUSED, UNFUSED, device.kind))]
    return Workload(buffers.title, buffers.sizes, tuple(cases), tuple(pairs), buffers.notes)


@dataclass(frozen=True)
class _Move:
    """One table with its array and its packed buffer."""

    array: Array
    table: BoxTable
    packed: Array


@dataclass(frozen=True)
class _Group:
    """The tables that a round goes through, and how they are copied for comparison."""

    moves: tuple[_Move, ...]
    same: bool
    """True if all are one and the same, so that they stay in cache; the copy is then repeated in place."""
    yardstick: Yardstick

    @property
    def payload_bytes(self) -> int:
        """Bytes packed in a round."""
        return sum(move.table.total_elems for move in self.moves) * _ITEMSIZE

    def copy(self, moved_bytes: int) -> Copy:
        """Return the copy with so much traffic: in one piece, or as often in one place as the table is used."""
        return self.yardstick.copy(moved_bytes, len(self.moves) if self.same else 1)

    @property
    def note(self) -> str:
        """How many tables a round is."""
        return f"{len(self.moves)} {'times the same table' if self.same else 'tables'} a round"


class _Buffers:
    """Arrays, tables and packed buffers, made when first asked for."""

    def __init__(self, device: Device, boxes: int, round_bytes: int) -> None:
        self.device, self.boxes = device, boxes
        self.tables = {
            what: tables_a_round(2 * boxes * BOX_BYTES[what], round_bytes) for what in (BIG, SMALL, AGAIN)
        }
        # Quantising moves three quarters of what packing does, and is to move enough too.
        quantized_bytes = bench_mxfp8.moved_bytes(boxes * BOX_BYTES[BIG] // _ITEMSIZE, _ITEMSIZE)
        self.tables[BIG] = tables_a_round(quantized_bytes, round_bytes)
        self.rows = slice_rows(round_bytes)
        self._groups: dict[str, _Group] = {}

    @property
    def title(self) -> str:
        """Sizes, in words."""
        return (
            f"{self.boxes:,} boxes a table, bf16, at random places of an array {SPREAD} times as large; "
            f"slices of {self.rows:,} rows of {ROW_ELEMS} elements out of {SPREAD * ROW_ELEMS}"
        )

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The same as names and numbers."""
        return (
            ("boxes", self.boxes),
            ("tables_of_4_kb", self.tables[BIG]),
            ("tables_of_512_b", self.tables[SMALL]),
            ("slice_rows", self.rows),
            ("slice_row_elems", ROW_ELEMS),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures of this measurement mean."""
        small, again = self.tables[SMALL], self.tables[AGAIN]
        small_mb, again_mb = (2 * self.boxes * BOX_BYTES[SMALL] * n / 1e6 for n in (small, 1))
        turns = f"{SMALL}: a round takes {small} tables, arrays and packed buffers in turn, {small_mb:,.1f} MB moved"
        warm = f"(same table): the same {again_mb:,.2f} MB moved {again} times a round, in cache if they fit"
        return f"{turns}; its memcpy is one copy", f"{warm}; its memcpy too"

    @property
    def base_elems(self) -> int:
        """Elements of the array that all boxes come from, the larger of both kinds."""
        each = (BOX_BYTES[what] // _ITEMSIZE * self.boxes * self.tables[what] for what in (BIG, SMALL))
        return SPREAD * max(each)

    @property
    def need_bytes(self) -> int:
        """Bytes of everything."""
        packed = sum(BOX_BYTES[what] * self.boxes * self.tables[what] for what in (BIG, SMALL))
        slice_bytes = self.rows * ROW_ELEMS * _ITEMSIZE
        copies = 2 * (packed + slice_bytes)
        return _ITEMSIZE * self.base_elems + 2 * packed + (SPREAD + 2) * slice_bytes + copies

    @cached_property
    def base(self) -> Array:
        """The array that all boxes come from."""
        return self._weights(self.base_elems)

    @cached_property
    def matrix(self) -> Array:
        """The matrix that slices come from, [rows, SPREAD * ROW_ELEMS]."""
        return self._weights(self.rows * SPREAD * ROW_ELEMS).reshape(self.rows, SPREAD * ROW_ELEMS)

    def group(self, what: str) -> _Group:
        """Return the tables of a kind of row."""
        if what not in self._groups:
            same = what == AGAIN
            moves = []
            for index in range(1 if same else self.tables[what]):
                table = box_table(self.boxes, BOX_BYTES[what] // _ITEMSIZE, seed=index)
                size = table.shape[0]
                array = self.base[index * size : (index + 1) * size]
                moves.append(_Move(array, table, self.device.empty((table.total_elems,), array.dtype)))
            packed_bytes = sum(move.packed.nbytes for move in moves)
            repeated = tuple(moves) * (self.tables[what] if same else 1)
            self._groups[what] = _Group(repeated, same, Yardstick(self.device, packed_bytes))
        return self._groups[what]

    @cached_property
    def slice(self) -> _Move:
        """1 KB of each row of the matrix."""
        table = BoxTable(self.matrix.shape, (((0, self.rows), (ROW_ELEMS, 2 * ROW_ELEMS)),))
        return _Move(self.matrix, table, self.device.empty((table.total_elems,), self.matrix.dtype))

    @cached_property
    def slice_tensor(self) -> MXFP8Tensor:
        """What the slice is quantised into."""
        return self.tensor(self.slice.table.total_elems)

    @cached_property
    def slice_yardstick(self) -> Yardstick:
        """Copies up to the traffic of packing the slice."""
        return Yardstick(self.device, self.slice.table.total_elems * _ITEMSIZE)

    def tensor(self, elems: int) -> MXFP8Tensor:
        """Return a packed tensor to quantise into."""
        wire = self.device.empty((MXFP8Tensor.buffer_bytes((elems,)),), np.dtype(np.uint8))
        return MXFP8Tensor.over(wire, (elems,))

    def _weights(self, elems: int) -> Array:
        dtype: np.dtype[Any] = dtypes.get("bfloat16").numpy
        # Repeated where there are many: what they are hardly matters here, and fp32 takes twice the memory.
        few = bench_mxfp8.weights(min(elems, bench_mxfp8.FRESH_ELEMS)).astype(dtype)
        return self.device.put(np.resize(few, elems))


def _case(buffers: _Buffers, name: str, run: Work, moved: int, copy: Copy, **more: Any) -> Case:
    return Case(name, run, moved, copy, ratio_limit=ratio_limit(name, buffers.device.kind), **more)


def _packed_boxes(buffers: _Buffers, what: str) -> Case:
    group = buffers.group(what)
    moved = 2 * group.payload_bytes
    run, copy = _pack(group.moves), group.copy(moved)
    return _case(buffers, f"pack {what}", run, moved, copy, note=group.note)


def _unpacked_boxes(buffers: _Buffers, what: str) -> Case:
    group = buffers.group(what)
    moved = 2 * group.payload_bytes
    run, copy = _unpack(group.moves), group.copy(moved)
    return _case(buffers, f"unpack {what}", run, moved, copy, note=group.note, prepare=_pack(group.moves))


def _quantized_boxes(buffers: _Buffers) -> Case:
    group = buffers.group(BIG)
    moved = len(group.moves) * bench_mxfp8.moved_bytes(group.moves[0].table.total_elems, _ITEMSIZE)
    run, copy = _pack_quantize(buffers, group.moves), group.copy(moved)
    return _case(buffers, f"pack_quantize {BIG}", run, moved, copy, note=group.note)


def _packed_slice(buffers: _Buffers) -> Case:
    moved = 2 * buffers.slice.table.total_elems * _ITEMSIZE
    return _case(buffers, f"pack {SLICE}", _pack([buffers.slice]), moved, buffers.slice_yardstick.copy(moved))


def _unpacked_slice(buffers: _Buffers) -> Case:
    moved = 2 * buffers.slice.table.total_elems * _ITEMSIZE
    run, prepare = _unpack([buffers.slice]), _pack([buffers.slice])
    return _case(buffers, f"unpack {SLICE}", run, moved, buffers.slice_yardstick.copy(moved), prepare=prepare)


def _fused(buffers: _Buffers) -> Case:
    return _quantized_slice(buffers, FUSED, _fused_work(buffers))


def _unfused(buffers: _Buffers) -> Case:
    move, q = buffers.slice, buffers.slice_tensor

    def run() -> None:
        pack(move.array, move.table, move.packed)
        quantize_mxfp8(move.packed, out=q)

    note = "two calls with buffers of their own; bytes of the job alone"
    return _quantized_slice(buffers, UNFUSED, run, note=note)


def _dequantized_slice(buffers: _Buffers) -> Case:
    matrix, rows, q = buffers.matrix, buffers.rows, buffers.slice_tensor
    # Columns that no other row reads: what is quantised stays weights, and not dequantised ones.
    aside = BoxTable(matrix.shape, (((0, rows), (2 * ROW_ELEMS, 3 * ROW_ELEMS)),))
    name, prepare = f"unpack_dequantize {SLICE}", _fused_work(buffers)
    return _quantized_slice(buffers, name, lambda: unpack_dequantize(q, aside, matrix), prepare=prepare)


def _quantized_slice(buffers: _Buffers, name: str, run: Work, **more: Any) -> Case:
    moved = bench_mxfp8.moved_bytes(buffers.slice.table.total_elems, _ITEMSIZE)
    return _case(buffers, name, run, moved, buffers.slice_yardstick.copy(moved), **more)


def _fused_work(buffers: _Buffers) -> Work:
    move, q = buffers.slice, buffers.slice_tensor
    return lambda: pack_quantize(move.array, move.table, out=q)


def _pack(moves: Sequence[_Move]) -> Work:
    def run() -> None:
        for move in moves:
            pack(move.array, move.table, move.packed)

    return run


def _unpack(moves: Sequence[_Move]) -> Work:
    def run() -> None:
        for move in moves:
            unpack(move.packed, move.table, move.array)

    return run


def _pack_quantize(buffers: _Buffers, moves: Sequence[_Move]) -> Work:
    tensors = [buffers.tensor(move.table.total_elems) for move in moves]

    def run() -> None:
        for move, tensor in zip(moves, tensors, strict=True):
            pack_quantize(move.array, move.table, out=tensor)

    return run
