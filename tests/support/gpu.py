"""What the tests on GPUs share: whether they can run, ranks on one GPU, a kernel that takes its time."""

from __future__ import annotations

from functools import cache
from typing import Any

from lowshard.comm.nccl_bindings import Binding
from lowshard.comm.nccl_over_mpi import why_unusable

REASON = why_unusable()
"""Why NCCL cannot be used here, or None."""

SHARED_GPU = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # it cannot be shared
    "NCCL_MAX_CTAS": "2",  # all ranks' blocks must be resident at once
}
"""Environment of ranks that share GPU 0; needs NCCL 2.30.3."""

_SPIN = r"""
extern "C" __global__ void spin(const long long ns) {
    long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begun < ns);
}
"""


def why_no_gpu() -> str | None:
    """Return why CuPy arrays cannot be used here, or None; NCCL is not needed."""
    try:
        count = int(Binding.load(with_nccl=False).xp.cuda.runtime.getDeviceCount())
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if count else "CuPy sees no CUDA device"


def gpus() -> int:
    """Return the number of GPUs that NCCL can use here; 0 where it cannot."""
    return 0 if REASON else int(Binding.load().xp.cuda.runtime.getDeviceCount())


def nccl_version() -> int:
    """Return the loaded NCCL's version, 23007 for 2.30.7; 0 where there is none."""
    return 0 if REASON else int(Binding.load().nccl.get_version())


def version_text() -> str:
    """Return the loaded NCCL's version as NCCL's releases are named."""
    number = nccl_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "none"


@cache
def _spin(cupy: Any) -> Any:
    return cupy.RawKernel(_SPIN, "spin")


def busy(cupy: Any, seconds: float) -> None:
    """Keep the current stream busy for a while, with one thread of the GPU."""
    _spin(cupy)((1,), (1,), (cupy.int64(int(seconds * 1e9)),))


def warm_up(cupy: Any) -> None:
    """Compile what tests ask of CuPy while a stream is busy: to compile then takes longer than the stream is busy."""
    busy(cupy, 0.0)
    for dtype in (cupy.float32, cupy.float64):
        value = cupy.arange(8, dtype=dtype)
        value *= 2
        value += 1
        for fill in (2, 2.0):
            cupy.full(8, fill, dtype)
        _ = value + 0, value + 1, value * 2, cupy.zeros(8, dtype), cupy.ones(8, dtype)
    cupy.cuda.Device().synchronize()
