"""`lowshard bench mxfp8` and `bench pack`: whole arrays quantised, boxes packed, beside copies of the same traffic."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.bench import bench_argument as options
from lowshard.bench import bench_table as table
from lowshard.bench.bench_device import Copy, Device, Yardstick, open_device, require_memory
from lowshard.bench.bench_limits import AGAIN, KERNEL_BYTES, fused_limit, kernel_limit
from lowshard.bench.bench_report import Beside, Limit, Report, Row, Spread, better
from lowshard.bench.bench_world import Progress
from lowshard.bench.machine import facts
from lowshard.bench.turn_timing import Runner, Work, take_turns
from lowshard.errors import LowshardError
from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    dequantize_mxfp8,
    pack,
    pack_quantize,
    quantize_mxfp8,
    unpack,
    unpack_dequantize,
)
from lowshard.kernels.buffer import Array
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode

MXFP8 = """\
Quantises and dequantises whole arrays of weights, N(0, 0.02), between bf16, fp16, fp32 and MXFP8. Every row is
compared with a copy that reads and writes as many bytes, in the same rounds: bf16 to e4m3 moves 3.03125 bytes an
element (2 read, 1 written, 1/32 of scale) and is compared with a copy of half as many bytes.
"""
PACK = """\
Packs boxes of a bf16 array into a 1-D buffer and back: tables of 4 KB and of 512 B boxes at random places, and 1 KB
of each row of a matrix; plain, and quantised to MXFP8 in the same pass. Every row is compared with a copy that reads
and writes as many bytes, in the same rounds.
"""
EPILOG = """\
Columns: bytes the work reads and writes; median time; GB/s (10^9) of these bytes; x memcpy, the median over the
rounds of (time of the work / time of its copy, run right after it), with the quartiles of these ratios; the
speed of that copy; the first call, which compiles or loads and counts nowhere else; the promised figure, if any.
Host kernels run on one thread. GPU times are taken by events on the stream, without the launch.
Exit codes: 0 done, 1 a figure misses its limit (with --check), 2 wrong usage, 130 interrupted.
"""
_MXFP8_SIZE = (
    "elements (64Mi), or bytes of the bf16 array (128MiB, 1GB), in whole blocks of 32. Default 64Mi; 1Mi with the "
    "plain engine; 64MB,1GB on a GPU. Takes about 31 bytes of memory an element"
)
_PACK_SIZE = (
    "bytes that each row moves in a round, at least; small tables are rotated to reach it. Default 100MB; 10MB with "
    "the plain engine; 64MB,1GB on a GPU. Takes about 15 times as much memory"
)
DEFAULT_SIZES = {
    "mxfp8": {"numba": "64Mi", "plain": "1Mi", "cuda": "64MB,1GB"},
    "pack": {"numba": "100MB", "plain": "10MB", "cuda": "64MB,1GB"},
}


@dataclass(frozen=True)
class Case:
    """Work to time, and the copy that it is compared with."""

    name: str
    run: Work
    moved_bytes: int
    copy: Copy
    note: str = ""
    prepare: Work | None = None


@dataclass(frozen=True)
class Workload:
    """Cases that are measured together."""

    title: str
    sizes: dict[str, int]
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()


def add_kernel_parsers(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `mxfp8` and `pack`."""
    for name, summary, description, names, what in (
        ("mxfp8", "quantise and dequantise whole arrays", MXFP8, MXFP8_NAMES,
         _MXFP8_SIZE),
        ("pack", "pack, unpack and quantise boxes and slices", PACK, PACK_NAMES,
         _PACK_SIZE),
    ):  # fmt: skip
        parser = options.add_parser(benches, name, run_kernels, summary, description, EPILOG)
        parser.add_argument("--size", type=options.sizes, metavar="N[,N...]", help=what)
        if name == "pack":
            parser.add_argument(
                "--boxes",
                type=options.count,
                default=10_000,
                metavar="N",
                help="boxes a table (default 10000)",
            )
        parser.add_argument(
            "--rounds", type=options.count, default=15, metavar="N", help="rounds that count (default 15)"
        )
        parser.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto",
            help="where to run; auto, the default, takes a GPU if CuPy sees one",
        )  # fmt: skip
        parser.add_argument(
            "--only", metavar="WORDS[,WORDS...]",
            help="only rows whose names begin with these words, such as quantize or 'pack boxes of 4 KB'",
        )  # fmt: skip
        options.add_result_arguments(
            parser,
            "measured up to twice more with new buffers; limits hold for the host and rounds of 100 MB",
        )
        parser.set_defaults(bench=name, names=names)


def run_kernels(args: argparse.Namespace) -> int:
    """Run `lowshard bench mxfp8` or `bench pack` and return the exit code."""
    from lowshard.kernels.engine import host_engine

    options.require_results(args)
    names = options.selected(args.names, args.only)
    device = open_device(args.device)
    if args.check_limits and all(kernel_limit(name, device.kind) is None for name in names):
        raise LowshardError(
            "--check needs a row with a limit, and none of these has one; limits are for the host (--device cpu)"
        )
    say = Progress(args.bench)
    say("loading the kernels")
    machine = facts(device.kind)
    engine = device.kind if device.kind == "cuda" else host_engine().name
    rows: list[Row] = []
    notes: dict[str, None] = {}
    found_sizes: list[dict[str, int]] = []
    for size in args.size or options.sizes(DEFAULT_SIZES[args.bench][engine]):
        build = partial(_build, args, device, size)
        title, section, more, made = _section(device, build(names), args.rounds, say)
        for _ in range(AGAIN if args.check_limits else 0):
            missed = {row.name for row in section if row.is_missed}
            if missed:
                if FUSED in missed and UNFUSED in names:
                    missed.add(UNFUSED)
                again = {row.name: row for row in _section(device, build(missed), args.rounds, say)[1]}
                section = [better(row, again.get(row.name)) for row in section]
                more += (f"measured again with new buffers, the better one counts: {', '.join(again)}",)
        rows += [replace(row, group=title) for row in section]
        notes |= dict.fromkeys(more)
        found_sizes.append(made)
    settings = {"rounds": args.rounds, "sizes": found_sizes}
    report = Report(args.bench, machine, settings, tuple(rows), notes=tuple(notes))
    return options.conclude(report, args, table.report_lines(report, _columns()))


def _columns() -> Sequence[table.Column]:
    copy = table.Column("memcpy", lambda row: f"{row.facts['memcpy_gb_per_s']:,.2f}", "(GB/s)")
    first = table.fact_column("first call", "first_call_s", ".3f", "(s)")
    return (*table.standard("memcpy"), copy, first)


def _build(args: argparse.Namespace, device: Device, size: options.Size, names: Collection[str]) -> Workload:
    if args.bench == "pack":
        return build_pack(device, args.boxes, size.count, names)
    elems = size.count // 2 if size.in_bytes else size.count
    return build_mxfp8(device, max(elems // BLOCK_ELEMS, 1) * BLOCK_ELEMS, names)


def _section(
    device: Device, workload: Workload, rounds: int, say: Callable[[str], object]
) -> tuple[str, list[Row], tuple[str, ...], dict[str, int]]:
    """Measure one size: title, rows, notes and sizes. Its arrays are given back when this returns."""
    cases, first_s = workload.cases, []
    for case in cases:
        say(f"first call: {case.name}")
        if case.prepare is not None:
            case.prepare()
        first_s.append(device.clock.call_s(case.run))
    runners = [Runner(work) for case in cases for work in (case.run, case.copy.run)]
    timings = take_turns(runners, rounds, device.clock, warm=1, say=say)
    rows = []
    notes: dict[str, list[str]] = {}
    for case, first, own, copy in zip(cases, first_s, timings[::2], timings[1::2], strict=True):
        copied = 2 * case.copy.copied_bytes
        more = {"first_call_s": first, "memcpy_gb_per_s": copied / copy.median_s / 1e9}
        row = Row(
            case.name, case.moved_bytes, own, {"memcpy": Beside(copy, copied / case.moved_bytes)}, facts=more
        )
        rows.append(row.limited("memcpy", kernel_limit(case.name, device.kind)))
        if case.note:
            notes.setdefault(case.note, []).append(case.name)
    said = [*(f"{note}: {', '.join(names)}" for note, names in notes.items()), *workload.notes]
    if any(row.limits and row.moved_bytes < KERNEL_BYTES for row in rows):
        said.append(
            "limits are promised for rounds of 100 MB and more; these rows move less, perhaps in cache"
        )
    return workload.title, _with_speed_up(rows, device.kind), tuple(said), workload.sizes


def _with_speed_up(rows: list[Row], kind: str) -> list[Row]:
    """Put the fused kernel beside the two in turn, where both were measured."""
    named = {row.name: row for row in rows}
    if FUSED not in named or UNFUSED not in named:
        return rows
    fused, unfused = named[FUSED], named[UNFUSED]
    beside = Beside(unfused.timing, unfused.moved_bytes / fused.moved_bytes)
    fused = replace(fused, beside={**fused.beside, "in turn": beside})
    bound = fused_limit(kind)
    if bound is not None:
        times = Spread.of([1 / x for x in fused.timing.over(beside.timing, beside.scale)]).median
        limit = Limit("times faster than in turn", times, bound, at_least=True)
        fused = replace(fused, limits=(*fused.limits, limit))
    return [fused if row.name == FUSED else row for row in rows]


def moved_bytes(elems: int, itemsize_bytes: int) -> int:
    """Return what quantising or dequantising moves: the floats, a code each, a scale byte for every 32."""
    return elems * itemsize_bytes + elems + elems // BLOCK_ELEMS


def weights(elems: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return N(0, 0.02) in float32 [elems], what weights of trained models look like; repeated after 16 Mi."""
    fresh = min(elems, FRESH_ELEMS)
    values = np.random.default_rng(seed).standard_normal(fresh, dtype=np.float32)
    values *= np.float32(_WEIGHT_STD)
    return values if fresh == elems else np.resize(values, elems)


def _require(device: Device, need_bytes: int) -> None:
    require_memory(need_bytes, device.free_bytes(), where="GPU" if device.kind == "cuda" else "host")


# ---- mxfp8

QUANTIZE: tuple[tuple[str, Elem, Mode], ...] = (
    ("bf16", "e4m3", "rceil"), ("bf16", "e4m3", "floor"), ("bf16", "e4m3", "even"), ("bf16", "e4m3", "ceil"),
    ("bf16", "e5m2", "rceil"), ("fp16", "e4m3", "rceil"), ("fp16", "e5m2", "rceil"), ("fp32", "e4m3", "rceil"),
    ("fp32", "e5m2", "rceil"),
)  # fmt: skip
"""Rows that quantise: source, element type, mode."""
DEQUANTIZE: tuple[tuple[Elem, str], ...] = (
    ("e4m3", "bf16"),
    ("e4m3", "fp16"),
    ("e4m3", "fp32"),
    ("e5m2", "bf16"),
)
"""Rows that dequantise: element type, target."""
MXFP8_NAMES = (
    *(f"quantize {source} -> {elem} {mode}" for source, elem, mode in QUANTIZE),
    *(f"dequantize {elem} -> {target}" for elem, target in DEQUANTIZE),
)
FRESH_ELEMS = 1 << 24
"""Random values that are drawn; longer arrays repeat them."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_WEIGHT_STD = 0.02
# Sources in three dtypes, two quantised tensors, one target of fp32; and the copies beside each source, and beside
# the target, with as many bytes in their two buffers as the work reads and writes.
_BYTES_PER_ELEM = (2 + 2 + 4) + 2 * (1 + 1 / BLOCK_ELEMS) + 4 + (3 + 3 + 5 + 5 + 4 / BLOCK_ELEMS)


def build_mxfp8(device: Device, elems: int, names: Collection[str]) -> Workload:
    """Return the rows of these names over arrays of `elems` elements, a multiple of 32."""
    _require(device, int(elems * _BYTES_PER_ELEM))
    arrays = _Arrays(device, elems)
    cases: list[Case] = []
    for (source, elem, mode), name in zip(QUANTIZE, MXFP8_NAMES, strict=False):
        if name in names:
            x, q = arrays.source(source), arrays.tensor(elem)
            cases.append(Case(name, _quantize(x, q, mode), *arrays.traffic(source, f"copy {source}")))
    for (elem, target), name in zip(DEQUANTIZE, MXFP8_NAMES[len(QUANTIZE) :], strict=True):
        if name in names:
            q, out = arrays.tensor(elem), arrays.target(target)
            fill = _quantize(arrays.source("bf16"), q, "rceil")
            work = partial(dequantize_mxfp8, q, out.dtype, out)
            cases.append(Case(name, work, *arrays.traffic(target, "copy target"), prepare=fill))
    title = f"{elems:,} elements ({2 * elems / 1e6:,.1f} MB as bf16), N(0, {_WEIGHT_STD})"
    return Workload(title, {"elems": elems}, tuple(cases))


class _Arrays:
    """The arrays of one size, made when first asked for; targets share one buffer."""

    def __init__(self, device: Device, elems: int) -> None:
        self._device, self._elems = device, elems
        self._made: dict[str, Any] = {}

    @cached_property
    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return weights(self._elems)

    def traffic(self, floats: str, key: str) -> tuple[int, Copy]:
        moved = moved_bytes(self._elems, dtypes.get(_DTYPES[floats]).itemsize_bytes)
        if key not in self._made:
            most = moved_bytes(self._elems, 4) if key == "copy target" else moved
            self._made[key] = Yardstick(self._device, -(-most // 2))
        return moved, self._made[key].copy(moved)

    def source(self, short: str) -> Array:
        if short not in self._made:
            dtype = dtypes.get(_DTYPES[short]).numpy
            self._made[short] = self._device.put(self.values.astype(dtype, copy=False))
        return self._made[short]

    def tensor(self, elem: Elem) -> MXFP8Tensor:
        if elem not in self._made:
            byte = np.dtype(np.uint8)
            data = self._device.empty((self._elems,), byte)
            scale = self._device.empty((self._elems // BLOCK_ELEMS,), byte)
            self._made[elem] = MXFP8Tensor(data, scale, elem)
        found: MXFP8Tensor = self._made[elem]
        return found

    def target(self, short: str) -> Array:
        dtype = dtypes.get(_DTYPES[short]).numpy
        if "target" not in self._made:
            self._made["target"] = self._device.empty((self._elems * 4,), np.dtype(np.uint8))
        return self._made["target"][: self._elems * dtype.itemsize].view(dtype)


def _quantize(x: Array, out: MXFP8Tensor, mode: Mode) -> Work:
    return lambda: quantize_mxfp8(x, out.elem, mode, out)


# ---- pack

BIG, SMALL, SAME = "boxes of 4 KB", "boxes of 512 B", "boxes of 512 B (same table)"
SLICE = "slice of 1 KB rows"
FUSED, UNFUSED = f"pack_quantize {SLICE}", f"pack then quantize {SLICE}"
PACK_NAMES = (
    *(f"{verb} {what}" for verb in ("pack", "unpack") for what in (BIG, SMALL, SAME)),
    f"pack {SLICE}", f"unpack {SLICE}", FUSED, UNFUSED, f"unpack_dequantize {SLICE}", f"pack_quantize {BIG}",
)  # fmt: skip
"""Every row, in the order of measurement."""
BOX_BYTES = {BIG: 4096, SMALL: 512, SAME: 512}
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


def build_pack(device: Device, boxes: int, round_bytes: int, names: Collection[str]) -> Workload:
    """Return the rows of these names over tables of so many boxes, each round moving at least `round_bytes`."""
    made = _Boxes(device, boxes, round_bytes)
    _require(device, made.need_bytes)
    makers: dict[str, Callable[[str], Case]] = {
        f"pack_quantize {BIG}": made.quantized_boxes,
        f"pack {SLICE}": made.packed_slice,
        f"unpack {SLICE}": made.unpacked_slice,
        FUSED: made.fused,
        UNFUSED: made.unfused,
        f"unpack_dequantize {SLICE}": made.dequantized_slice,
    }
    for what in (BIG, SMALL, SAME):
        makers[f"pack {what}"] = partial(made.packed_boxes, what)
        makers[f"unpack {what}"] = partial(made.unpacked_boxes, what)
    cases = tuple(makers[name](name) for name in PACK_NAMES if name in names)
    return Workload(made.title, made.sizes, cases, made.notes)


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
        return sum(move.table.total_elems for move in self.moves) * _ITEMSIZE

    def copy(self, moved: int) -> Copy:
        return self.yardstick.copy(moved, len(self.moves) if self.same else 1)

    @property
    def note(self) -> str:
        return f"{len(self.moves)} {'times the same table' if self.same else 'tables'} a round"


class _Boxes:
    """Arrays, tables and packed buffers, made when first asked for, and the cases over them."""

    def __init__(self, device: Device, boxes: int, round_bytes: int) -> None:
        self.device, self.boxes = device, boxes

        def tables(each_bytes: int) -> int:
            return max(1, -(-round_bytes // each_bytes))

        self.tables = {what: tables(2 * boxes * BOX_BYTES[what]) for what in (SMALL, SAME)}
        # Quantising moves three quarters of what packing does, and is to move enough too.
        self.tables[BIG] = tables(moved_bytes(boxes * BOX_BYTES[BIG] // _ITEMSIZE, _ITEMSIZE))
        self.rows = tables(moved_bytes(ROW_ELEMS, _ITEMSIZE))
        self._groups: dict[str, _Group] = {}

    @property
    def title(self) -> str:
        return (
            f"{self.boxes:,} boxes a table, bf16, at random places of an array {SPREAD} times as large; "
            f"slices of {self.rows:,} rows of {ROW_ELEMS} elements out of {SPREAD * ROW_ELEMS}"
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "boxes": self.boxes, "tables_of_4_kb": self.tables[BIG], "tables_of_512_b": self.tables[SMALL],
            "slice_rows": self.rows, "slice_row_elems": ROW_ELEMS,
        }  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        small, again = self.tables[SMALL], self.tables[SAME]
        small_mb, again_mb = (2 * self.boxes * BOX_BYTES[SMALL] * n / 1e6 for n in (small, 1))
        turns = f"{SMALL}: a round takes {small} tables, arrays and packed buffers in turn, {small_mb:,.1f} MB moved"
        warm = f"(same table): the same {again_mb:,.2f} MB moved {again} times a round, in cache if they fit"
        return f"{turns}; its memcpy is one copy", f"{warm}; its memcpy too"

    @property
    def base_elems(self) -> int:
        return SPREAD * max(
            BOX_BYTES[what] // _ITEMSIZE * self.boxes * self.tables[what] for what in (BIG, SMALL)
        )

    @property
    def need_bytes(self) -> int:
        packed = sum(BOX_BYTES[what] * self.boxes * self.tables[what] for what in (BIG, SMALL))
        slice_bytes = self.rows * ROW_ELEMS * _ITEMSIZE
        copies = 2 * (packed + slice_bytes)
        return _ITEMSIZE * self.base_elems + 2 * packed + (SPREAD + 2) * slice_bytes + copies

    @cached_property
    def base(self) -> Array:
        return self._weights(self.base_elems)

    @cached_property
    def matrix(self) -> Array:
        return self._weights(self.rows * SPREAD * ROW_ELEMS).reshape(self.rows, SPREAD * ROW_ELEMS)

    def group(self, what: str) -> _Group:
        if what not in self._groups:
            same = what == SAME
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
        table = BoxTable(self.matrix.shape, (((0, self.rows), (ROW_ELEMS, 2 * ROW_ELEMS)),))
        return _Move(self.matrix, table, self.device.empty((table.total_elems,), self.matrix.dtype))

    @cached_property
    def slice_tensor(self) -> MXFP8Tensor:
        return self._tensor(self.slice.table.total_elems)

    @cached_property
    def slice_yardstick(self) -> Yardstick:
        return Yardstick(self.device, self.slice.table.total_elems * _ITEMSIZE)

    def _tensor(self, elems: int) -> MXFP8Tensor:
        wire = self.device.empty((MXFP8Tensor.buffer_bytes((elems,)),), np.dtype(np.uint8))
        return MXFP8Tensor.over(wire, (elems,))

    def _weights(self, elems: int) -> Array:
        dtype: np.dtype[Any] = dtypes.get("bfloat16").numpy
        # Repeated where there are many: what they are hardly matters here, and fp32 takes twice the memory.
        few = weights(min(elems, FRESH_ELEMS)).astype(dtype)
        return self.device.put(np.resize(few, elems))

    # ---- cases

    def packed_boxes(self, what: str, name: str) -> Case:
        group = self.group(what)
        moved = 2 * group.payload_bytes
        return Case(name, _pack(group.moves), moved, group.copy(moved), group.note)

    def unpacked_boxes(self, what: str, name: str) -> Case:
        group = self.group(what)
        moved = 2 * group.payload_bytes
        return Case(name, _unpack(group.moves), moved, group.copy(moved), group.note, _pack(group.moves))

    def quantized_boxes(self, name: str) -> Case:
        group = self.group(BIG)
        moved = len(group.moves) * moved_bytes(group.moves[0].table.total_elems, _ITEMSIZE)
        tensors = [self._tensor(move.table.total_elems) for move in group.moves]

        def run() -> None:
            for move, tensor in zip(group.moves, tensors, strict=True):
                pack_quantize(move.array, move.table, out=tensor)

        return Case(name, run, moved, group.copy(moved), group.note)

    def packed_slice(self, name: str) -> Case:
        moved = 2 * self.slice.table.total_elems * _ITEMSIZE
        return Case(name, _pack([self.slice]), moved, self.slice_yardstick.copy(moved))

    def unpacked_slice(self, name: str) -> Case:
        return replace(self.packed_slice(name), run=_unpack([self.slice]), prepare=_pack([self.slice]))

    def fused(self, name: str) -> Case:
        move, q = self.slice, self.slice_tensor
        moved = moved_bytes(move.table.total_elems, _ITEMSIZE)
        run = partial(pack_quantize, move.array, move.table, out=q)
        return Case(name, run, moved, self.slice_yardstick.copy(moved))

    def unfused(self, name: str) -> Case:
        move, q = self.slice, self.slice_tensor

        def run() -> None:
            pack(move.array, move.table, move.packed)
            quantize_mxfp8(move.packed, out=q)

        note = "two calls with buffers of their own; bytes of the job alone"
        return replace(self.fused(name), run=run, note=note)

    def dequantized_slice(self, name: str) -> Case:
        matrix, q = self.matrix, self.slice_tensor
        # Columns that no other row reads: what is quantised stays weights, and not dequantised ones.
        aside = BoxTable(matrix.shape, (((0, self.rows), (2 * ROW_ELEMS, 3 * ROW_ELEMS)),))
        fused = self.fused(name)
        return replace(fused, run=partial(unpack_dequantize, q, aside, matrix), prepare=fused.run)


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
