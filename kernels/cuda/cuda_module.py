"""The CUDA sources, compiled and launched by CuPy."""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowshard.errors import CaptureError, DependencyError
from lowshard.kernels.buffer import Array

FOLDER = Path(__file__).parent
SOURCES = ("quantize", "dequantize", "copy", "convert", "swizzle", "step", "fold", "changes", "checksum")
"""The .cu files, each of which is a module of its own: only what is used gets compiled."""

COMPILER_OPTIONS = ("-std=c++17",)

# The file of a kernel, by the first word of its name.
_FILE_OF = {
    "quantize": "quantize",
    "dequantize": "dequantize",
    "copy": "copy",
    "cast": "convert",
    "sum": "convert",
    "swizzle": "swizzle",
    "unswizzle": "swizzle",
    "adamw": "step",
    "sgd": "step",
    "fold": "fold",
    "differ": "changes",
    "gather": "changes",
    "scatter": "changes",
    "checksum": "checksum",
}
_INCLUDE = re.compile(r'^#include "([a-z0-9_]+\.cuh)"$', re.MULTILINE)


@cache
def source(name: str) -> str:
    """Return a .cu file as one text with our own includes inlined once each: RawModule takes no folders."""
    seen: set[str] = set()

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: read(match[1]), text)

    return read(f"{name}.cu")


def program_of(kernel: str) -> tuple[str, tuple[str, ...]]:
    """Return the file of a kernel and its compile options; where all of a file takes long it is compiled alone."""
    first, *words = kernel.split("_")
    alone = _FILE_OF[first] in ("quantize", "dequantize", "convert", "fold")
    only = (f"-DONLY={first.upper()}({','.join(words)})",) if alone else ()
    return _FILE_OF[first], COMPILER_OPTIONS + only


_PER_THREAD = 2
"""cudaStreamPerThread: one address for the default stream of every thread, each a stream of its own."""


class CuPyLauncher:
    """Starts kernels on one GPU, on the stream that is current there; never waits."""

    def __init__(self, device_id: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DependencyError(
                f"kernels on a GPU need CuPy, which cannot be imported ({error}); "
                "pip install 'lowshard[cuda13]', or 'lowshard[cuda12]' for CUDA 12"
            ) from error
        self._cupy = cupy
        self._device = cupy.cuda.Device(device_id)
        self.multiprocessors = int(self._device.attributes["MultiProcessorCount"])
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._kernels: dict[str, Any] = {}
        self._captured: dict[int, Array] = {}  # a graph reads them whenever it runs

    @property
    def current_stream(self) -> Hashable:
        """Return a key of this GPU's current stream: its address, and the thread for a per-thread stream."""
        at = int(self._cupy.cuda.get_current_stream(self._device.id).ptr)
        return (at, threading.get_ident()) if at == _PER_THREAD else at

    def to_device(self, words: npt.NDArray[np.int64]) -> Array:
        """Return a copy on the GPU, made in the current stream's order from pinned memory.

        Raises:
            CaptureError: a CUDA graph records the stream; CuPy would keep the pinned memory for ever.
        """
        with self._device:
            if self._captures():
                raise CaptureError(
                    "a CUDA graph cannot record the first call of a kernel with this layout, which puts a table on the "
                    "GPU; make the call once on this stream before the capture"
                )
            return self._cupy.array(words, blocking=False)

    def keep_captured(self, words: Array) -> None:
        """Keep a table for ever where a CUDA graph records its use."""
        if self._captures():
            self._captured[int(words.data.ptr)] = words

    def _captures(self) -> bool:
        stream = self._cupy.cuda.get_current_stream(self._device.id)
        return bool(self._cupy.cuda.runtime.streamIsCapturing(stream.ptr))

    def launch(self, kernel: str, ctas: int, threads: int, args: Sequence[int]) -> None:
        """Start a kernel on the current stream. CuPy passes a Python integer as 64 bits."""
        with self._device:
            self._kernel(kernel)((ctas,), (threads,), tuple(args))

    def _kernel(self, name: str) -> Any:
        found = self._kernels.get(name)
        if found is None:
            program = file, options = program_of(name)
            module = self._modules.get(program)
            if module is None:
                # Compiled on first use for the GPU that is current, and kept on disk by CuPy.
                module = self._modules[program] = self._cupy.RawModule(code=source(file), options=options)
            found = self._kernels[name] = module.get_function(name)
        return found
