"""Other ways to do the same work on the host, to compare with: NumPy with ml_dtypes, NumPy slices, torchao.

They are written as their users would write them. The bytes of `numpy_quantize` are those of lowshard on finite data.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowshard.bench.machine import version
from lowshard.bench.turn_timing import Work
from lowshard.kernels import BoxTable
from lowshard.kernels.reference import BLOCK_ELEMS

TORCHAO_MODES = {"rceil": "RCEIL", "floor": "FLOOR"}
"""Modes that are compared with torchao, and torchao's names for them."""

_FEWER = 16
_E4M3_MAX = 448.0
_EXPONENT_BIAS = 127

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def fewer(elems: int) -> int:
    """Return the elements that the slow baselines run on: a sixteenth, in whole blocks."""
    return max(elems // (_FEWER * BLOCK_ELEMS), 1) * BLOCK_ELEMS


def numpy_quantize(x: np.ndarray[Any, Any], data: Bytes, scale: Bytes) -> None:
    """Quantise finite values [n] to e4m3 with mode rceil into codes [n] and scale bytes [n/32]."""
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(-1, BLOCK_ELEMS)
    amax = np.abs(blocks).max(axis=1)
    # amax = m * 2^e with m in [0.5, 1), and 448 = 0.875 * 2^9: the smallest power that reaches it.
    significand, exponent = np.frexp(amax)
    power = np.maximum(exponent - 9 + (significand > np.float32(0.875)), -_EXPONENT_BIAS)
    power[amax == 0] = -_EXPONENT_BIAS
    scaled = blocks * np.ldexp(np.float32(1), -power)[:, None]
    codes = np.clip(scaled, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    data[...] = codes.view(np.uint8).reshape(-1)
    scale[...] = power + _EXPONENT_BIAS


def numpy_dequantize(data: Bytes, scale: Bytes, out: np.ndarray[Any, Any]) -> None:
    """Dequantise e4m3 codes [n] and scale bytes [n/32], none of them 255, into floats [n]."""
    import ml_dtypes

    codes = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, BLOCK_ELEMS)
    factor = np.ldexp(np.float32(1), scale.astype(np.int32) - _EXPONENT_BIAS)
    out[...] = (codes * factor[:, None]).astype(out.dtype).reshape(-1)


def numpy_copies(
    array: np.ndarray[Any, Any], table: BoxTable, packed: np.ndarray[Any, Any]
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return a pair of views, in the array and in the packed buffer, of the same shape for every box."""
    return [
        (array[tuple(slice(*span) for span in box)], packed[start : start + count].reshape(_shape(box)))
        for box, start, count in zip(table.boxes, table.offsets_elems, table.elems, strict=True)
    ]


def numpy_pack(copies: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> None:
    """Copy every box to its place in the packed buffer, a NumPy call each."""
    for source, target in copies:
        target[...] = source


def torchao_quantize(x: np.ndarray[Any, Any], mode: str) -> tuple[list[tuple[str, Work]], list[str]]:
    """Return torchao's `to_mx` on the CPU, eager and compiled, one thread, as (label, work); and what to say.

    Args:
        x: bf16 [n].
        mode: one of `TORCHAO_MODES`.
    """
    missing = [name for name in ("torch", "torchao") if version(name) is None]
    if missing:
        return [], [f"torchao is not compared: {' and '.join(missing)} not installed"]
    try:
        # By name: neither is a dependency, and neither has to be there for the types to be checked.
        torch: Any = importlib.import_module("torch")
        mx: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        to_mx, scaling = mx.to_mx, getattr(mx.ScaleCalculationMode, TORCHAO_MODES[mode])
    except (ImportError, AttributeError) as error:
        return [], [f"torchao is not compared: it has no to_mx to import ({error})"]
    torch.set_num_threads(1)
    values = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).reshape(-1, math.gcd(x.size, 4096))
    compiled = torch.compile(to_mx, dynamic=False)
    found: list[tuple[str, Work]] = []
    notes = [f"torchao {version('torchao')}, torch {version('torch')}, 1 thread"]
    for label, call in (("torchao", to_mx), ("torch.compile(torchao)", compiled)):
        work = _to_mx(call, values, torch.float8_e4m3fn, scaling)
        begin = time.perf_counter()
        try:
            work()
        except Exception as error:  # whatever keeps a rival from running is a line of the report, not our end
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            notes.append(f"{label} {mode} is not compared: {type(error).__name__}: {reason[0]}")
            continue
        notes.append(f"{label} {mode}: first call {time.perf_counter() - begin:.1f} s")
        found.append((label, work))
    return found, notes


def _to_mx(call: Any, values: Any, elem: Any, scaling: Any) -> Work:
    return lambda: call(values, elem, BLOCK_ELEMS, scaling)


def _shape(box: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
