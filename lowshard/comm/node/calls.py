"""The compiled calls of the node transport, loaded once a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from lowshard.comm.node import fold, meeting, moves
from lowshard.comm.node.combine import recipe_of, source_digest
from lowshard.compiled import INT, Signature, load_compiled

FUNCTIONS = (
    meeting.barrier, moves.move_by_slots, moves.move, moves.spread, moves.collect, moves.exchange,
    fold.fold_by_slots, fold.fold, fold.fold_rows,
)  # fmt: skip
"""What Python calls, of int64 alone; each returns how the call ended."""


@cache
def load_calls() -> SimpleNamespace:
    """Return the calls by name, compiled on first use and kept on disk."""
    recipe_of("float32", "sum")  # what programs most often reduce; the first call that needs another loads it

    def compiled(function: Any) -> Callable[..., int]:
        args = Signature((INT,) * function.py_func.__code__.co_argcount)
        return load_compiled(f"{function.__name__}_{source_digest()}", lambda: function, args)

    return SimpleNamespace(**{function.__name__: compiled(function) for function in FUNCTIONS})
