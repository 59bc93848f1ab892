"""MPI's own calls for the ranks of a node, below the sizes of a tuned table (`lowshard bench tune`).

Where no table was written the ranks of a node take shared memory from the first byte, and nothing here is used.
"""

from __future__ import annotations

from typing import Any

from lowshard.comm.call import Call
from lowshard.comm.collectives import COLLECTIVES, planned
from lowshard.comm.mpi import MPITransport
from lowshard.comm.node.node_transport import NodeTransport
from lowshard.comm.transport import Planner, Run
from lowshard.comm.tuned import Crossover

_PARTS = ("all_gather", "gather", "scatter", "reduce_scatter")
"""Planned for the elements of a rank's part; their sizes are those of the whole."""
_REDUCTIONS = ("all_reduce", "reduce_scatter")


def cross(node: NodeTransport, flat: MPITransport, crossover: Crossover) -> None:
    """Have a transport take MPI's calls below the sizes of a table; before the first call. Its groups have no table.

    Args:
        node: the transport.
        flat: the same ranks over MPI; it is closed with the other.
        crossover: the sizes, equal on all ranks.
    """
    flat.check = "off"  # compared in shared memory, at the cost of a meeting
    ways = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", *_REDUCTIONS)
    # Of this transport alone, in place of what its class declares.
    node.plans = {**node.plans, **{name: _by_size(name, flat, crossover) for name in ways}}  # type: ignore[misc]
    node.beside = flat


def _by_size(name: str, flat: MPITransport, crossover: Crossover) -> Planner:
    own = NodeTransport.plans[name]

    def plan(node: NodeTransport, call: Call, dtype: Any, elems: int, *detail: Any) -> Run | None:
        size_bytes = elems * dtype.itemsize * (node.size if name in _PARTS else 1)
        ours = name in _REDUCTIONS and detail[1] != "fast"  # the order is not MPI's
        if ours or not crossover.takes_mpi(name, size_bytes):
            return own(node, call, dtype, elems, *detail)
        run = planned(flat, COLLECTIVES[name], call, dtype, elems, *detail)

        def checked(send: Any, recv: Any) -> None:
            node.verify(call)
            run(send, recv)

        return checked

    return plan
