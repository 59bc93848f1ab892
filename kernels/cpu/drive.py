"""The loop over a run table that all CPU kernels share, and how kernels are compiled once for a machine.

A kernel is this loop with the row function of one kind inlined: each kernel module registers an overload of `run_rows`,
picked at compile time by a text such as "quantize bfloat16 e4m3".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lowshard import block_format, dtypes
from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.deferred import njit, overload, types
from lowshard.compiled.emitted import fence
from lowshard.kernels.cpu.memory_steps import prefetch
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET

# Long runs that are not quantised, and runs with small gaps, are left to the machine's own prefetching. The lines of
# others are asked for three times, since some requests are not served, into the second cache: what is asked for as
# read once takes up to three times as long. What other numbers, distances and caches take: docs/developer/figures.md.
Ahead = tuple[int, int, int]
AHEAD_BYTES: Ahead = (12 << 10, 8 << 10, 4 << 10)
OWN_ROWS_BYTES = 32 << 10
"""In larger boxes the box's own rows are prefetched, in smaller ones the next boxes."""
_LONG_RUN_BYTES = 16 << 10
SMALL_GAP_BYTES = 512

SCRATCH_BYTES = 32 << 10
"""Scratch memory of a kernel. Given by the caller: LLVM takes ten times as long over as much on the stack."""

OuterDims = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
COLUMNS = "int64[2]"
_DRIVE = Signature((COLUMNS, *(INT,) * 6, "bool"), "void")


_ROWS: dict[str, Callable[..., Callable[..., None]]] = {}


def rows_of(job: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the maker of a job's row function, from the further words of a kind."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        _ROWS[job] = make
        return make

    return register


def named(*words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function that is made anew for each kind a name of that kind's own.

    Numba tells compiled functions apart by name and a number that each process counts anew. Kernels that were compiled
    in several processes, and are loaded from disk into one, would run the function that was loaded first.
    """

    def rename(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = "_".join((function.__qualname__, *words))
        return function

    return rename


def run_rows(
    kind: str, src: int, dst: int, scales: int, run: int, rows: int, src_step: int, dst_step: int,
    ahead: Ahead, scratch: int, first: int, second: int, streaming: bool,
) -> NoReturn:  # fmt: skip
    """Do one kind of work on `rows` runs of a box; only ever compiled, from what `rows_of` has for the job.

    Args:
        kind: job and further words, a literal.
        src: address of the first run on the side read.
        dst: address of the first run on the side written.
        scales: address of the scale bytes of the first run, where there are any.
        run: elements of a run.
        rows: number of runs.
        src_step: bytes from run to run on the side read.
        dst_step: bytes from run to run on the side written.
        ahead: bytes from what is read to what to prefetch, furthest first; zeros where nothing is.
        scratch: address of SCRATCH_BYTES that nobody else uses, on a cache line.
        first: parameter of the job.
        second: parameter of the job.
        streaming: write past the caches.
    """
    raise NotImplementedError("run_rows is compiled, never called")


@overload(run_rows, prefer_literal=True)
def _run_rows(
    kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
    ahead: Any, scratch: Any, first: Any, second: Any, streaming: Any,
) -> Any:  # fmt: skip
    if not isinstance(kind, types.StringLiteral):
        return None
    job, *words = kind.literal_value.split(" ")
    return named(*words)(_ROWS[job](*words))


@cache
def compiled(kind: str) -> Callable[..., None]:
    """Return the kernel of a kind: `kernel(columns, src, dst, scales, scratch, first, second, streaming)`."""
    job = kind.split(" ")[0]
    itemsize, linear = src_itemsize(kind), AHEAD_BYTES
    asks_on = job in ("quantize", "fetch")

    def drive(
        columns: Any, src: int, dst: int, scales: int, scratch: int, first: int, second: int,
        streaming: bool,
    ) -> None:  # fmt: skip
        last_bytes = 0
        far, mid, near = 1, 1, 1
        boxes = columns.shape[1]
        for box in range(boxes):
            src_offset, dst_offset, run = (
                columns[SRC_OFFSET, box],
                columns[DST_OFFSET, box],
                columns[RUN, box],
            )
            n1, n2, n3, n4, s1, s2, s3, s4, d1, d2, d3, d4 = outer_dims(columns, box)
            size_bytes = run * (first if job == "copy" else itemsize)
            ahead = (0, 0, 0)
            if size_bytes < _LONG_RUN_BYTES:
                box_bytes = size_bytes * n1 * n2 * n3 * n4
                if box_bytes > OWN_ROWS_BYTES:
                    if abs(s1) >= size_bytes + SMALL_GAP_BYTES:
                        ahead = rows_ahead(s1, size_bytes)
                elif box + 1 < boxes:
                    gap = columns[SRC_OFFSET, box + 1] - src_offset - box_bytes
                    if gap < 0 or gap >= SMALL_GAP_BYTES:
                        if box_bytes != last_bytes:  # a division takes as long as copying a line
                            last_bytes = box_bytes
                            far, mid, near = rows_ahead(1, box_bytes)
                        ahead = boxes_ahead(columns, SRC_OFFSET, box, far, mid, near)
            elif (
                asks_on
            ):  # quantising, or writing into the caches, keeps the machine from reading far enough ahead
                ahead = linear
            for i4 in range(n4):
                for i3 in range(n3):
                    for i2 in range(n2):
                        at = src_offset + i4 * s4 + i3 * s3 + i2 * s2
                        to = dst_offset + i4 * d4 + i3 * d3 + i2 * d2
                        beside = scales
                        if job == "quantize":
                            beside += to >> 5
                        elif job == "dequantize":
                            beside += at >> 5
                        run_rows(
                            kind,
                            src + at,
                            dst + to,
                            beside,
                            run,
                            n1,
                            s1,
                            d1,
                            ahead,
                            scratch,
                            first,
                            second,
                            streaming,
                        )
        if streaming:
            fence()

    return load_compiled(f"{kind.replace(' ', '_')}_{source_digest()}", lambda: drive, _DRIVE)


@njit(nogil=True)
def outer_dims(columns: Any, box: int) -> OuterDims:
    """Return the outer dims of a box of a run table, innermost first: counts, source strides, target strides."""
    dims = (columns.shape[0] - FIRST_DIM) // 3
    n1, n2, n3, n4 = 1, 1, 1, 1
    s1, s2, s3, s4, d1, d2, d3, d4 = 0, 0, 0, 0, 0, 0, 0, 0
    if dims > 0:
        n1, s1, d1 = columns[3, box], columns[4, box], columns[5, box]
    if dims > 1:
        n2, s2, d2 = columns[6, box], columns[7, box], columns[8, box]
    if dims > 2:
        n3, s3, d3 = columns[9, box], columns[10, box], columns[11, box]
    if dims > 3:
        n4, s4, d4 = columns[12, box], columns[13, box], columns[14, box]
    return n1, n2, n3, n4, s1, s2, s3, s4, d1, d2, d3, d4


@njit(nogil=True)
def rows_ahead(step: int, size_bytes: int) -> Ahead:
    """Return AHEAD_BYTES as steps from row to row, each at least one; with a step of 1 the number of rows."""
    far, mid, near = AHEAD_BYTES
    return (
        step * max(1, far // size_bytes),
        step * max(1, mid // size_bytes),
        step * max(1, near // size_bytes),
    )


@njit(nogil=True)
def boxes_ahead(columns: Any, side: int, box: int, far: int, mid: int, near: int) -> Ahead:
    """Return the byte distances to the boxes this many further on, the last box at most."""
    last, offset = columns.shape[1] - 1, columns[side, box]
    return (
        columns[side, min(box + far, last)] - offset,
        columns[side, min(box + mid, last)] - offset,
        columns[side, min(box + near, last)] - offset,
    )


@njit(nogil=True)
def prefetch_line(address: int, ahead: Ahead) -> None:
    """Prefetch the lines at three distances from an address, as `run_rows` says."""
    prefetch(address + ahead[0])
    prefetch(address + ahead[1])
    prefetch(address + ahead[2])


@njit(nogil=True)
def prefetch_run(address: int, size_bytes: int, ahead: Ahead) -> None:
    """Prefetch ahead of every 64th byte of a run, and of its last: it may begin within a line."""
    for at in range(address, address + size_bytes, 64):
        prefetch_line(at, ahead)
    prefetch_line(address + size_bytes - 1, ahead)


def src_itemsize(kind: str) -> int:
    """Return the bytes of an element on the side read; 1 for copies, whose first parameter says it."""
    job, *words = kind.split(" ")
    return dtypes.get(words[0]).itemsize_bytes if job in ("quantize", "cast") else 1


@cache
def source_digest() -> str:
    """Return a digest of every source file that compiled code is made from."""
    folder = Path(__file__).parent
    outside = (
        *(folder.parent / f"{name}.py" for name in ("reference", "runs", "unit_weights")),
        Path(block_format.__file__),
    )
    return digest_of([*folder.glob("*.py"), *outside])
