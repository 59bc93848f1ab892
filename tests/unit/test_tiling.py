"""Tilings: values made from layouts and from pieces, checked, read back from JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowshard import DeviceMesh, Layout, Partial, Replicated, Sharded
from lowshard.box import Box, full_box, relative_slices, split_interval
from lowshard.errors import DTypeError, LayoutError
from lowshard.tiling import Tile, Tiling


def filled(tiling: Tiling, rank: int) -> np.ndarray:
    """Return what a rank holds of an array that counts its own elements."""
    source = np.arange(tiling.size_elems).reshape(tiling.shape)
    local = np.full(tiling.local_shape(rank), -1)
    for tile in tiling.tiles(rank):
        local[relative_slices(tile.local, full_box(local.shape))] = source[
            relative_slices(tile.box, full_box(tiling.shape))
        ]
    return local


def stacked(rows: int, parts: int) -> list[list[Box]]:
    return [
        [((s * rows + a, s * rows + b), (0, 5)) for s in range(3)]
        for a, b in (split_interval((0, rows), parts, i) for i in range(parts))
    ]


@pytest.mark.parametrize("parts", [1, 3, 4, 9])
def test_pieces_lie_behind_one_another_in_the_local_array(parts: int) -> None:
    tiling = Tiling.from_pieces((21, 5), "bf16", stacked(7, parts))
    source = np.arange(105).reshape(3, 7, 5)
    for rank, part in enumerate(np.array_split(source, parts, axis=1)):
        assert np.array_equal(filled(tiling, rank), part.reshape(-1, 5))
        assert tiling.local_bytes(rank) == part.size * 2
    assert tiling.is_cover


@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_a_layout_is_the_tiling_with_one_tile_a_rank(
    shape: tuple[int, ...], sizes: tuple[int, int], data: st.DataObject
) -> None:
    mesh = DeviceMesh(sizes, ("dp", "tp"))
    dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
    layout = Layout(
        mesh, shape, "f32", [Replicated() if d is None else Sharded(d) for d in (data.draw(dims), data.draw(dims))]
    )  # fmt: skip
    tiling = Tiling.from_layout(layout)
    for rank in mesh.ranks:
        assert tiling.local_shape(rank) == layout.local_shape(rank)
        assert [t.box for t in tiling.tiles(rank)] == [layout.box(rank)] * bool(layout.local_elems(rank))
    assert tiling.is_cover
    again = Tiling.from_json(json.loads(json.dumps(tiling.to_json())))
    assert again == tiling
    assert again.digest() == tiling.digest()
    assert hash(again) == hash(tiling)


def test_a_tiling_on_a_mesh_repeats_along_the_other_axes() -> None:
    tiling = Tiling.from_pieces((6, 2), "f32", [[((0, 3), (0, 2))], [((3, 6), (0, 2))]])
    mesh = DeviceMesh((2, 2), ("tp", "dp"))
    spread = tiling.on_mesh(mesh, "tp", num_ranks=5)
    assert [spread.tiles(r) for r in range(4)] == [tiling.tiles(0)] * 2 + [tiling.tiles(1)] * 2
    assert 4 not in spread
    assert spread.tiles(4) == ()
    assert spread.local_bytes(4) == 0
    assert list(spread.holders().values()) == [(0, 1), (2, 3)]
    assert tiling.on_mesh(mesh, "tp").widened(5) == spread
    with pytest.raises(LayoutError, match="takes no part"):
        spread.local_shape(4)
    with pytest.raises(LayoutError, match="make it for 2"):
        Tiling.whole((2,), "f32", 3).on_mesh(mesh, "tp")


def test_a_0d_array_is_one_tile() -> None:
    tiling = Tiling.whole((), "f32", 2)
    assert tiling.tiles(1) == (Tile((), ()),)
    assert tiling.local_elems(0) == 1


def test_digests_tell_tilings_apart() -> None:
    made = [Tiling.whole((4,), "f32", 1), Tiling.whole((4,), "f32", 2), Tiling.whole((4,), "bf16", 1),
            Tiling.from_pieces((4,), "f32", [[((0, 2),)], [((2, 4),)]])]  # fmt: skip
    assert len({t.digest() for t in made}) == len(set(made)) == 4


def test_a_rank_without_pieces_takes_no_part() -> None:
    halves = [[((0, 2),)], [((2, 4),)]]
    made = Tiling.from_pieces((4,), "f32", [[], [], *halves])
    on_mesh = Tiling.from_pieces((4,), "f32", halves).on_mesh(DeviceMesh((2,), ("tp",), ranks=(2, 3)), "tp")
    assert (made, list(made.ranks)) == (on_mesh, [2, 3])


def test_what_cannot_be_is_refused() -> None:
    mesh = DeviceMesh((2,), ("x",))
    with pytest.raises(LayoutError, match="partial"):
        Tiling.from_layout(Layout(mesh, (4,), "f32", (Partial(),)))
    with pytest.raises(LayoutError, match="inside"):
        Tiling.from_pieces((4,), "f32", [[((0, 5),)]])
    with pytest.raises(LayoutError, match="exactly one tile"):
        Tiling((4,), "f32", ((Tile(((0, 2),), ((0, 2),)), Tile(((2, 4),), ((1, 3),))),), ((4,),))
    with pytest.raises(LayoutError, match="exactly one tile"):
        Tiling((4,), "f32", ((Tile(((0, 2),), ((0, 2),)),),), ((4,),))
    with pytest.raises(LayoutError, match="agree in every other"):
        Tiling.from_pieces((4, 4), "f32", [[((0, 1), (0, 4)), ((1, 2), (0, 3))]])
    with pytest.raises(LayoutError, match="has no piece"):
        Tiling.from_pieces((4,), "f32", [[]])
    with pytest.raises(LayoutError, match="one shape"):
        Tiling((4,), "f32", ((Tile(((0, 2),), ((0, 1),)),),), ((1,),))
    with pytest.raises(LayoutError, match="ranks 0 to 0"):
        Tiling.whole((4,), "f32").tiles(1)
    with pytest.raises(LayoutError, match="not a valid tiling"):
        Tiling.from_json({"shape": [4.5], "dtype": "f32", "tiles": [[]], "local_shapes": [[0]]})
    with pytest.raises(LayoutError, match="not a valid tiling"):
        Tiling.from_json({"shape": [4]})
    with pytest.raises(DTypeError):
        Tiling.whole((4,), "f31")
    assert not Tiling.from_pieces((4,), "f32", [[((0, 2),)]]).is_cover
