"""Runs of bytes copied: single elements, rows by memcpy, and long rows past the caches."""

from __future__ import annotations

from typing import Any

from numba import njit

from lowshard.kernels.cpu.drive import prefetch_rows, rows_of
from lowshard.kernels.cpu.vector import (
    copy_bytes,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    store_value,
    stream_lines,
)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def stream_copy(dst: int, src: int, size_bytes: int) -> None:
    """Copy bytes past the caches; the part lines at both ends go through them."""
    end = dst + size_bytes
    head = min(-dst & 63, size_bytes)
    copy_bytes(dst, src, head)
    src, dst = src + head, dst + head
    while dst + 256 <= end:
        stream_lines(dst, src, 4)
        src, dst = src + 256, dst + 256
    while dst + 64 <= end:
        stream_lines(dst, src, 1)
        src, dst = src + 64, dst + 64
    copy_bytes(dst, src, end - dst)


@rows_of("copy")
def _copy_rows() -> Any:
    def copy_rows(
        kind: Any, src: Any, dst: Any, scales: Any, run: Any, rows: Any, src_step: Any, dst_step: Any,
        ahead: Any, first: Any, second: Any, streaming: Any,
    ) -> None:  # fmt: skip
        size = run * first
        if size == 1:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u8(src + row * src_step))
        elif size == 2:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u16(src + row * src_step))
        elif size == 4:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u32(src + row * src_step))
        elif size == 8:
            for row in range(rows):
                store_value(dst + row * dst_step, load_u64(src + row * src_step))
        elif streaming and size >= second:
            for row in range(rows):
                at, to = src + row * src_step, dst + row * dst_step
                if ahead:
                    prefetch_rows(at, size, src_step, 0)
                stream_copy(to, at, size)
        else:
            for row in range(rows):
                at = src + row * src_step
                if ahead:
                    prefetch_rows(at, size, src_step, 0)
                copy_bytes(dst + row * dst_step, at, size)

    return copy_rows
