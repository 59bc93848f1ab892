"""Caches and states between servers, and the benches of planning: without a rank started."""

from __future__ import annotations

import numpy as np
import pytest
from support.recorded import oracle

from lowshard.errors import LayoutError
from lowshard.reshard import build_reshard_plan, kv_cache_layout, ssm_state_layouts


def transfers(plan: object, names: tuple[str, ...] = ("kv",)) -> list[tuple]:
    return [
        (m.src_rank, m.dst_rank, m.src_box, m.dst_box)
        for rank in plan.ranks  # type: ignore[attr-defined]
        for m in plan.receives(rank)  # type: ignore[attr-defined]
    ]


def test_a_cache_goes_from_two_ranks_to_four_by_heads() -> None:
    plan = build_reshard_plan(
        {"kv": kv_cache_layout(4, 8, (16,), tp=2)}, {"kv": kv_cache_layout(4, 8, (16,), tp=4, offset=2)}
    )
    whole, tokens = (0, 4), (0, 16)
    assert transfers(plan) == [
        (0, 2, (whole, (0, 2), tokens), (whole, (0, 2), tokens)),
        (0, 3, (whole, (2, 4), tokens), (whole, (0, 2), tokens)),
        (1, 4, (whole, (0, 2), tokens), (whole, (0, 2), tokens)),
        (1, 5, (whole, (2, 4), tokens), (whole, (0, 2), tokens)),
    ]


def test_stages_of_their_own_size_and_ranks_that_share_a_head() -> None:
    src = kv_cache_layout(7, 2, (4,), tp=4, pp=2, windows=(5, 2))
    assert [src.local_shape(r) for r in (0, 1, 4, 7)] == [(5, 1, 4), (5, 1, 4), (2, 1, 4), (2, 1, 4)]
    assert src.tiles(0) == src.tiles(1)
    build_reshard_plan(
        {"kv": src}, {"kv": kv_cache_layout(7, 2, (4,), tp=2, copies=2, offset=8)}
    ).check_coverage()
    with pytest.raises(LayoutError, match="7 in all"):
        kv_cache_layout(7, 2, (4,), pp=2, windows=(5, 3))
    with pytest.raises(LayoutError, match="divide each other"):
        kv_cache_layout(7, 3, (4,), tp=2)


def test_states_are_dealt_band_by_band() -> None:
    src = ssm_state_layouts(2, 8, 4, 4, 2, 4, tp=2)
    dst = ssm_state_layouts(2, 8, 4, 4, 2, 4, tp=4, offset=2)
    plan = build_reshard_plan(src, dst)
    plan.check_coverage()
    bands = [(m.src_box[2], m.dst_box[2]) for m in plan.receives(3) if plan.entries[m.entry].name == "conv"]
    assert bands == [((8, 16), (0, 8)), ((18, 20), (8, 10)), ((22, 24), (10, 12))]


def test_oracle_caches() -> None:
    for case in oracle("megatron_reshard")["kv_reshard"]:
        sides = [
            kv_cache_layout(
                case["layers"],
                case["heads"],
                (),
                tp=side["tp"],
                pp=side["pp"],
                windows=None if side["windows"] is None else [b - a for a, b in side["windows"]],
                offset=side.get("rank_offset", 0),
            )
            for side in (case["src"], case["dst"])
        ]
        plan = build_reshard_plan({"kv": sides[0]}, {"kv": sides[1]})
        expected = [(a, b, *map(tuple, boxes)) for a, b, *boxes in case["transfers"]]
        got = []
        for rank in plan.ranks:
            for m in plan.receives(rank):
                (tile,) = sides[0].tiles(m.src_rank)
                got.append(
                    (
                        m.src_rank,
                        rank,
                        *((b[0] + t[0], b[1] + t[0]) for b, t in zip(m.src_box, tile.box, strict=True)),
                    )
                )
        assert sorted(got) == sorted(expected), case["name"]


def test_oracle_states() -> None:
    for case in oracle("megatron_reshard")["ssm_reshard"]:
        d = case["dims"]
        count = len(case["layers"])
        args = (count, d["nheads"], d["headdim"], d["ngroups"], d["d_state"], d["d_conv"])
        plan = build_reshard_plan(
            ssm_state_layouts(*args, tp=case["src_tp"]),
            ssm_state_layouts(*args, tp=case["dst_tp"], offset=case["dst_rank_offset"]),
        )
        got = {
            (m.src_rank, m.dst_rank, plan.entries[m.entry].name, m.src_box[2], m.dst_box[2])
            for rank in plan.ranks
            for m in plan.receives(rank)
        }
        expected = {
            (a, b, "recurrent" if band == "recurrent" else "conv", tuple(x), tuple(y))
            for a, b, band, _, x, y in case["transfers"]
        }
        assert got == expected


# ---- planning times


def test_states_move_like_other_tensors(rng: np.random.Generator) -> None:
    from support.reshard_cases import arrays_of, local_part

    from lowshard.comm import run_loopback
    from lowshard.reshard import execute_reshard_plan

    src = {"kv": kv_cache_layout(3, 4, (2, 5), "float32", tp=2)}
    dst = {"kv": kv_cache_layout(3, 4, (2, 5), "float32", tp=1, pp=3, offset=1)}
    whole = {"kv": rng.standard_normal((3, 4, 2, 5)).astype(np.float32)}

    def work(comm: object) -> None:
        rank = comm.rank  # type: ignore[attr-defined]
        out = {n: np.zeros(a.shape, a.dtype) for n, a in arrays_of(dst, rank, whole).items()}
        execute_reshard_plan(build_reshard_plan(src, dst), arrays_of(src, rank, whole), out, comm)  # type: ignore[arg-type]
        for name, array in out.items():
            assert np.array_equal(array, local_part(dst[name], rank, whole[name]))

    run_loopback(4, work, 20.0)
