"""Where a measurement runs: arrays, clock and yardstick of the host, or of a GPU through CuPy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lowshard.bench.turn_timing import HostClock, ProcessClock, Work
from lowshard.errors import BufferMismatchError, DependencyError
from lowshard.kernels.buffer import Array, allocate

Kind = Literal["cpu", "cuda"]

# The GPU waits in a kernel of this code while the host queues work behind it.
_HOLD_SOURCE = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""
_FIRST_HOLD_S = 2e-4
_LONGEST_HOLD_S = 0.2


class HostDevice:
    """NumPy arrays, one thread, `numpy.copyto` (which is the C library's memcpy)."""

    kind: Kind = "cpu"

    def __init__(self) -> None:
        self.clock: ProcessClock = HostClock()

    def put(self, array: np.ndarray[Any, Any]) -> Array:
        """Return a copy that begins on a cache line; arrays that NumPy makes begin 16 bytes after one."""
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array, on a cache line as the results of the kernels are."""
        return allocate(shape, dtype, like=np.empty(0))

    def copy_work(self, dst: Array, src: Array) -> Work:
        """Return a call of `numpy.copyto`."""
        return lambda: np.copyto(dst, src)

    def free_bytes(self) -> int | None:
        """Return what Linux says is available without swapping."""
        try:
            with open("/proc/meminfo", encoding="ascii") as file:
                for line in file:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            return None
        return None


class CudaDevice:
    """CuPy arrays on the current GPU and stream; the yardstick is a device-to-device copy there."""

    kind: Kind = "cuda"

    def __init__(self) -> None:
        reason = why_no_gpu()
        if reason is not None:
            raise DependencyError(
                f"--device cuda needs CuPy and a GPU: {reason}; install the cuda12 or cuda13 extra of lowshard, "
                "and see `lowshard doctor`"
            )
        import cupy

        self._cupy = cupy
        self.clock: ProcessClock = CudaClock(cupy)

    def put(self, array: np.ndarray[Any, Any]) -> Array:
        """Return a copy on the GPU."""
        return self._cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array on the GPU."""
        return self._cupy.empty(shape, dtype)

    def copy_work(self, dst: Array, src: Array) -> Work:
        """Return an asynchronous copy on the current stream."""
        return lambda: dst.data.copy_from_device_async(src.data, dst.nbytes)

    def free_bytes(self) -> int | None:
        """Return what the driver says is free, after CuPy has given back what it keeps for later."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        return int(self._cupy.cuda.runtime.memGetInfo()[0])


class CudaClock(ProcessClock):
    """Times work between two events on the current stream."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._hold = cupy.RawKernel(_HOLD_SOURCE, "hold")
        self._hold_s = _FIRST_HOLD_S
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def work_s(self, run: Work) -> float:
        """Queue the work behind the waiting kernel and return the seconds the GPU spent on it."""
        while True:
            self._hold((1,), (1,), (np.uint64(self._hold_s * 1e9),))
            begin = time.perf_counter()
            self._start.record()
            run()
            self._stop.record()
            queued_s = time.perf_counter() - begin
            self._stop.synchronize()
            if queued_s < self._hold_s or self._hold_s >= _LONGEST_HOLD_S:
                return float(self._cupy.cuda.get_elapsed_time(self._start, self._stop)) / 1e3
            self._hold_s = min(2 * queued_s, _LONGEST_HOLD_S)  # the GPU ran dry meanwhile: once more

    def call_s(self, run: Work) -> float:
        """Run the work and return the seconds until the GPU was done."""
        self._cupy.cuda.get_current_stream().synchronize()
        begin = time.perf_counter()
        run()
        self._cupy.cuda.get_current_stream().synchronize()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Copy:
    """A copy, which reads each of its bytes once and writes it once."""

    run: Work
    copied_bytes: int


Device = HostDevice | CudaDevice
"""A place to measure in."""


class Yardstick:
    """Copies of any size up to a largest one, between two buffers that have been written before."""

    def __init__(self, device: Device, most_bytes: int) -> None:
        self._device = device
        # Both are written: pages that never were would all be read from one page of zeros.
        self._src = device.empty((most_bytes,), np.dtype(np.uint8))
        self._dst = device.empty((most_bytes,), np.dtype(np.uint8))
        self._src.fill(1)
        self._dst.fill(2)

    def copy(self, moved_bytes: int, times: int = 1) -> Copy:
        """Return the copy that reads and writes as many bytes in total."""
        each = -(-moved_bytes // (2 * times))
        once = self._device.copy_work(self._dst[:each], self._src[:each])

        def run() -> None:
            for _ in range(times):
                once()

        return Copy(run, each * times)


def open_device(choice: str) -> Device:
    """Return the device of `--device`: "cpu", "cuda", or "auto" for a GPU where there is one."""
    if choice == "auto":
        choice = "cpu" if why_no_gpu() else "cuda"
    return CudaDevice() if choice == "cuda" else HostDevice()


def why_no_gpu() -> str | None:
    """Return what keeps this process from using a GPU through CuPy, or None when nothing does."""
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError) as error:  # CuPy raises RuntimeErrors for a missing driver or GPU
        return f"{type(error).__name__}: {error}"
    return None if count else "CuPy sees no CUDA device"


def require_memory(need_bytes: int, free: int | None, option: str = "--size", where: str = "host") -> None:
    """Raise BufferMismatchError when a measurement's buffers would not fit into what is free."""
    if free is not None and need_bytes > free:
        raise BufferMismatchError(
            f"the buffers of this measurement take {need_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on the "
            f"{where}; pass a smaller {option}"
        )
