"""The cost model: formulas, error bars, what lies outside the measured range, files, the built-in default."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowshard.cost import OPS, SCHEMA, ClusterProfile, Curve, Estimate, Piece, factor, steps, sums
from lowshard.errors import ProfileError


def curve(op: str = "all_gather", ranks: int = 2, **more: Any) -> Curve:
    pieces = (Piece(1e-5, 1e-9, 0.0, 4096, 0.1), Piece(2e-5, 5e-10, 0.0, None, 0.2))
    return Curve(op, "mpi", "node", ranks, 1024, 1 << 20, more.pop("pieces", pieces), **more)


@pytest.mark.parametrize(
    ("op", "n", "messages", "moved", "summed"),
    [
        ("all_reduce", 4, 6, 1.5, 0.75),
        ("all_gather", 4, 3, 0.75, 0),
        ("reduce_scatter", 4, 3, 0.75, 0.75),
        ("all_to_all", 8, 7, 0.875, 0),
        ("all_to_all_v", 8, 7, 0.875, 0),
        ("broadcast", 5, 3, 1, 0),
        ("reduce", 8, 3, 1, 1),
        ("gather", 4, 3, 0.75, 0),
        ("scatter", 4, 3, 0.75, 0),
        ("send_recv", 7, 1, 1, 0),
        ("barrier", 8, 3, 0, 0),
    ],
)
def test_steps_bytes_and_sums_of_each_collective(
    op: str, n: int, messages: float, moved: float, summed: float
) -> None:
    assert (steps(op, n), factor(op, n), sums(op, n)) == (messages, moved, summed)
    assert (steps(op, 1), factor(op, 1), sums(op, 1)) == (0, 0, 0)


def test_a_time_is_the_formula_with_the_piece_that_the_size_belongs_to() -> None:
    profile = ClusterProfile((curve(),))
    small = profile.seconds("all_gather", 2, 2048)
    assert small.seconds == pytest.approx(1e-5 + 0.5 * 1e-9 * 2048)
    assert (small.low, small.high) == pytest.approx(
        (small.seconds / math.exp(0.1), small.seconds * math.exp(0.1))
    )
    assert not small.extrapolated
    assert not small.is_default
    assert profile.seconds("all_gather", 2, 4096).seconds == pytest.approx(2e-5 + 0.5 * 5e-10 * 4096)
    reducing = ClusterProfile((curve("all_reduce", 4, pieces=(Piece(1e-6, 1e-9, 4e-9),)),))
    assert reducing.seconds("all_reduce", 4, 1e6).seconds == pytest.approx(6e-6 + 1.5e-3 + 3e-3)


@pytest.mark.parametrize("size", [1, 100, 1 << 24, 1 << 30])
def test_beyond_the_measured_sizes_bars_widen_with_the_distance_and_the_estimate_says_so(size: int) -> None:
    profile = ClusterProfile((curve(),))
    edge = profile.seconds("all_gather", 2, 1024 if size < 1024 else 1 << 20)
    far = profile.seconds("all_gather", 2, size)
    assert far.extrapolated
    assert not edge.extrapolated
    distance = abs(math.log(size / (1024 if size < 1024 else 1 << 20)))
    assert math.log(far.high / far.seconds) == pytest.approx(
        math.log(edge.high / edge.seconds) + distance / 4
    )
    assert math.log(far.seconds / far.low) == pytest.approx(math.log(far.high / far.seconds))


def test_more_or_fewer_ranks_than_measured_widen_the_bars_too() -> None:
    profile = ClusterProfile((curve(ranks=4),))
    inside = profile.seconds("all_gather", 4, 4096)
    for ranks in (2, 8):
        beyond = profile.seconds("all_gather", ranks, 4096)
        assert beyond.extrapolated
        assert math.log(beyond.high / beyond.seconds) == pytest.approx(0.2 + math.log(2) / 2)
        assert beyond.seconds == pytest.approx((ranks - 1) * 2e-5 + (ranks - 1) / ranks * 5e-10 * 4096)
    assert not inside.extrapolated


def test_between_two_measured_numbers_of_ranks_the_estimate_lies_between_and_the_bar_spans_both() -> None:
    slow = (Piece(1e-4, 1e-8, 0.0, None, 0.1),)
    profile = ClusterProfile((curve(ranks=8, pieces=slow), curve(ranks=2)))
    alone = [ClusterProfile((one,)).seconds("all_gather", 4, 4096).seconds for one in profile.curves]
    both = profile.seconds("all_gather", 4, 4096)
    assert both.seconds == pytest.approx(math.sqrt(alone[0] * alone[1]))  # 4 is half way from 2 to 8
    assert both.low == pytest.approx(min(alone) * math.exp(-0.2))
    assert both.high == pytest.approx(max(alone) * math.exp(0.1))
    assert not both.extrapolated
    assert profile.seconds("all_gather", 16, 4096).extrapolated


def test_over_one_rank_nothing_is_taken() -> None:
    assert ClusterProfile((curve(),)).seconds("all_gather", 1, 1 << 40) == Estimate(0.0, 0.0, 0.0)


def test_calls_without_a_curve_of_their_own_are_priced_as_their_like() -> None:
    profile = ClusterProfile((curve("all_to_all"), curve("send_recv")))
    assert profile.seconds("all_to_all_v", 2, 5000) == profile.seconds("all_to_all", 2, 5000)
    assert profile.seconds("send", 2, 5000) == profile.seconds("send_recv", 2, 5000)


def test_transports_and_levels_are_kept_apart() -> None:
    fast = dataclasses.replace(curve(pieces=(Piece(1e-6, 1e-12),)), transport="nccl")
    far = dataclasses.replace(curve(pieces=(Piece(1.0, 0.0),)), level="network")
    profile = ClusterProfile((curve(), fast, far))
    assert profile.transports == ("mpi", "nccl")
    assert profile.seconds("all_gather", 2, 4096, transport="nccl").seconds < 2e-6
    assert profile.seconds("all_gather", 2, 4096).seconds > 2e-6
    assert profile.seconds("all_gather", 2, 4096, level="network").seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("scatter", 2, 10), "no scatter on mpi .*it has all_gather on mpi"),
        (("all_gather", 2, 10, "network"), "no all_gather on mpi \\(network\\)"),
        (("all_gather", 2, 10, "node", "nccl"), "no all_gather on nccl"),
        (("all_gather", 0, 10), "1 rank or more, got 0"),
        (("all_gather", 2, -1), "0 bytes or more, got -1"),
        (("all_gather", 2, math.nan), "0 bytes or more"),
    ],
)
def test_what_the_profile_does_not_know_is_an_error(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        ClusterProfile((curve(),)).seconds(*asked)
    with pytest.raises(ProfileError, match="collectives that have a model"):
        steps("all_sorts", 2)


def test_the_default_covers_every_collective_and_says_that_it_was_not_measured() -> None:
    profile = ClusterProfile.default()
    assert profile.is_default
    assert "not measured" in dict(profile.machine)["source"]
    for op in OPS:
        for ranks in (2, 7, 512):
            node = profile.seconds(op, ranks, 1 << 20, transport="nccl")
            network = profile.seconds(op, ranks, 1 << 20, "network")
            assert node.is_default
            assert 0 < node.low < node.seconds < network.seconds
            assert node.high / node.seconds == pytest.approx(4)
    assert "not measured here" in str(profile.seconds("all_reduce", 2, 1024))
    small, large = (profile.seconds("all_reduce", 2, size).seconds for size in (1024, 1 << 30))
    assert small < 1e-4 < 1e-2 < large


def test_an_estimate_reads_well() -> None:
    assert str(Estimate(1.5e-3, 1e-3, 2.0)) == "1.5 ms (1 ms to 2 s)"
    assert str(Estimate(2e-6, 1e-6, 3e-6, True)) == "2 us (1 us to 3 us), extrapolated"


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = ClusterProfile((curve(), curve("barrier", pieces=(Piece(1e-6, 0.0),))), (("cpu", "some"),))
    path = tmp_path / "profile.json"
    profile.save(path)
    assert ClusterProfile.load(path) == profile
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert hash(ClusterProfile.load(path)) == hash(profile)
    assert ClusterProfile.from_json(ClusterProfile.default().to_json()) == ClusterProfile.default()


def damaged(**change: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(ClusterProfile((curve(),)).to_json()))
    for name, value in change.items():
        if name in data:
            data[name] = value
        else:
            data["curves"][0][name] = value
    return data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "schema: expected text, got nothing"),
        ([], r"at \$: expected a cluster profile"),
        (damaged(schema="lowshard-profile-0"), "got 'lowshard-profile-0'"),
        (damaged(curves=[{}]), r"curves\[0\].op: expected text, got nothing"),
        (damaged(pieces=[]), "no end"),
        (damaged(pieces=[dataclasses.asdict(Piece(1, 1, 1, 5))]), "no end"),
        (damaged(pieces=[{"alpha_s": -1.0, "beta_s_per_byte": 0.0}]), "0 or more"),
        (
            damaged(pieces=[{"alpha_s": "1", "beta_s_per_byte": 0.0}]),
            "alpha_s: expected a finite number, got '1'",
        ),
        (damaged(pieces=[{"alpha_s": math.nan, "beta_s_per_byte": 0.0}]), "a finite number, got nan"),
        (damaged(level="moon"), "expected 'node' or 'network'"),
        (damaged(ranks=0), "1 rank or more"),
        (damaged(op="all_sorts"), "got 'all_sorts'"),
        (damaged(machine=[]), "machine: expected an object"),
    ],
)
def test_damaged_profiles_are_refused(data: Any, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        ClusterProfile.from_json(data)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    said = "is not a valid cluster profile: .*; `lowshard bench profile -o FILE` writes one"
    with pytest.raises(ProfileError, match=said):
        ClusterProfile.load(path)
    for text in ("{", '{"format": "lowshard-bench-collective-1"}'):
        path.write_text(text)
        with pytest.raises(ProfileError, match=said):
            ClusterProfile.load(path)


def test_knees_grow() -> None:
    with pytest.raises(ProfileError, match="growing sizes"):
        curve(pieces=(Piece(1, 1, 0, 10), Piece(1, 1, 0, 10), Piece(1, 1)))
