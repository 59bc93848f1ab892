"""The CUDA engine: from checked arrays and run tables to kernel launches.

What runs a kernel is behind `Launcher`: CuPy's current stream in use, a host build of the same sources in the
tests. Everything that decides what is launched is here. Nothing in this module waits for the GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lowshard.kernels import reference
from lowshard.kernels.buffer import Array, address, allocate
from lowshard.kernels.cuda.cuda_table import UnitTable, start_divisor_bytes, unit_table
from lowshard.kernels.reference import BLOCK_ELEMS, Elem, Mode
from lowshard.kernels.runs import DST_OFFSET, RUN, SRC_OFFSET, RunTable, lower, whole_array_runs

THREADS = 256
"""Threads of a CTA; the sources have the same number."""

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_KIND = {"bfloat16": 0, "float16": 1, "float32": 2}
_VECTOR_BYTES = 16
_DIRECT_SOURCES = 8  # of a sum: as arguments, and loaded together; the rest by a table
_FOLD_GROUP = 8  # sources of a fold that are arguments, or are loaded together
_FOLD_LEVELS = 10
_OPS = {"sum": 0, "avg": 0, "prod": 1, "max": 2, "min": 3}
MOST_FOLDED = _FOLD_GROUP << (_FOLD_LEVELS - 2)
"""Sources that `CudaEngine.fold` takes."""
_KEPT_SOURCE_TABLES = 256
_KEPT_STREAMS = 64  # that a run table has a copy for
_TILE_BYTES = 512  # of the 128x4 layout
_SWIZZLE_TILES = 8  # of a CTA's turn
_CHUNK_BYTES, _PLACE_BITS = 4096, 40  # of checksums: as checksum.cu has them
_WAVES = 32  # of CTAs: at 1 GB 4 % faster on an H200 than one wave that loops


class Launcher(Protocol):
    """What the engine needs of a GPU, or of a stand-in."""

    multiprocessors: int

    @property
    def current_stream(self) -> Hashable:
        """The stream that launches and copies go to now."""

    def to_device(self, words: npt.NDArray[np.int64]) -> Array:
        """Return a copy on the device, made in the current stream's order."""

    def keep_captured(self, words: Array) -> None:
        """Keep what `to_device` returned for ever, where a CUDA graph records what reads it."""

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        """Start a kernel on the current stream; all arguments are 64-bit integers."""


@dataclass(frozen=True, eq=False)
class _Placed:
    """A unit table on the device. `words` owns the memory."""

    words: Array
    args: tuple[int, ...]
    units: int


class CudaEngine:
    """Every kernel by CUDA, on what its launcher calls device arrays."""

    name = "cuda"

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._key = object()  # of this engine's copies in run tables, which may live longer than it
        self._sources: OrderedDict[Hashable, Array] = OrderedDict()
        self._lock = threading.Lock()

    def copy(self, src: Array, dst: Array, runs: RunTable, streaming: bool | None = None) -> None:
        """Copy every run of `src` to its place in `dst`, in the largest units that all addresses allow."""
        if not runs.boxes:
            return
        bits = address(src) | address(dst) | _start_bits(runs) | _VECTOR_BYTES
        unit_bytes = bits & -bits
        table = self._placed(runs, unit_bytes, bytes_as_items=True)
        args = (address(src), address(dst), *table.args)
        self._launch(f"copy_{unit_bytes}", table.units, 4 * THREADS, 4, args)

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
        tiled_columns: int = 0,
    ) -> None:
        """Quantise every run, whole blocks, of a bf16, fp16 or fp32 array; by columns of scales into 128x4 tiles."""
        self._quantize(src, data, scale, runs, elem, mode, min_scale_byte, (0, tiled_columns))

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
        """Quantise a matrix; the kernel puts each scale byte to its place in the 128x4 layout."""
        runs = whole_array_runs(src.shape, src.strides, data.strides, src.dtype.itemsize, 1)
        tiled = (src.shape[0], src.shape[1] // BLOCK_ELEMS)
        self._quantize(src, data, scale, runs, elem, mode, min_scale_byte, tiled)

    def _quantize(
        self,
        src: Array,
        data: Array,
        scale: Array,
        runs: RunTable,
        elem: Elem,
        mode: Mode,
        min_scale_byte: int,
        tiled: tuple[int, int],
    ) -> None:
        """Start a kernel of quantize.cu; `tiled`: rows and columns of scales in the 128x4 layout, zeros for rows."""
        if not runs.boxes:
            return
        src_bits = address(src) | runs.src_divisor_bytes
        aligned = 1 * (src_bits % _VECTOR_BYTES == 0) + 2 * (src_bits % runs.src_itemsize == 0)
        aligned += 4 * ((address(data) | runs.dst_divisor_bytes) % 8 == 0)
        sides = [(src, SRC_OFFSET, 1), (data, DST_OFFSET, 1), (scale, DST_OFFSET, BLOCK_ELEMS)]
        # The places of tiles are counted from the start of data: a run that begins later goes by its table.
        is_linear = not tiled[1] or not _first_offsets(runs)[1]
        form, args, units = self._form(runs, aligned & 5 == 5, sides, is_linear)
        name = f"quantize_{_SHORT[src.dtype.name]}_{elem}_{form}"
        round_up = reference.scale_round_up(reference.element_format(elem), mode)
        resident = 3 if runs.src_itemsize == 4 else 4 if form == "any" else 5
        self._launch(name, units, THREADS, resident, (*args, round_up, min_scale_byte, aligned, *tiled))

    def dequantize(self, data: Array, scale: Array, elem: Elem, dst: Array, runs: RunTable) -> None:
        """Dequantise every run, whole blocks."""
        if not runs.boxes:
            return
        dst_bits = address(dst) | runs.dst_divisor_bytes
        aligned = 1 * ((address(data) | runs.src_divisor_bytes) % 8 == 0)
        aligned += 2 * (dst_bits % _VECTOR_BYTES == 0) + 4 * (dst_bits % runs.dst_itemsize == 0)
        sides = [(data, SRC_OFFSET, 1), (scale, SRC_OFFSET, BLOCK_ELEMS), (dst, DST_OFFSET, 1)]
        form, args, units = self._form(runs, aligned & 3 == 3, sides)
        name = f"dequantize_{elem}_{_SHORT[dst.dtype.name]}_{form}"
        resident = 4 if runs.dst_itemsize == 4 else 5
        self._launch(name, units, THREADS, resident, (*args, aligned))

    def cast(self, src: Array, dst: Array, runs: RunTable) -> None:
        """Convert every run from src's dtype to dst's, in units of 16 bytes of the wider where addresses allow it."""
        if not runs.boxes:
            return
        bits = address(src) | address(dst) | _start_bits(runs)
        widest = max(runs.src_itemsize, runs.dst_itemsize)
        unit_elems = _VECTOR_BYTES // widest if bits % _VECTOR_BYTES == 0 else 1
        table = self._placed(runs, unit_elems)
        name = f"cast_{_SHORT[src.dtype.name]}_{_SHORT[dst.dtype.name]}_{unit_elems}"
        each = 2 if unit_elems == 8 else 4
        self._launch(name, table.units, each * THREADS, 4, (address(src), address(dst), *table.args))

    def sum_into(self, out: Array, sources: Sequence[Array], accumulate: bool) -> None:
        """Sum contiguous arrays of one size in fp32, from left to right, and round once."""
        bases = [address(source) for source in sources]
        kinds = [_KIND[source.dtype.name] for source in sources]
        together = address(out)
        for base in bases:
            together |= base
        source_kind = _SHORT[sources[0].dtype.name] if len(set(kinds)) == 1 else "mixed"
        group = 4 if source_kind == "mixed" or 4 in (out.dtype.itemsize, sources[0].dtype.itemsize) else 8
        if together % _VECTOR_BYTES:
            source_kind, group = "mixed", 1
        packed = sum(kind << (4 * i) for i, kind in enumerate(kinds[:_DIRECT_SOURCES]))
        direct = (bases + [0] * _DIRECT_SOURCES)[:_DIRECT_SOURCES]
        more = self._source_table(bases[_DIRECT_SOURCES:], kinds[_DIRECT_SOURCES:])
        args = (
            address(out),
            out.size,
            int(accumulate),
            len(bases),
            packed,
            *direct,
            address(more) if more is not None else 0,
        )
        # At least one CTA: the elements after the last group are its work.
        name = f"sum_{source_kind}_{_SHORT[out.dtype.name]}_{group}"
        self._launch(name, max(1, out.size // group), THREADS, 4, args)

    def fold(
        self, out: Array, sources: Sequence[Array], dtype: str, op: str, tree: bool, divisor: int
    ) -> None:
        """Fold contiguous arrays of one size and dtype into out, in one launch; out may be one of them."""
        bases = [address(source) for source in sources]
        together = address(out)
        for base in bases:
            together |= base
        count = 2 if out.dtype.itemsize == 8 else 4
        if together % (count * out.dtype.itemsize):
            count = 1
        groups = _fold_tree(len(bases)) if tree else _fold_rows(len(bases))
        words, rest = [], iter(bases)
        for mask, combines in groups:
            words += [next(rest) if mask >> place & 1 else 0 for place in range(_FOLD_GROUP)]
            words.append(mask | combines << _FOLD_GROUP)
        table = self._words_on_device(words) if len(groups) > 1 else None
        args = (
            address(out),
            out.size,
            _OPS[op],
            int(tree),
            divisor,
            address(table) if table is not None else 0,
            len(groups),
            groups[0][0],
            *words[:_FOLD_GROUP],
        )
        # At least one CTA: the elements after the last unit are its work.
        self._launch(f"fold_{dtype}_{count}", max(1, out.size // count), THREADS, 2, args)

    def adamw(
        self, param: Array, grad: Array, first: Array, second: Array, scalars: Sequence[float]
    ) -> None:  # fmt: skip
        """Run one step of AdamW in one launch."""
        self._step("adamw", (param, grad, first, second), (), scalars)

    def sgd(self, param: Array, grad: Array, buffer: Array, mode: int, scalars: Sequence[float]) -> None:
        """Run one step of SGD in one launch."""
        self._step("sgd", (param, grad, buffer), (mode,), scalars)

    def _step(
        self, name: str, arrays: Sequence[Array], words: tuple[int, ...], scalars: Sequence[float]
    ) -> None:
        bases = [address(array) for array in arrays]
        unit = 4 if all(base % _VECTOR_BYTES == 0 for base in bases) else 1
        elems = arrays[0].size
        # At least one CTA: the elements after the last unit are its work.
        bits = np.array(scalars, np.float32).view(np.uint32).tolist()  # kernels take integers
        args = (*bases, elems, *words, *bits)
        self._launch(f"{name}_{unit}", max(1, elems // unit), THREADS, 5, args)

    def differ(self, new: Array, old: Array, masks: Array, runs: RunTable, unit_bytes: int) -> None:
        """Write which elements of two arrays differ."""
        table = self._placed(runs, unit_bytes, bytes_as_items=True)
        args = (address(new), address(old), address(masks), runs.src_itemsize, *table.args)
        self._launch(f"differ_{unit_bytes}", table.units, THREADS, 8, args)

    def gather(self, array: Array, packed: Array, places: Array, runs: RunTable) -> None:
        """Copy items of an array's runs, by number, into a packed buffer."""
        self._move_listed("gather", array, packed, places, runs)

    def scatter(self, array: Array, packed: Array, places: Array, runs: RunTable) -> None:
        """Copy items of a packed buffer into an array's runs: the reverse of `gather`."""
        self._move_listed("scatter", array, packed, places, runs)

    def _move_listed(self, name: str, array: Array, packed: Array, places: Array, runs: RunTable) -> None:
        if not len(places):
            return
        table = self._placed(runs, 1)
        word = self.word_bytes(runs, array, packed)
        parts = runs.src_itemsize // word
        args = (address(array), address(packed), address(places), len(places), parts, *table.args)
        self._launch(f"{name}_{word}", len(places) * parts, THREADS, 8, args)

    def checksum(
        self, data: Array, sums: Array, expected: Array | None, runs: RunTable, version: int
    ) -> None:
        """Write a version and the checksum of each of `numbered_runs`, uint64, less what is expected of them."""
        words = (address(sums), 0 if expected is None else address(expected), sums.size, version)
        self._launch("checksum_start", sums.size, THREADS, 8, words)
        table = self._placed(runs, _CHUNK_BYTES)
        args = (address(data), address(sums), *table.args)
        self._launch("checksum_add", table.units, THREADS // 32, 4, args)

    def word_bytes(self, runs: RunTable, *arrays: Array, of_runs: bool = False) -> int:
        """Return the largest word, of up to 16 bytes, that all runs in arrays begin at multiples of."""
        bits = _start_bits(runs) | (_run_bits(runs) if of_runs else runs.src_itemsize) | _VECTOR_BYTES
        for array in arrays:
            bits |= address(array)
        return bits & -bits

    def swizzle(self, scale: Array, out: Array) -> None:
        """Write uint8 [rows, cols] of any strides in the 128x4 layout, padding included."""
        self._swizzle("swizzle_scales", scale, out)

    def unswizzle(self, swizzled: Array, out: Array) -> None:
        """Write a flat array in the 128x4 layout to uint8 [rows, cols] of any strides."""
        self._swizzle("unswizzle_scales", out, self._contiguous(swizzled))

    def _contiguous(self, array: Array) -> Array:
        """Return the array, or a copy that is contiguous, made by our own kernel."""
        if array.flags.c_contiguous:
            return array
        flat = allocate(array.shape, array.dtype, array)
        itemsize = array.dtype.itemsize
        self.copy(array, flat, whole_array_runs(array.shape, array.strides, flat.strides, itemsize, itemsize))
        return flat

    def _swizzle(self, name: str, matrix: Array, tiles: Array) -> None:
        rows, columns = matrix.shape
        row_stride, column_stride = matrix.strides
        bits = address(matrix) | (row_stride if rows > 1 else 0)
        words = column_stride == 1 and bits % 4 == 0
        args = (address(matrix), address(tiles), rows, columns, row_stride, column_stride, int(words))
        self._launch(name, tiles.size // _TILE_BYTES, _SWIZZLE_TILES, 8, args)

    def _form(
        self, runs: RunTable, vectors: bool, sides: list[tuple[Array, int, int]], is_linear: bool = True
    ) -> tuple[str, tuple[int, ...], int]:
        """Return the form of a block kernel, its first arguments, and the blocks."""
        if is_linear and vectors and runs.boxes == 1 and not runs.outer_dims:
            firsts = _first_offsets(runs)
            starts = [address(array) + firsts[row] // per for array, row, per in sides]
            units = runs.total_elems // BLOCK_ELEMS
            return "linear", (*starts, 0, 1, 0, 0, units), units
        table = self._placed(runs, BLOCK_ELEMS)
        bases = (address(array) for array, _, _ in sides)
        return "table" if vectors else "any", (*bases, *table.args), table.units

    def _placed(self, runs: RunTable, unit_items: int, bytes_as_items: bool = False) -> _Placed:
        """Return the table on the device, made on first use for each stream.

        A stream has its own copy because memory goes back to the pool of the stream it was made on: a kernel
        that waits on another stream could find the next owner's words there.
        """
        stream = self._launcher.current_stream
        key = (self._key, unit_items, bytes_as_items)
        of_streams: OrderedDict[Hashable, _Placed] = runs.derived.setdefault(key, OrderedDict())
        found = of_streams.get(stream)
        if found is None:
            host_key = ("units", unit_items, bytes_as_items)
            host: UnitTable | None = runs.derived.get(host_key)
            if host is None:
                host = runs.derived[host_key] = unit_table(runs, unit_items, bytes_as_items)
            words = self._launcher.to_device(host.words)
            args = (address(words), host.boxes, host.dims, host.map_shift, host.units)
            found = of_streams[stream] = _Placed(words, args, host.units)
            if len(of_streams) > _KEPT_STREAMS:
                of_streams.popitem(last=False)
        self._launcher.keep_captured(found.words)
        return found

    def _source_table(self, bases: list[int], kinds: list[int]) -> Array | None:
        """Return the address and kind of each source, interleaved, on the device."""
        if not bases:
            return None
        return self._words_on_device([word for pair in zip(bases, kinds, strict=True) for word in pair])

    def _words_on_device(self, words: Sequence[int]) -> Array:
        """Return a table of sources on the device; cached."""
        key = (self._launcher.current_stream, *words)
        with self._lock:
            found = self._sources.get(key)
            if found is None:
                found = self._sources[key] = self._launcher.to_device(np.array(words, np.int64))
                if len(self._sources) > _KEPT_SOURCE_TABLES:
                    self._sources.popitem(last=False)
            else:
                self._sources.move_to_end(key)
        self._launcher.keep_captured(found)
        return found

    def _launch(self, kernel: str, units: int, each: int, resident: int, args: tuple[int, ...]) -> None:
        """Start the CTAs that the units need, `each` a CTA, up to `_WAVES` times what the GPU holds."""
        ctas = min(-(-units // each), self._launcher.multiprocessors * resident * _WAVES)
        self._launcher.launch(kernel, ctas, THREADS, args)


@cache
def device_engine(device_id: int) -> CudaEngine:
    """Return the engine of a GPU."""
    from lowshard.kernels.cuda.cuda_module import CuPyLauncher

    return CudaEngine(CuPyLauncher(device_id))


def numbered_runs(offsets: Sequence[int], sizes: Sequence[int]) -> RunTable:
    """Return pieces of bytes, each on a 16-byte boundary, for `CudaEngine.checksum`."""
    extents = np.array(sizes, np.int64).reshape(-1, 1)
    words = np.arange(1, len(extents) + 1) << _PLACE_BITS  # the first is the version's
    ones = np.ones_like(extents)
    return lower(extents, np.array(offsets, np.int64), words, ones, ones, 1, 1)


def _first_offsets(runs: RunTable) -> list[int]:
    """Return the byte offsets of the first run in source and target."""
    key = "first offsets"
    found: list[int] | None = runs.derived.get(key)
    if found is None:
        found = runs.derived[key] = [int(runs.columns[row, 0]) for row in (SRC_OFFSET, DST_OFFSET)]
    return found


def _start_bits(runs: RunTable) -> int:
    """Return a number with just the powers of two as factors that every run's first byte has, both sides."""
    key = "start bits"
    found: int | None = runs.derived.get(key)
    if found is None:
        found = runs.derived[key] = start_divisor_bytes(runs, 0) | start_divisor_bytes(runs, 1)
    return found


def _run_bits(runs: RunTable) -> int:
    """Return a number with just the powers of two as factors that the bytes of every run have."""
    key = "run bits"
    found: int | None = runs.derived.get(key)
    if found is None:
        found = runs.derived[key] = int(np.bitwise_or.reduce(runs.columns[RUN])) * runs.src_itemsize
    return found


_Groups = tuple[tuple[int, int], ...]
"""Of a fold: of each the places that hold a source, as bits, and how many earlier results it is folded into."""


@cache
def _fold_tree(sources: int) -> _Groups:
    """Return the groups of a balanced binary tree: the largest subtrees of up to `_FOLD_GROUP` operands, in order."""
    if sources <= _FOLD_GROUP:
        return ((_tree_places(sources, _FOLD_GROUP), 0),)
    half = (sources + 1) // 2
    *inner, (mask, combines) = _fold_tree(sources - half)
    return (*_fold_tree(half), *inner, (mask, combines + 1))


def _tree_places(sources: int, places: int) -> int:
    if sources <= 1:
        return sources
    half = (sources + 1) // 2
    return _tree_places(half, places // 2) | _tree_places(sources - half, places // 2) << (places // 2)


@cache
def _fold_rows(sources: int) -> _Groups:
    """Return the groups of a fold from the left."""
    whole, rest = divmod(sources, _FOLD_GROUP)
    full = (1 << _FOLD_GROUP) - 1
    return ((full, 0),) * whole + (((1 << rest) - 1, 0),) * bool(rest)
