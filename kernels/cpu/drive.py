"""The loop over a run table that all CPU kernels share, and how kernels are compiled once for a machine.

A kernel is this loop with the rows of one kind inlined: `run_rows` has an overload in each kernel module, picked when
the loop is compiled by a text such as "quantize bfloat16 e4m3".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from lowshard import dtypes
from lowshard.compiled import INT, Signature, digest_of, load_compiled
from lowshard.compiled.deferred import njit, overload, types
from lowshard.kernels.cpu.vector import fence, prefetch_far, prefetch_near
from lowshard.kernels.runs import DST_OFFSET, FIRST_DIM, RUN, SRC_OFFSET

# Long runs, and runs with small gaps, are best left to the machine's own prefetching. Others are asked for twice: far
# ahead into the second cache, which has many misses under way at a time, then near ahead into the first, so that
# the work itself never waits. Both in small steps between the work, since a burst of them holds it up. Quantising
# rows of 1 KB at every 4 KB takes 245 ns a row without, 150 with one kind in bursts, 60 like this.
FAR_BYTES = 32 << 10
NEAR_BYTES = 4 << 10
_LONG_RUN_BYTES = 16 << 10
SMALL_GAP_BYTES = 512

SCRATCH_BYTES = 32 << 10
"""Scratch memory of a kernel. Given by the caller: LLVM takes ten times as long over as much on the stack."""

COLUMNS = "int64[2]"
_DRIVE = Signature((COLUMNS, *(INT,) * 6, "bool"), "void")


_ROWS: dict[str, Callable[..., Callable[..., None]]] = {}


def rows_of(job: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what makes the rows of a job, from the further words of a kind.

    It returns a function that Numba compiles, with the parameters of `run_rows`.
    """

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
    near: int, far: int, scratch: int, first: int, second: int, streaming: bool,
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
        near: bytes from what is read to what to prefetch into the first cache.
        far: the same for the second cache; both are 0 where nothing is to be prefetched.
        scratch: address of SCRATCH_BYTES that nobody else uses, on a cache line.
        first: parameter of the job.
        second: parameter of the job.
        streaming: write past the caches.
    """
    raise NotImplementedError("run_rows is compiled, never called")


@overload(run_rows, prefer_literal=True)
def _run_rows(
    kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
    near: Any, far: Any, scratch: Any, first: Any, second: Any, streaming: Any,
) -> Any:  # fmt: skip
    if not isinstance(kind, types.StringLiteral):
        return None
    job, *words = kind.literal_value.split(" ")
    return named(*words)(_ROWS[job](*words))


@cache
def compiled(kind: str) -> Callable[..., None]:
    """Return the kernel of a kind: `kernel(columns, src, dst, scales, scratch, first, second, streaming)`.

    `columns` are a run table's; the four after it are addresses, of scales 0 where there are none. Compiled on the
    first call for this machine and kept in Numba's cache on disk.
    """
    job = kind.split(" ")[0]
    itemsize = src_itemsize(kind)

    def drive(
        columns: Any, src: int, dst: int, scales: int, scratch: int, first: int, second: int,
        streaming: bool,
    ) -> None:  # fmt: skip
        last_bytes, near_boxes, far_boxes = 0, 1, 1
        boxes, dims = columns.shape[1], (columns.shape[0] - FIRST_DIM) // 3
        for box in range(boxes):
            src_offset, dst_offset, run = (
                columns[SRC_OFFSET, box],
                columns[DST_OFFSET, box],
                columns[RUN, box],
            )
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
            size_bytes = run * (first if job == "copy" else itemsize)
            near, far = 0, 0
            if size_bytes < _LONG_RUN_BYTES:
                box_bytes = size_bytes * n1 * n2 * n3 * n4
                if box_bytes > FAR_BYTES:
                    if abs(s1) >= size_bytes + SMALL_GAP_BYTES:
                        near, far = s1 * max(1, NEAR_BYTES // size_bytes), s1 * (FAR_BYTES // size_bytes)
                elif box + 1 < boxes:
                    gap = columns[SRC_OFFSET, box + 1] - src_offset - box_bytes
                    if gap < 0 or gap >= SMALL_GAP_BYTES:
                        if box_bytes != last_bytes:  # a division takes as long as copying a line
                            last_bytes = box_bytes
                            near_boxes = max(1, NEAR_BYTES // box_bytes)
                            far_boxes = max(1, FAR_BYTES // box_bytes)
                        near = columns[SRC_OFFSET, min(box + near_boxes, boxes - 1)] - src_offset
                        far = columns[SRC_OFFSET, min(box + far_boxes, boxes - 1)] - src_offset
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
                            near,
                            far,
                            scratch,
                            first,
                            second,
                            streaming,
                        )
        if streaming:
            fence()

    return load_compiled(f"{kind.replace(' ', '_')}_{source_digest()}", lambda: drive, _DRIVE)


@njit(nogil=True)
def prefetch_both(address: int, size_bytes: int, near: int, far: int) -> None:
    """Ask for the lines near and far ahead of every 64th byte of a stretch; `prefetch_end` gets the one left."""
    for at in range(address, address + size_bytes, 64):
        prefetch_far(at + far)
        prefetch_near(at + near)


@njit(nogil=True)
def prefetch_end(end: int, near: int, far: int) -> None:
    """Ask for the lines of the byte before an address: a run that begins amid a line has one line more."""
    prefetch_far(end - 1 + far)
    prefetch_near(end - 1 + near)


def src_itemsize(kind: str) -> int:
    """Return the bytes of an element on the side read; 1 for copies, whose first parameter says it."""
    job, *words = kind.split(" ")
    return dtypes.get(words[0]).itemsize_bytes if job in ("quantize", "cast") else 1


@cache
def source_digest() -> str:
    """Return a digest of every source file that compiled code is made from.

    It is part of the name under which Numba keeps the code: Numba looks at one file's time stamp alone, and the
    vector code of a kernel lies in others.
    """
    folder = Path(__file__).parent
    return digest_of([*folder.glob("*.py"), folder.parent / "reference.py", folder.parent / "runs.py"])
