"""The compiled calls of the node transport, loaded once a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowshard.comm.node import call_table, fold, message_rings, node_moves
from lowshard.comm.node.combine import recipe_of, source_digest
from lowshard.compiled import INT, Signature, load_compiled


@dataclass(frozen=True)
class Calls:
    """Each is described where it is defined: `call_table`, `message_rings`, `node_moves`, `fold`."""

    perform: Callable[..., int]
    may_lie_so: Callable[..., int]
    quick: Callable[..., int]
    post: Callable[..., int]
    is_taken: Callable[..., int]
    send: Callable[..., int]
    withdraw: Callable[..., int]
    receive: Callable[..., int]
    receive_if_come: Callable[..., int]
    run_group: Callable[..., int]
    barrier: Callable[..., int]
    gather_slots: Callable[..., int]
    place: Callable[..., int]
    exchange: Callable[..., int]
    fold_rows: Callable[..., int]


@cache
def load_calls() -> Calls:
    """Return the calls, compiled on first use and kept on disk."""

    def compiled(function: Any, args: int) -> Callable[..., int]:
        name = f"{function.__name__}_{source_digest()}"
        return load_compiled(name, lambda: function, Signature((INT,) * args))

    recipe_of(
        "float32", "sum"
    )  # what programs most often reduce; the others are loaded by the first call that needs one
    return Calls(
        perform=compiled(call_table.perform, 4),
        may_lie_so=compiled(call_table.may_lie_so, 4),
        quick=compiled(call_table.quick, 5),
        post=compiled(message_rings.post, 5),
        is_taken=compiled(message_rings.is_taken, 3),
        send=compiled(message_rings.send, 4),
        withdraw=compiled(message_rings.withdraw, 3),
        receive=compiled(message_rings.receive, 4),
        receive_if_come=compiled(message_rings.receive_if_come, 4),
        run_group=compiled(message_rings.run_group, 3),
        barrier=compiled(node_moves.barrier, 2),
        gather_slots=compiled(node_moves.gather_slots, 9),
        place=compiled(node_moves.place, 3),
        exchange=compiled(node_moves.exchange, 8),
        fold_rows=compiled(fold.fold_rows, 10),
    )
