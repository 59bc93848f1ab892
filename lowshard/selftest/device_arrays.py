"""Where a step's arrays lie: NumPy on the host, or CuPy on the current GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from lowshard.errors import DependencyError
from lowshard.selftest.step_setting import Device


def array_module(device: Device) -> ModuleType:
    """Return numpy or cupy."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError as error:
        raise DependencyError(
            f"--device cuda needs CuPy, which cannot be imported ({error}); pip install 'lowshard[cuda12]' or "
            "'lowshard[cuda13]'"
        ) from error
    module: ModuleType = cupy
    return module


def put(xp: ModuleType, array: np.ndarray) -> Any:
    """Return a new array there with these values."""
    return array.copy() if xp is np else xp.asarray(array)


def settle(xp: ModuleType) -> None:
    """Wait for the work on the current stream; an error of the device is raised here."""
    # Never for the whole device: there another rank's kernel may wait for this rank.
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def fill_pools(xp: ModuleType) -> None:
    """Take memory of the device and page-locked memory for CuPy's pools of the current stream, and give it back.

    CUDA allocates only while no kernel runs, and a kernel of NCCL may run until this rank comes.
    """
    if xp is not np:
        held = [xp.empty(bytes_, xp.uint8) for bytes_ in (64 << 20, *[1 << 20] * 16)]
        held.append(xp.asarray(held[1].get()))
        del held
        settle(xp)
