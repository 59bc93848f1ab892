"""How thorough this run of the tests is, and the one number its random choices come from."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:  # rank programs import this module too, and need no pytest
    import pytest

T = TypeVar("T")

# In the environment, so that rank processes started by a test see the same mode.
_FULL, _SEED = "LOWSHARD_TESTS_FULL", "LOWSHARD_TESTS_SEED"


def set_mode(full: bool, seed: int) -> None:
    """Fix the mode; conftest.py calls this before tests are collected."""
    os.environ[_FULL], os.environ[_SEED] = str(int(full)), str(seed)


def full() -> bool:
    """Return whether the run was started with `pytest --full`."""
    return os.environ.get(_FULL) == "1"


def seed() -> int:
    """Return the seed in the header of the run; `pytest --seed N` repeats its choices."""
    return int(os.environ.get(_SEED, "0"))


def rng(name: str) -> np.random.Generator:
    """Return a generator that depends on the run's seed and on `name` alone: equal on all ranks."""
    return np.random.default_rng([seed(), zlib.crc32(name.encode())])


def sample(items: Sequence[T], few: int, name: str) -> list[T]:
    """Return all items in a full run, else `few` of them, in order; the seed says which."""
    if full() or few >= len(items):
        return list(items)
    chosen = random.Random(f"{seed()} {name}").sample(range(len(items)), few)
    return [items[i] for i in sorted(chosen)]


def thinned(cases: Mapping[T, Mapping[str, int]], few: int, name: str) -> set[T]:
    """Return which cases of a matrix are tried: all in a full run, else those that are drawn until each value of each
    parameter is among them once, and others up to `few`. A value is given by any number of its own.
    """
    if full() or len(cases) <= few:
        return set(cases)
    drawn = list(cases)
    random.Random(f"{seed()} {name}").shuffle(drawn)
    chosen: set[T] = set()
    seen: set[tuple[str, int]] = set()
    for case in drawn:
        values = set(cases[case].items())
        if not values <= seen:
            chosen.add(case)
            seen |= values
    for case in drawn:
        if len(chosen) >= few:
            break
        chosen.add(case)
    return chosen


def selected(request: pytest.FixtureRequest, param: str) -> list[Any]:
    """Return the values of `param` in those tests of the fixture's own file that this run has selected, in order."""
    own = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    params = [call.params for call in own if call is not None]
    return list(dict.fromkeys(values[param] for values in params if param in values))
