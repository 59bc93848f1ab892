"""The compiled calls of the node transport, loaded once a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowshard.comm.node import fold, meeting, moves
from lowshard.comm.node.combine import recipe_of, source_digest
from lowshard.compiled import INT, Signature, load_compiled


@dataclass(frozen=True)
class Calls:
    """Each is described where it is defined: `meeting`, `moves`, `fold`."""

    barrier: Callable[..., int]
    move_by_slots: Callable[..., int]
    move: Callable[..., int]
    spread: Callable[..., int]
    exchange: Callable[..., int]
    fold_by_slots: Callable[..., int]
    fold_parts_by_slots: Callable[..., int]
    fold: Callable[..., int]
    fold_rows: Callable[..., int]


@cache
def load_calls() -> Calls:
    """Return the calls, compiled on first use and kept on disk."""

    def compiled(function: Any, args: int) -> Callable[..., int]:
        name = f"{function.__name__}_{source_digest()}"
        return load_compiled(name, lambda: function, Signature((INT,) * args))

    recipe_of("float32", "sum")  # what programs most often reduce; the first call that needs another loads it
    return Calls(
        barrier=compiled(meeting.barrier, 2),
        move_by_slots=compiled(moves.move_by_slots, 10),
        move=compiled(moves.move, 9),
        spread=compiled(moves.spread, 5),
        exchange=compiled(moves.exchange, 9),
        fold_by_slots=compiled(fold.fold_by_slots, 11),
        fold_parts_by_slots=compiled(fold.fold_parts_by_slots, 9),
        fold=compiled(fold.fold, 12),
        fold_rows=compiled(fold.fold_rows, 9),
    )
