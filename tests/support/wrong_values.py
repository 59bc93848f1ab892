"""What users pass by mistake, and what a call says to it."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from lowshard import DeviceMesh, Layout, Replicated, Sharded
from lowshard.errors import LowshardError

Prepared = tuple[Callable[..., object], dict[str, Any]]
Prepare = Callable[[], Prepared]
"""Makes a call and its right arguments."""


class Stranger:
    """Looks like a sharding of another library: it has a mesh, a spec and a shape, and is none of ours."""

    def __init__(self, *given: object) -> None:
        self.mesh, self.spec, self.shape, self.dtype = object(), ("tp", None), (8, 6), "float32"


WRONG: dict[str, Any] = {
    "None": None,
    "text": "nothing of that name",
    "empty text": "",
    "a text with a zero byte": "a\0b",
    "bytes": b"x",
    "empty list": [],
    "list of None": [None],
    "list of texts": ["a", "b"],
    "nested lists": [[[]]],
    "empty mapping": {},
    "mapping": {"a": 1},
    "set": {"a", "b"},
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "-1": -1,
    "0": 0,
    "2^70": 1 << 70,
    "True": True,
    "object": object(),
    "class": Stranger,
    "stranger": Stranger(),
    "complex array": np.zeros(4, np.complex64),
    "array of objects": np.array([None, "x"], object),
    "0-d array": np.array(1.5),
}
"""By name, for messages. Nobody may write to them."""

# Right arguments of many calls.
MESH = DeviceMesh((2, 2), ("dp", "tp"))
LAYOUT = Layout(MESH, (8, 6), "float32", (Sharded(0), Replicated()))
MOVED = Layout(MESH, (8, 6), "float32", (Replicated(), Sharded(1)))
A = Layout(MESH, (8, 4), "float32", (Sharded(0), Replicated()))
B = Layout(MESH, (4, 8), "float32", (Replicated(), Sharded(1)))


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def raised(call: Callable[[], object], must: bool = False) -> str:
    """Return what a call raised that is no LowshardError, with where; "" where it raised one, or may work and did."""
    try:
        call()
    except LowshardError as error:
        return "" if str(error) else f"{type(error).__name__} without a text"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__}: {str(error)[:200]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        )
    return "no error" if must else ""


def key(value: object) -> object:
    """Return what may be a key of a mapping: what cannot be hashed as text."""
    return value if isinstance(value, Hashable) else repr(value)


def call(function: Callable[..., object], /, **right: Any) -> Prepared:
    """Return a call and its right arguments."""
    return function, right


def swept(prepare: Prepare) -> str:
    """Put each wrong value in the place of each argument; return what went wrong, a line each."""
    function, right = prepare()
    function(**right)
    failed = []
    for argument, value in right.items():
        for what, wrong in [*WRONG.items(), *((None, wrong) for wrong in _like_a_number(value))]:
            function, given = prepare()
            begin_s = time.thread_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                error = raised(lambda: function(**{**given, argument: wrong}), must=what is None)  # noqa: B023
            took_s = time.thread_time() - begin_s
            if error or took_s > 1:
                failed.append(f"{argument}={what or repr(wrong)}: {error or f'{took_s:.1f} s'}")
    return "\n".join(failed)


def _like_a_number(value: object) -> list[object]:
    """Return what is no number, however much it looks like this one."""
    if type(value) is int:
        return [True, str(value), float(value), value + 0.5]
    if type(value) is float:
        return [True, str(value), complex(value)]
    if type(value) is tuple and value and all(type(v) is int for v in value):
        return [tuple(map(float, value)), tuple(map(str, value)), "".join(map(str, value))]
    return []
