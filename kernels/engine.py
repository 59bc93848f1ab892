"""Which implementation runs a kernel: plain NumPy, Numba on the CPU, or CUDA for CuPy arrays.

All of them do the same work on the same run tables and give the same bytes. Callers have checked shapes, dtypes,
byte order and overlap before; an engine trusts what it is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lowshard.errors import DependencyError, KernelError
from lowshard.kernels.buffer import Array, is_gpu
from lowshard.kernels.reference import Elem, Mode
from lowshard.kernels.runs import RunTable
from lowshard.settings import KERNELS

"""Environment variable that picks the engine of NumPy arrays: "numba" (default) or "plain"."""


class Engine(Protocol):
    """The kernels, over checked buffers."""

    name: str

    def copy(self, src: Array, dst: Array, runs: RunTable, streaming: bool | None = None) -> None:
        """Copy every run of `src` to `dst`; both itemsizes of the table are equal.

        streaming: bypass the caches, on a CPU; None: if the written bytes do not fit in them.
        """

    def quantize(
        self,
        src: Array,
        data: Array,
        scale: Array,
        runs: RunTable,
        elem: Elem,
        mode: Mode,
        min_scale_byte: int,
        streaming: bool | None = None,
    ) -> None:
        """Quantise every run, whole blocks, of a bf16, fp16 or fp32 array.

        The runs' target is `data`; the scale byte of the block at byte `i` of data goes to byte `i / 32` of scale.
        streaming: as for `copy`.
        """

    def quantize_swizzled(
        self,
        src: Array,
        data: Array,
        scale: Array,
        elem: Elem,
        mode: Mode,
        min_scale_byte: int,
        streaming: bool | None = None,
    ) -> None:
        """Quantise a matrix [rows, K] with contiguous rows, and write its scales in the 128x4 layout."""

    def dequantize(self, data: Array, scale: Array, elem: Elem, dst: Array, runs: RunTable) -> None:
        """Dequantise every run, whole blocks; the runs' source is `data`, scales lie as in `quantize`."""

    def cast(self, src: Array, dst: Array, runs: RunTable) -> None:
        """Convert every run from src's dtype to dst's, two of bf16, fp16 and fp32."""

    def sum_into(self, out: Array, sources: Sequence[Array], accumulate: bool) -> None:
        """Sum contiguous arrays of one size in fp32, from out (if `accumulate`) and the first source on."""

    def swizzle(self, scale: Array, out: Array) -> None:
        """Write uint8 [rows, cols] of any strides in the 128x4 layout, padding included, to a flat out."""

    def unswizzle(self, swizzled: Array, out: Array) -> None:
        """Write a flat array in the 128x4 layout to uint8 [rows, cols] of any strides."""

    def adamw(
        self, param: Array, grad: Array, first: Array, second: Array, scalars: Sequence[float]
    ) -> None:  # fmt: skip
        """Run `adamw_step` on float32 arrays.

        scalars: what p is multiplied by, beta1, 1 - beta1, beta2, 1 - beta2, scale, root, eps.
        """

    def sgd(self, param: Array, grad: Array, buffer: Array, mode: int, scalars: Sequence[float]) -> None:
        """Run `sgd_step`; mode 0: no buffer, 1: it is written, 2: added to; scalars: lr, momentum, decay."""


def engine_for(*arrays: Array) -> Engine:
    """Return the engine for arrays that live in one place."""
    if all(type(array) is np.ndarray for array in arrays):  # most calls: nothing more is looked at
        return host_engine()
    devices = {array.device.id if is_gpu(array) else None for array in arrays}
    if devices == {None}:
        return host_engine()
    if len(devices) != 1:
        places = ", ".join("the host" if d is None else f"GPU {d}" for d in sorted(devices, key=str))
        raise KernelError(
            f"all arrays of a kernel call lie in one place, got arrays on {places}; copy one over first, "
            "cupy.asarray(x) or cupy.asnumpy(x)"
        )
    from lowshard.kernels.cuda.cuda_engine import device_engine

    return device_engine(devices.pop())


class HostEngine(Engine, Protocol):
    """The kernels over NumPy arrays."""

    def rows_copier(
        self, src: Array, dst: Array, runs: RunTable, streaming: bool, fetching: bool = False
    ) -> Callable[[], None]:
        """Return a function that copies every run separately, bypassing the caches if asked: for rows from a KB on."""

    def bit_digest(self, src: Array, runs: RunTable, first: int = 0) -> npt.NDArray[np.uint32]:
        """Return the weighted sums of a source's bits; the table's target side counts elements of the whole array."""


@cache
def host_engine() -> HostEngine:
    """Return the engine of NumPy arrays: Numba's, or the plain one if asked for or if Numba is missing."""
    choice = KERNELS.choice()
    if choice != "plain":
        try:
            from lowshard.kernels.cpu.cpu_engine import NumbaEngine

            return NumbaEngine()
        except ImportError as error:
            if choice == "numba":
                raise DependencyError(
                    f"{KERNELS.name}=numba, but Numba cannot be imported ({error}); pip install numba"
                ) from error
            warnings.warn(
                f"Numba cannot be imported ({error}): kernels run as plain NumPy, far slower, with the same "
                f"results; pip install numba, or set {KERNELS.name}=plain to run so without this warning",
                RuntimeWarning,
                stacklevel=2,
            )
    from lowshard.kernels.plain import PlainEngine

    return PlainEngine()
