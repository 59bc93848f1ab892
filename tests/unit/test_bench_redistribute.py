"""The transitions that `lowshard bench redistribute` measures: what they are, what is promised, what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support import mode

from lowshard.bench.bench_redistribute import above_limits
from lowshard.bench.bench_transition import ONE_AXIS, TWO_AXES, Transition, floor_of, transitions
from lowshard.bench.peer import peer_rows
from lowshard.cli import main
from lowshard.errors import LowshardError


def test_ranks_decide_which_transitions_there_are() -> None:
    every = [*ONE_AXIS, *TWO_AXES]
    assert [t.name for t in transitions(every, 2, 1 << 20)] == list(ONE_AXIS)
    four = transitions(every, 4, 1 << 20)
    assert [t.name for t in four] == every
    assert {t.grid for t in four} == {(4,), (2, 2)}
    assert {t.side for t in four} == {512}
    assert [t.name for t in transitions(every, 3, 1 << 20)] == list(ONE_AXIS)


@pytest.mark.parametrize("name", ["S0", "S0->R,R", "S0,S0,S0->R,R,R", "S5->R", "Q->R"])
def test_what_is_no_transition_is_refused(name: str) -> None:
    with pytest.raises(LowshardError):
        transitions([name], 8, 1 << 20)


def test_limits_are_those_of_large_arrays() -> None:
    def limit(name: str, mb: int, private: bool = False) -> float | None:
        (made,) = transitions([name], 4, mb << 20)
        return made.limit(private)

    assert limit("S0->R", 64) == 1.3
    assert limit("S0->R", 256) == 1.8
    assert limit("S0->R", 16) is None
    assert limit("R->S0", 64) is None
    assert limit("P->R", 64, private=True) == pytest.approx(2.7)
    row = {
        "transition": "P->R", "bytes": 64 << 20, "limit": 1.5, "private_limit": 2.7,
        "ways": {"shared": {"ratio": 1.6}, "private": {"ratio": 2.6}},
    }  # fmt: skip
    (miss,) = above_limits({"rows": [row]})
    assert miss == "P->R of 64 MB, source in shared memory: 1.60 times the floor, promised 1.5"


@pytest.mark.parametrize("name", [*ONE_AXIS, *TWO_AXES])
def test_a_floor_writes_each_element_of_the_result(name: str) -> None:
    (made,) = transitions([name], 4, 1 << 18)
    elems = math.prod(made.dst.local_shape(3))
    floor = floor_of(made, elems)
    floor()
    own = -(-elems // made.spread) if made.terms > 1 else 0
    out = floor._out
    assert out.size == elems
    if own < elems:
        assert (out == 1).all()
    else:
        assert (out == sum(range(made.terms))).all()
    assert made.value(((1, 3), (0, 2)), 2).tolist() == [[62, 76], [124, 138]]
    assert isinstance(made, Transition)


def test_peers_that_are_not_installed_are_named() -> None:
    rows = peer_rows({"names": ["S0->R"], "sizes": [1024], "rounds": 1}, 2, ["/no/python"])
    assert [row["peer"] for row in rows] == ["dtensor", "jax"]
    assert all("no torch for /no/python" in row["missing"] or "no jax" in row["missing"] for row in rows)


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("ranks", [2, 4] if mode.full() else [4])
@pytest.mark.full_only
def test_the_command_measures_and_checks_every_transition(
    ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "redistribute", "--ranks", str(ranks), "--size", "100K", "-n", "1", "--json", "-"])
    report = json.loads(capfd.readouterr().out)
    assert code == 0
    assert [row["transition"] for row in report["rows"]] == [*ONE_AXIS, *(TWO_AXES if ranks == 4 else ())]
    for row in report["rows"]:
        assert row["wrong"] == 0
        assert row["floor_s"] > 0
        assert {"shared", "private", "new", "pool"} <= set(row["ways"])
        assert all(np.isfinite(way["ratio"]) for way in row["ways"].values())
        assert row["is_view"] == (row["transition"] == "R->S0")


def test_wrong_usage_is_told_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "redistribute", "--only", "S0->S1,R"]) == 2
    assert "a transition reads like S0->S1" in capsys.readouterr().err
    assert main(["bench", "redistribute", "--only", "S0,S1->S1,S0", "--ranks", "2"]) == 2
    assert "over 2 ranks there is nothing to measure" in capsys.readouterr().err
