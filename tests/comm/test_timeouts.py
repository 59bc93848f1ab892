"""Times to wait at most: what is none is refused, and what no clock holds is cut, wherever one is given."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.comm_kit import refused
from support.wrong_values import WRONG, raised

from lowshard import settings
from lowshard.comm import loopback, run_loopback
from lowshard.errors import CommError


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf"])
def test_a_variable_that_is_no_time_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TIMEOUT_S.name, text)
    refused(
        settings.TIMEOUT_S.seconds,
        CommError,
        f"LOWSHARD_TIMEOUT_S is a positive number of seconds, got '{text}': deadline of each wait for other ranks",
    )


def test_long_times_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TIMEOUT_S.name, "1e300")
    assert settings.TIMEOUT_S.seconds() == settings.MOST_S
    assert time.monotonic_ns() + int(settings.MOST_S * 1e9) < 1 << 62
    assert loopback(1, timeout_s=1 << 70)[0].timeout_s == settings.MOST_S


@pytest.mark.parametrize("what", WRONG)
def test_a_work_is_waited_for_by_a_time_or_an_error_says_so(what: str) -> None:
    def job(comm: Any) -> list[str]:
        work = comm.start.barrier()
        found = [raised(lambda: work.wait(WRONG[what]))]
        work.wait(1e300)
        return [error for error in found if error]

    assert run_loopback(2, job) == [[], []]
