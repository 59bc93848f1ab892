"""The compiled CPU kernels at every alignment and way to write, beside plain NumPy; no byte outside is touched.

Sources and targets end where unreadable pages begin, in some tests: a load or store too far ends the process there,
and faulthandler names the test. Prefetches may go anywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import contextmanager
from functools import cache
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from support import engines, mode

from lowshard.kernels import (
    BoxTable,
    MXFP8Tensor,
    cast,
    dequantize_mxfp8,
    pack,
    quantize_mxfp8,
    sum_into,
    unpack,
)
from lowshard.kernels import engine as engine_module
from lowshard.kernels.plain import PlainEngine
from lowshard.selftest.kernel_cases import through

pytest.importorskip("numba", reason="numba is not there to be imported")

from lowshard.kernels.cpu import cpu_engine as cpu_engine
from lowshard.kernels.cpu.gather import SHORT_RUN_BYTES, STAGED, THROUGH_CACHES, WHOLE_LINES
from lowshard.kernels.runs import lower

FLOATS = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
ELEMS = ("e4m3", "e5m2")
LINE, PAGE, PROT_NONE = 64, mmap.PAGESIZE, 0
NEVER = 1 << 60
BYTES = np.random.default_rng(0).integers(0, 256, 1 << 23, dtype=np.uint8)

engine = engines.fixture(["numba"])


@pytest.fixture(params=[True, False], ids=["past the caches", "through the caches"])
def streaming(request, monkeypatch):
    """Whether outputs of every size are written past the caches, or none."""
    monkeypatch.setattr(engine_module.host_engine(), "stream_from_bytes", 0 if request.param else NEVER)
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """The kernels that copies ran through: a way of gathering, "scatter_kernel" or "compiled"."""
    seen = []

    def spied(name, make, way=None):
        def spying(*words):
            kernel = make(*words)

            def run(*args):
                seen.append(args[way] if way else name)
                kernel(*args)

            return run

        monkeypatch.setattr(cpu_engine, name, spying)

    spied("gather_kernel", cpu_engine.gather_kernel, way=5)
    spied("scatter_kernel", cpu_engine.scatter_kernel)
    spied("compiled", cpu_engine.compiled)
    return seen


def aligned(size_bytes, past=0):
    """Return arbitrary bytes, writable, the first of them some bytes past a cache line."""
    room = np.empty(size_bytes + 2 * LINE, np.uint8)
    start = -room.ctypes.data % LINE + past
    room[start : start + size_bytes] = BYTES[:size_bytes]
    return room[start : start + size_bytes]


@contextmanager
def guarded(size_bytes, past=0, guard=128):
    """Give arbitrary bytes, writable, of which none around them is written to."""
    arena = aligned(size_bytes + 2 * guard, past)
    around = arena[:guard].tobytes() + arena[-guard:].tobytes()
    yield arena[guard:-guard]
    assert arena[:guard].tobytes() + arena[-guard:].tobytes() == around


class Fenced:
    """Memory of whole pages between two that nobody may read or write."""

    def __init__(self, size_bytes):
        pages = -(-size_bytes // PAGE)
        memory = np.frombuffer(mmap.mmap(-1, (pages + 2) * PAGE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, pages + 1):
            at = ctypes.c_void_p(memory.ctypes.data + page * PAGE)
            assert libc.mprotect(at, ctypes.c_size_t(PAGE), PROT_NONE) == 0
        self.bytes = memory[PAGE:-PAGE]

    def last(self, values):
        """Return a copy of an array that ends with the last byte before the fence."""
        part = self.bytes[len(self.bytes) - values.nbytes :].view(values.dtype).reshape(values.shape)
        part[...] = values
        return part

    def first(self, values):
        """Return a copy of an array that begins with the first byte after the fence."""
        part = self.bytes[: values.nbytes].view(values.dtype).reshape(values.shape)
        part[...] = values
        return part


@cache
def fenced(which):
    """Return one of some fenced stretches of half a megabyte; a test may overwrite all of it."""
    return Fenced(1 << 19)


def packed(src, boxes):
    """Return boxes of an array one after the other, by NumPy."""
    parts = [src[tuple(slice(*span) for span in box)].reshape(-1) for box in boxes]
    return np.concatenate(parts)


def single_runs(run, count, width):
    """One run a box in [count, width], and the order of the rows is mixed up."""
    starts = [(i * 37) % (width - run + 1) for i in range(count)]
    rows = np.random.default_rng(run).permutation(count)
    return [((int(r), int(r) + 1), (s, s + run)) for r, s in zip(rows, starts, strict=True)]


def row_runs(run, count, width):
    """Boxes of one to seven rows in [count, width], of all its rows."""
    boxes, row = [], 0
    while row < count:
        stop, start = min(count, row + 1 + len(boxes) % 7), (len(boxes) * 29) % (width - run + 1)
        boxes.append(((row, stop), (start, start + run)))
        row = stop
    return boxes


def way_of(run_bytes, target_bytes, streaming):
    """The way that runs of equal size are to be gathered."""
    if not 64 <= run_bytes <= SHORT_RUN_BYTES:
        return "compiled"
    if not streaming:
        return THROUGH_CACHES
    return STAGED if (target_bytes | run_bytes) % LINE else WHOLE_LINES


SHORT = range(60, 201)
LONGER = (
    255, 256, 257, 320, 448, 511, 512, 513, 1000, 2047, 2048, 2049, 3000, 4032, 4095, 4096, 4097, 6000, 8128,
    8191, 8192, 8193,
)  # fmt: skip
FORMS = pytest.mark.parametrize("form", [single_runs, row_runs], ids=["one run a box", "rows"])
FEW_TARGETS = 16
"""Of the 64 places within a line of memory that a default run tries."""


# ------------------------------------------------------------------------------------ gather and scatter
@FORMS
@pytest.mark.parametrize("runs", [SHORT, LONGER], ids=["60 to 200 bytes", "up to 8 KB"])
def test_pack_is_right_for_every_run_length_at_every_alignment(form, runs, streaming, calls):
    ways = set()
    for run in runs:
        # The stage of 12 KB is emptied several times; the last row of the source ends with the array.
        count, width = 42000 // run + 1, run + 67
        boxes = form(run, count, width)
        table = BoxTable((count, width), boxes)
        wanted = None
        for past in mode.sample(range(LINE), FEW_TARGETS, f"targets of {run}"):
            src = aligned(count * width, (past * 11 + run) % LINE).reshape(count, width)
            wanted = packed(src, boxes) if wanted is None else wanted
            calls.clear()
            with guarded(table.total_elems, past) as out:
                assert pack(src, table, out) is out
                assert np.array_equal(out, wanted), (run, past)
            assert calls == [way_of(run, past, streaming)], (run, past)
            ways.add(calls[0])
    assert ways == ({"compiled", STAGED, WHOLE_LINES} if streaming else {"compiled", THROUGH_CACHES})


@FORMS
@pytest.mark.parametrize("runs", [SHORT, LONGER], ids=["60 to 200 bytes", "up to 8 KB"])
def test_unpack_is_right_for_every_run_length_at_every_alignment(form, runs, streaming, calls):
    for run in runs:
        count, width = 42000 // run + 1, run + 67
        boxes = form(run, count, width)
        table = BoxTable((count, width), boxes)
        wanted = None
        for past in mode.sample(range(LINE), FEW_TARGETS, f"targets of {run}"):
            src = aligned(table.total_elems, (past * 11 + run) % LINE)
            arena = aligned(count * width + 256, past)
            if wanted is None:
                wanted, at = arena.copy(), 0
                for box in boxes:
                    part = wanted[128:-128].reshape(count, width)[tuple(slice(*span) for span in box)]
                    part[...] = src[at : at + part.size].reshape(part.shape)
                    at += part.size
            calls.clear()
            unpack(src, table, arena[128:-128].reshape(count, width))
            assert np.array_equal(arena, wanted), (run, past)
            short = 64 <= run <= SHORT_RUN_BYTES and streaming
            assert calls == ["scatter_kernel" if short else "compiled"]


@pytest.mark.parametrize("index", range(24))
def test_tables_of_runs_of_many_lengths_are_packed_and_unpacked(index, streaming):
    rng = mode.rng(f"mixed table {index}")
    dtype = np.dtype([np.uint8, np.uint16, np.uint32, np.complex128][index % 4])
    lowest, step = -(-64 // dtype.itemsize), LINE // min(LINE, dtype.itemsize) if index % 3 == 0 else 1
    highest = [260, 1100, 5000, SHORT_RUN_BYTES][index // 4 % 4] // dtype.itemsize
    boxes, column = [], 0
    for _ in range(int(rng.integers(1, 60))):
        run = int(rng.integers(lowest, highest + 1)) // step * step or lowest
        rows = int(rng.integers(1, 6)) if index % 2 else 1
        first, column = int(rng.integers(0, 3)), column + int(rng.integers(0, 40))
        boxes.append(((first, first + rows), (column, column + run)))
        column += run
    order = rng.permutation(len(boxes))
    boxes = [boxes[i] for i in order]
    width = column
    table = BoxTable((8, width), boxes)
    src = rng.integers(0, 256, 8 * width * dtype.itemsize, dtype=np.uint8).view(dtype).reshape(8, width)
    wanted = packed(src, boxes)
    for past in (0, 1, 16, 32, 63):
        with guarded(wanted.nbytes, past) as room:
            out = pack(src, table, room.view(dtype))
            assert out.tobytes() == wanted.tobytes()
        back, expected = (aligned(src.nbytes, past).view(dtype).reshape(8, width) for _ in range(2))
        with through(PlainEngine()):
            unpack(wanted, table, expected)
        unpack(out, table, back)
        assert back.tobytes() == expected.tobytes()


def test_two_threads_at_once_get_the_bytes_of_one(monkeypatch):
    monkeypatch.setattr(engine_module.host_engine(), "stream_from_bytes", 0)
    table = BoxTable((300, 400), [((i, i + 1), (3, 104)) for i in range(300)])
    jobs, wrong, done = [], [], []
    for seed in range(2):
        x = floats(300, 13, "float32", seed, rare=0.1)
        src = np.roll(BYTES, seed + 1)[: 300 * 400].reshape(300, 400)
        q = quantize_mxfp8(x)
        jobs.append((src, pack(src, table), x, q, dequantize_mxfp8(q, "float32")))

    def work(src, moved, x, q, values):
        out = aligned(values.nbytes, 16).view(np.float32).reshape(values.shape)
        for _ in range(150):
            again = quantize_mxfp8(x)
            same = np.array_equal(pack(src, table), moved) and again.data.tobytes() == q.data.tobytes()
            same = same and again.scale.tobytes() == q.scale.tobytes()
            if not (same and dequantize_mxfp8(q, "float32", out=out).tobytes() == values.tobytes()):
                wrong.append(threading.get_ident())
        done.append(None)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 2
    assert not wrong


# --------------------------------------------------------------------------------------------- quantise
def rare_blocks(dtype):
    """Blocks that the vector code leaves to scalar code, or zeros, by what they are."""
    kind = FLOATS[dtype]
    rng = np.random.default_rng(5)
    some = rng.standard_normal(32).astype(kind)
    nan, inf, late = some.copy(), some.copy(), some.copy()
    nan[7], inf[31], late[0] = np.nan, -np.inf, np.inf
    bits = np.uint32 if dtype == "float32" else np.uint16
    smallest = rng.integers(1, 100, 32).astype(bits).view(kind)  # subnormals of the source
    tiny = (rng.standard_normal(32) * 2.0**-110).astype(np.float32).astype(kind)  # a low scale, or zeros
    low = (rng.choice([-1.5, 1.0, 1.25], 32) * 2.0 ** -rng.integers(0, 20, 32)).astype(np.float32)
    low = (low * np.float32(2.0**-110)).astype(kind)  # codes of the source's subnormals can be seen
    minus = np.full(32, -0.0, kind)
    return {
        "nan": nan,
        "inf": inf,
        "first": late,
        "smallest": smallest,
        "tiny": tiny,
        "low": low,
        "zero": minus,
    }


def floats(rows, blocks, dtype, seed=0, rare=0.0):
    """Values [rows, 32 * blocks] with scales far apart, and rare blocks among them."""
    rng = np.random.default_rng([seed, rows, blocks])
    x = rng.standard_normal((rows, blocks, 32)).astype(np.float32)
    x *= np.exp2(rng.integers(-8, 9, (rows, blocks, 1)) + rng.integers(-9, 2, x.shape)).astype(np.float32)
    made = x.astype(FLOATS[dtype])
    kinds = list(rare_blocks(dtype).values())
    for row, block in zip(*np.nonzero(rng.random((rows, blocks)) < rare), strict=True):
        made[row, block] = kinds[int(rng.integers(len(kinds)))]
    return made.reshape(rows, 32 * blocks)


def within(values, pad, past=0):
    """Return values [rows, cols] in rows that are `pad` elements longer."""
    rows, cols = values.shape
    wide = aligned(rows * (cols + pad) * values.dtype.itemsize, past).view(values.dtype)
    view = wide.reshape(rows, cols + pad)[:, :cols]
    view[...] = values
    return view


def check_quantised(x, codes, scale, past, pad_blocks, elem, scale_mode="rceil", least=0):
    """Quantise into windows of guarded arenas and compare with what is wanted, bit for bit."""
    rows, blocks = scale.shape
    wide = blocks + pad_blocks
    arenas = aligned(rows * wide * 32 + 256, past), aligned(rows * wide + 128, past % 3)
    wanted = [arena.copy() for arena in arenas]

    def window(arena, guard, unit):
        return arena[guard:-guard].reshape(rows, wide * unit)[:, : blocks * unit]

    for arena, guard, unit, values in zip(wanted, (128, 64), (32, 1), (codes, scale), strict=True):
        window(arena, guard, unit)[...] = values
    out = MXFP8Tensor(window(arenas[0], 128, 32), window(arenas[1], 64, 1), elem)
    quantize_mxfp8(x, elem, scale_mode, out=out, min_scale_byte=least)
    case = (x.dtype, x.shape, x.strides, past, pad_blocks, elem)
    assert np.array_equal(arenas[0], wanted[0]), case
    assert np.array_equal(arenas[1], wanted[1]), case


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("prefetched", [True, False])
def test_rows_of_1_to_40_blocks_are_quantised_right_wherever_codes_go(dtype, prefetched, streaming):
    itemsize = FLOATS[dtype].itemsize
    some = mode.sample(range(1, 41), 14, f"blocks {dtype} {prefetched} {streaming}")
    for blocks in sorted({16, 32, *some}):  # whole pieces of code without a loop, always
        row_bytes = 32 * blocks * itemsize
        # Rows with a gap of 512 bytes and more, in boxes of over 32 KB, are prefetched.
        rows = (33 << 10) // row_bytes + 2 if prefetched else 1 + blocks % 7
        gap = 512 // itemsize if prefetched else (blocks % 3) * 16
        x = within(floats(rows, blocks, dtype, rare=0.05), gap, past=itemsize * (blocks % 9))
        elem = ELEMS[blocks % 2]
        with through(PlainEngine()):
            q = quantize_mxfp8(np.ascontiguousarray(x), elem)
        for past, pad_blocks in product((0, 16, 32, 48), (0, 1, 2)):
            check_quantised(x, q.data, q.scale, past, pad_blocks, elem)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "blocks", "gap"),
    # groups; then whole pieces, pieces and a rest in one run, and in each of many
    [(1, 80, 0), (27, 3, 16), (12, 7, 640), (190, 9, 640), (40, 32, 640), (1, 540, 0), (6, 140, 640)],
)
def test_a_rare_block_is_right_at_every_place_of_a_group_or_piece(dtype, rows, blocks, gap, streaming):
    base = floats(rows, blocks, dtype)
    least = 3
    for index, elem in enumerate(ELEMS):
        with through(PlainEngine()):
            q = quantize_mxfp8(base, elem, min_scale_byte=least)
        for kind, values in rare_blocks(dtype).items():
            with through(PlainEngine()):
                one = quantize_mxfp8(values, elem, min_scale_byte=least)
            places = range(rows * blocks)
            places = [*places[:70], *places[-70:]] if len(places) > 140 else places
            for place in mode.sample(places, 35, f"{kind} {elem} {dtype} {rows}"):
                x = within(base, gap)
                codes, scale = q.data.copy(), q.scale.copy()
                row, at = divmod(place, blocks)
                x[row, 32 * at : 32 * at + 32] = values
                codes[row, 32 * at : 32 * at + 32], scale[row, at] = one.data, one.scale[0]
                check_quantised(x, codes, scale, 32 * (place % 2), index, elem, least=least)


# ------------------------------------------------------------------------------------------- dequantise
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("elem", ELEMS)
def test_rows_of_1_to_70_blocks_are_dequantised_right_wherever_values_go(dtype, elem, streaming):
    kind = FLOATS[dtype]
    for blocks in [*range(1, 40), 63, 64, 65, 70]:
        rows = 40 if blocks % 4 == 0 else 3
        codes = BYTES[blocks : blocks + rows * blocks * 32].reshape(rows, 32 * blocks)
        rng = np.random.default_rng(blocks)
        scale = rng.integers(90, 150, (rows, blocks), dtype=np.uint8)
        rare = rng.random(scale.shape) < 0.1
        scale[rare] = rng.choice(
            [0, 1, 2, 3, 8, 15, 16, 17, 18, 238, 239, 245, 246, 247, 254, 255], rare.sum()
        )
        with through(PlainEngine()):
            values = dequantize_mxfp8(MXFP8Tensor(codes, scale, elem), dtype)
        pad = (blocks % 3) * 320  # blocks in the data: 0, 10 or 20
        q = MXFP8Tensor(within(codes, 2 * pad), within(scale, 2 * pad // 32), elem)
        for past, gap in product((0, 16, 32, 48), (0, 8, 32)):
            cols = codes.shape[1] + gap
            arena = aligned(rows * cols * kind.itemsize + 256, past)
            wanted = arena.copy()
            bits = np.dtype(f"u{kind.itemsize}")
            wanted[128:-128].view(bits).reshape(rows, cols)[:, : codes.shape[1]] = values.view(bits)
            dequantize_mxfp8(
                q, dtype, out=arena[128:-128].view(kind).reshape(rows, cols)[:, : codes.shape[1]]
            )
            assert np.array_equal(arena, wanted), (blocks, past, gap)


# Short rows; whole pieces of code without a loop, with a rest, and rings of pieces that are filled several times.
ANYWHERE = [(1, 1), (1, 2), (1, 15), (3, 17), (1, 512), (1, 540), (2, 272), (70, 16)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "blocks"), ANYWHERE)
def test_source_elements_and_scales_may_each_begin_at_any_byte_of_a_line(rows, blocks, dtype, streaming):
    kind, elem = FLOATS[dtype], ELEMS[blocks % 2]
    x = floats(rows, blocks, dtype, rare=0.1)
    wide = 32 * blocks + 640  # rows of the source lie apart, those of the codes follow each other
    with through(PlainEngine()):
        q = quantize_mxfp8(x, elem)
        values = dequantize_mxfp8(q, dtype)
    for past in range(LINE):
        at, beside = (past * 5 + 16) % LINE, (past * 11) % LINE  # all of them, in other orders
        source = aligned(rows * wide * kind.itemsize, at).view(kind).reshape(rows, wide)[:, : 32 * blocks]
        source[...] = x
        with (
            guarded(x.size, past) as codes,
            guarded(q.scale.size, beside) as scales,
            guarded(values.nbytes, at) as room,
        ):
            made = MXFP8Tensor(codes.reshape(x.shape), scales.reshape(q.scale.shape), elem)
            quantize_mxfp8(source, elem, out=made)
            assert np.array_equal(made.data, q.data), past
            assert np.array_equal(made.scale, q.scale), past
            dequantize_mxfp8(made, dtype, out=room.view(kind).reshape(x.shape))
            assert room.tobytes() == values.tobytes(), past


# ----------------------------------------------------------------------------------------- fenced memory
def ends(which, values):
    """Yield an array at either end of fenced memory."""
    memory = fenced(which)
    yield memory.last(values)
    yield memory.first(values)


@pytest.mark.parametrize(
    "run", [1, 2, 4, 8, 63, 64, 65, 100, 127, 128, 192, 200, 511, 2048, 2113, 8192, 8193, 20000]
)
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
def test_pack_and_unpack_stay_within_their_arrays(run, backwards, streaming):
    count, width = min(300, 60000 // run + 2), run + 9
    src = BYTES[: count * width].reshape(count, width)
    flip = slice(None, None, -1 if backwards else 1)
    for form in (single_runs, row_runs):
        # The run at the very end and the one at the very front of the array are among them.
        boxes = [b for b in form(run, count, width) if b[0][0] and b[0][1] < count]
        boxes += [((0, 1), (0, run)), ((count - 1, count), (width - run, width))]
        table = BoxTable(src.shape, boxes)
        wanted = packed(src[flip], boxes)
        for memory, room in product(ends(0, src), ends(1, np.zeros(len(wanted), np.uint8))):
            assert np.array_equal(pack(memory[flip], table, room), wanted)
        if table.overlap is None:
            expected = np.zeros_like(src)
            with through(PlainEngine()):
                unpack(wanted, table, expected)
            for memory, room in product(ends(0, wanted), ends(1, np.zeros_like(src))):
                room[...] = 0
                unpack(memory, table, room)
                assert np.array_equal(room, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "blocks", "gap"),
    [(1, 1, 0), (1, 33, 0), (7, 3, 0), (5, 40, 32), (30, 19, 640), (36, 16, 640), (2, 530, 0)],
)
def test_quantise_and_dequantise_stay_within_their_arrays(dtype, rows, blocks, gap, streaming):
    kind = FLOATS[dtype]
    wide = np.zeros((rows, 32 * blocks + gap), kind)
    wide[:, gap:] = floats(rows, blocks, dtype, rare=0.1)
    for elem, front in product(ELEMS, (False, True)):
        use = slice(gap, None) if not front else slice(None, 32 * blocks)
        wide[:, use] = floats(rows, blocks, dtype, rare=0.1)
        with through(PlainEngine()):
            q = quantize_mxfp8(np.ascontiguousarray(wide[:, use]), elem)
            values = dequantize_mxfp8(q, dtype)
        bits = np.dtype(f"u{kind.itemsize}")
        for memory, data, scale in product(ends(0, wide), ends(1, q.data), ends(2, q.scale)):
            data[...], scale[...] = 0, 0
            quantize_mxfp8(memory[:, use], elem, out=MXFP8Tensor(data, scale, elem))
            assert np.array_equal(data, q.data)
            assert np.array_equal(scale, q.scale)
        for room, data, scale in product(ends(0, wide), ends(1, q.data), ends(2, q.scale)):
            dequantize_mxfp8(MXFP8Tensor(data, scale, elem), dtype, out=room[:, use])
            assert np.array_equal(room[:, use].view(bits), values.view(bits))


@pytest.mark.parametrize("elems", [1, 31, 32, 33, 95, 1000, 2047, 2048, 2049, 5000])
def test_casts_and_sums_stay_within_their_arrays(elems, streaming):
    rng = np.random.default_rng(elems)
    for source, target in product(FLOATS, FLOATS):
        x = rng.standard_normal(elems).astype(FLOATS[source])
        if source != target:
            wanted = x.astype(np.float32).astype(FLOATS[target])
            for memory, room in product(ends(0, x), ends(1, wanted)):
                room[...] = 0
                cast(memory, target, out=room)
                assert room.tobytes() == wanted.tobytes()
        before = rng.standard_normal(elems).astype(FLOATS[target])
        total = (before.astype(np.float32) + x.astype(np.float32)).astype(FLOATS[target])
        for memory, room in product(ends(0, x), ends(1, before)):
            room[...] = before
            sum_into(room, memory)
            assert room.tobytes() == total.tobytes()


@pytest.mark.parametrize(
    ("rows", "run", "src_step", "dst_step"),
    [
        (1, 70_001, 70_001, 70_001),
        (40, 1024, 2048, 1024),
        (33, 1000, 1537, 1000),
        (7, 20_447, 20_500, 21_000),
        (3, 4096, -5000, 4096),
    ],
)
@pytest.mark.parametrize("past", [0, 1, 16])
def test_rows_fetched_into_the_caches_are_right(rows, run, src_step, dst_step, past):
    low = min(0, (rows - 1) * src_step)
    source = Fenced((rows - 1) * abs(src_step) + run + past).last(
        np.asarray(np.resize(BYTES, (rows - 1) * abs(src_step) + run))
    )
    target = aligned((rows - 1) * dst_step + run, past)
    right = target.copy()
    for row in range(rows):
        at = row * src_step - low
        right[row * dst_step : row * dst_step + run] = source[at : at + run]
    extents, zero = np.array([[rows, run]]), np.zeros(1, np.int64)
    table = lower(extents, zero - low, zero, np.array([[src_step, 1]]), np.array([[dst_step, 1]]), 1, 1)
    cpu_engine.NumbaEngine().rows_copier(source, target, table, False, fetching=True)()
    assert np.array_equal(target, right)
