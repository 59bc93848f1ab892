"""The step `kernels`: every kernel against its plain twin, byte for byte, on values that show mistakes."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from lowshard import dtypes, kernels
from lowshard.box import Box
from lowshard.kernels import MXFP8Tensor, reference
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.change_encoding import values_of
from lowshard.kernels.changes import ChangeBoxes
from lowshard.kernels.plain import PlainEngine
from lowshard.kernels.reference import Elem, Mode
from lowshard.selftest.comparisons import Tally, bits
from lowshard.selftest.device_arrays import array_module, put, settle
from lowshard.selftest.random_arrays import hard, ordinary, rng
from lowshard.selftest.step_setting import Setting

_FLOATS = ("bfloat16", "float16", "float32")
_ELEMS: tuple[Elem, ...] = ("e4m3", "e5m2")
_MODES: tuple[Mode, ...] = ("rceil", "floor", "even", "ceil")
_SHAPES = ((67, 352), (1, 32), (3, 4096))
"""[rows, cols]: many rows of an odd number of blocks, one block, and a few long rows."""
_SWIZZLED = ((1, 1), (128, 4), (300, 11))
_FLAT_ELEMS = (1, 31, 4099)
_BOXES = (((3, 64), (32, 320)), ((0, 3), (0, 32)), ((66, 67), (0, 352)))
"""Of [67, 352], whole blocks along the columns, disjoint."""


def run(setting: Setting, tally: Tally) -> None:
    """Run every kernel and compare."""
    xp = array_module(setting.device)
    if setting.device == "cpu":
        from lowshard.kernels.engine import host_engine

        engine = host_engine().name
        where = (
            "Numba compiled for this processor" if engine == "numba" else "plain NumPy: Numba was not used"
        )
    else:
        where = "CUDA C++ compiled by NVRTC"
    for check in (_mxfp8, _moves, _fused, _casts, _sums, _swizzles, _optimizers, _changes):
        print(f"{check.__name__[1:]}, {where}", flush=True)
        try:
            check(xp, tally)
            settle(xp)
        except Exception as error:  # a kernel that fails does not keep the others from being tried
            traceback.print_exc()
            tally.fail(f"{check.__name__[1:]}: {type(error).__name__}: {error}")
    tally.summary = f"{tally.checks} results equal their plain twins ({where})"


def _mxfp8(xp: ModuleType, tally: Tally) -> None:
    """Quantise in every mode, element type and dtype; dequantise to every dtype."""
    for dtype in _FLOATS:
        for shape in _SHAPES:
            x = hard(shape, dtype, "quantize", shape)
            for elem in _ELEMS:
                for mode in _MODES:
                    what = f"quantize_mxfp8 elem={elem} mode={mode} {dtype} {list(shape)}"
                    _quantised(tally, what, kernels.quantize_mxfp8(put(xp, x), elem, mode), x, mode)
    for elem in _ELEMS:
        random = rng("dequantize", elem)
        data = random.integers(0, 256, (300, 128), np.uint8)
        scale = random.integers(0, 256, (300, 4), np.uint8)
        for dtype in _FLOATS:
            table = reference.value_table(elem, dtype)
            expected = table[np.repeat(scale.astype(np.intp) << 8, 32, axis=-1) | data]
            got = kernels.dequantize_mxfp8(MXFP8Tensor(put(xp, data), put(xp, scale), elem), dtype)
            tally.same(f"dequantize_mxfp8 elem={elem} {dtype} [300, 128]", got, _as(expected, dtype))


def _moves(xp: ModuleType, tally: Tally) -> None:
    """Pack boxes of every width of element, and unpack them."""
    for dtype in ("uint8", "bfloat16", "float32", "float64"):
        x = hard((67, 352), dtype, "pack")
        expected = _packed(x)
        got = kernels.pack(put(xp, x), _BOXES)
        tally.same(f"pack {dtype} 3 boxes of [67, 352]", got, expected)
        out = put(xp, np.zeros_like(x))
        kernels.unpack(put(xp, expected), _BOXES, out)
        tally.same(f"unpack {dtype} 3 boxes of [67, 352]", out, _unpacked(expected, x.dtype))


def _fused(xp: ModuleType, tally: Tally) -> None:
    """Pack and quantise in one pass, and back."""
    for dtype in _FLOATS:
        x = hard((67, 352), dtype, "pack_quantize")
        packed = _packed(x)
        for elem in _ELEMS:
            for mode in _MODES:
                q = kernels.pack_quantize(put(xp, x), _BOXES, elem, mode)
                what = f"pack_quantize elem={elem} mode={mode} {dtype} 3 boxes of [67, 352]"
                _quantised(tally, what, q, packed, mode)
            codes, scales = _quantise(packed, elem, "rceil")
            table = reference.value_table(elem, dtype)
            values = _as(table[np.repeat(scales.astype(np.intp) << 8, 32) | codes], dtype)
            out = put(xp, np.zeros_like(x))
            kernels.unpack_dequantize(MXFP8Tensor(put(xp, codes), put(xp, scales), elem), _BOXES, out)
            tally.same(
                f"unpack_dequantize elem={elem} {dtype} 3 boxes of [67, 352]", out, _unpacked(values, x.dtype)
            )


def _casts(xp: ModuleType, tally: Tally) -> None:
    """Convert between each two floats."""
    for src in _FLOATS:
        for dst in _FLOATS:
            if src != dst:
                x = hard((67, 353), src, "cast", dst)
                wide = reference.widen_to_fp32_bits(bits(x), src)
                expected = _as(reference.round_fp32_bits(wide, dst), dst)
                tally.same(f"cast {src} to {dst} [67, 353]", kernels.cast(put(xp, x), dst), expected)


def _sums(xp: ModuleType, tally: Tally) -> None:
    """Sum one to nine arrays; which NaN comes out is not said."""
    plain = PlainEngine()
    for src, dst in (
        *((dtype, "float32") for dtype in _FLOATS),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ):
        for count in (1, 2, 3, 8, 9):
            for elems in _FLAT_ELEMS:
                sources = [hard((elems,), src, "sum", count, i) for i in range(count)]
                start = hard((elems,), dst, "sum to", count)
                for accumulate in (False, True):
                    out, expected = put(xp, start), start.copy()
                    kernels.sum_into(out, [put(xp, source) for source in sources], accumulate)
                    plain.sum_into(expected, sources, accumulate)
                    what = f"sum_into {dst} of {count} {src} [{elems}]{' accumulate' if accumulate else ''}"
                    tally.same(what, out, expected, any_nan=True)


def _swizzles(xp: ModuleType, tally: Tally) -> None:
    """Lay scales out as 128x4 tiles, and back; quantise into them."""
    plain = PlainEngine()
    for rows, cols in _SWIZZLED:
        scale = rng("swizzle", rows, cols).integers(0, 256, (rows, cols), np.uint8)
        expected = np.empty(-(-rows // 128) * -(-cols // 4) * 512, np.uint8)
        plain.swizzle(scale, expected)
        tally.same(f"swizzle_scales [{rows}, {cols}]", kernels.swizzle_scales(put(xp, scale)), expected)
        got = kernels.unswizzle_scales(put(xp, expected), rows, cols)
        tally.same(f"unswizzle_scales [{rows}, {cols}]", got, scale)
        for dtype in _FLOATS:
            x = hard((rows, 32 * cols), dtype, "tiles", rows)
            codes, scale = _quantise(x, "e4m3", "rceil")
            plain.swizzle(scale, expected)
            q = kernels.quantize_mxfp8(put(xp, x), scale_layout="128x4")
            tally.same(f"quantize_mxfp8 {dtype} [{rows}, {32 * cols}] into tiles, codes", q.data, codes)
            tally.same(f"quantize_mxfp8 {dtype} [{rows}, {32 * cols}] into tiles, scales", q.scale, expected)


def _optimizers(xp: ModuleType, tally: Tally) -> None:
    """Run three steps of AdamW and SGD, on ordinary values and on subnormal ones."""
    for elems in _FLAT_ELEMS:
        for size in (1.0, 1e-38):
            names = ("param", "grad", "first", "second")
            start = [
                np.abs(v) if n == "second" else v
                for n in names
                for v in [(ordinary((elems,), "float32", n) * np.float32(size)).astype(np.float32)]
            ]
            of = f"float32 [{elems}], values around {size:g}"
            adamw = partial(kernels.adamw_step, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
            got = [put(xp, array) for array in start]
            expected = [array.copy() for array in start]
            sgd = partial(kernels.sgd_step, lr=1e-2, momentum=0.9, weight_decay=0.1)
            moved, wanted = [put(xp, array) for array in start[:3]], [array.copy() for array in start[:3]]
            for step in (1, 2, 3):
                adamw(*got, step=step)
                _plain_adamw(expected, step)
                sgd(*moved, first=step == 1)
                PlainEngine().sgd(wanted[0], wanted[1], wanted[2], 1 if step == 1 else 2, (1e-2, 0.9, 0.1))
            for name, array, plain in zip(names, got, expected, strict=True):
                tally.same(f"adamw_step, {name} after 3 steps, {of}", array, plain)
            for name, array, plain in zip(("param", "grad", "buffer"), moved, wanted, strict=True):
                tally.same(f"sgd_step, {name} after 3 steps, {of}", array, plain)


def _changes(xp: ModuleType, tally: Tally) -> None:
    """Find what differs between two arrays, and write it into a third."""
    boxes = _BOXES[:2]
    for dtype, block in (("uint8", 1), ("bfloat16", 1), ("float32", 1), ("float64", 1), ("bfloat16", 32)):
        old = hard((67, 352), dtype, "changes")
        random = rng("changes", dtype, block)
        for share in (0.0, 0.01, 0.9):
            new = old.copy()
            bits(new)[random.random(new.shape) < share] ^= 1
            what = f"changes of {dtype} by {block}, {share:g} of [67, 352]"
            made = ChangeBoxes(boxes, old.itemsize, block)
            before, after = (_units(array, boxes, made.unit_bytes) for array in (old, new))
            places = np.flatnonzero((before != after).any(axis=1))
            found = made.find(put(xp, new), put(xp, old), ScratchBuffer(), False)
            tally.same(f"{what}, places", made.places(found, made.unit_bytes), places)
            tally.same(f"{what}, values", values_of(found, made.unit_bytes), after[places])
            out, wanted = put(xp, old), old.copy()
            made.write(out, found)
            for box in boxes:
                part = tuple(slice(*span) for span in box)
                wanted[part] = new[part]
            tally.same(f"{what}, written", out, wanted)


def _units(x: np.ndarray, boxes: Sequence[Box], unit_bytes: int) -> np.ndarray:
    """Return the units of boxes one behind the other, uint8 [units, bytes of one]."""
    parts = [x[tuple(slice(*span) for span in box)].reshape(-1).view(np.uint8) for box in boxes]
    return np.concatenate(parts).reshape(-1, unit_bytes)


def _plain_adamw(arrays: list[np.ndarray], step: int) -> None:
    """One step of the formula that `adamw_step` documents, in float32, each operation rounded once."""
    p, g, m, v = arrays
    f = np.float32
    scale, root = f(1e-2 / (1 - 0.9**step)), f(np.sqrt(1 - 0.999**step))
    with np.errstate(all="ignore"):
        m[...] = m * f(0.9) + g * f(1 - 0.9)
        v[...] = v * f(0.999) + (g * g) * f(1 - 0.999)
        p[...] = p * f(1 - 1e-2 * 0.1) - (m / (np.sqrt(v) / root + f(1e-8))) * scale


def _quantised(tally: Tally, what: str, q: Any, x: np.ndarray, mode: str) -> None:
    codes, scales = _quantise(x, q.elem, mode)
    tally.same(f"{what}, codes", q.data, codes)
    tally.same(f"{what}, scales", q.scale, scales)


def _quantise(x: np.ndarray, elem: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales by the integer rules, [..., K] and [..., K/32]."""
    wide = reference.widen_to_fp32_bits(bits(x), dtypes.get(x.dtype).name).reshape(-1, reference.BLOCK_ELEMS)
    codes, scales = reference.quantize_bits(wide, reference.element_format(elem), mode)
    return codes.reshape(x.shape), scales.reshape((*x.shape[:-1], x.shape[-1] // reference.BLOCK_ELEMS))


def _packed(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[tuple(slice(*span) for span in box)].reshape(-1) for box in _BOXES])


def _unpacked(packed: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    out, at = np.zeros((67, 352), dtype), 0
    for box in _BOXES:
        part = out[tuple(slice(*span) for span in box)]
        part[...] = packed[at : at + part.size].reshape(part.shape)
        at += part.size
    return out


def _as(patterns: np.ndarray, dtype: str) -> np.ndarray:
    return patterns.view(dtypes.get(dtype).numpy)
