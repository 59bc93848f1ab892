"""What users pass by mistake, and what a call says to it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from lowshard.errors import LowshardError


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


def raised(call: Callable[[], object]) -> str:
    """Return what a call raised that is no LowshardError, with where; "" where it worked or raised one."""
    try:
        call()
    except LowshardError as error:
        return "" if str(error) else f"{type(error).__name__} without a text"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__}: {str(error)[:200]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
        )
    return ""
