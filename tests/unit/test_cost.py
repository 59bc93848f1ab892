"""The cost model: formulas, files, the built-in default."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowshard.cost import SCHEMA, ClusterProfile, Curve, Piece, factor
from lowshard.errors import ProfileError


def curve(op: str = "all_gather", ranks: int = 2, **more: Any) -> Curve:
    pieces = (Piece(1e-5, 1e-9, 0.0, 4096), Piece(2e-5, 5e-10))
    return Curve(op, "node", ranks, more.pop("pieces", pieces), **more)


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
def test_messages_bytes_and_sums_of_each_collective(
    op: str, n: int, messages: float, moved: float, summed: float
) -> None:
    units = (Piece(1.0, 0.0), Piece(0.0, 1.0), Piece(0.0, 0.0, 1.0))
    alone = [curve(op, pieces=(unit,)) for unit in units]
    assert [one.seconds(n, 1) for one in alone] == [messages, moved, summed]
    assert [one.seconds(1, 1) for one in alone] == [0, 0, 0]
    assert factor(op, n) == moved


def test_a_time_is_the_formula_with_the_piece_that_the_size_belongs_to() -> None:
    assert curve().seconds(2, 2048) == pytest.approx(1e-5 + 0.5 * 1e-9 * 2048)
    assert curve().seconds(2, 4096) == pytest.approx(2e-5 + 0.5 * 5e-10 * 4096)
    reducing = curve("all_reduce", 4, pieces=(Piece(1e-6, 1e-9, 4e-9),))
    assert reducing.seconds(4, 1e6) == pytest.approx(6e-6 + 1.5e-3 + 3e-3)
    for wrong in ((0, 10), (2, -1), (2, math.nan)):
        with pytest.raises(ProfileError, match="or more"):
            curve().seconds(*wrong)


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
        ({}, "missing .*schema"),
        ([], r"a valid cluster profile: at \$"),
        (damaged(schema="lowshard-profile-0"), "got 'lowshard-profile-0'"),
        (damaged(curves=[{}]), r"curves\[0\]: .*missing .*op"),
        (damaged(pieces=[]), "no end"),
        (damaged(pieces=[dataclasses.asdict(Piece(1, 1, 1, 5))]), "no end"),
        (damaged(pieces=[{"alpha_s": -1.0, "beta_s_per_byte": 0.0}]), "0 or more"),
        (damaged(pieces=[{"alpha_s": math.nan, "beta_s_per_byte": 0.0}]), r"alpha_s: a number is finite"),
        (damaged(level="moon"), "level: expected 'node' or 'network'"),
        (damaged(ranks=0), "1 rank or more"),
        (damaged(op="all_sorts"), "got 'all_sorts'"),
    ],
)
def test_damaged_profiles_are_refused(data: Any, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        ClusterProfile.from_json(data)
