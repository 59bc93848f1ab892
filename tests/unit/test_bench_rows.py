"""What the rows of the benchmarks do: bytes against numbers worked out by hand, places of boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowshard.bench import bench_mxfp8, bench_pack, limit
from lowshard.bench.bench_device import HostDevice
from lowshard.kernels import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8
from lowshard.kernels.engine import host_engine

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing is compiled here; the bytes are those of every engine."""
    monkeypatch.setenv("LOWSHARD_KERNELS", "plain")
    host_engine.cache_clear()
    yield
    host_engine.cache_clear()


def test_quantising_moves_the_floats_a_code_each_and_a_scale_for_32() -> None:
    assert bench_mxfp8.moved_bytes(32, 2) == 64 + 32 + 1
    assert bench_mxfp8.moved_bytes(64, 4) == 256 + 64 + 2
    assert bench_mxfp8.moved_bytes(64 * 2**20, 2) == 203_423_744  # 3.03125 bytes an element


def test_mxfp8_rows_carry_their_bytes_and_a_copy_of_the_same_traffic() -> None:
    load = bench_mxfp8.build(HostDevice(), 6400, bench_mxfp8.NAMES)
    assert [case.name for case in load.cases] == list(bench_mxfp8.NAMES)
    bytes_of = {case.name: (case.moved_bytes, case.copy.moved_bytes) for case in load.cases}
    assert bytes_of["quantize bf16 -> e4m3 rceil"] == (19400, 19400)
    assert bytes_of["quantize fp16 -> e5m2 rceil"] == (19400, 19400)
    assert bytes_of["quantize fp32 -> e4m3 rceil"] == (32200, 32200)
    assert bytes_of["dequantize e4m3 -> bf16"] == (19400, 19400)
    assert bytes_of["dequantize e4m3 -> fp32"] == (32200, 32200)
    assert load.sizes == (("elems", 6400),)


def test_mxfp8_rows_do_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def quantize(x: Any, elem: str, mode: str, out: MXFP8Tensor) -> MXFP8Tensor:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[x.dtype.name]
        assert (x.size, out.data.size) == (320, 320)
        calls.append(f"quantize {short} -> {elem} {mode}")
        return quantize_mxfp8(x, elem, mode, out)  # type: ignore[arg-type]

    def dequantize(q: MXFP8Tensor, dtype: Any, out: Any) -> Any:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[np.dtype(dtype).name]
        assert (q.data.size, out.size) == (320, 320)
        calls.append(f"dequantize {q.elem} -> {short}")
        return dequantize_mxfp8(q, dtype, out)

    monkeypatch.setattr(bench_mxfp8, "quantize_mxfp8", quantize)
    monkeypatch.setattr(bench_mxfp8, "dequantize_mxfp8", dequantize)
    load = bench_mxfp8.build(HostDevice(), 320, bench_mxfp8.NAMES)
    for case in load.cases:
        case.run()
    assert calls == list(bench_mxfp8.NAMES)


def test_boxes_are_disjoint_at_random_places_of_an_array_four_times_as_large() -> None:
    table = bench_pack.box_table(500, 256)
    assert table.shape == (500 * 4 * 256,)
    assert table.total_elems == 500 * 256
    assert table.overlap is None
    starts = np.array([box[0][0] for box in table.boxes])
    assert (starts % 32 == 0).all()
    assert (np.diff(starts) < 0).mean() > 0.3  # no order
    assert len(np.unique(starts % 1024)) > 10  # nor at one place of their stretches
    assert table == bench_pack.box_table(500, 256)
    assert table != bench_pack.box_table(500, 256, seed=1)


def test_a_round_goes_through_enough_tables_to_move_what_was_asked() -> None:
    assert bench_pack.tables_a_round(2 * 10_000 * 512, 100_000_000) == 10  # 10.24 MB each
    assert bench_pack.tables_a_round(2 * 10_000 * 4096, 100_000_000) == 2  # 81.92 MB each
    assert bench_pack.tables_a_round(100, 100) == 1
    assert bench_pack.tables_a_round(101, 100) == 1
    assert bench_pack.slice_rows(100_000_000) == 64_433  # 512 elements a row: 1024 + 512 + 16 bytes
    assert 64_433 * 1552 >= 100_000_000 > 64_432 * 1552


def test_pack_rows_move_the_bytes_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    payload_bytes = {"pack": 4, "unpack": 4, "pack_quantize": 3 + 1 / 32, "unpack_dequantize": 3 + 1 / 32}

    def counted(name: str, real: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            moved.append(int(args[place].total_elems * payload_bytes[name]))
            return real(*args, **more)

        return call

    for name in payload_bytes:
        monkeypatch.setattr(bench_pack, name, counted(name, getattr(bench_pack, name), 1))
    load = bench_pack.build(HostDevice(), 8, 40_000, bench_pack.NAMES)
    assert [case.name for case in load.cases] == list(bench_pack.NAMES)
    for case in load.cases:
        if case.prepare is not None:
            case.prepare()
        if case.name == bench_pack.UNFUSED:  # counted as the job, which is the fused row's
            assert case.moved_bytes == next(c.moved_bytes for c in load.cases if c.name == bench_pack.FUSED)
            continue
        moved.clear()
        case.run()
        assert case.moved_bytes == sum(moved) >= 40_000, case.name
        assert case.copy.moved_bytes - case.moved_bytes in range(2 * len(moved)), case.name
    assert dict(load.sizes) == {
        "boxes": 8,
        "tables_of_4_kb": 1,
        "tables_of_512_b": 5,
        "slice_rows": 26,
        "slice_row_elems": 512,
    }


@pytest.mark.parametrize("narrow", [False, True])
def test_every_limit_belongs_to_a_row_and_holds_on_the_host_alone(
    narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "is_narrow", lambda: narrow)
    names = {*bench_mxfp8.NAMES, *bench_pack.NAMES}
    assert set(limit.NARROW_RATIO_LIMITS) <= set(limit.RATIO_LIMITS) <= names
    assert {name for pair in limit.SPEED_UP_LIMITS for name in pair} <= names
    assert limit.ratio_limit("quantize bf16 -> e4m3 rceil", "cpu") == (1.6 if narrow else 1.0)
    assert limit.ratio_limit("pack boxes of 4 KB", "cpu") == 1.1
    assert (limit.refit_limit(False), limit.refit_limit(True)) == (1.6, 2.5 if narrow else 1.6)
    assert limit.ratio_limit("pack boxes of 512 B", "cuda") is None
    assert limit.speed_up_limit(bench_pack.FUSED, bench_pack.UNFUSED, "cpu") == (1.4 if narrow else 1.8)
    assert limit.speed_up_limit(bench_pack.FUSED, bench_pack.UNFUSED, "cuda") is None
