"""The node's communicator with MPI's own calls below the sizes of a tuned table (`lowshard bench tune`).

Where no table was written the ranks of a node take shared memory from the first byte, and nothing here is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowshard.comm.call import Call
from lowshard.comm.default_collectives import Run
from lowshard.comm.mpi import MPICommunicator
from lowshard.comm.node.communicator import NodeCommunicator
from lowshard.comm.tuned import Crossover


class CrossingCommunicator(NodeCommunicator):
    """All ranks of one machine, by shared memory or by MPI as a table says; groups split from it have no table."""

    def cross(self, flat: MPICommunicator, crossover: Crossover) -> None:
        """Take MPI's calls below the sizes of a table; before the first call.

        Args:
            flat: the same ranks over MPI; it is closed with this communicator.
            crossover: the sizes, equal on all ranks.
        """
        self._over_mpi, self._crossover = flat, crossover
        flat._check = "off"  # compared here, at the cost of a meeting in shared memory

    def _by_size(self, call: Call, size_bytes: int, mpi: Callable[[], Run], node: Callable[[], Run]) -> Run:
        if not self._crossover.takes_mpi(call.name, size_bytes):
            return node()
        run = mpi()

        def checked(*buffers: Any) -> Any:
            self._verify(call)
            return run(*buffers)

        return checked

    def _plan_all_gather(self, call: Call, dtype: Any, elems: int) -> Run:
        args, parent = (call, dtype, elems), super()._plan_all_gather
        size = elems * dtype.itemsize * self.size
        return self._by_size(
            call, size, lambda: self._over_mpi._plan_all_gather(*args), lambda: parent(*args)
        )

    def _plan_all_to_all(self, call: Call, dtype: Any, elems: int) -> Run:
        args, parent = (call, dtype, elems), super()._plan_all_to_all
        size = elems * dtype.itemsize
        return self._by_size(
            call, size, lambda: self._over_mpi._plan_all_to_all(*args), lambda: parent(*args)
        )

    def _plan_broadcast(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        args, parent = (call, dtype, elems, root), super()._plan_broadcast
        size = elems * dtype.itemsize
        return self._by_size(call, size, lambda: self._over_mpi._plan_broadcast(*args), lambda: parent(*args))

    def _plan_gather(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        args, parent = (call, dtype, elems, root), super()._plan_gather
        size = elems * dtype.itemsize * self.size
        return self._by_size(call, size, lambda: self._over_mpi._plan_gather(*args), lambda: parent(*args))

    def _plan_scatter(self, call: Call, dtype: Any, elems: int, root: int) -> Run:
        args, parent = (call, dtype, elems, root), super()._plan_scatter
        size = elems * dtype.itemsize * self.size
        return self._by_size(call, size, lambda: self._over_mpi._plan_scatter(*args), lambda: parent(*args))

    def _plan_all_reduce(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        args, parent = (call, dtype, elems, op, order), super()._plan_all_reduce
        if order != "fast":  # the order is ours
            return parent(*args)
        size = elems * dtype.itemsize
        return self._by_size(
            call, size, lambda: self._over_mpi._plan_all_reduce(*args), lambda: parent(*args)
        )

    def _plan_reduce_scatter(self, call: Call, dtype: Any, elems: int, op: str, order: str) -> Run:
        args, parent = (call, dtype, elems, op, order), super()._plan_reduce_scatter
        if order != "fast":
            return parent(*args)
        size = elems * dtype.itemsize * self.size
        return self._by_size(
            call, size, lambda: self._over_mpi._plan_reduce_scatter(*args), lambda: parent(*args)
        )

    def _close(self) -> None:
        self._over_mpi._failed = self._over_mpi._failed or self._failed
        self._over_mpi.close()
        super()._close()
