"""`--limits`: the same work by a small program in C, built here and now, whose time says what a processor reaches.

A row's limit is then the larger of the one that is promised (`lowshard.bench.limit`) and X_PROGRAM times the program's
own multiple of a memcpy, in the quickest of its ways to write. Its source is in bench/limit/ of a checkout, no part of
the wheel.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lowshard.bench.turn_timing import Program, Work
from lowshard.errors import LowshardError
from lowshard.kernels import MXFP8Tensor, pack
from lowshard.kernels.buffer import Array, address
from lowshard.kernels.reference import BLOCK_ELEMS, Mode, element_format, scale_round_up
from lowshard.kernels.slices import BoxTable

WAYS = range(3)
"""Through the caches; past them; past them and asking for lines ahead."""
SOURCE = Path(__file__).with_name("limit") / "kernels.c"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BUILD_S = 60.0


class LimitProgram:
    """The program, built and loaded.

    Raises:
        LowshardError: there is no source or no compiler, or it does not compile; the text says what holds then.
    """

    def __init__(self) -> None:
        compiler = shutil.which("cc")
        if not SOURCE.is_file():
            raise LowshardError(f"its source {SOURCE} is in a checkout of lowshard alone")
        if compiler is None:
            raise LowshardError("no C compiler cc is on PATH")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "limit.so"
            command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
            if ran.returncode:
                raise LowshardError(f"{compiler} does not compile it: {ran.stderr.strip()[-300:]}")
            self._library = ctypes.CDLL(str(made))

    def quantize(self, x: Array, out: MXFP8Tensor, mode: Mode) -> Program:
        """Return the program that quantises a contiguous array to e4m3."""
        numbers = (address(x), address(out.data), address(out.scale), x.size // BLOCK_ELEMS, _increment(mode))
        return self._program(f"quantize_{_SHORT[x.dtype.name]}", numbers, (out.data, out.scale))

    def dequantize(self, q: MXFP8Tensor, out: Array) -> Program:
        """Return the program that dequantises a contiguous array."""
        numbers = (address(q.data), address(q.scale), address(out), out.size // BLOCK_ELEMS)
        return self._program(f"dequantize_{_SHORT[out.dtype.name]}", numbers, (out,))

    def boxes(self, moves: Sequence[tuple[Array, BoxTable, Array]], back: bool) -> Program:
        """Return the program that packs boxes of one size, or unpacks them if `back`: (array, table, packed) each."""
        calls = []
        for array, table, packed in moves:
            there = np.array([box[0][0] for box in table.boxes], np.int64) * array.itemsize
            size_bytes = packed.nbytes // len(there)
            calls.append((array, table, packed, there, (len(there), size_bytes, int(back))))
        function = self._library.move_boxes

        def way(number: int) -> Work:
            def run() -> None:
                for array, _, packed, there, rest in calls:
                    function(
                        *map(
                            ctypes.c_size_t, (address(array), address(packed), address(there), *rest, number)
                        )
                    )

            return run

        def same(run: Work) -> bool:
            if not back:
                return _writes_the_same(run, [packed for _, _, packed, _, _ in calls])
            for _, _, packed, _, _ in calls:
                np.invert(packed.view(np.uint8), out=packed.view(np.uint8))
            run()
            right = all(np.array_equal(_bits(pack(a, t)), _bits(p)) for a, t, p, _, _ in calls)
            for _, _, packed, _, _ in calls:
                np.invert(packed.view(np.uint8), out=packed.view(np.uint8))
            run()
            return right

        targets = [array if back else packed for array, _, packed, _, _ in calls]
        return Program(tuple(way(number) for number in _ways(targets)), same)

    def quantize_rows(
        self, matrix: Array, first_elem: int, out: MXFP8Tensor, packed: Array | None
    ) -> Program:
        """Return the program that quantises 1 KB of each row of a bf16 matrix to e4m3.

        It reads them where they lie; or, if `packed` is given, packs them there first and reads them from there.
        """
        rows, row_bytes = len(matrix), matrix.shape[1] * matrix.itemsize
        start, increment = address(matrix) + first_elem * matrix.itemsize, _increment("rceil")
        outputs = (out.data, out.scale)
        wire = tuple(map(address, outputs))
        if packed is None:
            return self._program("quantize_rows", (start, row_bytes, *wire, rows, increment), outputs)
        there = np.arange(rows, dtype=np.int64) * row_bytes
        blocks = packed.size // BLOCK_ELEMS

        def way(number: int) -> Work:
            def run() -> None:
                box_bytes, back = packed.nbytes // rows, 0
                moved = (start, address(packed), address(there), rows, box_bytes, back, number)
                self._library.move_boxes(*map(ctypes.c_size_t, moved))
                quantized = (address(packed), *wire, blocks, increment, number)
                self._library.quantize_bf16(*map(ctypes.c_size_t, quantized))

            return run

        ways = tuple(way(number) for number in _ways((out.data, packed)))
        return Program(ways, lambda run: _writes_the_same(run, outputs))

    def _program(self, name: str, numbers: Sequence[int], outputs: Sequence[Array]) -> Program:
        function: Callable[..., object] = getattr(self._library, name)

        def way(number: int) -> Work:
            return lambda: function(*map(ctypes.c_size_t, (*numbers, number)))

        ways = tuple(way(number) for number in _ways(outputs[:1]))
        return Program(ways, lambda run: _writes_the_same(run, outputs))


def _ways(targets: Sequence[Array]) -> range:
    """Return the ways that are open: past the caches go whole lines alone, and small arrays may begin amid one."""
    return WAYS if all(address(target) % 64 == 0 for target in targets) else WAYS[:1]


def _increment(mode: Mode) -> int:
    return scale_round_up(element_format("e4m3"), mode)


def _bits(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _writes_the_same(run: Work, outputs: Sequence[Array]) -> bool:
    """Say whether a program writes what is there now, which lowshard wrote."""
    wanted = [_bits(output).copy() for output in outputs]
    for output in outputs:
        _bits(output).fill(0xA5)
    run()
    return all(np.array_equal(_bits(output), right) for output, right in zip(outputs, wanted, strict=True))
