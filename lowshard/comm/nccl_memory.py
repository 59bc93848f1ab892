"""Device memory that NCCL allocates and registers: what `comm.empty` takes large arrays from where nccl4py calls NCCL.

NCCL can move bytes out of and into such memory without a copy to buffers of its own ("user buffer registration" in
NCCL's documentation). A block is registered with its communicator by ncclCommRegister, which concerns one rank alone;
windows (ncclCommWindowRegister) are collective, which `comm.empty` is not.

    ncclMemAlloc -> ncclCommRegister -> arrays, one after another -> ncclCommDeregister -> ncclMemFree

Blocks go through a pool of CuPy's: memory is used again in the order of its stream, as of any CuPy array. They go back
when the communicator is closed; arrays that live on keep theirs, which is freed with them. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FROM_BYTES = 1 << 21
"""Arrays from here on: NCCL allocates in pages of 2 MiB, and small transfers go through its own buffers anyhow."""


class NCCLMemory:
    """Blocks of one communicator.

    Args:
        low: nccl4py's lower layer.
        comm: the communicator, as that layer takes it.
        cupy: CuPy.
    """

    def __init__(self, low: Any, comm: Any, cupy: Any) -> None:
        self._low, self._comm, self._cupy = low, comm, cupy
        self._registered: dict[int, Any] = {}
        self._pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(self._malloc, self._free).malloc)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Take CuPy arrays that are made in the block, if they are large, from here."""
        others = self._cupy.cuda.get_allocator()

        def allocate(n_bytes: int) -> Any:
            return self._pool.malloc(n_bytes) if n_bytes >= FROM_BYTES else others(n_bytes)

        with self._cupy.cuda.using_allocator(allocate):
            yield

    def close(self, aborted: bool) -> None:
        """Free what no array uses, and have NCCL forget the rest, before the communicator ends.

        Args:
            aborted: whether NCCL has forgotten all of it already.
        """
        if aborted:
            self._registered.clear()
        self._pool.free_all_blocks()
        while self._registered:
            self._forget(next(iter(self._registered)))

    def _malloc(self, n_bytes: int, device: int) -> int:
        try:
            address = int(self._low.mem_alloc(n_bytes))
        except self._low.NCCLError as error:
            raise MemoryError(
                f"NCCL could not allocate {n_bytes} bytes on device {device}: {error}"
            ) from error
        try:
            self._registered[address] = self._low.comm_register(self._comm, address, n_bytes)
        except self._low.NCCLError as error:
            self._low.mem_free(address)
            raise MemoryError(
                f"NCCL could not register {n_bytes} bytes on device {device}: {error}"
            ) from error
        return address

    def _free(self, address: int, device: int) -> None:
        self._forget(address)
        with self._cupy.cuda.Device(device):
            self._cupy.cuda.runtime.deviceSynchronize()  # as cudaFree does: work that is queued may still use it
            self._low.mem_free(address)

    def _forget(self, address: int) -> None:
        registration = self._registered.pop(address, None)
        if registration is not None:
            with suppress(self._low.NCCLError):  # a communicator that has failed
                self._low.comm_deregister(self._comm, registration)
