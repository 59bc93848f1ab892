"""The fit: planted parameters and knees come back, noise adds no pieces, bounds hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lowshard.bench.cluster import colours, describe
from lowshard.bench.fit import Point, bounded_least_squares, fit_curve, fit_line, fit_profile
from lowshard.cost import ClusterProfile, Curve, Piece
from lowshard.errors import ProfileError

SIZES = [2**k for k in range(8, 27)]
PLANTED = (
    Piece(2e-6, 5e-10, 0.0, 32 << 10),
    Piece(1e-5, 1e-10, 0.0, 4 << 20),
    Piece(2e-4, 3e-10),
)


def points(
    op: str,
    ranks: int,
    pieces: Sequence[Piece],
    noise: float = 0.0,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
) -> list[Point]:
    planted = Curve(op, "mpi", "node", ranks, sizes[0], sizes[-1], tuple(pieces))
    rng = np.random.default_rng(seed)
    return [
        Point(
            op,
            "mpi",
            "node",
            ranks,
            size,
            planted.seconds(ranks, size) * math.exp(noise * rng.standard_normal()),
        )
        for size in sizes
    ]


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_planted_parameters_and_knees_come_back(ranks: int, count: int) -> None:
    planted = (*PLANTED[: count - 1], Piece(PLANTED[count - 1].alpha_s, PLANTED[count - 1].beta_s_per_byte))
    found = fit_curve(points("all_gather", ranks, planted))
    assert len(found.pieces) == count
    for piece, want in zip(found.pieces, planted, strict=True):
        assert piece.alpha_s == pytest.approx(want.alpha_s, rel=1e-6)
        assert piece.beta_s_per_byte == pytest.approx(want.beta_s_per_byte, rel=1e-6)
        if want.below_bytes is not None:  # between the last size of the one and the first of the next
            assert piece.below_bytes is not None
            assert want.below_bytes / 2 < piece.below_bytes <= want.below_bytes
        assert piece.log_error == pytest.approx(0.01)
    assert (found.least_bytes, found.most_bytes) == (SIZES[0], SIZES[-1])


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_them_a_little_and_is_what_the_error_bar_says(seed: int) -> None:
    measured = points("all_gather", 2, PLANTED, 0.03, seed=seed)
    profile = fit_profile(measured, (("cpu", "planted"),))
    (curve,) = profile.curves
    assert [piece.below_bytes is None for piece in curve.pieces] == [False, False, True]
    assert curve.pieces[0].alpha_s == pytest.approx(2e-6, rel=0.08)
    assert curve.pieces[1].alpha_s == pytest.approx(1e-5, rel=0.15)
    assert curve.pieces[2].beta_s_per_byte == pytest.approx(3e-10, rel=0.08)
    assert all(0.01 <= piece.log_error < 0.15 for piece in curve.pieces)
    for point in measured:
        estimate = profile.seconds("all_gather", 2, point.size_bytes)
        assert estimate.low * 0.999999 <= point.seconds <= estimate.high * 1.000001
        assert not estimate.extrapolated


@pytest.mark.parametrize("seed", range(8))
def test_one_noisy_line_stays_one_piece_mostly_and_right(seed: int) -> None:
    found = fit_curve(points("all_gather", 4, [Piece(2e-6, 5e-10)], 0.03, seed=seed))
    assert len(found.pieces) <= 2
    assert found.seconds(4, SIZES[0]) == pytest.approx(6e-6, rel=0.1)
    assert found.seconds(4, SIZES[-1]) == pytest.approx(0.75 * 5e-10 * SIZES[-1], rel=0.1)


def test_relative_errors_count_at_every_size() -> None:
    """A plain least squares of seconds would leave the small sizes to chance."""
    measured = points("send_recv", 2, [Piece(1e-6, 1e-10)], 0.05)
    (piece,) = fit_curve(measured).pieces
    assert piece.alpha_s == pytest.approx(1e-6, rel=0.1)
    assert piece.beta_s_per_byte == pytest.approx(1e-10, rel=0.1)


def test_coefficients_are_never_negative() -> None:
    falling = [
        Point("all_gather", "mpi", "node", 2, size, 1e-5 / (1 + k / 10)) for k, size in enumerate(SIZES)
    ]
    for piece in fit_curve(falling).pieces:
        assert piece.alpha_s >= 0
        assert piece.beta_s_per_byte >= 0
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert bounded_least_squares(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert bounded_least_squares(table, np.array([-3.0, -2.0, -1.0])) == pytest.approx([0.0, 0.0])
    assert bounded_least_squares(table, np.array([1.0, 3.0, 5.0])) == pytest.approx([0.0, 22 / 14])


def test_a_line_is_fitted_to_logarithms_not_to_ratios() -> None:
    """Of times half and twice a constant the best constant is that one; by ratios it would be another."""
    table, logs = np.ones((2, 1)), np.log([0.5, 2.0])
    assert fit_line(table, logs) == pytest.approx([1.0])


def test_what_a_reduction_takes_beyond_the_move_is_its_sum() -> None:
    move, whole = [Piece(1e-6, 2e-10)], [Piece(1e-6, 6e-10)]
    profile = fit_profile(points("all_gather", 4, move) + points("reduce_scatter", 4, whole))
    (piece,) = profile.curves[1].pieces
    assert piece.beta_s_per_byte == pytest.approx(2e-10, rel=1e-6)
    assert piece.gamma_s_per_byte == pytest.approx(4e-10, rel=1e-6)
    assert profile.curves[0].pieces[0].gamma_s_per_byte == 0
    for point in points("reduce_scatter", 4, whole):
        assert profile.seconds("reduce_scatter", 4, point.size_bytes).seconds == pytest.approx(point.seconds)


def test_a_reduction_faster_than_the_move_or_alone_has_no_sum() -> None:
    fast = fit_profile(
        points("all_gather", 2, [Piece(1e-6, 9e-10)]) + points("all_reduce", 2, [Piece(1e-6, 2e-10)])
    )
    alone = fit_profile(points("all_reduce", 2, [Piece(1e-6, 2e-10)]))
    for profile in (fast, alone):
        piece = profile.curves[-1].pieces[0]
        assert (piece.beta_s_per_byte, piece.gamma_s_per_byte) == pytest.approx((2e-10, 0.0))


def test_a_barrier_is_steps_alone() -> None:
    found = fit_curve([Point("barrier", "mpi", "node", 8, 0, 3e-6)])
    (piece,) = found.pieces
    assert piece.alpha_s == pytest.approx(1e-6)
    assert piece.beta_s_per_byte == 0
    assert ClusterProfile((found,)).seconds("barrier", 8, 0).seconds == pytest.approx(3e-6)
    assert not ClusterProfile((found,)).seconds("barrier", 8, 0).extrapolated


@pytest.mark.parametrize(
    "bad",
    [
        [Point("all_gather", "mpi", "node", 2, 10, 1e-6)],
        [Point("all_gather", "mpi", "node", 1, s, 1e-6) for s in (10, 20)],
        [Point("all_gather", "mpi", "node", 2, s, 0.0) for s in (10, 20)],
    ],
)
def test_points_that_say_too_little_are_refused(bad: list[Point]) -> None:
    with pytest.raises(ProfileError, match="a fit needs"):
        fit_curve(bad)


def test_few_points_are_one_line() -> None:
    found = fit_curve(points("all_gather", 2, [Piece(1e-6, 1e-9)], sizes=[1024, 1 << 20]))
    assert len(found.pieces) == 1
    assert found.pieces[0].alpha_s == pytest.approx(1e-6)


def test_each_collective_rank_count_level_and_transport_has_its_curve() -> None:
    measured = [*points("all_gather", 2, [Piece(1e-6, 1e-9)]), *points("all_gather", 4, [Piece(5e-6, 1e-9)])]
    profile = fit_profile([*measured, *points("broadcast", 2, [Piece(1e-6, 1e-9)])])
    assert [(curve.op, curve.ranks) for curve in profile.curves] == [
        ("all_gather", 2),
        ("all_gather", 4),
        ("broadcast", 2),
    ]
    assert profile.seconds("all_gather", 4, 1024).seconds == pytest.approx(15e-6, rel=0.06)


def test_predicted_stands_beside_measured_with_the_error() -> None:
    measured = points("all_gather", 2, [Piece(1e-5, 1e-9)])
    text = "\n".join(describe(fit_profile(measured, (("cpu", "planted"),)), measured))
    for shown in ("planted", "all_gather, mpi, node, 2 ranks", "alpha 10.00 us, beta 1.0000 ns/B", "+0.0%",
                  "fit error: 0.0% median, 0.0% at most"):  # fmt: skip
        assert shown in text, text


# ---- levels


def test_on_several_hosts_the_first_ones_ranks_and_one_rank_a_host_are_measured() -> None:
    assert colours(["a", "a"], 1) is None
    hosts = ["a", "a", "b", "b"]
    assert [colours(hosts, rank) for rank in range(4)] == [
        [("node", 0), ("network", 0)],
        [("node", 0), ("network", None)],
        [("node", None), ("network", 0)],
        [("node", None), ("network", None)],
    ]
    assert colours(["a", "b", "b"], 1) == [("network", 0)]
