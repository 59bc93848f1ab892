"""The step `kernels`: every kernel against its plain twin, byte for byte, on values that show mistakes.

The tests run the same cases through the compiled kernels, through the CUDA sources on the host, and on GPUs.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lowshard import kernels
from lowshard.box import Box, slices_of
from lowshard.kernels import MXFP8Tensor, SwizzledMXFP8, engine
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.change_encoding import values_of
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.mxfp8 import FLOATS
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.reference import ELEMS, MODES
from lowshard.selftest.arrays import array_module, bits, hard, hard_blocks, ordinary, put, rng, settle
from lowshard.selftest.comparisons import Tally
from lowshard.selftest.steps import Setting

_SHAPES = ((67, 352), (1, 32), (3, 4096))
"""[rows, cols]: many rows of an odd number of blocks, one block, and a few long rows."""
_VIEWS = {
    "": (),
    "every second row from column 32": (slice(None, None, 2), slice(32, None)),
    "rows backwards": (slice(None, None, -1), slice(0, 320)),
}
"""How an array lies in memory: what of another one it is; whole blocks."""
_BOXES = (((3, 64), (32, 320)), ((0, 3), (0, 32)), ((66, 67), (0, 352)))
"""Of [67, 352], whole blocks along the columns, disjoint."""
_FLAT_ELEMS = (1, 31, 4099)

Put = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class KernelCase:
    """A call of a kernel on new arrays, `call(*args)`, which returns what it has written.

    view: what of the first array it takes. expected: what comes out; by default what the plain engine makes of the
    same call. any_nan: a NaN is as good as any other.
    """

    what: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    view: tuple[slice, ...] = ()
    expected: tuple[np.ndarray, ...] | None = None
    any_nan: bool = False

    def arrays(self, to_device: Put) -> tuple[Any, ...]:
        """Make the call on arrays of a device, and return all that comes out."""
        first, *rest = (_placed(arg, to_device) for arg in self.args)
        result = self.call(first[self.view] if self.view else first, *rest)
        if isinstance(result, (MXFP8Tensor, SwizzledMXFP8)):
            return result.data, result.scale
        return result if isinstance(result, tuple) else (result,)

    def check(self, to_device: Put, tally: Tally) -> None:
        """Compare what comes out on a device with what is expected."""
        expected = self.expected
        if expected is None:
            with through(PlainEngine()):
                expected = self.arrays(partial(put, np))
        for place, (found, wanted) in enumerate(zip(self.arrays(to_device), expected, strict=True)):
            name = (", codes", ", scales", ", third")[place] if len(expected) > 1 else ""
            tally.same(f"{self.what}{name}", found, wanted, any_nan=self.any_nan)


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def through(chosen: engine.HostEngine | engine.Engine) -> Iterator[None]:
    """Run the public calls on NumPy arrays through an engine; ranks that are threads one after the other."""
    with _ONE_AT_A_TIME:
        usual = engine.host_engine
        engine.host_engine = lambda: chosen  # type: ignore[assignment]  # engine_for looks it up
        try:
            yield
        finally:
            engine.host_engine = usual


def _placed(value: Any, to_device: Put) -> Any:
    """Return arguments with new arrays on a device."""
    if isinstance(value, np.ndarray):
        return to_device(value)
    if isinstance(value, MXFP8Tensor):
        return MXFP8Tensor(to_device(value.data), to_device(value.scale), value.elem)
    return [_placed(one, to_device) for one in value] if isinstance(value, list) else value


def _case(
    kernel: Callable[..., Any], *args: Any, note: str = "", view: tuple[slice, ...] = (), any_nan: bool = False,
    **options: Any,
) -> KernelCase:  # fmt: skip
    """Return a call of a kernel, with its options and its first array in its name."""
    first = args[0].data if isinstance(args[0], MXFP8Tensor) else args[0]
    named = [f"{name}={value}" for name, value in options.items() if name != "table"]
    words = [kernel.__name__, *named, first.dtype.name, str(list(first.shape)), note]
    return KernelCase(" ".join(words).strip(), partial(kernel, **options), args, view, any_nan=any_nan)


def quantise() -> Iterator[KernelCase]:
    """Quantise in every mode, element type and dtype, arrays that lie in any way, with any lowest scale."""
    for dtype, shape, elem in product(FLOATS, _SHAPES, ELEMS):
        x = hard_blocks(shape, dtype, "quantize")
        yield from (_case(kernels.quantize_mxfp8, x, elem=elem, mode=mode) for mode in MODES)
        for (way, view), low in product(_VIEWS.items() if shape[0] > 1 else (), (0, 1, 127, 254)):
            yield _case(kernels.quantize_mxfp8, x, note=way, view=view, elem=elem, min_scale_byte=low)


def dequantise() -> Iterator[KernelCase]:
    """Dequantise every code under every scale: side by side, and without NaN."""
    code = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    for elem, dtype in product(ELEMS, FLOATS):
        numbers = np.where((code & 0x7F) >= (0x7F if elem == "e4m3" else 0x7D), np.uint8(0x80), code)
        for note, data in (("every code", code), ("every number", numbers)):
            q = MXFP8Tensor(data, scale, elem)
            yield _case(kernels.dequantize_mxfp8, q, note=f"{elem}, {note} under every scale", dtype=dtype)


def boxes() -> Iterator[KernelCase]:
    """Pack boxes of elements of every width, and unpack them; quantise and dequantise on the way."""
    for dtype in ("uint8", "bfloat16", "float32", "float64"):
        x = hard((67, 352), dtype, "pack")
        yield _case(kernels.pack, x, table=_BOXES)
        yield _case(kernels.pack, x, note="rows backwards", view=(slice(None, None, -1),), table=_BOXES)
        yield _case(kernels.unpack, _cut(x, _BOXES), _BOXES, np.zeros_like(x))
    for dtype, elem in product(FLOATS, ELEMS):
        x = hard_blocks((67, 352), dtype, "pack_quantize")
        yield from (_case(kernels.pack_quantize, x, table=_BOXES, elem=elem, mode=mode) for mode in MODES)
        with through(PlainEngine()):
            q = kernels.pack_quantize(x, _BOXES, elem)
        yield _case(kernels.unpack_dequantize, q, _BOXES, np.zeros_like(x), note=f"{elem} to {dtype}")


def _cut(x: np.ndarray, spans: Sequence[Box]) -> np.ndarray:
    return np.concatenate([x[slices_of(box)].reshape(-1) for box in spans])


def casts() -> Iterator[KernelCase]:
    """Convert between each two floats."""
    for src, dst, (way, view) in product(FLOATS, FLOATS, _VIEWS.items()):
        yield _case(kernels.cast, hard((67, 353), src, "cast", dst), note=way, view=view, dtype=dst)


def sums() -> Iterator[KernelCase]:
    """Sum one to twelve arrays of one dtype or of several; which NaN comes out is not said."""
    for dst, count, elems, accumulate in product(FLOATS, (1, 2, 3, 8, 9, 12), _FLAT_ELEMS, (False, True)):
        for src in sorted({dst, "bfloat16", "mixed"}):
            of = FLOATS if src == "mixed" else (src,)
            sources = [hard((elems,), of[i % len(of)], "sum", count, i) for i in range(count)]
            out, note = hard((elems,), dst, "sum to", count), f"of {count} {src}"
            yield _case(kernels.sum_into, out, sources, note=note, any_nan=True, accumulate=accumulate)


def tiles() -> Iterator[KernelCase]:
    """Lay scales out as 128x4 tiles, and back; quantise into them."""
    for rows, cols in ((1, 1), (128, 4), (129, 5), (300, 33)):
        scale = rng("tiles", rows, cols).integers(0, 256, (rows, cols), np.uint8)
        with through(PlainEngine()):
            swizzled = kernels.swizzle_scales(scale)
        yield _case(kernels.swizzle_scales, scale)
        yield _case(kernels.unswizzle_scales, swizzled, rows, cols)
        for dtype, elem in product(FLOATS, ELEMS):
            x = hard_blocks((rows, 32 * cols), dtype, "tiles")
            yield _case(kernels.quantize_mxfp8, x, elem=elem, scale_layout="128x4")


def optimizers() -> Iterator[KernelCase]:
    """Run three steps of AdamW and SGD, on ordinary values and on subnormal ones."""
    rates: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

    def adamw(p: Any, m: Any, v: Any, *grads: Any) -> tuple[Any, ...]:
        for t, g in enumerate(grads, 1):
            kernels.adamw_step(p, g, m, v, beta1=0.9, beta2=0.999, eps=1e-8, step=t, **rates)
        return p, m, v

    def sgd(p: Any, buffer: Any, *grads: Any) -> tuple[Any, ...]:
        for t, g in enumerate(grads):
            kernels.sgd_step(p, g, buffer, momentum=0.9, first=not t, **rates)
        return p, buffer

    for elems, size in product(_FLAT_ELEMS, (1.0, 1e-38)):
        arrays = [ordinary((elems,), "float32", "step", i) * np.float32(size) for i in range(6)]
        of = f"float32 [{elems}] of values about {size:g}, 3 steps"
        yield KernelCase(f"adamw_step {of}", adamw, (*arrays[:2], np.abs(arrays[2]), *arrays[3:]))
        yield KernelCase(f"sgd_step {of}", sgd, tuple(arrays[1:]))


def changes() -> Iterator[KernelCase]:
    """Find what differs between two arrays, and write it into a third."""

    def call(new: Any, old: Any, out: Any, made: ChangeBoxes) -> tuple[Any, ...]:
        found = made.find(new, old, ScratchBuffer(), False)
        made.write(out, found)
        return made.places(found, made.unit_bytes), values_of(found, made.unit_bytes), out

    for dtype, block in (("uint8", 1), ("bfloat16", 1), ("float32", 1), ("float64", 1), ("bfloat16", 32)):
        old, random = hard((67, 352), dtype, "changes"), rng("changes", dtype, block)
        for share in (0.0, 0.01, 0.9):
            new, wanted, made = old.copy(), old.copy(), ChangeBoxes(_BOXES[:2], old.itemsize, block)
            bits(new)[random.random(new.shape) < share] ^= 1
            for box in _BOXES[:2]:
                wanted[slices_of(box)] = new[slices_of(box)]
            units = [_cut(x, _BOXES[:2]).view(np.uint8).reshape(-1, made.unit_bytes) for x in (old, new)]
            places = np.flatnonzero((units[0] != units[1]).any(axis=1))
            what = f"changes of {dtype} by {block}, {share:g} of all"
            yield KernelCase(what, call, (new, old, old, made), expected=(places, units[1][places], wanted))


FAMILIES = (quantise, dequantise, boxes, casts, sums, tiles, optimizers, changes)


def run(setting: Setting, tally: Tally) -> None:
    """Run every kernel and compare."""
    xp = array_module(setting.device)
    compiled = setting.device == "cpu" and engine.host_engine().name == "numba"
    where = "Numba compiled for this processor" if compiled else "plain NumPy: Numba was not used"
    where = "CUDA C++ compiled by NVRTC" if setting.device == "cuda" else where
    for family in FAMILIES:
        print(f"{family.__name__}, {where}", flush=True)
        try:
            for case in family():
                case.check(partial(put, xp), tally)
            settle(xp)
        except Exception as error:  # a kernel that fails does not keep the others from being tried
            traceback.print_exc()
            tally.fail(f"{family.__name__}: {type(error).__name__}: {error}")
    tally.summary = f"{tally.checks} results match the NumPy reference ({where})"
