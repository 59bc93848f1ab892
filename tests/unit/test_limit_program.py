"""The C program of `lowshard bench --limits`: what is said where it cannot be built, and that its work is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lowshard import dtypes
from lowshard.bench import limit_program
from lowshard.errors import LowshardError
from lowshard.kernels import BoxTable, pack_quantize, quantize_mxfp8


def test_without_a_compiler_or_its_source_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LowshardError, match="no C compiler cc"):
        limit_program.LimitProgram()
    monkeypatch.setattr(limit_program, "SOURCE", tmp_path / "kernels.c")
    with pytest.raises(LowshardError, match="checkout of lowshard alone"):
        limit_program.LimitProgram()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc, on PATH")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_it_quantises_to_the_bytes_of_lowshard(dtype: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 128)).astype(dtype)
    q = quantize_mxfp8(x)
    program = limit_program.LimitProgram().quantize(x, q, "rceil")
    assert program.ways
    for way in program.ways:
        assert program.same(way)
        q.data.view(np.uint8)[0, 0] ^= 1  # what lowshard wrote is now another
        assert not program.same(way)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc, on PATH")
def test_it_quantises_rows_where_they_lie_and_packed_first_to_the_bytes_of_lowshard(
    rng: np.random.Generator,
) -> None:
    matrix = rng.standard_normal((33, 2048)).astype(dtypes.get("bfloat16").numpy)
    table = BoxTable(matrix.shape, (((0, 33), (512, 1024)),))
    q = pack_quantize(matrix, table)
    program = limit_program.LimitProgram()
    for packed in (None, np.empty(33 * 512, matrix.dtype)):
        made = program.quantize_rows(matrix, 512, q, packed)
        for way in made.ways:
            assert made.same(way)
            q.data.view(np.uint8)[-1] ^= 1
            assert not made.same(way)
