"""Scale bytes between rows and the 128x4 layout (see `lowshard.kernels.swizzle`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from lowshard.compiled import INT, Signature, load_compiled
from lowshard.compiled.deferred import types
from lowshard.kernels.cpu.drive import source_digest
from lowshard.kernels.cpu.memory_steps import load_u8, load_u32, store_value


@cache
def swizzle_kernel(reverse: bool) -> Callable[..., None]:
    """Return `kernel(rowwise, swizzled, rows, cols, row_stride, col_stride)` over addresses; strides in bytes."""

    def swizzle(rowwise: int, swizzled: int, rows: int, cols: int, row_stride: int, col_stride: int) -> None:
        tile = swizzled
        for first_row in range(0, rows, 128):
            for first_col in range(0, cols, 4):
                for r in range(128):
                    row = first_row + r
                    at = rowwise + row * row_stride + first_col * col_stride
                    to = tile + (r & 31) * 16 + (r >> 5) * 4
                    if row >= rows:
                        if not reverse:
                            store_value(to, types.uint32(0))
                    elif col_stride == 1 and first_col + 4 <= cols:
                        if reverse:
                            store_value(at, load_u32(to))
                        else:
                            store_value(to, load_u32(at))
                    else:
                        for c in range(4):
                            if first_col + c < cols:
                                if reverse:
                                    store_value(at + c * col_stride, load_u8(to + c))
                                else:
                                    store_value(to + c, load_u8(at + c * col_stride))
                            elif not reverse:
                                store_value(to + c, types.uint8(0))
                tile += 512

    name = "unswizzle" if reverse else "swizzle"
    return load_compiled(f"{name}_{source_digest()}", lambda: swizzle, Signature((INT,) * 6, "void"))
