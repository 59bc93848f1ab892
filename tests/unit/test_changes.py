"""What differs between two arrays: as a byte oracle says, in both twins, and written elsewhere bit for bit."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
from support import mode
from support.cuda_host import host_cuda_engine

from lowshard import dtypes
from lowshard.box import Box, full_box
from lowshard.errors import KernelError, VerificationError
from lowshard.kernels.change_boxes import ScratchBuffer
from lowshard.kernels.change_encoding import Changes
from lowshard.kernels.changes import ChangeBoxes, PlainSearch
from lowshard.kernels.cuda.cuda_changes import DeviceSearch

DTYPES = [dtype.name for dtype in dtypes.all_dtypes()]
SHARES = (0, 0.001, 0.01, 0.1, 0.4, 0.9, 1)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = dtypes.get(dtype).numpy
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    raw = rng.integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    return raw.view(kind).reshape(shape)


def _changed(rng: np.random.Generator, old: np.ndarray) -> np.ndarray:
    """Return a copy of which some elements have other bits: single ones, or rows, or the sign of a zero."""
    new = np.array(old, order="C")
    raw = new.reshape(-1).view(np.uint8).reshape(new.size, new.itemsize)
    picked = rng.random(new.size) < rng.choice(SHARES)
    if rng.random() < 0.3 and new.size:
        first = int(rng.integers(new.size))
        picked[first : first + int(rng.integers(1, 200))] = True
    if old.dtype == bool:
        raw[picked] ^= 1
    else:
        where = rng.integers(new.itemsize, size=int(picked.sum()))
        raw[np.flatnonzero(picked), where] ^= (1 << rng.integers(8, size=where.size)).astype(np.uint8)
    return new


def _boxes(rng: np.random.Generator, shape: tuple[int, ...], block: int) -> list[Box]:
    """Return disjoint boxes of an array, in any order, that cover it or leave some out."""
    if not shape or rng.random() < 0.3:
        return [full_box(shape)]
    dim = int(rng.integers(len(shape)))
    step = block if dim == len(shape) - 1 else 1
    points = sorted({0, shape[dim], *(step * rng.integers(0, shape[dim] // step + 1, 3)).tolist()})
    cuts = [(*full_box(shape)[:dim], side, *full_box(shape)[dim + 1 :]) for side in pairwise(points)]
    picked = [cuts[i] for i in rng.permutation(len(cuts)).tolist() if rng.random() < 0.8]
    return picked or [full_box(shape)]


def _units(array: np.ndarray, boxes: list[Box], unit_bytes: int) -> np.ndarray:
    parts = [array[(*(slice(*side) for side in box), ...)].tobytes() for box in boxes]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, unit_bytes)


def _plain(boxes: ChangeBoxes) -> ChangeBoxes:
    boxes._search = lambda array: PlainSearch()  # type: ignore[method-assign]
    return boxes


def _on_cuda(boxes: ChangeBoxes) -> ChangeBoxes:
    """Have the CUDA kernels search and write, built for the host."""
    with patch.object(np, "cuda", MagicMock(), create=True):  # as CuPy has it, for streams
        search = DeviceSearch(host_cuda_engine(), np)
    boxes._search = lambda array: search  # type: ignore[method-assign]
    return boxes


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++, which builds the kernels, is not on PATH")
def test_the_cuda_kernels_find_and_write_the_same(rng: np.random.Generator) -> None:
    """Any dtype, boxes, strides and addresses; elements and blocks, values and steps."""
    for _ in range(2000 if mode.full() else 100):
        shape = tuple(rng.integers(1, 20, int(rng.integers(1, 4))).tolist())
        dtype, block = str(rng.choice(DTYPES)), 1
        if rng.random() < 0.4:
            block = int(rng.choice([2, 3, 4, 16]))
            shape = (*shape[:-1], max(1, shape[-1] // block) * block)
        old = _random(rng, shape, dtype)
        new = _changed(rng, old)
        scratch = np.zeros(old.nbytes + 64, np.uint8)
        begin = old.itemsize * int(rng.integers(8))
        base = scratch[begin : begin + old.nbytes].view(old.dtype).reshape(shape)
        base[...] = old
        if block == 1 and rng.random() < 0.3:
            base = np.array(old, order="F")
        boxes = _boxes(rng, shape, block)
        made, twin = (
            ChangeBoxes(boxes, old.itemsize, block),
            _on_cuda(ChangeBoxes(boxes, old.itemsize, block)),
        )
        found, wanted = (search.find(new, base, ScratchBuffer(), False) for search in (made, twin))
        assert found._replace(encoded=None) == wanted._replace(encoded=None)
        assert wanted.encoded is not None
        assert found.encoded is not None
        assert found.encoded.tobytes() == wanted.encoded.tobytes()
        stops, may_stop = (search.find(new, base, ScratchBuffer(), True) for search in (made, twin))
        assert (stops.encoded is None) == (may_stop.encoded is None)
        stepped = made.find(new, base, ScratchBuffer(), False, True).shorter(old.itemsize * block)
        for encoded in (wanted, stepped):
            out, expected = np.array(base, order="C"), np.array(base, order="C")
            made.write(expected, encoded)
            twin.write(out, encoded)
            assert out.tobytes() == expected.tobytes()


def test_changes_are_those_of_a_byte_oracle_in_both_twins(rng: np.random.Generator) -> None:
    scratch, by_steps = ScratchBuffer(), 0
    for _ in range(10_000 if mode.full() else 1_000):
        shape = tuple(rng.integers(0 if rng.random() < 0.05 else 1, 40, int(rng.integers(0, 4))).tolist())
        dtype, block = str(rng.choice(DTYPES)), 1
        if shape and rng.random() < 0.3:
            block = int(rng.choice([2, 4, 32]))
            shape = (*shape[:-1], max(1, shape[-1] // block) * block)
        old = _random(rng, shape, dtype)
        new = _changed(rng, old)
        boxes = _boxes(rng, shape, block)
        base = np.array(old, order="F") if block == 1 and rng.random() < 0.3 else old
        made, twin = (ChangeBoxes(boxes, old.itemsize, block) for _ in range(2))
        found = made.find(new, base, scratch, False)
        unit_bytes = old.itemsize * block
        there, here = _units(new, boxes, unit_bytes), _units(old, boxes, unit_bytes)
        wanted = np.flatnonzero((there != here).any(axis=1))
        elems = (there != here).reshape(-1, old.itemsize).any(axis=1)
        assert (found.units, found.changed_elems) == (len(wanted), int(elems.sum()))
        assert found.encoded is not None
        assert found.encoded[: found.units * unit_bytes].tobytes() == there[wanted].tobytes()
        if found.units:
            assert made.places(found, unit_bytes).tolist() == wanted.tolist()
        told = found.gaps_bytes + found.lengths_bytes
        assert told <= min(4 * found.units, made.units + 4)
        plain = _plain(twin).find(new, base, scratch, False)
        assert plain[:3] == found[:3]
        assert plain.encoded is not None
        assert plain.encoded.tobytes() == found.encoded.tobytes()
        stepped = made.find(new, base, scratch, False, True).shorter(unit_bytes)
        plain = twin.find(new, base, scratch, False, True).shorter(unit_bytes)
        assert plain._replace(encoded=None) == stepped._replace(encoded=None)
        assert stepped.encoded is not None
        assert plain.encoded is not None
        assert plain.encoded.tobytes() == stepped.encoded.tobytes()
        assert stepped.encoded.size <= found.encoded.size
        by_steps += stepped.steps_bytes > 0
        expected = old.copy()
        for box in boxes:
            at = (*(slice(*side) for side in box), ...)
            expected[at] = new[at]
        for writer in (made, twin):
            for encoded in (found, stepped):
                out = np.array(old, order="F" if block == 1 and rng.random() < 0.3 else "C")
                writer.write(out, encoded)
                assert out.tobytes() == expected.tobytes()
    assert by_steps > 50


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_small_update_takes_a_byte_and_any_step_arrives(rng: np.random.Generator, itemsize: int) -> None:
    kind = np.dtype(f"u{itemsize}")
    old = rng.integers(0, 1 << 8 * kind.itemsize, (64, 500), dtype=kind)
    boxes = ChangeBoxes([full_box(old.shape)], kind.itemsize)
    for most in (64, 1 << 8 * kind.itemsize - 1):  # the larger ones go around
        steps = rng.integers(-most, most, old.shape).astype(kind)
        new = np.where(rng.random(old.shape) < 0.1, old + steps, old)
        found = boxes.find(new, old, ScratchBuffer(), True, True).shorter(itemsize)
        if most == 64:
            assert found.steps_bytes == found.units
        for writer in (boxes, _plain(ChangeBoxes([full_box(old.shape)], kind.itemsize))):
            out = old.copy()
            writer.write(out, found)
            assert (out == new).all()


def test_what_takes_about_as_much_as_all_is_not_written(rng: np.random.Generator) -> None:
    for dtype, block in (("bfloat16", 1), ("uint8", 1), ("float64", 1), ("bfloat16", 32)):
        old = _random(rng, (500, 640), dtype)
        for share in (0.0, 0.01, 0.2, 0.5, 0.8, 0.95, 1.0):
            new = old.copy()
            picked = rng.random(old.shape) < share
            new.view(np.uint8).reshape(*old.shape, -1)[..., 0][picked] ^= 1
            boxes = ChangeBoxes([full_box(old.shape)], old.itemsize, block)
            whole, found = (boxes.find(new, old, ScratchBuffer(), may_stop) for may_stop in (False, True))
            assert whole.encoded is not None
            assert found.changed_elems == whole.changed_elems == int(picked.sum())
            if found.encoded is None:
                assert (
                    9 * whole.units * boxes.unit_bytes >= 7 * old.nbytes
                    or 8 * whole.encoded.size > 7 * old.nbytes
                )
            else:
                assert found.encoded.tobytes() == whole.encoded.tobytes()
                assert 8 * whole.encoded.size <= 7 * old.nbytes
        # All of what comes first differs, and nothing after it: the search must not be misled by its begin.
        new = old.copy()
        new[:120].view(np.uint8)[...] ^= 1
        boxes = ChangeBoxes([full_box(old.shape)], old.itemsize, block)
        begins = boxes.find(new, old, ScratchBuffer(), True)
        assert begins.encoded is not None
        assert begins.encoded.size < 1.01 * new[:120].nbytes


def test_bits_are_compared_and_not_numbers() -> None:
    old = np.array([0.0, np.nan, 1.0, np.nan, 0.0], np.float32)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] ^= 1  # another NaN
    boxes = ChangeBoxes([((0, 5),)], 4)
    for made in (boxes, _plain(ChangeBoxes([((0, 5),)], 4))):
        found = made.find(new, old, ScratchBuffer(), False)
        assert made.places(found, 4).tolist() == [0, 1]
        out = old.copy()
        made.write(out, found)
        assert out.tobytes() == new.tobytes()


def test_a_broken_text_is_refused_and_nothing_beside_the_boxes_is_written(rng: np.random.Generator) -> None:
    """Every text that was changed in a byte is right, refused, or at least keeps within the boxes."""
    refused = 0
    for _ in range(4000 if mode.full() else 400):
        old = _random(rng, (60, 40), "uint16")
        new = _changed(rng, old)
        boxes = [((10, 30), (5, 20)), ((30, 50), (0, 17))]
        made, twin = ChangeBoxes(boxes, 2), _plain(ChangeBoxes(boxes, 2))
        found = made.find(new, old, ScratchBuffer(), False, bool(rng.random() < 0.5)).shorter(2)
        assert found.encoded is not None
        numbers = found.gaps_bytes + found.lengths_bytes + found.steps_bytes
        if not numbers:
            continue
        encoded = found.encoded.copy()
        encoded[encoded.size - 1 - int(rng.integers(numbers))] = int(rng.integers(256))
        sizes: list[Any] = [found.units, found.gaps_bytes, found.lengths_bytes, found.steps_bytes]
        if rng.random() < 0.3:
            sizes[int(rng.integers(4))] += int(rng.integers(-2, 3))
        lies = Changes(*sizes[:3], encoded, 0, sizes[3])
        inside = np.zeros(old.shape, bool)
        for box in boxes:
            inside[tuple(slice(*side) for side in box)] = True
        errors = []
        for writer in (made, twin):
            out = old.copy()
            try:
                writer.write(out, lies)
                errors.append(False)
            except VerificationError:
                errors.append(True)
            assert (out == old)[~inside].all()
        assert errors[0] == errors[1]
        refused += errors[0]
    assert refused


@pytest.mark.parametrize(
    "gaps", [[1 << 62, 1 << 62, 1 << 62, (1 << 62) + 2], [(1 << 62) - 1] * 2, [7, 1 << 62]]
)
def test_runs_whose_places_pass_all_integers_are_refused(gaps: list[int]) -> None:
    """Sums beyond 2^63 come back as places before the array, or within it; both writers refuse them."""
    streams = [*(_number(2 * gap) for gap in gaps)]
    encoded = np.frombuffer(bytes(4 * len(gaps)) + b"".join(streams), np.uint8).copy()
    lies = Changes(len(gaps), sum(map(len, streams)), 0, encoded, 0)
    made, twin = ChangeBoxes([((0, 9),)], 4), _plain(ChangeBoxes([((0, 9),)], 4))
    for writer in (made, twin):
        out = np.ones(9, np.float32)
        with pytest.raises(VerificationError):
            writer.write(out, lies)


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_blocks_whose_elements_lie_apart_are_refused_and_elements_are_not() -> None:
    apart, side_by_side = np.zeros((3, 128), np.float32)[:, ::2], np.zeros((3, 64), np.float32)
    boxes = ChangeBoxes([((0, 3), (0, 64))], 4, 32)
    for new, old in ((apart, side_by_side), (side_by_side, apart)):
        for call in (
            lambda n=new, o=old: boxes.find(n, o, ScratchBuffer(), False),
            lambda n=new, o=old: boxes.copy(n, o),
        ):
            with pytest.raises(KernelError, match="lie in one piece"):
                call()
        assert boxes.by_elem.units == 192
        assert ChangeBoxes(boxes.boxes, 4).find(new, old, ScratchBuffer(), False).units == 0


def test_boxes_are_copied_and_nothing_else(rng: np.random.Generator) -> None:
    for _ in range(2_000 if mode.full() else 200):
        shape = tuple(rng.integers(0 if rng.random() < 0.05 else 1, 40, int(rng.integers(0, 4))).tolist())
        dtype = str(rng.choice(DTYPES))
        source, target = _random(rng, shape, dtype), _random(rng, shape, dtype)
        boxes = _boxes(rng, shape, 1)
        if rng.random() < 0.3:
            source = np.array(source, order="F")
        wanted = target.copy()
        for box in boxes:
            at = (*(slice(*side) for side in box), ...)
            wanted[at] = source[at]
        ChangeBoxes(boxes, source.itemsize).copy(source, target)
        assert target.tobytes() == wanted.tobytes(), (shape, dtype, boxes)
