"""A block format that lowshard does not know, of 4 bits in blocks of 2 by 16, goes through all that moves weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lowshard import DeviceMesh, Layout, Replicated, Sharded, ShardingError
from lowshard import comm as lc
from lowshard.block_format import BlockFormat
from lowshard.checkpoint import Catalog
from lowshard.comm import Communicator
from lowshard.reshard import build_reshard_plan, execute_reshard_plan
from lowshard.tiling import Tiling
from lowshard.weights import load, plan_load, save

NIBBLES = BlockFormat("nibbles", 4, (2, 16), "uint8", "float32", "low_first", ".s")
SHAPE = (12, 192)


def quantize(values: np.ndarray) -> dict[str, np.ndarray]:
    """Return integers from -8 to 7 for values over the largest of their block, packed, and the scales."""
    rows, columns = values.shape[0] // 2, values.shape[1] // 16
    blocks = values.reshape(rows, 2, columns, 16)
    scale = (np.abs(blocks).max(axis=(1, 3)) / 7).astype(np.float32)
    safe = np.where(scale == 0, 1, scale)[:, None, :, None]
    codes = (np.rint(blocks / safe).astype(np.int8) & 15).astype(np.uint8)
    return {"w": NIBBLES.pack(codes.reshape(values.shape)), "w.s": scale}


def dequantize(stored: dict[str, np.ndarray]) -> np.ndarray:
    codes = NIBBLES.unpack(stored["w"]).astype(np.int8)
    signed = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    return signed * np.repeat(np.repeat(stored["w.s"], 2, axis=0), 16, axis=1)


def values_of(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(SHAPE, np.float32)


def tilings(spec: tuple[Sharded | Replicated, ...], mesh: DeviceMesh) -> dict[str, Tiling]:
    return Tiling.from_layout(Layout(mesh, SHAPE, "float32", spec)).stored("w", NIBBLES)


def held(tiling: Tiling, rank: int, whole: np.ndarray) -> np.ndarray:
    out = np.empty(tiling.local_shape(rank), whole.dtype)
    for tile in tiling.tiles(rank):
        out[tuple(slice(*i) for i in tile.local)] = whole[tuple(slice(*i) for i in tile.box)]
    return out


MESH = DeviceMesh((2, 2), ("a", "b"))
SPECS = [
    (Sharded(0), Sharded(1)),
    (Sharded(1), Replicated()),
    (Replicated(), Sharded(0)),
    (Sharded(1), Sharded(1)),
    (Replicated(), Replicated()),
]


def test_codes_of_any_width_are_packed_and_unpacked(rng: np.random.Generator) -> None:
    for bits in range(1, 9):
        for packing in ("low_first", "high_first"):
            form = BlockFormat("f", bits, (8,), "uint8", "uint8", packing)
            codes = rng.integers(0, 1 << bits, (3, 40), np.uint8)
            stored = form.pack(codes)
            assert stored.shape == (3, 40 * bits // 8)
            assert np.array_equal(form.unpack(stored), codes)
    low, high = (BlockFormat("f", 4, (8,), "uint8", "uint8", p) for p in ("low_first", "high_first"))
    pair = np.array([[1, 15]], np.uint8)
    assert low.pack(pair).tolist() == [[0xF1]]
    assert high.pack(pair).tolist() == [[0x1F]]


@pytest.mark.parametrize(
    ("box", "told"),
    [
        (((1, 6), (32, 80)), "w .* 1 to 6 of dim 0 is a cut inside a block of 2 "),
        (((2, 6), (32, 72)), "w .* 32 to 72 of dim 1 is a cut inside a block of 16 .*divide 12 blocks"),
    ],
)
def test_a_cut_within_a_block_is_refused(box: tuple[tuple[int, int], ...], told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        NIBBLES.boxes("w", box, SHAPE)
    with pytest.raises(ShardingError, match="of dim 0 is a cut inside a block of 2"):
        tilings((Sharded(0), Replicated()), DeviceMesh((4, 1), ("a", "b")))  # 12 rows: 3 each


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"bits": 9}, "1 to 8 bits"),
        ({"block": ()}, "got none"),
        ({"packing": "nibbles"}, "packing is"),
        ({"element": "float8_e4m3fn"}, "packed ones in uint8"),
        ({"element": "float32", "packing": "bytes"}, "an array of bytes"),
    ],
)
def test_formats_that_cannot_be_are_refused(wrong: dict[str, object], told: str) -> None:
    given = {
        "name": "f",
        "bits": 4,
        "block": (16,),
        "element": "uint8",
        "scale": "uint8",
        "packing": "low_first",
    }
    with pytest.raises(ShardingError, match=told):
        BlockFormat(**(given | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("dst", SPECS)
@pytest.mark.parametrize("src", SPECS)
def test_a_reshard_moves_codes_and_scales(
    src: tuple[Sharded | Replicated, ...], dst: tuple[Sharded | Replicated, ...], rng: np.random.Generator
) -> None:
    whole = quantize(values_of(rng))
    have, want = tilings(src, MESH), tilings(dst, MESH)
    plan = build_reshard_plan(have, want)

    def run(comm: Communicator) -> None:
        mine = {part: held(have[part], comm.rank, whole[part]) for part in whole}
        out = {part: np.empty(want[part].local_shape(comm.rank), whole[part].dtype) for part in whole}
        execute_reshard_plan(plan, mine, out, comm)
        for part, tiling in want.items():
            assert np.array_equal(out[part], held(tiling, comm.rank, whole[part])), part
        assert np.array_equal(
            dequantize(out),
            held(Tiling.from_layout(Layout(MESH, SHAPE, "float32", dst)), comm.rank, dequantize(whole)),
        )

    lc.run_loopback(4, run, 30)


def test_a_checkpoint_keeps_codes_and_scales(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = quantize(values_of(rng))
    have, want = tilings(SPECS[0], MESH), tilings(SPECS[3], MESH)

    def store(comm: Communicator) -> None:
        save(tmp_path / "c", {p: (t, held(t, comm.rank, whole[p])) for p, t in have.items()}, comm)

    def restore(comm: Communicator) -> None:
        out = load(tmp_path / "c", plan_load(Catalog.open(tmp_path / "c"), want, num_ranks=4), comm)
        for part, tiling in want.items():
            assert np.array_equal(out[part], held(tiling, comm.rank, whole[part])), part

    lc.run_loopback(4, store, 30)
    lc.run_loopback(4, restore, 30)
