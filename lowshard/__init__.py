"""lowshard: place, move and quantise raw array buffers over many processes.

NumPy over MPI on any machine, CuPy over NCCL on GPUs, one program text for both.
"""

from __future__ import annotations

from pathlib import Path

# The folders kernels/, launch/ and bench/ stand beside this one in a checkout and install as
# lowshard.kernels and so on. Without an install, look for them there.
_here = Path(__file__).parent
if not (_here / "kernels").is_dir():
    __path__.append(str(_here.parent))

# `execute` and `redistribute` are modules and, publicly, functions: importing both modules here, once,
# leaves the names bound to the functions whatever is imported later.
from lowshard._version import __version__  # noqa: E402
from lowshard.errors import LowshardError, ShardingError  # noqa: E402
from lowshard.execute import execute, execute_all, redistribute  # noqa: E402
from lowshard.layout import Layout  # noqa: E402
from lowshard.mesh import DeviceMesh  # noqa: E402
from lowshard.placement import Partial, Replicated, Sharded  # noqa: E402
from lowshard.pool import BufferPool  # noqa: E402
from lowshard.redistribute_plan import RedistributePlan, plan_redistribute, predict_redistribute  # noqa: E402

__all__ = [
    "BufferPool",
    "DeviceMesh",
    "Layout",
    "LowshardError",
    "Partial",
    "RedistributePlan",
    "Replicated",
    "Sharded",
    "ShardingError",
    "__version__",
    "execute",
    "execute_all",
    "plan_redistribute",
    "predict_redistribute",
    "redistribute",
]

_PACKAGES = (
    "checkpoint",
    "comm",
    "fsdp",
    "interop",
    "kernels",
    "launch",
    "op",
    "reshard",
    "rules",
    "solver",
    "weights",
)


def __dir__() -> list[str]:
    loaded = [name for name in _PACKAGES if name in globals()]
    return sorted([*__all__, *loaded])
