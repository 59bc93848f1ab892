"""The compiled calls of the node transport, loaded once a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from numba import types

from lowshard.comm.node import fold, move
from lowshard.comm.node.combine import source_digest
from lowshard.compiled import compile_cached

_INT = types.int64


@dataclass(frozen=True)
class Calls:
    """Each is described in `lowshard.comm.node.move` or `lowshard.comm.node.fold`."""

    barrier: Callable[..., int]
    gather_slots: Callable[..., int]
    gather_buffers: Callable[..., int]
    collect: Callable[..., int]
    place: Callable[..., int]
    spread: Callable[..., int]
    exchange: Callable[..., int]
    fold_slots: Callable[..., int]
    fold_buffers: Callable[..., int]


@cache
def load_calls() -> Calls:
    """Return the calls, compiled on first use and kept on disk."""

    def compiled(function: Callable[..., int], args: int) -> Callable[..., int]:
        python = function.py_func  # type: ignore[attr-defined]
        python.__qualname__ = f"{python.__name__}_{source_digest()}"
        return compile_cached(python, _INT(*(_INT,) * args))

    return Calls(
        barrier=compiled(move.barrier, 2),
        gather_slots=compiled(move.gather_slots, 9),
        gather_buffers=compiled(move.gather_buffers, 9),
        collect=compiled(move.collect, 7),
        place=compiled(move.place, 3),
        spread=compiled(move.spread, 5),
        exchange=compiled(move.exchange, 8),
        fold_slots=compiled(fold.fold_slots, 10),
        fold_buffers=compiled(fold.fold_buffers, 12),
    )
